//! The host that a call goes to.

use std::net::Ipv6Addr;

use http::{Uri, request::Parts};

use super::extractor::{KeyError, KeyExtractor};
use crate::key::Key;

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
