//! Errors of wrong settings, and the kinds of the server's errors.

use std::{borrow::Cow, error::Error, iter};

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::{pool::NoConnection, url::redacted};
use crate::error::{ConfigError, ConfigErrorKind, StoreError, StoreErrorKind};

/// A setting that is wrong.
pub(crate) fn setting(problem: impl Into<Cow<'static, str>>) -> ConfigError {
    ConfigError::new(ConfigErrorKind::Store, problem)
}

/// A URL that is not a Redis URL.
pub(super) fn url(url: &str, cause: &RedisError) -> ConfigError {
    let shown = redacted(url).map(|shown| format!("{shown:?}"));
    let shown = shown.as_deref().unwrap_or("a URL, not shown since it may hold a password,");
    let problem = format!("{shown} is not a Redis URL such as redis://127.0.0.1:6379/0");
    // The client's error repeats the values of parameters, and nothing else of the URL.
    setting(if url.contains('?') { problem } else { format!("{problem}: {cause}") })
}

/// A failure while `doing` something, of the kind that its cause shows.
pub(crate) fn failure(doing: &'static str, cause: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    let cause = cause.into();
    let causes = iter::successors(Some(&*cause as &(dyn Error + 'static)), |&cause| cause.source());
    let kind = match { causes }.find_map(|cause| cause.downcast_ref()).map_or(StoreErrorKind::Other, kind) {
        StoreErrorKind::Other | StoreErrorKind::TimedOut if cause.is::<NoConnection>() => StoreErrorKind::Unreachable,
        kind => kind,
    };
    StoreError::new(doing, cause).of_kind(kind)
}

fn kind(error: &RedisError) -> StoreErrorKind {
    match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => StoreErrorKind::Denied,
        ErrorKind::Server(ServerErrorKind::ReadOnly) => StoreErrorKind::ReadOnly,
        ErrorKind::Io if error.is_timeout() => StoreErrorKind::TimedOut,
        ErrorKind::Io => StoreErrorKind::Unreachable,
        _ => kind_of_reply(&error.to_string()),
    }
}

/// The kind of an error that the server has sent. Redis 6.2 puts its word into the middle of the text.
pub(crate) fn kind_of_reply(text: &str) -> StoreErrorKind {
    const KINDS: [(&str, StoreErrorKind); 7] = [
        ("NOAUTH", StoreErrorKind::Denied),
        ("WRONGPASS", StoreErrorKind::Denied),
        ("permission", StoreErrorKind::Denied),
        ("can't run", StoreErrorKind::Denied),
        ("READONLY", StoreErrorKind::ReadOnly),
        ("OOM ", StoreErrorKind::OutOfMemory),
        ("WRONGTYPE", StoreErrorKind::WrongType),
    ];
    KINDS.into_iter().find(|(word, _)| text.contains(word)).map_or(StoreErrorKind::Other, |(_, kind)| kind)
}
