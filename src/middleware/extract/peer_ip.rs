//! The address at the other end of the connection.

use std::net::{IpAddr, SocketAddr};

use http::{StatusCode, request::Parts};

use super::{
    KeyError, KeyExtractor,
    address::{InvalidPrefix, Ipv6Prefix},
};
use crate::key::Key;

/// The address at the other end of the connection: nothing a client sends can change it.
///
/// Behind a proxy that is the proxy's address, so all clients would share one key: use [`ClientIp`](super::ClientIp)
/// there. IPv4 addresses count one by one, also where they are mapped or translated into IPv6 (`::ffff:a.b.c.d`,
/// `64:ff9b::a.b.c.d`) or come by 6to4; IPv6 addresses by their /64. A translator with a prefix of your own network makes
/// addresses like any other: there count by [all bits](Self::ipv6_prefix).
///
/// With axum, serve the router with `into_make_service_with_connect_info::<SocketAddr>()`. Elsewhere, put the
/// connection's [`SocketAddr`] into the request's extensions. A request without either is answered with 500 and logged.
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
    /// The peer's address, IPv6 by /64.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts IPv6 addresses by this many leading bits. Default: 64. Prefixes of different lengths have different keys.
    ///
    /// # Errors
    ///
    /// [`InvalidPrefix`] if that is not 1 to 128.
    pub fn ipv6_prefix(self, bits: u8) -> Result<Self, InvalidPrefix> {
        Ok(Self { prefix: Ipv6Prefix::new(bits)? })
    }

    /// The key of an address, for lists and resets. Of an IPv6 address it is that of its whole prefix.
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

/// The peer's address, wherever the server has put it.
pub(super) fn peer(parts: &Parts) -> Result<IpAddr, KeyError> {
    #[cfg(feature = "axum")]
    let from_axum = {
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

        let real = parts.extensions.get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| *peer);
        real.or_else(|| parts.extensions.get().map(|MockConnectInfo(peer): &MockConnectInfo<SocketAddr>| *peer))
    };
    #[cfg(not(feature = "axum"))]
    let from_axum: Option<SocketAddr> = None;

    from_axum.or_else(|| parts.extensions.get().copied()).map(|peer: SocketAddr| peer.ip()).ok_or_else(|| {
        // A set-up error and not the client's fault, so not something that `or` may pass over either.
        KeyError::invalid(
            "peer address",
            "unknown; serve with into_make_service_with_connect_info::<SocketAddr>(), or put a SocketAddr into the \
             request's extensions",
        )
        .with_status(StatusCode::INTERNAL_SERVER_ERROR)
    })
}
