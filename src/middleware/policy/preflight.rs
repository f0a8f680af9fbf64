//! CORS preflights.

use std::net::Ipv6Addr;

use http::{
    HeaderMap, HeaderName, HeaderValue, Method,
    header::{ACCESS_CONTROL_REQUEST_METHOD, CONTENT_LENGTH, ORIGIN, TRANSFER_ENCODING},
};

/// Whether an `OPTIONS` request of these headers is one that a browser sends by itself before a request to another origin
/// (Fetch, section 3.3.2), which is counted in its place. A preflight has one origin, one method, and no body.
pub(super) fn is_preflight(headers: &HeaderMap) -> bool {
    only(headers, &ORIGIN).is_some_and(|value| is_origin(value.as_bytes()))
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
