//! What is wrong with a setting.

use std::{error, fmt};

use redis::RedisError;

use super::url::host;

const EXAMPLE: &str = "redis://127.0.0.1:6379/0";

/// A setting that no [`RedisStore`](super::RedisStore) can have: the error of
/// [`RedisStoreBuilder::build`](super::RedisStoreBuilder::build), naming the value. Of a URL it
/// shows the host at most, and not even that where a password may stand in its place.
#[derive(Debug)]
pub struct InvalidRedisConfig {
    problem: String,
    cause: Option<RedisError>,
}

impl InvalidRedisConfig {
    pub(super) fn new(problem: impl Into<String>) -> Self {
        Self { problem: problem.into(), cause: None }
    }

    pub(super) fn caused(problem: impl Into<String>, cause: RedisError) -> Self {
        Self { problem: problem.into(), cause: Some(cause) }
    }

    /// A URL is not one of Redis. The cause is the client's, which does not repeat the URL.
    pub(super) fn url(url: &str, cause: RedisError) -> Self {
        let problem = match host(url) {
            Some(host) => format!("the URL of the host {host:?} is not a Redis URL such as {EXAMPLE}"),
            None => format!("a URL, not shown since it may hold a password, is not a Redis URL such as {EXAMPLE}"),
        };
        Self::caused(problem, cause)
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
