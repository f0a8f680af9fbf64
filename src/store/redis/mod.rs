//! The shared store: one atomic script on Redis decides.
//!
//! 1. One sorted set a limit and identity; `sliding_log.lua` beside this file says what stands in it.
//! 2. The time is the server's, read once a script, so all processes decide by one clock.
//! 3. EVALSHA, and EVAL once when the server does not know the script.
//! 4. A check that met a broken connection, or a server that has become a replica, is sent once more over a new
//!    connection. It carries its identity, so should the first try have run after all, it counts once.
//! 5. Nothing but digests leaves the process: see `keys.rs` for the layout.

mod batch;
mod connection;
mod keys;
mod script;

use std::{
    error, fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use redis::{ConnectionInfo, IntoConnectionInfo, RedisError, Value, cmd};

use self::{
    batch::Submission,
    connection::{Connections, ends_the_connection},
    script::Script,
};
use super::{
    Store,
    clock::{Clock, ManualClock},
};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::{Limit, is_fixed_alphabet},
};

/// Limits shared by every process that uses the same Redis. See the [crate docs](crate#stores).
///
/// Clones share the connections.
#[derive(Clone)]
pub struct RedisStore(Arc<Shared>);

struct Shared {
    connections: Connections,
    script: Script,
    prefix: String,
    /// A clock of this process instead of the server's.
    clock: Option<Clock>,
}

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

impl RedisStore {
    /// A store on the server at `url`, such as `redis://127.0.0.1:6379/0`, that has been reached once.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the URL is not valid or the server cannot be reached. A process that has to start while Redis
    /// is down uses [`builder`](Self::builder) and [`build`](RedisStoreBuilder::build).
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let store = Self::builder(url).build().map_err(|error| StoreError::new("setting up Redis", error))?;
        // A batch of nothing: reaches the server, loads the script, and tells whether this user may run it.
        store.0.decide(&[]).await.map_err(|cause| StoreError::new("connecting to Redis", cause))?;
        Ok(store)
    }

    /// A store with settings of its own.
    pub fn builder(url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder {
            url: url.to_owned(),
            prefix: keys::DEFAULT_PREFIX.to_owned(),
            connections: 8,
            connect_timeout: Duration::from_secs(1),
            clock: None,
        }
    }
}

impl RedisStoreBuilder {
    /// What every key begins with: 1 to 64 characters of `A-Z a-z 0-9 _ . -`. Default: `tsw1`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// How many connections to open at most, each for one check at a time. Default: 8.
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
        let connections = connection_info(&self.url)
            .and_then(|info| Connections::new(info, self.connections, self.connect_timeout))
            .map_err(|error| InvalidRedisConfig::url(&self.url, error))?;
        Ok(RedisStore(Arc::new(Shared {
            connections,
            script: Script::new(include_str!("sliding_log.lua")),
            prefix: self.prefix,
            clock: self.clock.map(Clock::Manual),
        })))
    }
}

fn connection_info(url: &str) -> Result<ConnectionInfo, RedisError> {
    url.into_connection_info()
}

impl Store for RedisStore {
    type Decide = RedisFuture<Decision>;
    type Reset = RedisFuture<()>;

    fn decide(&self, check: Check) -> RedisFuture<Decision> {
        let shared = Arc::clone(&self.0);
        RedisFuture::new(async move {
            let batch = [Submission::new(check)];
            let mut outcomes =
                shared.decide(&batch).await.map_err(|cause| StoreError::new("deciding a check", cause))?;
            outcomes.pop().unwrap_or_else(|| Err(StoreError::new("deciding a check", batch::MalformedReply)))
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> RedisFuture<()> {
        let shared = Arc::clone(&self.0);
        RedisFuture::new(async move {
            let key = keys::redis_key(&shared.prefix, &limit, &key);
            let outcome = shared.unlink(&key).await;
            outcome.map(drop).map_err(|cause| StoreError::new("resetting a key", cause))
        })
    }
}

type Cause = Box<dyn error::Error + Send + Sync>;

impl Shared {
    /// Sends a batch, and once more if the connection was broken.
    async fn decide(&self, batch: &[Submission]) -> Result<Vec<Result<Decision, StoreError>>, Cause> {
        let now = self.clock.as_ref().map_or_else(String::new, |clock| clock.now().to_string());
        let outcome = match self.try_decide(batch, &now, false).await? {
            Err(error) if ends_the_connection(&error) => self.try_decide(batch, &now, true).await?,
            outcome => outcome,
        };
        Ok(batch::read(outcome?, batch)?)
    }

    /// The inner error is the server's or the connection's, the outer one that there was no connection.
    async fn try_decide(
        &self,
        batch: &[Submission],
        now: &str,
        again: bool,
    ) -> Result<Result<Value, RedisError>, Cause> {
        let mut connection = self.connections.get().await?;
        Ok(self.script.run(&mut connection, |command| batch::write(command, &self.prefix, batch, now, again)).await)
    }

    /// Deletes a key. Deleting it twice does no harm, so it is sent once more if the connection was broken.
    async fn unlink(&self, key: &str) -> Result<Value, Cause> {
        let mut command = cmd("UNLINK");
        command.arg(key);
        match self.connections.get().await?.send(&command).await {
            Err(error) if ends_the_connection(&error) => Ok(self.connections.get().await?.send(&command).await?),
            outcome => Ok(outcome?),
        }
    }
}

/// The future of a [`RedisStore`]'s answer.
#[must_use = "futures do nothing unless polled"]
pub struct RedisFuture<T>(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>);

impl<T> RedisFuture<T> {
    fn new(future: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(Box::pin(future))
    }
}

impl<T> Future for RedisFuture<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl<T> fmt::Debug for RedisFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisFuture").finish_non_exhaustive()
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.0.prefix).finish_non_exhaustive()
    }
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
