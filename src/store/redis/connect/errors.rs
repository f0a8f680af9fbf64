//! Makes the errors for wrong URLs, classifies errors from Redis, and tells which of them need a
//! new connection.
//!
//! Errors never show a URL. In a URL, a user name and a password come before the host, and may
//! contain any character. If a `/`, `?` or `#` in a password is not percent-encoded, a parser takes
//! the text before it for the host.

use std::fmt;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::error::{
    ConfigError, StoreError,
    StoreErrorKind::{self, *},
};

const UNTRUSTED: &str =
    "no authority that is trusted has signed the server's certificate, set `root_certificate`";
const NODE: &str = "another node of the cluster has the slot, use `RedisSource::cluster`, or a URL that begins with redis+cluster://: if this store does, that node is down";
const NO_SENTINEL: &str = "the server is no sentinel, use `RedisStore::builder`";
const OLD: &str =
    "the server lacks a command of the store: if it is a sentinel, use `RedisSource::sentinels`";
const NO_REDIS: &str =
    "the reply is not one of Redis: if the server is a sentinel, use `RedisSource::sentinels`";
const REPLICA: &str =
    "the server is a replica, connect to its primary, or use `RedisSource::sentinels`";
const NO_PASSWORD: &str =
    "no password was sent, set it in the URL, as in redis://:password@host, or with `credentials`";
const LOGIN: &str = "the user or the password is wrong, set them in the URL, where % is written as %25, or with `credentials`";
const SENTINEL: &str = "a sentinel needs another user or password, write them into its own URL for `RedisSource::sentinels`: a redis+sentinel:// URL has those of the primary alone";
const NO_DATABASE: &str =
    "the server has no database of this number, see `databases` in its configuration";
const LACKS_PREFIX: &str =
    "the user needs the prefix of the store in its ACL, ~tsw1:* if you set no other prefix";
const LACKS_COMMANDS: &str = "the user needs the commands that `guide::running_redis` lists";
const NO_NODE: &str = "no node that the cluster announces can be reached, see cluster-announce-ip";
const NO_CLUSTER: &str = "the server is not in cluster mode, use `RedisStore::builder`";

/// These words are in the error from a sentinel that refuses the login or a command.
pub(super) const SENTINEL_REFUSES: &str = "a sentinel refuses";

/// Words in an error's text, their kind, and what to do about a mistake in the set-up. The first
/// row with a kind decides the kind, and the first row with advice decides the advice.
const REPLIES: [(&str, StoreErrorKind, &str); 28] = [
    ("UnknownIssuer", Other, UNTRUSTED),
    ("Moved:", Other, NODE),
    ("unknown command 'SENTINEL'", Other, NO_SENTINEL),
    ("unknown command", Other, OLD),
    (SENTINEL_REFUSES, Denied, SENTINEL),
    ("NOAUTH", Denied, NO_PASSWORD),
    ("Authentication required", Denied, NO_PASSWORD),
    ("AuthenticationFailed", Denied, LOGIN),
    ("WRONGPASS", Denied, LOGIN),
    ("permissions to access", Denied, LACKS_PREFIX),
    ("permissions to run", Denied, LACKS_COMMANDS),
    ("permission", Denied, ""),
    ("can't run this command", Denied, LACKS_COMMANDS),
    ("can't run", Denied, ""),
    ("read only replica", ReadOnly, REPLICA),
    ("READONLY", ReadOnly, ""),
    ("ReadOnly", ReadOnly, ""),
    ("NOREPLICAS", ReadOnly, ""),
    ("MISCONF", ReadOnly, ""),
    ("BusyLoading", Busy, ""),
    ("BUSY", Busy, ""),
    ("when used memory >", OutOfMemory, ""),
    ("WRONGTYPE", WrongType, ""),
    ("refused to switch database", Config, NO_DATABASE),
    ("not allowed in cluster mode", Config, ""),
    ("ClusterConnectionNotFound", Other, NO_NODE),
    ("cluster support disabled", Other, NO_CLUSTER),
    ("Parse error", Other, NO_REDIS),
];

