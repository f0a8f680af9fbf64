//! API keys and bearer tokens, as keyed hashes.

use http::{HeaderName, HeaderValue, header::AUTHORIZATION, request::Parts};

use super::{
    KeyError, KeyExtractor,
    header::{header_name, single_value},
};
use crate::{key::Key, secret::Secret};

/// An API key from a header, or a bearer token, as a keyed hash.
///
/// The key is the first 128 bits of HMAC-SHA-256 under your [`Secret`]. The token itself is neither
/// kept, nor logged, nor sent to a store. A request whose token is absent, repeated, empty, not
/// UTF-8 or longer than 4 KiB gets a 401.
///
/// The token is not verified. A client that makes up tokens gets a new budget for each token, so
/// put the layer behind your authentication, or add a limit by address.
///
/// ```no_run
/// use http::Request;
/// use tower_sliding_window::{ApiKey, KeyExtractor, Secret};
///
/// let secret = Secret::new(std::env::var("RATE_LIMIT_SECRET")?)?;
/// let (parts, ()) = Request::get("/").header("authorization", "bearer  t0ken").body(())?.into_parts();
/// let key = ApiKey::bearer(&secret).extract(&parts)?;
/// assert_eq!(key.value().len(), 16);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ApiKey {
    /// `None` for a bearer token.
    header: Option<HeaderName>,
    secret: Secret,
}

impl ApiKey {
    /// Reads the API key from the header `name`.
    ///
    /// # Panics
    ///
    /// If `name` is a text that is not a header name. A call with a [`HeaderName`] never panics.
    #[track_caller]
    pub fn header(name: impl TryInto<HeaderName>, secret: &Secret) -> Self {
        Self { header: Some(header_name(name)), secret: secret.clone() }
    }

    /// Reads the token of `Authorization: Bearer` (RFC 6750). The scheme may be in upper or lower
    /// case. Spaces around the token are trimmed.
    ///
    /// The token is absent only if the request has no `Authorization`. Another scheme is an error,
    /// not an absent token: an authentication that ignores the scheme would accept a
    /// [denied](crate::RateLimitLayer::deny) token under another scheme. If you accept another
    /// scheme, treat its requests as requests without a token:
    ///
    /// ```no_run
    /// use http::{header::AUTHORIZATION, request::Parts};
    /// use tower_sliding_window::{ApiKey, KeyExtractor, PeerIp, Secret, extract::KeyError};
    ///
    /// let bearer = ApiKey::bearer(&Secret::new(std::env::var("RATE_LIMIT_SECRET")?)?);
    /// let unless_basic = move |parts: &Parts| {
    ///     let mut lines = parts.headers.get_all(AUTHORIZATION).into_iter();
    ///     match (lines.next(), lines.next()) {
    ///         (Some(only), None) if only.as_bytes().starts_with(b"Basic ") => Err(KeyError::missing("bearer token")),
    ///         _ => bearer.extract(parts),
    ///     }
    /// };
    /// let by_token_or_address = unless_basic.or(PeerIp::new());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bearer(secret: &Secret) -> Self {
        Self { header: None, secret: secret.clone() }
    }

    /// The key of a token, to deny, exempt or reset it. Spaces around the token are trimmed.
    pub fn key(&self, token: &str) -> Key {
        self.secret.key("api-key", token.trim())
    }
}

impl KeyExtractor for ApiKey {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        let (token, challenge) = match &self.header {
            Some(name) => (single_value(&parts.headers, name), "ApiKey"),
            None => (single_value(&parts.headers, &AUTHORIZATION).and_then(bearer_token), "Bearer"),
        };
        let token = token.map_err(|error| error.unauthorized(HeaderValue::from_static(challenge)))?;
        Ok(self.key(token))
    }
}

fn bearer_token(credentials: &str) -> Result<&str, KeyError> {
    let invalid = |problem| Err(KeyError::invalid("authorization", problem));
    // Any white space may separate the scheme from the token, as a lenient authentication allows.
    let (scheme, token) = credentials.split_once(char::is_whitespace).unwrap_or((credentials, ""));
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") {
        return invalid("not a bearer token");
    }
    // With commas or quotes in tokens, one token could have two spellings: a proxy may join two
    // lines with a comma, and an authentication may remove quotes.
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic() && !b",\"".contains(&byte)) {
        return invalid("not one token");
    }
    Ok(token)
}
