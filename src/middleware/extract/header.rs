//! Keys from the text of a request: the value of a header, an API key or bearer token as a keyed
//! hash, and the host that a call goes to.

use std::net::Ipv6Addr;

use http::{HeaderMap, HeaderName, HeaderValue, Uri, header::AUTHORIZATION, request::Parts};

use super::{KeyError, KeyExtractor};
use crate::{key::Key, secret::Secret};

const MAX_LENGTH: usize = 4096;

/// The value of a header, such as a tenant's name that a gateway has set.
///
/// The header must be present exactly once, with 1 to 4096 bytes of UTF-8. Otherwise the request
/// gets a 400.
///
/// For [`peek`](crate::Limiter::peek) and [`reset`](crate::Limiter::reset), make the key of a value
/// by [`key`](Self::key): the string `"acme"` alone is [another key](crate::key#the-key-of-a-layer)
/// than the key of a header with the value `acme`.
///
/// A client that can set the header can spend the units of any other client. So use a header that a
/// trusted proxy sets. For a secret, use [`ApiKey`].
///
/// ```
/// use http::Request;
/// use tower_sliding_window::{Header, KeyExtractor};
///
/// let tenant = Header::new("x-tenant");
/// let (parts, ()) = Request::get("/").header("x-tenant", "7").body(()).unwrap().into_parts();
/// assert!(tenant.extract(&parts).is_ok());
///
/// let (parts, ()) = Request::get("/").body(()).unwrap().into_parts();
/// assert_eq!(tenant.extract(&parts).unwrap_err().status(), 400);
/// ```
#[derive(Clone, Debug)]
pub struct Header {
    name: HeaderName,
}

impl Header {
    /// Reads the value of the header `name`.
    ///
    /// # Panics
    ///
    /// If `name` is a text that is not a header name. A call with a [`HeaderName`] never panics.
    #[must_use]
    #[track_caller]
    pub fn new(name: impl TryInto<HeaderName>) -> Self {
        Self {
            name: header_name(name),
        }
    }

    /// The key of a value, for `deny`, `exempt` and `reset`. Spaces around the value are trimmed.
    pub fn key(&self, value: &str) -> Key {
        // No header name has a colon, so different headers have different keys.
        Key::joined(
            "header",
            &[self.name.as_str().as_bytes(), b":", value.trim().as_bytes()],
        )
    }
}

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        single_value(&parts.headers, &self.name).map(|value| self.key(value))
    }
}

/// An API key from a header, or a bearer token, as a keyed hash.
///
/// The key is the first 128 bits of HMAC-SHA-256 under your [`Secret`]. The token itself is neither
/// kept, nor logged, nor sent to a store. A request whose token is absent, repeated, empty, not
/// UTF-8 or longer than 4 KiB gets a 401.
///
/// The token is not verified. A client that makes up tokens gets all units of the limit again for
/// each token. So put the layer behind your authentication, or add a limit by address.
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
        Self {
            header: Some(header_name(name)),
            secret: secret.clone(),
        }
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
        Self {
            header: None,
            secret: secret.clone(),
        }
    }

    /// The key of a token, for `deny`, `exempt` and `reset`. Spaces around the token are trimmed.
    pub fn key(&self, token: &str) -> Key {
        self.secret.key("api-key", token.trim())
    }
}

impl KeyExtractor for ApiKey {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        let (token, challenge) = match &self.header {
            Some(name) => (single_value(&parts.headers, name), "ApiKey"),
            None => (
                single_value(&parts.headers, &AUTHORIZATION).and_then(bearer_token),
                "Bearer",
            ),
        };
        let token =
            token.map_err(|error| error.unauthorized(HeaderValue::from_static(challenge)))?;
        Ok(self.key(token))
    }
}

/// The host and port that a request goes to: for a layer around a client that calls several
/// upstreams.
///
/// The host of the URI is read in lower case, and without a dot at its end. A URI without a port
/// has the port of its scheme, 80 or 443. A request whose URI has no host, as on a server, is
/// rejected with a 400.
///
/// A limit by `UpstreamHost` can [heed](crate::KeyedLimit::heed_upstream) the upstream. Then each
/// upstream blocks only the calls to itself.
///
/// ```
/// use http::Request;
/// use tower_sliding_window::{KeyExtractor, extract::UpstreamHost};
///
/// let (parts, ()) = Request::get("https://API.example.org/items").body(())?.into_parts();
/// assert_eq!(UpstreamHost.extract(&parts)?, UpstreamHost.key(&"https://api.example.org:443/".parse()?)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct UpstreamHost;

impl UpstreamHost {
    /// The key of a URI's host, for `deny`, `exempt` and `reset`.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the URI has no host.
    pub fn key(self, uri: &Uri) -> Result<Key, KeyError> {
        let host = uri
            .host()
            .map(|host| host.strip_suffix('.').unwrap_or(host));
        let host = host
            .filter(|host| !host.is_empty())
            .ok_or_else(|| KeyError::missing("host of the URI"))?;
        let address = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']')?.parse::<Ipv6Addr>().ok());
        let host = address.map_or_else(|| host.to_ascii_lowercase(), |address| address.to_string());
        let port = uri.port_u16().or_else(|| match uri.scheme_str() {
            Some("http" | "ws") => Some(80),
            Some("https" | "wss") => Some(443),
            _ => None,
        });
        // The port always has two bytes, so different hosts have different keys.
        Ok(Key::joined(
            "upstream",
            &[&port.unwrap_or_default().to_be_bytes(), host.as_bytes()],
        ))
    }
}

impl KeyExtractor for UpstreamHost {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        self.key(&parts.uri)
    }
}

fn bearer_token(credentials: &str) -> Result<&str, KeyError> {
    let invalid = |problem| Err(KeyError::invalid("authorization", problem));
    // Any white space may separate the scheme from the token, as a lenient authentication allows.
    let (scheme, token) = credentials
        .split_once(char::is_whitespace)
        .unwrap_or((credentials, ""));
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") {
        return invalid("not a bearer token");
    }
    // A token with commas or quotes could have two spellings: a proxy may join two lines with a
    // comma, and an authentication may remove quotes.
    if token.is_empty()
        || !token
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && !b",\"".contains(&byte))
    {
        return invalid("not one token");
    }
    Ok(token)
}

/// Makes a header name, and panics if the name is invalid. The name is made while the layer is
/// built, so no request can cause this panic.
#[track_caller]
pub(super) fn header_name(name: impl TryInto<HeaderName>) -> HeaderName {
    match name.try_into() {
        Ok(name) => name,
        Err(_) => panic!("a header name must be a token of letters, digits and !#$%&'*+-.^_`|~"),
    }
}

/// The trimmed value of a header that must be present exactly once.
pub(super) fn single_value<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> Result<&'a str, KeyError> {
    let invalid = |problem| KeyError::invalid(name.as_str().to_owned(), problem);
    let mut lines = headers.get_all(name).into_iter();
    let line = lines
        .next()
        .ok_or_else(|| KeyError::missing(name.as_str().to_owned()))?;
    if lines.next().is_some() {
        return Err(invalid("repeated"));
    }
    let line = line.as_bytes().trim_ascii();
    if line.len() > MAX_LENGTH {
        return Err(invalid("longer than 4 KiB"));
    }
    let value = str::from_utf8(line)
        .map_err(|_| invalid("not UTF-8"))?
        .trim();
    if value.is_empty() {
        Err(invalid("empty"))
    } else {
        Ok(value)
    }
}
