//! A store that a URL chooses at run time.

use std::{error, fmt, sync::Arc};

#[cfg(feature = "redis")]
use super::redis::{InvalidRedisConfig, RedisStore};
use super::{interface::Store, memory::MemoryStore};
use crate::error::StoreError;

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
/// [`InvalidStoreUrl`] if the scheme is unknown or needs a feature that is missing, if something follows `memory:`, or if it
/// is not a valid Redis URL.
pub fn from_url(url: &str) -> Result<Arc<dyn Store>, InvalidStoreUrl> {
    Ok(match kind(url)? {
        StoreKind::Memory => Arc::new(MemoryStore::new()),
        #[cfg(feature = "redis")]
        StoreKind::Redis => Arc::new(redis_at(url)?),
    })
}

/// The store at `url`, chosen at run time as [`from_url`] does. One on Redis has been reached and can be written to.
///
/// # Errors
///
/// [`StoreError`] if the URL is invalid, as for [`from_url`], if the server cannot be reached, if it is a replica, or if this
/// user may not write keys. Print its [sources](std::error::Error::source) as well: they have the address and the cause.
pub async fn connect(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    let invalid = |error| StoreError::new("setting up the store", error);
    Ok(match kind(url).map_err(invalid)? {
        StoreKind::Memory => Arc::new(MemoryStore::new()),
        #[cfg(feature = "redis")]
        StoreKind::Redis => {
            let store = redis_at(url).map_err(invalid)?;
            store.try_out().await?;
            Arc::new(store)
        }
    })
}

#[cfg(feature = "redis")]
fn redis_at(url: &str) -> Result<RedisStore, InvalidStoreUrl> {
    RedisStore::builder(url).build().map_err(|error| InvalidStoreUrl(Problem::Redis(error)))
}

/// The store that a URL names.
#[derive(Debug, PartialEq, Eq)]
enum StoreKind {
    Memory,
    #[cfg(feature = "redis")]
    Redis,
}

/// The store that the scheme of the URL names.
fn kind(url: &str) -> Result<StoreKind, InvalidStoreUrl> {
    let url = url.trim();
    let Some((scheme, rest)) = url.split_once(':') else {
        let problem = if url.is_empty() { Problem::Empty } else { Problem::Hidden };
        return Err(InvalidStoreUrl(problem));
    };
    match &*scheme.to_ascii_lowercase() {
        "memory" if matches!(rest, "" | "//") => Ok(StoreKind::Memory),
        "memory" => Err(InvalidStoreUrl(Problem::BehindMemory)),
        #[cfg(feature = "redis")]
        known if REDIS_SCHEMES.contains(&known) => Ok(StoreKind::Redis),
        #[cfg(not(feature = "redis"))]
        known if REDIS_SCHEMES.contains(&known) => Err(InvalidStoreUrl(Problem::NoRedis)),
        _ if is_certainly_scheme(scheme, rest) => Err(InvalidStoreUrl(Problem::Scheme(scheme.to_owned()))),
        _ => Err(InvalidStoreUrl(Problem::Hidden)),
    }
}

/// Whether this is no user name or password of a URL that has lost its scheme.
fn is_certainly_scheme(scheme: &str, rest: &str) -> bool {
    let is_of_scheme = |byte: u8| byte.is_ascii_lowercase() || byte == b'+';
    rest.starts_with("//") && scheme.len() <= 16 && !scheme.is_empty() && scheme.bytes().all(is_of_scheme)
}

/// A URL that is not the URL of a store: the error of [`from_url`].
///
/// It names the scheme, and of a Redis URL at most the host as well. It shows nothing that may be part of a password.
pub struct InvalidStoreUrl(Problem);

enum Problem {
    Empty,
    /// An unknown scheme.
    Scheme(String),
    /// The URL may begin with a password.
    Hidden,
    BehindMemory,
    #[cfg(not(feature = "redis"))]
    NoRedis,
    #[cfg(feature = "redis")]
    Redis(InvalidRedisConfig),
}

impl fmt::Display for InvalidStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const VALID: &str = "it must begin with memory:, redis://, rediss:// or redis+unix://";
        match &self.0 {
            Problem::Empty => write!(f, "the URL of the store is empty: {VALID}"),
            Problem::Scheme(scheme) => write!(f, "{scheme}:// is not the scheme of a store's URL: {VALID}"),
            Problem::Hidden => {
                write!(f, "a URL, not shown since it may hold a password, is not the URL of a store: {VALID}")
            }
            Problem::BehindMemory => f.write_str("the URL of the in-process store is memory: with nothing behind it"),
            #[cfg(not(feature = "redis"))]
            Problem::NoRedis => f.write_str("URLs of Redis need this crate's feature `redis`"),
            #[cfg(feature = "redis")]
            Problem::Redis(error) => error.fmt(f),
        }
    }
}

/// With the text, since a `main` that returns the error prints its `Debug`.
impl fmt::Debug for InvalidStoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tuple = f.debug_tuple("InvalidStoreUrl");
        tuple.field(&self.to_string());
        if let Some(cause) = error::Error::source(self) {
            tuple.field(&cause);
        }
        tuple.finish()
    }
}

impl error::Error for InvalidStoreUrl {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match &self.0 {
            #[cfg(feature = "redis")]
            Problem::Redis(error) => error.source(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_names_the_store() {
        for url in ["memory:", "memory://", "Memory:", " memory:\n"] {
            assert_eq!(kind(url).unwrap(), StoreKind::Memory, "{url}");
        }
        #[cfg(feature = "redis")]
        for url in ["redis://host", "REDISS://a:b@host", "unix:///run/redis.sock", "valkey+unix:///x", "redis:"] {
            assert_eq!(kind(url).unwrap(), StoreKind::Redis, "{url}");
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
            let error = kind(url).unwrap_err();
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
