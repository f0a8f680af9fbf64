//! `PeerIp`: the address of the connection.

use std::net::SocketAddr;

use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
use tower_sliding_window::{Header, KeyExtractor, PeerIp};

use super::{from, key, with};

#[test]
fn the_peer_is_found_wherever_a_server_puts_it() {
    let peer = SocketAddr::from(([192, 0, 2, 1], 1));
    let mut requests = [with(&[]), with(&[]), with(&[])];
    requests[0].extensions.insert(peer);
    requests[1].extensions.insert(ConnectInfo(peer));
    requests[2].extensions.insert(MockConnectInfo(peer));
    // The address of the connection takes precedence over one that a layer has inserted.
    requests[1]
        .extensions
        .insert(SocketAddr::from(([192, 0, 2, 9], 1)));
    for request in requests {
        assert_eq!(PeerIp::new().extract(&request).unwrap(), key("192.0.2.1"));
    }
}

#[cfg(feature = "grpc")]
#[test]
fn the_peer_of_tonics_server_is_found() {
    use tonic::transport::server::TcpConnectInfo;

    let tonic = |remote_addr| TcpConnectInfo {
        local_addr: None,
        remote_addr,
    };
    let mut request = with(&[]);
    request
        .extensions
        .insert(tonic(Some(SocketAddr::from(([192, 0, 2, 1], 1)))));
    // One that a layer has inserted does not replace it.
    request
        .extensions
        .insert(SocketAddr::from(([192, 0, 2, 9], 1)));
    assert_eq!(PeerIp::new().extract(&request).unwrap(), key("192.0.2.1"));

    let mut request = with(&[]);
    request.extensions.insert(tonic(None));
    assert_eq!(PeerIp::new().extract(&request).unwrap_err().status(), 500);
}

#[cfg(all(feature = "grpc", unix))]
#[test]
fn a_unix_socket_has_no_peer_address() {
    use tonic::transport::server::UdsConnectInfo;

    let mut request = with(&[]);
    request.extensions.insert(UdsConnectInfo {
        peer_addr: None,
        peer_cred: None,
    });
    assert_eq!(PeerIp::new().extract(&request).unwrap_err().status(), 500);
}

#[test]
fn no_header_changes_the_peer() {
    for name in [
        "x-forwarded-for",
        "forwarded",
        "x-real-ip",
        "cf-connecting-ip",
    ] {
        let request = from("192.0.2.1", &[(name, "198.51.100.1")]);
        assert_eq!(PeerIp::new().extract(&request).unwrap(), key("192.0.2.1"));
    }
}

#[test]
fn a_missing_peer_is_an_error_and_not_a_shared_key() {
    let error = PeerIp::new()
        .extract(&with(&[("x-forwarded-for", "192.0.2.1")]))
        .unwrap_err();
    assert_eq!(error.status(), 500);
    assert!(
        PeerIp::new()
            .or(Header::new("x-tenant"))
            .extract(&with(&[("x-tenant", "7")]))
            .is_err()
    );
}

/// A dual-stack listener reports IPv4 peers as `::ffff:a.b.c.d`: one /64 for all of them
/// (CVE-2026-30827).
#[test]
fn mapped_ipv4_clients_do_not_share_a_key() {
    assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
    assert_ne!(key("::ffff:192.0.2.1"), key("::ffff:192.0.2.2"));
}

#[test]
fn rotating_within_an_ipv6_prefix_does_not_help() {
    assert_eq!(
        key("2001:db8:1:1::1"),
        key("2001:db8:1:1:ffff:ffff:ffff:ffff")
    );
    assert_ne!(key("2001:db8:1:1::1"), key("2001:db8:1:2::1"));
    let wider = PeerIp::new().ipv6_prefix(48).unwrap();
    let of = |peer| wider.extract(&from(peer, &[])).unwrap();
    assert_eq!(of("2001:db8:1:1::1"), of("2001:db8:1:2::1"));
    // If two limits of one name use different prefixes, subnet 0 is not the whole network.
    assert_ne!(of("2001:db8:1::1"), key("2001:db8:1::1"));
}
