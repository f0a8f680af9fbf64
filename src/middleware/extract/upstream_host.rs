//! The host that a client calls.

use std::net::Ipv6Addr;

use http::{Uri, request::Parts};

use super::{KeyError, KeyExtractor};
use crate::key::Key;

/// The host and port that a request goes to: for a layer around a client that calls several upstreams.
///
/// They are those of the request's URI, without user and password: the host in lower case and without a dot at its end,
/// and the scheme's own port (80, or 443) where none is named. A request whose URI names no host, as servers get them, is
/// answered with 400.
///
/// A limit by it listens to the upstream, where its layer [does](crate::RateLimitLayer::heed_upstream).
///
/// ```
/// use http::Request;
/// use tower_sliding_window::{KeyExtractor, UpstreamHost};
///
/// let (parts, ()) = Request::get("https://API.example.org/items").body(())?.into_parts();
/// assert_eq!(UpstreamHost.extract(&parts)?, UpstreamHost.key(&"https://api.example.org:443/".parse()?)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct UpstreamHost;

impl UpstreamHost {
    /// The key of the host that a URI names, for lists and resets.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if it names none.
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
        // The port has always as many bytes, so no two hosts give the same.
        Ok(Key::joined("upstream", &[&port.unwrap_or_default().to_be_bytes(), host.as_bytes()]))
    }
}

impl KeyExtractor for UpstreamHost {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        self.key(&parts.uri)
    }

    fn is_by_upstream(&self) -> bool {
        true
    }
}
