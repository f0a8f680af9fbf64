//! What is wrong with a setting.

use std::{error, fmt};

use redis::RedisError;

/// A setting that no [`RedisStore`](super::RedisStore) can have: the error of
/// [`RedisStoreBuilder::build`](super::RedisStoreBuilder::build), naming the value. Passwords are left out.
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

    pub(super) fn url(url: &str, cause: RedisError) -> Self {
        // A password stands before the host, or among the parameters.
        let (url, _) = url.split_once('?').unwrap_or((url, ""));
        let shown = match (url.split_once("://"), url.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, host))) => format!("{scheme}://***@{host}"),
            (None, Some((_, host))) => format!("***@{host}"),
            (_, None) => url.to_owned(),
        };
        Self::caused(format!("{shown:?} is not a Redis URL such as redis://127.0.0.1:6379/0"), cause)
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
