//! Errors of wrong settings, the kinds of the server's errors, and what they say of a connection.
//!
//! URLs are shown without passwords. A user name and a password come before the host, and may have any character. If a `/`, `?` or
//! `#` in them is not percent-encoded, a parser takes the text before it for the host. So an error shows only the scheme and the host
//! of a URL, and only if they cannot be part of a password.

use std::{borrow::Cow, fmt::Display};

use redis::{ErrorKind, RedisError, ServerErrorKind};

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

/// The words of an error, until the store says which call has failed.
pub(crate) const ASKING: &str = "asking Redis";

/// The failure of the server, or of a connection to it.
pub(crate) fn failure(cause: RedisError) -> StoreError {
    let kind = kind(&cause);
    StoreError::new(ASKING, kind, explained(cause))
}

/// The failure that no connection could be opened.
pub(super) fn no_connection(server: &impl Display, cause: &RedisError) -> StoreError {
    let kind = match kind(cause) {
        StoreErrorKind::Other | StoreErrorKind::TimedOut => StoreErrorKind::Unreachable,
        kind => kind,
    };
    let cause = explained(cause.clone());
    StoreError::new(ASKING, kind, format!("no connection to Redis at {server} could be opened: {cause}"))
}

/// Says what to do about a mistake in the set-up, where the words of the client or the server do not.
fn explained(error: RedisError) -> RedisError {
    const LOGIN: &str =
        "the password is missing or wrong, set it with `login` or in the URL (of a sentinel, in its URL)";
    const LACKS_COMMANDS: &str = "the user needs the commands that `guide::running_redis` lists";
    const MISTAKES: [(&str, &str); 9] = [
        ("read only replica", "the server is a replica, connect to its primary, or use `RedisStore::sentinel`"),
        ("NOAUTH", LOGIN),
        ("AuthenticationFailed", LOGIN),
        ("permissions to access", "the user needs the prefix of the store in its ACL, ~tsw1:* by default"),
        ("permissions to run", LACKS_COMMANDS),
        ("can't run this command", LACKS_COMMANDS),
        ("ClusterConnectionNotFound", "no node that the cluster announces can be reached, see cluster-announce-ip"),
        ("cluster support disabled", "the server is not in cluster mode, use `RedisStore::builder`"),
        ("SELECT is not allowed in cluster mode", "this cluster has only database 0"),
    ];
    let text = error.to_string();
    match MISTAKES.into_iter().find(|(words, _)| text.contains(words)) {
        Some((_, mistake)) => RedisError::from((error.kind(), mistake, text)),
        None => error,
    }
}

fn kind(error: &RedisError) -> StoreErrorKind {
    match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => StoreErrorKind::Denied,
        ErrorKind::Server(ServerErrorKind::ReadOnly) => StoreErrorKind::ReadOnly,
        ErrorKind::Io if error.is_timeout() => StoreErrorKind::TimedOut,
        // Of a cluster, the client has put the error of a node into the text of its own.
        ErrorKind::Io | ErrorKind::ClusterConnectionNotFound => match kind_of_reply(&error.to_string()) {
            StoreErrorKind::Other => StoreErrorKind::Unreachable,
            kind => kind,
        },
        _ => kind_of_reply(&error.to_string()),
    }
}

