//! Makes the errors of wrong URLs, sorts the errors of Redis into kinds, and tells after which
//! errors of Redis a connection has to be replaced.
//!
//! No error shows a URL. In a URL, a user name and a password come before the host, and may have
//! any character. If a `/`, `?` or `#` in a password is not percent-encoded, a parser takes the
//! text before this character for the host.

use std::fmt;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::{ConfigError, StoreError, StoreErrorKind};

/// The error of a URL that is not a Redis URL.
pub(super) fn url(url: &str, cause: &RedisError) -> ConfigError {
    const OF_SEVERAL: &str = "redis+sentinel:// and redis+cluster:// URLs are for `store::from_url` and `store::connect`: with settings of your own, use `RedisStore::sentinel` or `RedisStore::cluster` with redis:// URLs";
    if cause
        .to_string()
        .contains("TLS, the feature is not enabled")
    {
        return ConfigError::new(
            "rediss:// URLs, for TLS, need this crate's feature `tls`, or `tokio-native-tls-comp` of the crate `redis`",
        );
    }
    if ["+sentinel:", "+cluster:"]
        .iter()
        .any(|scheme| url.to_ascii_lowercase().contains(scheme))
    {
        return ConfigError::new(OF_SEVERAL);
    }
    let problem = "a URL, not shown since it may hold a password, is not a Redis URL such as redis://127.0.0.1:6379/0";
    // The only parts of a URL that the client's error repeats are the values of parameters. So the
    // error is shown if the URL has no parameters.
    ConfigError::new(if url.contains('?') {
        problem.into()
    } else {
        format!("{problem}: {cause}")
    })
}

/// The text of an error until the store replaces this text by the name of the call that failed.
pub(crate) const ASKING: &str = "asking Redis";

/// The error for a failure of the server, or of a connection to the server.
pub(crate) fn failure(cause: RedisError) -> StoreError {
    let kind = kind(&cause);
    StoreError::new(ASKING, kind, explained(cause))
}

/// The error when no connection could be opened.
pub(super) fn no_connection(server: &dyn fmt::Display, cause: &RedisError) -> StoreError {
    let kind = match kind(cause) {
        StoreErrorKind::Other | StoreErrorKind::TimedOut => StoreErrorKind::Unreachable,
        kind => kind,
    };
    let text = cause.to_string();
    let is_silent =
        cause.is_connection_dropped() || cause.is_timeout() || text.contains("corrupt message");
    // The client's text of an error has `Server(` if the server has given a reason.
    let is_clear = kind != StoreErrorKind::Unreachable
        || cause.is_connection_refusal()
        || text.contains("Server(");
    let cause = explained(cause.clone());
    let hint = if is_silent && !is_clear {
        ": it hangs up or is silent. Is only one side set to TLS, a proxy in between, or `maxclients` reached?"
    } else {
        ""
    };
    StoreError::new(
        ASKING,
        kind,
        format!("no connection to Redis at {server} could be opened: {cause}{hint}"),
    )
}

/// Adds to an error what to do about a mistake in the set-up, if the error's own text does not say
/// it.
fn explained(error: RedisError) -> RedisError {
    const LOGIN: &str = "the user or the password is wrong, set them with `login`, `credentials` or in the URL (of a sentinel, in its URL)";
    const NO_PASSWORD: &str = "no password was sent, set it with `login`, `credentials` or in the URL (of a sentinel, in its URL): redis://word@host has a user and no password, a password alone is redis://:password@host";
    const LACKS_COMMANDS: &str = "the user needs the commands that `guide::running_redis` lists";
    const MISTAKES: [(&str, &str); 16] = [
        (
            "UnknownIssuer",
            "no authority that is trusted has signed the server's certificate, set `root_certificate`",
        ),
        (
            "Moved:",
            "the server is a node of a cluster, use `RedisStore::cluster`",
        ),
        (
            "unknown command 'SENTINEL'",
            "the server is no sentinel, use `RedisStore::builder`",
        ),
        (
            "unknown command 'SELECT'",
            "a sentinel has no databases, set the number with `database`, not in its URL",
        ),
        (
            "unknown command",
            "the server lacks a command of the store: of sentinels, use `RedisStore::sentinel`",
        ),
        (
            "read only replica",
            "the server is a replica, connect to its primary, or use `RedisStore::sentinel`",
        ),
        ("NOAUTH", NO_PASSWORD),
        ("Authentication required", NO_PASSWORD),
        (
            "DB index",
            "the server has no database of this number, see `databases` in its configuration",
        ),
        ("AuthenticationFailed", LOGIN),
        ("WRONGPASS", LOGIN),
        (
            "permissions to access",
            "the user needs the prefix of the store in its ACL, ~tsw1:* by default",
        ),
        ("permissions to run", LACKS_COMMANDS),
        ("can't run this command", LACKS_COMMANDS),
        (
            "ClusterConnectionNotFound",
            "no node that the cluster announces can be reached, see cluster-announce-ip",
        ),
        (
            "cluster support disabled",
            "the server is not in cluster mode, use `RedisStore::builder`",
        ),
    ];
    // Redis 6.2 begins a quotation with a backtick.
    let mut text = error.to_string().replace('`', "'");
    let Some((_, mistake)) = MISTAKES.into_iter().find(|(words, _)| text.contains(words)) else {
        return error;
    };
    // The arguments of an unknown command are left out: those of a sign-in have the password.
    if text.contains("unknown command") {
        text.truncate(text.find(',').unwrap_or(0));
    }
    RedisError::from((error.kind(), mistake, text))
}

