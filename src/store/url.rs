//! A store that a URL chooses at run time.

use std::sync::Arc;

#[cfg(feature = "redis")]
use super::redis::RedisStoreBuilder;
use super::{MemoryStore, Store};
use crate::error::{ConfigError, StoreError, StoreErrorKind};

/// The store at `url`, chosen at run time. A store on Redis connects when the first check arrives,
/// so Redis may be down, and no runtime is needed yet.
///
/// | URL | store |
/// |---|---|
/// | `memory:`, `memory://` | [`MemoryStore::new`] |
/// | `redis://`, `rediss://` (TLS, with the feature `tls`), `redis+unix://`, `unix://`, and the same with `valkey` | `RedisStore::builder(url)` |
/// | `redis+cluster://host:port,host:port`, with the feature `cluster` | `RedisStore::cluster` |
/// | `redis+sentinel://host:port,host:port/primary` | `RedisStore::sentinel`, with the name of the primary |
///
/// A URL of a cluster may have the user and password of all nodes, as in
/// `redis+cluster://user:password@host:port`. A URL of sentinels may have those of the primary.
/// With `rediss`, the store reaches all servers by TLS. Schemes are compared without case (RFC
/// 3986, section 3.1).
///
/// Call this function once, and give clones of the store to all routes. Two stores of `memory:`
/// count apart, so a limit that two routes share would admit twice as much. Two stores on one Redis
/// count together.
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
/// [`ConfigError`] if the scheme is unknown or needs a feature that is missing, if something
/// follows `memory:`, or if the URL is not a valid Redis URL.
pub fn from_url(url: &str) -> Result<Arc<dyn Store>, ConfigError> {
    if is_memory(url)? {
        return Ok(Arc::new(MemoryStore::new()));
    }
    #[cfg(feature = "redis")]
    return Ok(Arc::new(RedisStoreBuilder::of_any_url(url).build()?));
    #[cfg(not(feature = "redis"))]
    Err(ConfigError::new("URLs of Redis need this crate's feature `redis`"))
}

/// The store at `url`, chosen at run time as [`from_url`] does. A store on Redis has reached its
/// server, and can write to it.
///
/// # Errors
///
/// [`StoreError`] if the URL is invalid (see [`from_url`]), if the server cannot be reached or is a
/// replica, or if this user may not write keys. Print its
/// [sources](std::error::Error::source) as well: they have the address and the cause.
pub async fn connect(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let invalid = |error| StoreError::new("setting up the store", StoreErrorKind::Config, error);
    #[cfg(feature = "redis")]
    if !is_memory(url).map_err(invalid)? {
        return Ok(Arc::new(RedisStoreBuilder::of_any_url(url).connect().await?));
    }
    from_url(url).map_err(invalid)
}

/// Whether the URL names the in-process store.
fn is_memory(url: &str) -> Result<bool, ConfigError> {
    match url.trim().to_ascii_lowercase().strip_prefix("memory") {
        Some(":" | "://") => Ok(true),
        Some(rest) if rest.is_empty() || rest.starts_with(':') => {
            Err(ConfigError::new("the URL of the in-process store is memory: with nothing behind it"))
        }
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_is_in_process() {
        for url in ["memory:", "memory://", "Memory:", " memory:\n"] {
            assert!(is_memory(url).unwrap(), "{url}");
        }
        for url in ["memory", "memory://s3cr3t", "memory:?capacity=5"] {
            let error = is_memory(url).unwrap_err().to_string();
            assert!(error.contains("memory: with nothing behind it") && !error.contains("s3cr3t"), "{error}");
        }
        for url in ["", "memoryless", "redis://host", "REDISS://a:b@host", "unix:///run/redis.sock"] {
            assert!(!is_memory(url).unwrap(), "{url}");
        }
    }

    #[cfg(not(feature = "redis"))]
    #[test]
    fn without_the_feature_a_redis_url_is_an_error_that_names_it() {
        let error = from_url("redis://shop:s3cr3t@host").unwrap_err().to_string();
        assert!(error.contains("`redis`") && !error.contains("s3cr3t"), "{error}");
    }
}
