//! The peer address, and the client address behind trusted proxies.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderName, StatusCode, header::FORWARDED, request::Parts};
use ipnet::IpNet;

use super::{
    KeyError, KeyExtractor,
    address::{self, AddressList, have, parse_ranges},
    forwarded::{Hop, Style, hops},
    header::{built, header_name, single_value},
};
use crate::{error::ConfigError, key::Key};

const MAX_HOPS: usize = 32;

/// The peer address: the other end of the connection. Requests cannot forge it.
///
/// Behind a proxy, this is the proxy's address, so all clients share one key. Use
/// [`ClientIp::behind`] there.
///
/// Each IPv4 address has one key, even if it is mapped or translated to IPv6 (`::ffff:a.b.c.d`,
/// `64:ff9b::a.b.c.d`, 6to4). IPv6 addresses share the key of their /64. If a translator in your
/// network uses its own prefix, let [all bits](ClientIp::ipv6_prefix) form the key.
///
/// With axum, serve the router with `into_make_service_with_connect_info::<SocketAddr>()`. tonic's
/// server needs only the feature `grpc`. With any other server, or if you accept TLS connections
/// yourself, put the connection's [`SocketAddr`] into the request's extensions. A request without
/// one gets a 500, and a log line says so. This includes requests over a [Unix
/// socket](crate::guide::behind_a_proxy#a-unix-socket), until you put an address for the socket's
/// peer into the extensions.
///
/// ```
/// use std::net::SocketAddr;
/// use http::Request;
/// use tower_sliding_window::{KeyExtractor, PeerIp};
///
/// let peer: SocketAddr = "203.0.113.7:50000".parse().unwrap();
/// let (parts, ()) = Request::get("/").extension(peer).body(()).unwrap().into_parts();
/// assert_eq!(PeerIp::new().extract(&parts).unwrap().value(), [203, 0, 113, 7]);
/// ```
pub type PeerIp = ClientIp;

/// The client address behind trusted proxies.
///
/// 1. A peer outside the trusted ranges is the client, whatever headers it sends.
/// 2. Behind a trusted peer, exactly one header is read. Default: `X-Forwarded-For`. All other
///    headers are ignored, since a proxy passes on the headers that it does not overwrite.
/// 3. `X-Forwarded-For` and `Forwarded` are read from right to left, from the last line to the
///    first. Each address is a hop. A trusted hop wrote the address to its left itself, so that
///    address is reliable. The client is the first hop that is not trusted. Reading also ends at
///    the left end, at an element without a readable address, and after 32 hops. In these cases,
///    the client is the last known hop. Empty elements are ignored. A request gets a 400 if its
///    trusted hops take more than 16 KiB.
/// 4. A single-value header must be present exactly once and hold an address. Otherwise the request
///    gets a 400.
/// 5. Addresses have the same keys as in [`PeerIp`]: one per IPv4 address, however it is written,
///    and one per IPv6 /64. Ranges match all spellings too.
///
/// ```
/// use std::net::SocketAddr;
/// use http::Request;
/// use tower_sliding_window::{ClientIp, KeyExtractor};
///
/// let client_ip = ClientIp::behind(["10.1.2.0/28"])?;
/// let proxy: SocketAddr = "10.1.2.3:4000".parse()?;
/// // The client wrote the first address itself; the proxy appended the second.
/// let request = Request::get("/").header("x-forwarded-for", "198.51.100.1, 203.0.113.7").extension(proxy);
/// let (parts, ()) = request.body(())?.into_parts();
/// assert_eq!(client_ip.extract(&parts)?.value(), [203, 0, 113, 7]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ClientIp {
    trusted: Vec<IpNet>,
    header: HeaderName,
    style: Style,
    /// How many leading bits of an IPv6 address form the key. Default: 64, since a subscriber has
    /// at least a /64 (RFC 6177).
    ipv6_bits: u8,
}

impl Default for ClientIp {
    fn default() -> Self {
        let header = HeaderName::from_static("x-forwarded-for");
        Self {
            trusted: Vec::new(),
            header,
            style: Style::Plain,
            ipv6_bits: 64,
        }
    }
}

impl ClientIp {
    /// Does not trust any proxy: the client is the peer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts proxies in these ranges or at these addresses, such as `10.1.2.0/28` or
    /// `2001:db8::1`, and reads `X-Forwarded-For`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if an item is neither a range nor an address.
    pub fn behind<R: AsRef<str>>(
        trusted: impl IntoIterator<Item = R>,
    ) -> Result<Self, ConfigError> {
        Ok(Self {
            trusted: parse_ranges(trusted)?,
            ..Self::default()
        })
    }