pub(super) fn kind(error: &RedisError) -> StoreErrorKind {
    // For a cluster, the client has put the error of a node into the text of its own error.
    match (kind_of_reply(&error.to_string()), error.kind()) {
        (StoreErrorKind::Other, _) if error.is_timeout() => StoreErrorKind::TimedOut,
        (StoreErrorKind::Other, ErrorKind::Io | ErrorKind::ClusterConnectionNotFound) => {
            StoreErrorKind::Unreachable
        }
        (kind, _) => kind,
    }
}

/// The kind of an error that the server has sent. Redis 6.2 puts the word of the kind into the
/// middle of the text.
pub(crate) fn kind_of_reply(text: &str) -> StoreErrorKind {
    const KINDS: [(&str, StoreErrorKind); 16] = [
        ("AuthenticationFailed", StoreErrorKind::Denied),
        ("NOAUTH", StoreErrorKind::Denied),
        ("Authentication required", StoreErrorKind::Denied),
        ("WRONGPASS", StoreErrorKind::Denied),
        ("permission", StoreErrorKind::Denied),
        ("can't run", StoreErrorKind::Denied),
        ("READONLY", StoreErrorKind::ReadOnly),
        ("ReadOnly", StoreErrorKind::ReadOnly),
        ("NOREPLICAS", StoreErrorKind::ReadOnly),
        ("MISCONF", StoreErrorKind::ReadOnly),
        ("BusyLoading", StoreErrorKind::Busy),
        ("BUSY", StoreErrorKind::Busy),
        ("when used memory >", StoreErrorKind::OutOfMemory),
        ("WRONGTYPE", StoreErrorKind::WrongType),
        ("DB index", StoreErrorKind::Config),
        ("not allowed in cluster mode", StoreErrorKind::Config),
    ];
    KINDS
        .into_iter()
        .find(|(word, _)| text.contains(word))
        .map_or(StoreErrorKind::Other, |(_, kind)| kind)
}

/// Whether the next request needs a new connection, because the server is gone or has become a
/// replica. A new connection may reach the new primary.
pub(crate) fn needs_new_connection(error: &RedisError) -> bool {
    // Before Redis 7.0, the READONLY error of a command in a script is inside the text of the
    // script's error.
    let is_read_only = error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error
            .detail()
            .is_some_and(|text| text.contains("-READONLY "));
    // The Redis client takes some broken connections for usable, for example after a damaged record
    // of TLS.
    let is_broken = error.kind() == ErrorKind::Io && !error.is_timeout();
    is_broken || error.is_unrecoverable_error() || is_read_only
}

/// Whether the error says that a node has not run the command, and that another node may run it.
pub(crate) fn was_not_run(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    matches!(
        error.kind(),
        ErrorKind::ClusterConnectionNotFound
            | ErrorKind::Server(
                Moved | Ask | TryAgain | ClusterDown | MasterDown | BusyLoading | ReadOnly
            )
    )
}

/// Whether the host that a parser finds in a URL may be part of a user name or a password.
pub(super) fn is_ambiguous(url: &str) -> bool {
    // URL parsers ignore these characters.
    let url = url.replace(['\t', '\n', '\r'], "");
    let Some((_, rest)) = url.split_once("//") else {
        return url.contains('@');
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    !authority.is_empty() && path.contains('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_that_ends_the_authority_early_is_found() {
        for url in [
            "redis://shop:1234?p4ss@host",
            "redis:/\t/shop:1234/p4ss@host",
            " REDIS://shop:1#2@host",
            "redis:a@b",
        ] {
            assert!(is_ambiguous(url), "{url}");
        }
        for url in [
            "redis://a@b@host:1/0",
            "redis+unix:///tmp/redis.sock?pass=p@ss",
            "redis://host/0",
            "host",
        ] {
            assert!(!is_ambiguous(url), "{url}");
        }
    }
}
