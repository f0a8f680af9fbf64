//! Requests that are not counted, and requests that are denied.
//!
//! 1. A request whose key is on a list of denied keys gets 403. Otherwise, a request whose key is on a list of allowed keys,
//!    a skipped request, and a CORS preflight go to the service uncounted. All other requests are counted.
//! 2. A request without a key is on no list. A key that is present but cannot be read may be a denied key, so a list of denied
//!    keys rejects it with the status of its [`KeyError`]. No list of allowed keys has it.

use std::{collections::HashSet, fmt, net::Ipv6Addr, sync::Arc};

use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{ACCESS_CONTROL_REQUEST_METHOD, CONTENT_LENGTH, ORIGIN, TRANSFER_ENCODING},
    request::Parts,
};

use super::super::{
    events::Events,
    extract::{KeyError, KeyExtractor},
    rejection::Rejection,
};
use crate::{key::Key, metrics};

type Skip = dyn Fn(&Parts) -> bool + Send + Sync;

/// Whether a request has a key of a list. An error if it has a key that cannot be read.
type KeyList = dyn Fn(&Parts) -> Result<bool, KeyError> + Send + Sync;

#[derive(Clone, Default)]
pub(crate) struct RequestFilter {
    pub(crate) denied: Vec<Arc<KeyList>>,
    pub(crate) exempt: Vec<Arc<KeyList>>,
    pub(crate) skipped: Vec<Arc<Skip>>,
    pub(crate) counts_preflights: bool,
}

impl RequestFilter {
    /// Whether the request is counted, unless it is denied.
    pub(crate) fn counts(&self, parts: &Parts, events: &Events) -> Result<bool, Rejection> {
        for list in &self.denied {
            if list(parts).map_err(Rejection::NoKey)? {
                return Err(Rejection::Denied);
            }
        }
        let exempts = |list: &Arc<KeyList>| {
            list(parts).unwrap_or_else(|error| {
                events.mistake(&Rejection::NoKey(error));
                false
            })
        };
        let uncounted = if !self.counts_preflights && is_preflight(parts) {
            "preflight"
        } else if self.skipped.iter().any(|skips| skips(parts)) {
            "skipped"
        } else if self.exempt.iter().any(exempts) {
            "allowed"
        } else {
            return Ok(true);
        };
        metrics::uncounted(uncounted, events.layer());
        Ok(false)
    }
}

/// A list for a filter.
pub(crate) fn key_list(extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Arc<KeyList> {
    let keys: HashSet<Key> = keys.into_iter().collect();
    Arc::new(move |parts| match extractor.extract(parts) {
        Ok(key) => Ok(keys.contains(&key)),
        Err(error) if error.is_missing() => Ok(false),
        Err(error) => Err(error),
    })
}

impl fmt::Debug for RequestFilter {
    // Numbers only, since keys may be personal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestFilter")
            .field("denied", &self.denied.len())
            .field("exempt", &self.exempt.len())
            .field("skipped", &self.skipped.len())
            .field("counts_preflights", &self.counts_preflights)
            .finish()
    }
}

/// Whether this is a request that a browser sends by itself before a request to another origin (Fetch, section 3.3.2), which
/// is counted in its place. A preflight has one origin, one method, and no body.
fn is_preflight(parts: &Parts) -> bool {
    let headers = &parts.headers;
    parts.method == Method::OPTIONS
        && only(headers, &ORIGIN).is_some_and(|value| is_origin(value.as_bytes()))
        && only(headers, &ACCESS_CONTROL_REQUEST_METHOD)
            .is_some_and(|value| Method::from_bytes(value.as_bytes()).is_ok())
        && !headers.contains_key(TRANSFER_ENCODING)
        && headers.get_all(CONTENT_LENGTH).into_iter().all(|length| length == "0")
}

fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut values = headers.get_all(name).into_iter();
    values.next().filter(|_| values.next().is_none())
}

/// An origin as browsers write it: `null`, or a scheme, a host, and perhaps a port (HTML, section 7.1.1).
fn is_origin(text: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(text) else { return false };
    let Some((scheme, rest)) = text.split_once("://") else { return text == "null" };
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    // The colons within the brackets of an IPv6 address begin no port.
    let (host, port) = match rest.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (rest, None),
    };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok();
    is_scheme && is_host(host) && port.is_none_or(is_port)
}

fn is_host(host: &str) -> bool {
    match host.strip_prefix('[') {
        Some(address) => address.strip_suffix(']').is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()),
        None => !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%".contains(&byte)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_a_scheme_a_host_and_perhaps_a_port() {
        for origin in [
            "null",
            "https://example.org",
            "http://localhost:8080",
            "http://192.0.2.1",
            "https://[2001:db8::1]",
            "https://[2001:db8::1]:8443",
            "chrome-extension://kbfnbcaeplbcioakkpcpgfkobkghlhen",
            "https://xn--bcher-kva.example",
        ] {
            assert!(is_origin(origin.as_bytes()), "{origin}");
        }
        for other in [
            "",
            " ",
            "Null",
            "example.org",
            "https://",
            "https://:80",
            "://example.org",
            "1http://example.org",
            "https://example.org/",
            "https://example.org:",
            "https://example.org:+80",
            "https://example.org:65536",
            "https://user@example.org",
            "https://a, https://b",
            "https://a https://b",
            "https://[::1",
            "https://[example.org]",
            "https://2001:db8::1",
            "file://",
        ] {
            assert!(!is_origin(other.as_bytes()), "{other}");
        }
        assert!(!is_origin(b"https://\xff"));
    }
}
