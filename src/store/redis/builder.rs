//! The settings of a store on Redis.

use std::{error, fmt, sync::Arc, time::Duration};

use redis::{ConnectionInfo, IntoConnectionInfo, RedisError};

use super::{RedisStore, connection::Connections, dispatcher::Dispatcher, keys::DEFAULT_PREFIX};
use crate::{
    limit::is_fixed_alphabet,
    store::clock::{Clock, ManualClock},
};

/// How to build a [`RedisStore`].
#[derive(Clone)]
#[must_use]
pub struct RedisStoreBuilder {
    url: String,
    prefix: String,
    connections: u32,
    connect_timeout: Duration,
    clock: Option<ManualClock>,
}

impl RedisStoreBuilder {
    pub(super) fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            prefix: DEFAULT_PREFIX.to_owned(),
            connections: 2,
            connect_timeout: Duration::from_secs(1),
            clock: None,
        }
    }

    /// What every key begins with, so that two applications on one Redis do not share limits of the same name: 1 to 64 characters of `A-Z a-z 0-9 _ . -`. Default: `tsw1`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How many connections to open at most, each for one batch of checks at a time. Default: 2, which is enough to
    /// keep one Redis busy: checks that arrive meanwhile form the next batch.
    pub fn connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// How long to wait for a connection before a check fails. A limiter's deadline mostly ends the wait before.
    /// Default: 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Decides by this clock instead of the server's: for tests.
    pub fn clock(mut self, clock: &ManualClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// The store. It connects when the first check arrives, so Redis may be down, and no runtime is needed yet.
    ///
    /// # Errors
    ///
    /// [`InvalidRedisConfig`], naming the value, if the URL is not one that Redis has, if the prefix has other
    /// characters, or if the number of connections or the timeout is zero.
    pub fn build(self) -> Result<RedisStore, InvalidRedisConfig> {
        if !is_fixed_alphabet(&self.prefix) {
            let rule = "the key prefix must be 1 to 64 characters of A-Z a-z 0-9 _ . -, not ";
            return Err(InvalidRedisConfig::new(format!("{rule}{:?}", self.prefix)));
        }
        if self.connections == 0 {
            return Err(InvalidRedisConfig::new("the number of connections must be 1 or more, not 0".to_owned()));
        }
        if self.connect_timeout.is_zero() {
            return Err(InvalidRedisConfig::new("the connect timeout must be longer than 0 s".to_owned()));
        }
        if self.url.starts_with("rediss:") {
            return Err(InvalidRedisConfig::new("rediss:// URLs, for TLS, are not supported yet".to_owned()));
        }
        let connections = connection_info(&self.url)
            .and_then(|info| Connections::new(info, self.connections, self.connect_timeout))
            .map_err(|error| InvalidRedisConfig::url(&self.url, error))?;
        let dispatcher =
            Dispatcher::new(connections, self.connections as usize, self.prefix, self.clock.map(Clock::Manual));
        Ok(RedisStore { dispatcher: Arc::new(dispatcher) })
    }
}

fn connection_info(url: &str) -> Result<ConnectionInfo, RedisError> {
    url.into_connection_info()
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("connect_timeout", &self.connect_timeout)
            .finish_non_exhaustive()
    }
}

/// A setting that no [`RedisStore`] can have: the error of [`RedisStoreBuilder::build`], naming the value. The password
/// of a URL is left out.
#[derive(Debug)]
pub struct InvalidRedisConfig {
    problem: String,
    cause: Option<RedisError>,
}

impl InvalidRedisConfig {
    fn new(problem: String) -> Self {
        Self { problem, cause: None }
    }

    fn url(url: &str, cause: RedisError) -> Self {
        // A password stands before the host, or among the parameters.
        let (url, _) = url.split_once('?').unwrap_or((url, ""));
        let shown = match (url.split_once("://"), url.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, host))) => format!("{scheme}://***@{host}"),
            (None, Some((_, host))) => format!("***@{host}"),
            (_, None) => url.to_owned(),
        };
        Self { problem: format!("{shown:?} is not a Redis URL such as redis://127.0.0.1:6379/0"), cause: Some(cause) }
    }
}

impl fmt::Display for InvalidRedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)
    }
}

impl error::Error for InvalidRedisConfig {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.cause.as_ref().map(|cause| cause as _)
    }
}
