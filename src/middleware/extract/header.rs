//! Keys from the text of a request: the value of a header, and the host that a call goes to.

use std::net::Ipv6Addr;

use http::{HeaderMap, HeaderName, Uri, request::Parts};

use super::{KeyError, KeyExtractor};
use crate::key::Key;

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
/// trusted proxy sets. For a secret, use [`ApiKey`](super::ApiKey).
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
        Self { name: header_name(name) }
    }

    /// The key of a value, to deny, exempt or reset it. Spaces around the value are trimmed.
    pub fn key(&self, value: &str) -> Key {
        // No header name has a colon, so different headers have different keys.
        Key::joined("header", &[self.name.as_str().as_bytes(), b":", value.trim().as_bytes()])
    }
}

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        single_value(&parts.headers, &self.name).map(|value| self.key(value))
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
    /// The key of a URI's host, to deny, exempt or reset it.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the URI has no host.
    pub fn key(self, uri: &Uri) -> Result<Key, KeyError> {
        let host = uri.host().map(|host| host.strip_suffix('.').unwrap_or(host));
        let host = host.filter(|host| !host.is_empty()).ok_or_else(|| KeyError::missing("host of the URI"))?;
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')?.parse::<Ipv6Addr>().ok());
        let host = address.map_or_else(|| host.to_ascii_lowercase(), |address| address.to_string());
        let port = uri.port_u16().or_else(|| match uri.scheme_str() {
            Some("http" | "ws") => Some(80),
            Some("https" | "wss") => Some(443),
            _ => None,
        });
        // The port always has two bytes, so different hosts have different keys.
        Ok(Key::joined("upstream", &[&port.unwrap_or_default().to_be_bytes(), host.as_bytes()]))
    }
}

impl KeyExtractor for UpstreamHost {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        self.key(&parts.uri)
    }
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
pub(super) fn single_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a str, KeyError> {
    let invalid = |problem| KeyError::invalid(name.as_str().to_owned(), problem);
    let mut lines = headers.get_all(name).into_iter();
    let line = lines.next().ok_or_else(|| KeyError::missing(name.as_str().to_owned()))?;
    if lines.next().is_some() {
        return Err(invalid("repeated"));
    }
    let line = line.as_bytes().trim_ascii();
    if line.len() > MAX_LENGTH {
        return Err(invalid("longer than 4 KiB"));
    }
    let value = str::from_utf8(line).map_err(|_| invalid("not UTF-8"))?.trim();
    if value.is_empty() { Err(invalid("empty")) } else { Ok(value) }
}
