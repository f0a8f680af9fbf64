//! What is wrong with a setting.

use std::{error, fmt};

use redis::RedisError;

use super::url::shown;

/// A setting that no [`RedisStore`](super::RedisStore) can have: the error of
/// [`RedisStoreBuilder::build`](super::RedisStoreBuilder::build), naming the value. Of a URL it shows the
/// scheme and the host at most, and not even those where a password may stand in their place.
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
        let shown = shown(url).map(|shown| format!("{shown:?}"));
        let shown = shown.as_deref().unwrap_or("a URL, not shown since it may hold a password,");
        let problem = format!("{shown} is not a Redis URL such as redis://127.0.0.1:6379/0");
        // Of parameters the client repeats the value.
        Self { problem, cause: (!url.contains('?')).then_some(cause) }
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