/// The kind of an error that the server has sent. Redis 6.2 puts its word into the middle of the text.
pub(crate) fn kind_of_reply(text: &str) -> StoreErrorKind {
    const KINDS: [(&str, StoreErrorKind); 8] = [
        ("AuthenticationFailed", StoreErrorKind::Denied),
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

/// Whether the next request needs a new connection: the peer is gone, or it has become a replica and a new connection may
/// reach the new primary.
pub(crate) fn needs_new_connection(error: &RedisError) -> bool {
    // Before Redis 7.0, READONLY for a command of a script is in the text of the script's error.
    let is_read_only = error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error.detail().is_some_and(|text| text.contains("-READONLY "));
    error.is_unrecoverable_error() || is_read_only
}

/// Whether the error says that a node has not run the command, and that another may.
pub(crate) fn was_not_run(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    matches!(
        error.kind(),
        ErrorKind::ClusterConnectionNotFound
            | ErrorKind::Server(Moved | Ask | TryAgain | ClusterDown | MasterDown | BusyLoading | ReadOnly)
    )
}

/// The schemes of Redis, and those that are written by mistake.
const SCHEMES: [&str; 10] =
    ["redis", "rediss", "valkey", "valkeys", "redis+unix", "valkey+unix", "unix", "http", "https", "tcp"];

/// The scheme and the host, such as `redis://…@host…`. `None` if they may be part of a password.
fn redacted(url: &str) -> Option<String> {
    let (scheme, rest) = url.split_once("://")?;
    if !SCHEMES.contains(&scheme) || is_ambiguous(url) {
        return None;
    }
    let (authority, path) = split_authority(rest);
    let (user, address) = authority.rsplit_once('@').map_or(("", authority), |(_, address)| ("…@", address));
    let host = host(address)?;
    let rest = if address == host && path.is_empty() { "" } else { "…" };
    Some(format!("{scheme}://{user}{host}{rest}"))
}

/// The host of an address, with the brackets of an IPv6 one.
fn host(address: &str) -> Option<&str> {
    let end = address.find(']').map_or_else(|| address.find(':').unwrap_or(address.len()), |end| end + 1);
    let (host, port) = address.split_at(end);
    let literal = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_of_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_host = match literal {
        Some(literal) => literal.chars().all(|c| c == ':' || is_of_host(c)),
        None => host.chars().all(is_of_host),
    };
    let is_port =
        port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.chars().all(|c| c.is_ascii_digit()));
    (is_host && is_port && !host.is_empty()).then_some(host)
}

/// Whether the host may be part of a user name or a password.
pub(super) fn is_ambiguous(url: &str) -> bool {
    // URL parsers ignore these characters.
    let url = url.replace(['\t', '\n', '\r'], "");
    let Some((_, rest)) = url.split_once("//") else { return url.contains('@') };
    let (authority, path) = split_authority(rest);
    !authority.is_empty() && path.contains('@')
}

fn split_authority(rest: &str) -> (&str, &str) {
    rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_certain_host_is_shown() {
        for (url, expected) in [
            ("redis://10.0.0.1/db", Some("redis://10.0.0.1…")),
            ("http://localhost", Some("http://localhost")),
            ("rediss://shop:s3cr3t@redis-1.internal:6380/0", Some("rediss://…@redis-1.internal…")),
            ("redis://shop:s3@cr3t@host", Some("redis://…@host")),
            ("redis://:s3cr3t@[2001:db8::1]:6379/x", Some("redis://…@[2001:db8::1]…")),
            ("redis://[::1]", Some("redis://[::1]")),
            ("redis+unix://user:s3cr3t@localhost/tmp/redis.sock", Some("redis+unix://…@localhost…")),
            ("redis://shop:s3cr3t?p4ss@host", None),
            ("redis://shop:12/s3cr3t@host", None),
            ("redis://shop:s3cr3t", None),
            ("redis://shop:s3cr3t@", None),
            ("redis://shop:s3cr3t@host:port", None),
            ("redis://shop:s3cr3t@[::1", None),
            ("redis://shop:s3cr3t@[::1]6379", None),
            ("redis://shop:s3cr3t@ho st", None),
            ("shop:s3://cr3t", None),
            ("default:s3cr3t", None),
            ("s3cr3t@host", None),
            ("redis:shop:s3cr3t@host", None),
            ("", None),
        ] {
            assert_eq!(redacted(url).as_deref(), expected, "{url}");
        }
    }

    #[test]
    fn a_password_that_ends_the_authority_early_is_found() {
        for url in
            ["redis://shop:1234?p4ss@host", "redis:/\t/shop:1234/p4ss@host", " REDIS://shop:1#2@host", "redis:a@b"]
        {
            assert!(is_ambiguous(url), "{url}");
        }
        for url in ["redis://a@b@host:1/0", "redis+unix:///tmp/redis.sock?pass=p@ss", "redis://host/0", "host"] {
            assert!(!is_ambiguous(url), "{url}");
        }
    }
}
