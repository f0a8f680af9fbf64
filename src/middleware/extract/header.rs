//! The value of a header.

use http::{HeaderMap, HeaderName, request::Parts};

use super::extractor::{KeyError, KeyExtractor};
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