/// Makes the error for a URL that is not a Redis URL, or that the Redis client would partly ignore.
pub(super) fn url(url: &str, cause: &dyn fmt::Display) -> ConfigError {
    const PROBLEM: &str = "a URL, not shown since it may hold a password, is not a Redis URL such as redis://127.0.0.1:6379/0";
    const OPTIONS: &str = "write redis://user:password@host:6379/8, where ?protocol=resp3 is the only option, or for a socket unix:///path?db=8&user=user&pass=password&protocol=resp3. A password alone is redis://:password@host, an IPv6 address is redis://[::1]:6379. In a user name or password write / as %2F, ? as %3F, # as %23, @ as %40 and % as %25, and + as %2B for a socket";
    const OF_SEVERAL: &str = "URLs of sentinels begin with redis+sentinel://, and those of a cluster with redis+cluster://, and each server of `RedisSource::sentinels` and `RedisSource::cluster` with redis://";
    const TLS: &str = "rediss:// URLs, for TLS, need this crate's feature `tls`, or `tokio-native-tls-comp` of the crate `redis`";
    const MEMORY: &str =
        "`memory:`, without options, is a URL for `store::from_url` and `store::connect`";
    let cause = cause.to_string();
    let (scheme, rest) = url.split_once(':').unwrap_or_else(|| (url.trim(), ""));
    let scheme = scheme.to_ascii_lowercase();
    let hosts = &rest[rest.rfind('@').unwrap_or(0)..];
    let problem = if cause.contains("TLS, the feature is not enabled") {
        return ConfigError::new(TLS);
    } else if scheme == "memory" {
        return ConfigError::new(MEMORY);
    } else if scheme.contains("sentinel") || scheme.contains("cluster") || hosts.contains(',') {
        return ConfigError::new(OF_SEVERAL);
    } else if !rest.starts_with("//") {
        "it does not begin with redis://".to_owned()
    } else if url.contains('?') {
        // The client's error repeats only the values of a URL's parameters.
        return ConfigError::new(format!("{PROBLEM}: {OPTIONS}"));
    } else {
        cause
    };
    ConfigError::new(format!("{PROBLEM}: {problem}: {OPTIONS}"))
}

/// The placeholder in an error's text until the store replaces it with the name of the failed call.
pub(crate) const ASKING: &str = "asking Redis";

/// Makes the error for a failure of the server, or of a connection to it.
pub(crate) fn failure(cause: RedisError) -> StoreError {
    let kind = kind(&cause);
    StoreError::new(ASKING, kind, explained(cause))
}

/// Makes the error for when no connection could be opened.
pub(super) fn no_connection(server: &dyn fmt::Display, cause: &RedisError) -> StoreError {
    let kind = match kind(cause) {
        Other | TimedOut => Unreachable,
        kind => kind,
    };
    let text = cause.to_string();
    let is_silent =
        cause.is_connection_dropped() || cause.is_timeout() || text.contains("corrupt message");
    // The client's error text has `Server(` if the server gave a reason. For a cluster, it has the
    // nodes' errors.
    let is_clear = kind != Unreachable || text.contains("refused") || text.contains("Server(");
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

/// Adds advice about a mistake in the set-up, if the error's own text does not have it.
fn explained(error: RedisError) -> RedisError {
    // Redis 6.2 begins a quotation with a backtick.
    let mut text = error.to_string().replace('`', "'").replace('\n', " ");
    let mut known = REPLIES.into_iter();
    let Some((.., mistake)) = known.find(|(words, _, m)| !m.is_empty() && text.contains(words))
    else {
        return error;
    };
    // The arguments of an unknown command are left out: in a sign-in, they include the password.
    if text.contains("unknown command") {
        text.truncate(text.find(',').unwrap_or(0));
    }
    RedisError::from((error.kind(), mistake, text))
}

pub(super) fn kind(error: &RedisError) -> StoreErrorKind {
    // For a cluster, the client puts a node's error into its own error's text.
    match (kind_of_reply(&error.to_string()), error.kind()) {
        (Other, _) if error.is_timeout() => TimedOut,
        (Other, ErrorKind::Io | ErrorKind::ClusterConnectionNotFound) => Unreachable,
        (kind, _) => kind,
    }
}

/// The kind of an error that the server sent. Redis 6.2 puts the kind into the middle of the text.
pub(crate) fn kind_of_reply(text: &str) -> StoreErrorKind {
    let mut known = REPLIES.into_iter();
    known
        .find(|(words, kind, _)| *kind != Other && text.contains(words))
        .map_or(Other, |(_, kind, _)| kind)
}

/// True if the next request needs a new connection, because the server is gone or has become a
/// replica. A new one may reach the new primary.
pub(crate) fn needs_new_connection(error: &RedisError) -> bool {
    // Before Redis 7.0, a command's READONLY error is inside the script's error text.
    let is_read_only = error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error
            .detail()
            .is_some_and(|text| text.contains("-READONLY "));
    // The Redis client takes some broken connections for usable, for example after a damaged TLS
    // record.
    let is_broken = error.kind() == ErrorKind::Io && !error.is_timeout();
    is_broken || error.is_unrecoverable_error() || is_read_only
}

/// True if the error says that a node has not run the command, and another may run it.
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
