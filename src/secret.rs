//! The application's secret for hashing credentials and Redis keys.
//!
//! 1. [`ApiKey`](crate::ApiKey) and [`Secret::key`] hash client credentials, such as API keys and
//!    access tokens.
//! 2. `RedisStoreBuilder::secret` hashes all keys written to Redis.
//!
//! One secret may serve both uses. Each use has its own domain, so the hashes for one use reveal
//! nothing about those for the other.

use std::{array, fmt};

use blake3::{Hash, derive_key, keyed_hash};

use crate::{config_error::ConfigError, key::Key};

const MIN_BYTES: usize = 16;

/// Public texts, which must not serve as secrets. The first is from the command that makes a
/// secret. If no shell has run this command, a configuration may contain the command itself instead
/// of its output. The other three texts are from examples.
const PUBLIC: [&str; 4] = [
    "openssl rand",
    "32 random bytes, the same on every instance",
    "32 random bytes out of the vault",
    "everybody can read this secret",
];

/// The length of a hash, truncated to 128 bits.
const HASH_BYTES: usize = 16;

/// The domain for secrets themselves.
const SECRET: &str = "tower-sliding-window secret v1";

/// The domain for credentials.
const CREDENTIALS: &str = "tower-sliding-window api key v1";

/// A secret for keyed hashes. Use the same secret on all instances that share a store.
///
/// This type contains only a key derived from the secret, and `Debug` does not show that key. With
/// a new secret, every key has a new hash, so all windows start empty.
#[derive(Clone)]
pub struct Secret {
    key: [u8; 32],
}

impl Secret {
    /// Makes a secret from at least 16 bytes, such as the output of `openssl rand -hex 32`. Keep
    /// the secret out of the source: read it from the environment or a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the secret has fewer than 16 bytes, contains text from an example, or
    /// repeats a single byte.
    pub fn new(secret: impl AsRef<[u8]>) -> Result<Self, ConfigError> {
        let secret = secret.as_ref();
        let is_public = PUBLIC.into_iter().any(|text| {
            let mut parts = secret.windows(text.len());
            parts.any(|part| part == text.as_bytes())
        });
        let fault = if is_public {
            "must not stand in an example".to_owned()
        } else if secret.len() < MIN_BYTES {
            format!("must have at least {MIN_BYTES} bytes, not {}", secret.len())
        } else if secret.iter().all(|byte| *byte == secret[0]) {
            "must not be one byte again and again".to_owned()
        } else {
            let key = derive_key(SECRET, secret);
            return Ok(Self { key });
        };
        let text = format!("a secret {fault}: `openssl rand -hex 32` makes one");
        Err(ConfigError::new(text))
    }

    /// The key for a secret value, such as an access token: the first 128 bits of its keyed BLAKE3
    /// hash. For API keys in requests, use [`ApiKey`](crate::ApiKey).
    ///
    /// ```no_run
    /// use tower_sliding_window::Secret;
    ///
    /// let secret = Secret::new(std::env::var("RATE_LIMIT_SECRET")?)?;
    /// let key = secret.key("token", "t0ken");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn key(&self, namespace: &'static str, value: &str) -> Key {
        Key::new(namespace, self.credentials().hash(value.as_bytes()))
    }

    /// The derived secret for credentials.
    pub(crate) fn credentials(&self) -> Self {
        self.domain(CREDENTIALS)
    }

    /// Derives the secret for a domain, which is a purpose for hashing. The hashes in one domain
    /// reveal nothing about those in another domain.
    pub(crate) fn domain(&self, name: &str) -> Self {
        let key = derive_key(name, &self.key);
        Self { key }
    }

    /// Returns the first 128 bits of the keyed hash.
    pub(crate) fn hash(&self, bytes: &[u8]) -> [u8; HASH_BYTES] {
        truncated(keyed_hash(&self.key, bytes))
    }
}

/// The first 128 bits of a hash.
pub(crate) fn truncated(hash: Hash) -> [u8; HASH_BYTES] {
    array::from_fn(|index| hash.as_bytes()[index])
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If a new version made different hashes, all windows would start empty.
    #[test]
    fn the_hash_stays_what_it_is() {
        let secret = Secret::new("a secret that only the tests know").unwrap();
        let hex: String = secret
            .key("", "t0ken")
            .value()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hex, "994f2658a251e886b83a73899b0b5ecb");
    }
}
