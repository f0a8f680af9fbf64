//! The address at the other end of the connection.

use std::net::{IpAddr, SocketAddr};

use http::{StatusCode, request::Parts};

use super::{
    address::{InvalidPrefix, Ipv6Prefix},
    extractor::KeyExtractor,
    key_error::KeyError,
};
use crate::key::Key;

/// The address at the other end of the connection. No client can forge it by its request.
///
/// Behind a proxy this is the proxy's address, one key for all clients: use [`ClientIp`](super::ClientIp) there.
///
/// Each IPv4 address has one key, even if it is mapped or translated to IPv6 (`::ffff:a.b.c.d`, `64:ff9b::a.b.c.d`,
/// 6to4). IPv6 addresses share the key of their /64. If a translator in your network uses its own prefix, count by [all
/// bits](Self::ipv6_prefix).
///
/// With axum, serve the router with `into_make_service_with_connect_info::<SocketAddr>()`. tonic's server needs nothing but
/// the feature `grpc`. With other servers, and where you accept TLS yourself, put the connection's [`SocketAddr`] into the request's
/// extensions. A request with none of these, such as one over a Unix socket, gets a 500, and is logged.
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
#[derive(Clone, Debug, Default)]
pub struct PeerIp {
    prefix: Ipv6Prefix,
}

impl PeerIp {
    /// IPv6 addresses by their /64.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Groups IPv6 addresses by this many leading bits. Default: 64. Prefixes of different lengths have different keys.
    ///
    /// # Errors
    ///
    /// [`InvalidPrefix`] if `bits` is not 1 to 128.
    pub fn ipv6_prefix(self, bits: u8) -> Result<Self, InvalidPrefix> {
        Ok(Self { prefix: Ipv6Prefix::new(bits)? })
    }

    /// The key of an address, for lists and resets. An IPv6 address has the key of its whole prefix.
    #[must_use]
    pub fn key(&self, address: IpAddr) -> Key {
        self.prefix.key(address)
    }
}

impl KeyExtractor for PeerIp {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        peer(parts).map(|peer| self.key(peer))
    }
}

/// The peer's address from the extensions, where axum or another server puts it.
pub(super) fn peer(parts: &Parts) -> Result<IpAddr, KeyError> {
    #[cfg(feature = "axum")]
    let from_axum = {
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

        let real = parts.extensions.get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| *peer);
        real.or_else(|| parts.extensions.get().map(|MockConnectInfo(peer): &MockConnectInfo<SocketAddr>| *peer))
    };
    #[cfg(not(feature = "axum"))]
    let from_axum: Option<SocketAddr> = None;

    let found = from_axum.or_else(|| from_tonic(parts)).or_else(|| parts.extensions.get().copied());
    found.map(|peer: SocketAddr| peer.ip()).ok_or_else(|| {
        // A mistake in the set-up: `invalid`, so that `or` does not hide it.
        KeyError::invalid(
            "peer address",
            "unknown; serve with into_make_service_with_connect_info::<SocketAddr>(), or put a SocketAddr into the \
             request's extensions",
        )
        .with_status(StatusCode::INTERNAL_SERVER_ERROR)
    })
}

/// The peer of tonic's server, which puts it there with and without TLS.
#[cfg(feature = "grpc")]
fn from_tonic(parts: &Parts) -> Option<SocketAddr> {
    use tonic::transport::server::TcpConnectInfo;

    parts.extensions.get().and_then(TcpConnectInfo::remote_addr)
}

#[cfg(not(feature = "grpc"))]
fn from_tonic(_: &Parts) -> Option<SocketAddr> {
    None
}
