//! Keys from request text: a header value, an API key or bearer token as a keyed hash, and the host
//! that a call goes to.

use std::{net::IpAddr, str::FromStr};

use http::{HeaderMap, HeaderName, HeaderValue, Uri, header::AUTHORIZATION, request::Parts};

use super::{KeyError, KeyExtractor};
use crate::{error::ConfigError, key::Key, secret::Secret};

const MAX_LENGTH: usize = 4096;

/// A header value, such as a tenant name set by a gateway.
///
/// The header must be present exactly once, with 1 to 4096 bytes of UTF-8. Otherwise the request
/// gets a 400.
///
/// For [`peek`](crate::Limiter::peek) and [`reset`](crate::Limiter::reset), make the key with
/// [`key`](Self::key): the string `"acme"` alone makes a [different
/// key](crate::key#the-key-of-a-layer) than the header value `acme` does.
///
/// A client that can set the header can spend the units of any other client, so use a header that a
/// trusted proxy sets. For a secret, use [`ApiKey`]. To read the header name from a configuration,
/// parse the name as a `Header`, so that mistakes become errors.
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
    /// Reads the value from the header `name`.
    ///
    /// # Panics
    ///
    /// If `name` is not a header name, or if the header has a dedicated extractor because clients
    /// can write one value in several ways or add values: `authorization`, `proxy-authorization`,
    /// `cookie`, `forwarded`, `x-forwarded-for`, and single-address headers such as `x-real-ip`.
    /// The message names the extractor.
    #[must_use]
    #[track_caller]
    pub fn new(name: impl TryInto<HeaderName>) -> Self {
        built(key_header(name).map(|name| Self { name }))
    }

    /// The key for a value, for `deny`, `exempt` and `reset`. Surrounding spaces are trimmed.
    pub fn key(&self, value: &str) -> Key {
        // A header name never has a colon, so different headers have different keys.
        Key::joined(
            "header",
            &[self.name.as_str().as_bytes(), b":", value.trim().as_bytes()],
        )
    }
}

/// Parses a header name.
///
/// # Errors
///
/// [`ConfigError`] where [`Header::new`] would panic.
impl FromStr for Header {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        key_header(name).map(|name| Self { name })
    }
}

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        single_value(&parts.headers, &self.name).map(|value| self.key(value))
    }
}

/// An API key from a header, or a bearer token, as a keyed hash.
///
/// The key is the first 128 bits of a BLAKE3 hash keyed by your [`Secret`]. The token itself is not
/// kept, logged or sent to a store. A request whose token is absent, repeated, empty, not UTF-8 or
/// longer than 4 KiB gets a 401.
///
/// The token is not verified. A client that makes up tokens gets the limit's full units for each
/// one, so put the layer behind your authentication, or add a limit per address.
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
    credentials: Secret,
}

impl ApiKey {
    /// Reads the API key from the header `name`.
    ///
    /// # Panics
    ///
    /// As for [`Header::new`]. To avoid this, parse a configured name as a [`Header`] first.
    #[track_caller]
    pub fn header(name: impl TryInto<HeaderName>, secret: &Secret) -> Self {
        Self {
            header: Some(built(key_header(name))),
            credentials: secret.credentials(),
        }
    }