    /// Matches requests whose address is in one of these ranges, for
    /// [`exempt`](crate::RateLimitLayer::exempt) and [`deny`](crate::RateLimitLayer::deny). The
    /// ranges may be replaced at run time: see [`AddressList`].
    pub fn within(
        self,
        addresses: &AddressList,
    ) -> impl Fn(&Parts) -> Result<bool, KeyError> + Send + Sync + 'static + use<> {
        let addresses = addresses.clone();
        move |parts| Ok(addresses.contains(self.address(parts)?))
    }

    /// Reads `Forwarded` (RFC 7239) instead of `X-Forwarded-For`.
    pub fn forwarded(mut self) -> Self {
        (self.header, self.style) = (FORWARDED, Style::Rfc7239);
        self
    }

    /// Reads a single-address header instead, such as `cf-connecting-ip` or `x-real-ip`. Use one
    /// only if the proxy always overwrites it.
    ///
    /// The address may have brackets and a port, as in `X-Forwarded-For`.
    /// `cloudfront-viewer-address` always ends with a port, even after an IPv6 address without
    /// brackets, so what follows its last colon is never part of the address. A request without
    /// this port gets a 400. In any other header, an IPv6 address without brackets has no port.
    ///
    /// # Panics
    ///
    /// If `name` is not a header name. A [`HeaderName`] never panics.
    #[track_caller]
    pub fn single_header(mut self, name: impl TryInto<HeaderName>) -> Self {
        self.header = built(header_name(name));
        self.style = if self.header == "cloudfront-viewer-address" {
            Style::SingleWithPort
        } else {
            Style::Single
        };
        self
    }

    /// Groups IPv6 addresses by this many leading bits. Default: 64. Prefixes with different
    /// lengths have different keys.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if `bits` is not 1 to 128.
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<Self, ConfigError> {
        if !(1..=128).contains(&bits) {
            return Err(ConfigError::new(format!(
                "an IPv6 prefix must have 1 to 128 bits, not {bits}"
            )));
        }
        self.ipv6_bits = bits;
        Ok(self)
    }

    /// The key for an address, for `deny`, `exempt` and `reset`. An IPv6 address's key stands for
    /// the whole prefix.
    pub fn key(&self, address: IpAddr) -> Key {
        address::key(address, self.ipv6_bits)
    }

    /// The address under which a request is counted, for a log or a handler. An IPv4 address that a
    /// dual-stack listener has mapped to IPv6 is returned as IPv4.
    ///
    /// ```
    /// use axum::extract::State;
    /// use http::request::Parts;
    /// use tower_sliding_window::{ClientIp, Rejection};
    ///
    /// async fn hello(State(client_ip): State<ClientIp>, request: Parts) -> Result<String, Rejection> {
    ///     Ok(format!("hello, {}", client_ip.address(&request)?))
    /// }
    /// # use std::net::SocketAddr;
    /// # use axum::{Router, body::{Body, to_bytes}, extract::connect_info::MockConnectInfo, routing::get};
    /// # use http::Request;
    /// # use tower::ServiceExt;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let app = Router::new().route("/", get(hello)).with_state(ClientIp::behind(["10.1.2.0/28"])?);
    /// # let app = app.layer(MockConnectInfo(SocketAddr::from(([10, 1, 2, 3], 4_000))));
    /// # let request = Request::get("/").header("x-forwarded-for", "203.0.113.7").body(Body::empty())?;
    /// # let body = to_bytes(app.oneshot(request).await?.into_body(), 99).await?;
    /// # assert_eq!(body, "hello, 203.0.113.7");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`KeyError`] if a limit that uses this extractor would reject the request.
    pub fn address(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        self.client(parts).map(|client| client.to_canonical())
    }

    fn client(&self, parts: &Parts) -> Result<IpAddr, KeyError> {
        let peer = peer(parts)?;
        let (trusted, header, style) = (&self.trusted, &self.header, self.style);
        if !have(trusted, peer) {
            return Ok(peer);
        }
        if let Style::Single | Style::SingleWithPort = style {
            let address = style.address(single_value(&parts.headers, header)?.as_bytes());
            return address.ok_or_else(|| self.invalid("not an address"));
        }
        let mut client = peer;
        let mut hops = hops(&parts.headers, header, style).take(MAX_HOPS);
        while have(trusted, client) {
            match hops.next() {
                Some(Hop::Address(address)) => client = address,
                Some(Hop::TooFar) => return Err(self.invalid("longer than 16 KiB")),
                Some(Hop::Unknown) | None => break,
            }
        }
        Ok(client)
    }

    fn invalid(&self, problem: &'static str) -> KeyError {
        KeyError::invalid(self.header.as_str().to_owned(), problem)
    }
}

impl KeyExtractor for ClientIp {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        self.client(parts).map(|client| self.key(client))
    }
}

/// The peer address from the extensions, where axum, tonic (with or without TLS), or another server
/// has put it.
fn peer(parts: &Parts) -> Result<IpAddr, KeyError> {
    #[cfg(feature = "axum")]
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

    let found = None::<SocketAddr>;
    #[cfg(feature = "axum")]
    let found = found
        .or_else(|| parts.extensions.get().map(|ConnectInfo(peer)| *peer))
        .or_else(|| parts.extensions.get().map(|MockConnectInfo(peer)| *peer));
    #[cfg(feature = "grpc")]
    let found = found.or_else(|| {
        parts
            .extensions
            .get()
            .and_then(tonic::transport::server::TcpConnectInfo::remote_addr)
    });
    found.or_else(|| parts.extensions.get().copied()).map(|peer| peer.ip()).ok_or_else(|| {
        // A missing peer address is a setup mistake. It is `invalid` rather than `missing`, so that
        // `or` does not hide it.
        KeyError::invalid(
            "peer address",
            "unknown; serve with into_make_service_with_connect_info::<SocketAddr>() of axum 0.8, or put a SocketAddr \
             into the request's extensions",
        )
        .with_status(StatusCode::INTERNAL_SERVER_ERROR)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_without_bits_or_with_too_many_is_refused_by_value() {
        let error = |bits| ClientIp::new().ipv6_prefix(bits).unwrap_err().to_string();
        assert_eq!(
            error(129),
            "an IPv6 prefix must have 1 to 128 bits, not 129"
        );
        assert_eq!(error(0), "an IPv6 prefix must have 1 to 128 bits, not 0");
    }
}
