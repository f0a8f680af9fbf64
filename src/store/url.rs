//! A store that a URL chooses at run time.

use std::sync::Arc;

#[cfg(feature = "redis")]
use super::redis::RedisStore;
use super::{MemoryStore, Store};
use crate::error::{ConfigError, ConfigErrorKind, StoreError, StoreErrorKind};

/// The schemes that the Redis client knows.
const REDIS_SCHEMES: [&str; 7] = ["redis", "rediss", "valkey", "valkeys", "redis+unix", "valkey+unix", "unix"];

/// The store at `url`, chosen at run time. One on Redis connects when the first check arrives, so Redis may be down, and no
/// runtime is needed yet.
///
/// | URL | store |
/// |---|---|
/// | `memory:`, `memory://` | [`MemoryStore::new`] |
/// | `redis://`, `rediss://` (TLS, with the feature `tls`), `redis+unix://`, `unix://`, and the same with `valkey` | `RedisStore::builder(url)` |
///
/// Schemes are compared without case (RFC 3986, section 3.1).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_sliding_window::{Everyone, Limit, RateLimitLayer, store};
///
/// let url = std::env::var("STORE_URL").unwrap_or_else(|_| "memory:".to_owned());
/// let layer = RateLimitLayer::new(store::from_url(&url)?).limit(Limit::per_minute("exports", 20).by(Everyone));
/// # let _: RateLimitLayer = layer;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`ConfigError`] if the scheme is unknown or needs a feature that is missing, if something follows `memory:`, or if it
/// is not a valid Redis URL.
pub fn from_url(url: &str) -> Result<Arc<dyn Store>, ConfigError> {
    if is_of_redis(url)? {
        #[cfg(feature = "redis")]
        return Ok(Arc::new(RedisStore::builder(url).build()?));
    }
    Ok(Arc::new(MemoryStore::new()))
}

/// The store at `url`, chosen at run time as [`from_url`] does. One on Redis has been reached and can be written to.
///
/// # Errors
///
/// [`StoreError`] if the URL is invalid, as for [`from_url`], if the server cannot be reached, if it is a replica, or if this
/// user may not write keys. Print its [sources](std::error::Error::source) as well: they have the address and the cause.
pub async fn connect(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    if is_of_redis(url).map_err(|error| StoreError::new("setting up the store", StoreErrorKind::Config, error))? {
        #[cfg(feature = "redis")]
        return Ok(Arc::new(RedisStore::connect(url).await?));
    }
    Ok(Arc::new(MemoryStore::new()))
}

/// Whether the URL names a store on Redis, which this build has. Otherwise it names the in-process one.
fn is_of_redis(url: &str) -> Result<bool, ConfigError> {
    let url = url.trim();
    // What is not certainly a scheme may be part of a password.
    let (scheme, rest) = url.split_once(':').unwrap_or_default();
    let problem = match &*scheme.to_ascii_lowercase() {
        "memory" if matches!(rest, "" | "//") => return Ok(false),
        "memory" => "the URL of the in-process store is memory: with nothing behind it".to_owned(),
        known if REDIS_SCHEMES.contains(&known) && cfg!(feature = "redis") => return Ok(true),
        known if REDIS_SCHEMES.contains(&known) => "URLs of Redis need this crate's feature `redis`".to_owned(),
        _ if url.is_empty() => no_scheme("the URL of the store is empty"),
        _ if is_certainly_scheme(scheme, rest) => no_scheme(&format!("{scheme}:// is not the scheme of a store's URL")),
        _ => no_scheme("a URL, not shown since it may hold a password, is not the URL of a store"),
    };
    Err(ConfigError::new(ConfigErrorKind::Store, problem))
}

/// Whether this is no user name or password of a URL that has lost its scheme.
fn is_certainly_scheme(scheme: &str, rest: &str) -> bool {
    let is_of_scheme = |byte: u8| byte.is_ascii_lowercase() || byte == b'+';
    rest.starts_with("//") && scheme.len() <= 16 && !scheme.is_empty() && scheme.bytes().all(is_of_scheme)
}

fn no_scheme(problem: &str) -> String {
    format!("{problem}: it must begin with memory:, redis://, rediss:// or redis+unix://")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_names_the_store() {
        for url in ["memory:", "memory://", "Memory:", " memory:\n"] {
            assert!(!is_of_redis(url).unwrap(), "{url}");
        }
        #[cfg(feature = "redis")]
        for url in ["redis://host", "REDISS://a:b@host", "unix:///run/redis.sock", "valkey+unix:///x", "redis:"] {
            assert!(is_of_redis(url).unwrap(), "{url}");
        }
    }

    #[test]
    fn an_error_shows_the_scheme_alone_and_only_if_it_is_one() {
        for (url, shown) in [
            ("", "the URL of the store is empty"),
            (" \n", "the URL of the store is empty"),
            ("mongodb://shop:s3cr3t@host", "mongodb:// is not the scheme"),
            ("redis+cluster://s3cr3t@host", "redis+cluster:// is not the scheme"),
            ("memory://s3cr3t", "memory: with nothing behind it"),
            ("memory:?capacity=5", "memory: with nothing behind it"),
            ("memory", "may hold a password"),
            ("default:s3cr3t", "may hold a password"),
            ("s3cr3t@host", "may hold a password"),
            ("s3cr3t://host", "may hold a password"),
            ("default:s3://cr3t@host", "may hold a password"),
            ("mongodb:s3cr3t", "may hold a password"),
            ("://s3cr3t@host", "may hold a password"),
        ] {
            let error = is_of_redis(url).unwrap_err();
            let seen = format!("{error} {error:?}");
            assert!(seen.contains(shown), "{url}: {seen}");
            assert!(!["s3cr3t", "cr3t", "default"].iter().any(|secret| seen.contains(secret)), "{url}: {seen}");
        }
    }

    #[cfg(not(feature = "redis"))]
    #[test]
    fn without_the_feature_a_redis_url_is_an_error_that_names_it() {
        let error = from_url("redis://shop:s3cr3t@host").unwrap_err().to_string();
        assert!(error.contains("`redis`") && !error.contains("s3cr3t"), "{error}");
    }
}
