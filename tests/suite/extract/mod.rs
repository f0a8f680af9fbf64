//! Extractors: the key of a request, and the ways in which attackers try to change it.

mod api_key;
mod client_ip;
mod combinations;
mod header;
mod peer_ip;
#[cfg(unix)]
mod proxies;
mod secrets;
mod upstream_host;

use std::net::SocketAddr;

use http::{Request, request::Parts};
use tower_sliding_window::{ClientIp, Key, KeyExtractor, PeerIp, Secret};

/// A request from a peer, with these headers.
fn from(peer: &str, lines: &[(&str, &str)]) -> Parts {
    let mut parts = with(lines);
    parts
        .extensions
        .insert(SocketAddr::new(peer.parse().unwrap(), 50_000));
    parts
}

fn with(lines: &[(&str, &str)]) -> Parts {
    let request = lines
        .iter()
        .fold(Request::builder(), |request, (name, value)| {
            request.header(*name, *value)
        });
    request.body(()).unwrap().into_parts().0
}

/// The key of an address that connects directly.
fn key(address: &str) -> Key {
    PeerIp::new().extract(&from(address, &[])).unwrap()
}

fn secret() -> Secret {
    Secret::new("0123456789abcdef").unwrap()
}

const PROXY: &str = "10.0.0.1";

fn behind() -> ClientIp {
    ClientIp::behind(["10.0.0.0/8", "2001:db8:ffff::/48"]).unwrap()
}