    /// Reads the token in `Authorization: Bearer` (RFC 6750). The scheme is case-insensitive, and
    /// spaces around the token are trimmed.
    ///
    /// The token is absent only if the request has no `Authorization`. A different scheme is an
    /// error. Otherwise, an authentication layer that ignores the scheme would accept a
    /// [denied](crate::RateLimitLayer::deny) token under a different scheme. If you accept a second
    /// scheme, treat requests that use it as having no token:
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
            credentials: secret.credentials(),
        }
    }

    /// The key for a token, for `deny`, `exempt` and `reset`. Surrounding spaces are trimmed.
    pub fn key(&self, token: &str) -> Key {
        Key::new("api-key", self.credentials.hash(token.trim().as_bytes()))
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

/// The host and port that a request goes to, for a layer around a client with several upstreams.
///
/// The URI's host is lowercased, a trailing dot is removed, and an IPv4-mapped IPv6 address becomes
/// IPv4. The default port is the scheme's, 80 or 443. A request gets a 400 if its URI has no host,
/// as on a server, or has an address that is not in its plain form, such as `127.1`.
///
/// A limit per upstream host can [heed](crate::KeyedLimit::heed_upstream) upstreams. Each upstream
/// then blocks only calls to itself. The layer sees only the request's URI, so the client inside it
/// must not follow redirects.
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
    /// The key for a URI's host, for `deny`, `exempt` and `reset`.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the URI has no host, or an address that is not in its plain form.
    pub fn key(self, uri: &Uri) -> Result<Key, KeyError> {
        const WHAT: &str = "host of the URI";
        let host = uri.host().unwrap_or_default();
        let mut host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        if host.is_empty() {
            return Err(KeyError::missing(WHAT));
        }
        if host.starts_with('[') || ends_in_number(&host) {
            let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
            let address =
                address.map_err(|_| KeyError::invalid(WHAT, "not an address in its plain form"))?;
            host = address.to_canonical().to_string();
        }
        let port = uri.port_u16().or_else(|| {
            let scheme = uri.scheme_str()?.to_ascii_lowercase();
            match &*scheme {
                "http" | "ws" => Some(80),
                "https" | "wss" => Some(443),
                _ => None,
            }
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

/// True if clients read the host as an IPv4 address (URL Standard, "ends in a number checker").
/// Such addresses have many spellings: `127.0.0.1` is also `127.1`, `0x7f000001` and
/// `017700000001`.
fn ends_in_number(host: &str) -> bool {
    let last = host.rsplit('.').next().unwrap_or_default();
    match last.strip_prefix("0x") {
        Some(hex) => hex.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => last.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

fn bearer_token(credentials: &str) -> Result<&str, KeyError> {
    // Any white space may separate scheme and token, since a lenient authentication layer accepts
    // it.
    let (scheme, token) = credentials
        .split_once(char::is_whitespace)
        .unwrap_or((credentials, ""));
    let token = token.trim();
    let problem = if !scheme.eq_ignore_ascii_case("bearer") {
        "not a bearer token"
    } else if token.is_empty() || !token.bytes().all(may_be_in_token) {
        "not one token"
    } else {
        return Ok(token);
    };
    Err(KeyError::invalid("authorization", problem))
}

/// A token with commas or quotes could have two spellings: a proxy may join two lines with a comma,
/// and an authentication may strip quotes.
fn may_be_in_token(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b",\"".contains(&byte)
}

/// Unwraps a value made while a layer is built. Requests cannot cause this panic.
#[track_caller]
pub(in crate::middleware) fn built<T>(value: Result<T, ConfigError>) -> T {
    match value {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

pub(super) fn header_name(name: impl TryInto<HeaderName>) -> Result<HeaderName, ConfigError> {
    const RULE: &str = "a header name must be a token of letters, digits and !#$%&'*+-.^_`|~";
    name.try_into().map_err(|_| ConfigError::new(RULE))
}

/// Parses the name of a header whose whole value is a key. Some headers are not accepted: clients
/// can write one value in several ways or add values, and each variant would get the limit's full
/// units.
fn key_header(name: impl TryInto<HeaderName>) -> Result<HeaderName, ConfigError> {
    let name = header_name(name)?;
    let extractor = match name.as_str() {
        "authorization" => "`ApiKey::bearer`",
        "proxy-authorization" | "cookie" => {
            "a closure that makes a key of one credential by `Secret::key`"
        }
        "x-forwarded-for" => "`ClientIp::behind`",
        "forwarded" => "`ClientIp::forwarded`",
        "cf-connecting-ip"
        | "cloudfront-viewer-address"
        | "fastly-client-ip"
        | "fly-client-ip"
        | "true-client-ip"
        | "x-client-ip"
        | "x-real-ip" => "`ClientIp::single_header`",
        _ => return Ok(name),
    };
    Err(ConfigError::new(format!(
        "the whole value of `{name}` is no key, since clients can write one value in several ways or add values: use \
         {extractor}"
    )))
}

/// The trimmed value of a header that must be present exactly once.
pub(super) fn single_value<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> Result<&'a str, KeyError> {
    let mut lines = headers.get_all(name).into_iter();
    let Some(line) = lines.next() else {
        return Err(KeyError::missing(name.as_str().to_owned()));
    };
    let line = line.as_bytes().trim_ascii();
    let problem = if lines.next().is_some() {
        "repeated"
    } else if line.len() > MAX_LENGTH {
        "longer than 4 KiB"
    } else {
        match str::from_utf8(line).map(str::trim) {
            Ok("") => "empty",
            Ok(value) => return Ok(value),
            Err(_) => "not UTF-8",
        }
    };
    Err(KeyError::invalid(name.as_str().to_owned(), problem))
}
