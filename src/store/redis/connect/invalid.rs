//! The error of a wrong setting.

use std::{error, fmt};

use redis::RedisError;

use super::url::redacted;

/// A wrong setting of a [`RedisStore`](crate::RedisStore): the error of
/// [`RedisStoreBuilder::build`](crate::store::RedisStoreBuilder::build).
///
/// It names the value. Of a URL it shows at most the scheme and the host, and nothing if they may be part of a password.
#[derive(Debug)]
pub struct InvalidRedisConfig {
    problem: String,
    cause: Option<RedisError>,
}

impl InvalidRedisConfig {
    pub(crate) fn new(problem: impl Into<String>) -> Self {
        Self { problem: problem.into(), cause: None }
    }

    pub(super) fn caused(problem: impl Into<String>, cause: RedisError) -> Self {
        Self { problem: problem.into(), cause: Some(cause) }
    }

    /// A URL that is not a Redis URL. The client's error, which is the cause, does not repeat the URL.
    pub(super) fn url(url: &str, cause: RedisError) -> Self {
        let shown = redacted(url).map(|shown| format!("{shown:?}"));
        let shown = shown.as_deref().unwrap_or("a URL, not shown since it may hold a password,");
        let problem = format!("{shown} is not a Redis URL such as redis://127.0.0.1:6379/0");
        // The client's error repeats the values of parameters.
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
