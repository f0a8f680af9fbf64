//! API keys and bearer tokens, as keyed hashes.

use std::{error, fmt};

use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderName, HeaderValue, header::AUTHORIZATION, request::Parts};
use sha2::Sha256;

use super::{
    KeyError, KeyExtractor,
    header::{header_name, single_value},
};
use crate::key::Key;

/// Bytes of the hash that make a key: 128 bits.
const HASH_BYTES: usize = 16;

/// What the hash is for, so that the same secret in another place gives other hashes.
const DOMAIN: &[u8] = b"tower-sliding-window api key v1\0";

/// An API key from a header, or a bearer token: hashed before anything else sees it.
///
/// The key is the first 128 bits of HMAC-SHA-256 under your [`Secret`]. What a client sent is not kept, logged, or sent
/// to a store. A request whose key is absent, repeated, empty, not UTF-8 or longer than 4 KiB is answered with 401.
///
/// Whether the key is a valid one is not checked here. A client that makes keys up gets a fresh budget for each, so put
/// the layer behind your authentication, or add a limit by address to it.
///
/// ```
/// use http::Request;
/// use tower_sliding_window::{ApiKey, KeyExtractor, Secret};
///
/// let secret = Secret::new("32 random bytes out of the vault")?;
/// let (parts, ()) = Request::get("/").header("authorization", "bearer  t0ken").body(())?.into_parts();
/// let key = ApiKey::bearer(&secret).extract(&parts)?;
/// assert_eq!(key.value().len(), 16);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ApiKey {
    source: Source,
    secret: Secret,
}

#[derive(Clone, Debug)]
enum Source {
    Header(HeaderName),
    Bearer,
}

impl ApiKey {
    /// The value of the header `name`.
    ///
    /// # Panics
    ///
    /// If `name` is a text that is not a header name. A [`HeaderName`] never panics.
    #[must_use]
    #[track_caller]
    pub fn header(name: impl TryInto<HeaderName>, secret: &Secret) -> Self {
        Self { source: Source::Header(header_name(name)), secret: secret.clone() }
    }

    /// The token of `Authorization: Bearer` (RFC 6750); the scheme in any case, the spaces around the token left out.
    #[must_use]
    pub fn bearer(secret: &Secret) -> Self {
        Self { source: Source::Bearer, secret: secret.clone() }
    }

    /// The key of a token, for lists and resets. White space around it does not count.
    #[must_use]
    pub fn key(&self, token: &str) -> Key {
        self.secret.key("api-key", token.trim())
    }

    fn token<'a>(&self, parts: &'a Parts) -> Result<&'a str, KeyError> {
        let Source::Header(name) = &self.source else {
            return bearer_token(single_value(&parts.headers, &AUTHORIZATION)?);
        };
        single_value(&parts.headers, name)
    }

    fn challenge(&self) -> HeaderValue {
        HeaderValue::from_static(match self.source {
            Source::Header(_) => "ApiKey",
            Source::Bearer => "Bearer",
        })
    }
}

impl KeyExtractor for ApiKey {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        let token = self.token(parts).map_err(|error| error.unauthorized(self.challenge()))?;
        Ok(self.key(token))
    }
}

fn bearer_token(credentials: &str) -> Result<&str, KeyError> {
    let what = "authorization";
    // At any white space, as a lenient authentication does: what only looks like another scheme would be "missing".
    let (scheme, token) = credentials.split_once(char::is_whitespace).unwrap_or((credentials, ""));
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") {
        // Credentials of another scheme are no bearer token at all.
        return Err(KeyError::missing(what));
    }
    if token.is_empty() || token.contains(|c: char| c.is_whitespace()) {
        return Err(KeyError::invalid(what, "not one token"));
    }
    Ok(token)
}

/// What API keys are hashed with: the same on all instances that share a store, and known to nobody else.
///
/// Only a state derived from it is kept, and `Debug` shows nothing of that. A new secret gives every key a new identity:
/// all windows start empty.
#[derive(Clone)]
pub struct Secret {
    mac: Hmac<Sha256>,
}

impl Secret {
    /// A secret of at least 16 bytes, best 32 random ones.
    ///
    /// # Errors
    ///
    /// [`WeakSecret`] if it is shorter.
    pub fn new(secret: impl AsRef<[u8]>) -> Result<Self, WeakSecret> {
        let secret = secret.as_ref();
        let weak = WeakSecret { bytes: secret.len() };
        if secret.len() < WeakSecret::MIN_BYTES {
            return Err(weak);
        }
        // HMAC takes a key of any length; the error is the trait's, not the algorithm's.
        Hmac::new_from_slice(secret).map(|mac| Self { mac }).map_err(|_| weak)
    }

    /// The key of something secret that does not come with a request, such as an access token of a client: the first 128
    /// bits of its HMAC-SHA-256, and nothing of itself.
    ///
    /// ```
    /// use tower_sliding_window::Secret;
    ///
    /// let secret = Secret::new("32 random bytes out of the vault")?;
    /// assert_eq!(secret.key("token", "t0ken").value().len(), 16);
    /// # Ok::<(), tower_sliding_window::middleware::extract::WeakSecret>(())
    /// ```
    #[must_use]
    pub fn key(&self, namespace: &'static str, value: &str) -> Key {
        Key::new(namespace, self.hash(value))
    }

    fn hash(&self, token: &str) -> [u8; HASH_BYTES] {
        let mut mac = self.mac.clone();
        mac.update(DOMAIN);
        mac.update(token.as_bytes());
        let full = mac.finalize().into_bytes();
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&full[..HASH_BYTES]);
        hash
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").finish_non_exhaustive()
    }
}

/// A secret too short to keep API keys secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeakSecret {
    bytes: usize,
}

impl WeakSecret {
    const MIN_BYTES: usize = 16;
}

impl fmt::Display for WeakSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a secret must have at least {} bytes, not {}", Self::MIN_BYTES, self.bytes)
    }
}

impl error::Error for WeakSecret {}
