//! Extractors, and what attackers try with them.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
};

use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
use http::{HeaderValue, Request, request::Parts};
use tower_sliding_window::{
    ApiKey, ClientIp, Everyone, Header, Key, KeyError, KeyExtractor, PeerIp, Secret, UpstreamHost,
};

/// A request from a peer, with these header lines.
fn from(peer: &str, lines: &[(&str, &str)]) -> Parts {
    let mut parts = with(lines);
    parts.extensions.insert(SocketAddr::new(peer.parse().unwrap(), 50_000));
    parts
}

fn with(lines: &[(&str, &str)]) -> Parts {
    let request = lines.iter().fold(Request::builder(), |request, (name, value)| request.header(*name, *value));
    request.body(()).unwrap().into_parts().0
}

/// The key of an address that is connected directly.
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

mod peer_ip {
    use super::*;

    #[test]
    fn the_peer_is_found_wherever_a_server_puts_it() {
        let peer = SocketAddr::from(([192, 0, 2, 1], 1));
        let mut requests = [with(&[]), with(&[]), with(&[])];
        requests[0].extensions.insert(peer);
        requests[1].extensions.insert(ConnectInfo(peer));
        requests[2].extensions.insert(MockConnectInfo(peer));
        // The connection's own knowledge goes before what a layer has inserted.
        requests[1].extensions.insert(SocketAddr::from(([192, 0, 2, 9], 1)));
        for request in requests {
            assert_eq!(PeerIp::new().extract(&request).unwrap(), key("192.0.2.1"));
        }
    }

    #[test]
    fn no_header_can_change_it() {
        for name in ["x-forwarded-for", "forwarded", "x-real-ip", "cf-connecting-ip"] {
            let request = from("192.0.2.1", &[(name, "198.51.100.1")]);
            assert_eq!(PeerIp::new().extract(&request).unwrap(), key("192.0.2.1"));
        }
    }

    #[test]
    fn without_a_peer_there_is_an_error_and_no_shared_key() {
        let error = PeerIp::new().extract(&with(&[("x-forwarded-for", "192.0.2.1")])).unwrap_err();
        assert_eq!(error.status(), 500);
        assert!(PeerIp::new().or(Header::new("x-tenant")).extract(&with(&[("x-tenant", "7")])).is_err());
    }

    /// A dual-stack listener reports IPv4 peers as `::ffff:a.b.c.d`: one /64 for all of them (CVE-2026-30827).
    #[test]
    fn mapped_ipv4_clients_do_not_share_a_key() {
        assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
        assert_ne!(key("::ffff:192.0.2.1"), key("::ffff:192.0.2.2"));
    }

    #[test]
    fn rotating_within_an_ipv6_prefix_does_not_help() {
        assert_eq!(key("2001:db8:1:1::1"), key("2001:db8:1:1:ffff:ffff:ffff:ffff"));
        assert_ne!(key("2001:db8:1:1::1"), key("2001:db8:1:2::1"));
        let wider = PeerIp::new().ipv6_prefix(48).unwrap();
        let of = |peer| wider.extract(&from(peer, &[])).unwrap();
        assert_eq!(of("2001:db8:1:1::1"), of("2001:db8:1:2::1"));
        // Where two limits of one name count by different prefixes, subnet 0 is not the whole network.
        assert_ne!(of("2001:db8:1::1"), key("2001:db8:1::1"));
    }
}

mod client_ip {
    use super::*;

    fn client(extractor: &ClientIp, peer: &str, lines: &[(&str, &str)]) -> Key {
        extractor.extract(&from(peer, lines)).unwrap()
    }

    #[test]
    fn a_peer_that_is_not_trusted_is_the_client_whatever_it_claims() {
        let claims =
            [("x-forwarded-for", "198.51.100.1"), ("forwarded", "for=198.51.100.1"), ("x-real-ip", "198.51.100.1")];
        for extractor in [behind(), behind().forwarded(), behind().single_header("x-real-ip")] {
            assert_eq!(client(&extractor, "192.0.2.1", &claims), key("192.0.2.1"));
        }
    }

    #[test]
    fn the_first_untrusted_hop_from_the_right_is_the_client() {
        for (chain, expected) in [
            ("192.0.2.1", "192.0.2.1"),
            ("192.0.2.1, 10.9.9.9", "192.0.2.1"),
            ("198.51.100.1, 192.0.2.1, 10.9.9.9, 2001:db8:ffff::1", "192.0.2.1"),
            ("192.0.2.1:4711, 10.9.9.9:80", "192.0.2.1"),
            ("10.3.3.3, 10.2.2.2", "10.3.3.3"),
            ("::ffff:192.0.2.1, ::ffff:10.9.9.9", "192.0.2.1"),
        ] {
            assert_eq!(client(&behind(), PROXY, &[("x-forwarded-for", chain)]), key(expected), "{chain}");
        }
    }

    /// The client writes the left end. Rotating it buys nothing, and naming a victim does not lock the victim out.
    #[test]
    fn the_left_end_is_not_believed() {
        for claimed in ["198.51.100.1", "198.51.100.2", "127.0.0.1", "unknown", "garbage", "10.1.1.1", "\"", ","] {
            let chain = format!("{claimed}, 192.0.2.1");
            assert_eq!(client(&behind(), PROXY, &[("x-forwarded-for", &chain)]), key("192.0.2.1"), "{claimed}");
            let chain = format!("for={claimed}, for=192.0.2.1");
            assert_eq!(client(&behind().forwarded(), PROXY, &[("forwarded", &chain)]), key("192.0.2.1"), "{claimed}");
        }
    }

    /// HAProxy appends a line of its own. Who reads only the first reads what the client wrote.
    #[test]
    fn a_second_line_is_read_before_the_first() {
        let lines = [("x-forwarded-for", "198.51.100.1"), ("x-forwarded-for", "192.0.2.1")];
        assert_eq!(client(&behind(), PROXY, &lines), key("192.0.2.1"));
        let lines = [("forwarded", "for=198.51.100.1"), ("forwarded", "for=192.0.2.1")];
        assert_eq!(client(&behind().forwarded(), PROXY, &lines), key("192.0.2.1"));
    }

    /// A proxy that sets one header passes on the others as the client sent them.
    #[test]
    fn only_the_chosen_header_is_read() {
        let lines = [
            ("forwarded", "for=198.51.100.1"),
            ("x-real-ip", "198.51.100.2"),
            ("cf-connecting-ip", "198.51.100.3"),
            ("x-forwarded-for", "192.0.2.1"),
        ];
        assert_eq!(client(&behind(), PROXY, &lines), key("192.0.2.1"));
        assert_eq!(client(&behind().forwarded(), PROXY, &lines), key("198.51.100.1"));
        assert_eq!(client(&behind().single_header("cf-connecting-ip"), PROXY, &lines), key("198.51.100.3"));
    }

    /// The walk never goes on to the left of what it cannot read.
    #[test]
    fn the_walk_stops_at_what_is_no_address() {
        for unreadable in ["unknown", "_hidden", "", "300.1.1.1", "fe80::1%eth0", "192.0.2.1:port", "for=192.0.2.1"] {
            let chain = format!("198.51.100.1, {unreadable}, 10.9.9.9");
            assert_eq!(client(&behind(), PROXY, &[("x-forwarded-for", &chain)]), key("10.9.9.9"), "{unreadable}");
            let chain = format!("198.51.100.1, {unreadable}");
            assert_eq!(client(&behind(), PROXY, &[("x-forwarded-for", &chain)]), key(PROXY), "{unreadable}");
        }
        let mut request = from(PROXY, &[]);
        request.headers.insert("x-forwarded-for", HeaderValue::from_bytes(b"198.51.100.1, \xff").unwrap());
        assert_eq!(behind().extract(&request).unwrap(), key(PROXY));
    }

    #[test]
    fn a_chain_is_followed_for_32_hops() {
        let chain = |hops| format!("192.0.2.1{}", ", 10.0.0.2".repeat(hops));
        assert_eq!(client(&behind(), PROXY, &[("x-forwarded-for", &chain(31))]), key("192.0.2.1"));
        assert_eq!(client(&behind(), PROXY, &[("x-forwarded-for", &chain(32))]), key("10.0.0.2"));
    }

    #[test]
    fn rfc_7239_is_read_with_quotes_ports_and_brackets() {
        for line in [
            "for=192.0.2.1",
            "For=\"192.0.2.1:4711\";proto=https;by=10.0.0.1",
            "proto=https; for=192.0.2.1",
            "for=198.51.100.1, for=192.0.2.1;host=\"a,b\"",
            "for=192.0.2.1;",
            // A hidden port does not hide the address.
            "for=\"192.0.2.1:_p\"",
            "for=\"192.0.2.1:_a.b-c_1\";by=\"10.0.0.1:_p\"",
            ";; for=192.0.2.1; ;proto=https",
        ] {
            assert_eq!(client(&behind().forwarded(), PROXY, &[("forwarded", line)]), key("192.0.2.1"), "{line}");
        }
        for line in ["for=\"[2001:db8:1:1::7]:4711\"", "for=\"[2001:db8:1:1::7]:_p\""] {
            assert_eq!(client(&behind().forwarded(), PROXY, &[("forwarded", line)]), key("2001:db8:1:1::1"), "{line}");
        }
    }

    /// Trusted behind IPv4 written as IPv6, too: a dual-stack listener shows the proxy as `::ffff:10.0.0.1`.
    #[test]
    fn a_mapped_proxy_is_still_the_proxy() {
        assert_eq!(client(&behind(), "::ffff:10.0.0.1", &[("x-forwarded-for", "192.0.2.1")]), key("192.0.2.1"));
    }

    /// And where it is the range that is written so.
    #[test]
    fn a_range_is_the_range_in_every_spelling() {
        for range in [
            "::ffff:10.0.0.1",
            "::ffff:10.0.0.0/104",
            "::ffff:0.0.0.0/96",
            "64:ff9b::10.0.0.1",
            "64:ff9b::10.0.0.0/104",
            "64:ff9b::/96",
            "::ffff:0:10.0.0.0/104",
            "2002:a00::/24",
        ] {
            let extractor = ClientIp::behind([range]).unwrap();
            for peer in ["10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::7"] {
                let lines = [("x-forwarded-for", "2001:db8:1:1::7")];
                assert_eq!(client(&extractor, peer, &lines), key("2001:db8:1:1::1"), "{range} {peer}");
            }
            assert_eq!(client(&extractor, "2001:db8::1", &[("x-forwarded-for", "192.0.2.1")]), key("2001:db8::1"));
        }
        let other = ClientIp::behind(["::ffff:10.0.0.2", "::ffff:11.0.0.0/104", "64:ff9b:1::/48"]).unwrap();
        assert_eq!(client(&other, PROXY, &[("x-forwarded-for", "192.0.2.1")]), key(PROXY));
        assert_eq!(client(&other, "64:ff9b:1::1", &[("x-forwarded-for", "192.0.2.1")]), key("192.0.2.1"));
    }

    /// The hops that are trusted are read up to a bound. A client that makes them longer gets no other key.
    #[test]
    fn a_header_is_read_for_16_kib() {
        let (forwarded, padded) = (behind().forwarded(), |bytes| format!("for=192.0.2.1;host={}", "x".repeat(bytes)));
        let extract = |line: &str| forwarded.extract(&from(PROXY, &[("forwarded", line)]));
        assert_eq!(extract(&padded(16_000)).unwrap(), key("192.0.2.1"));
        let error = extract(&padded(17_000)).unwrap_err();
        assert_eq!((error.status().as_u16(), error.to_string()), (400, "forwarded: longer than 16 KiB".to_owned()));
        assert!(!error.is_missing());
        // The text on the left of the client is not read at all.
        assert_eq!(extract(&format!("{}, for=192.0.2.1", "x".repeat(100_000))).unwrap(), key("192.0.2.1"));
        let chain = format!("192.0.2.1{}", ", 10.0.0.2".repeat(20)) + &" ".repeat(17_000);
        assert_eq!(behind().extract(&from(PROXY, &[("x-forwarded-for", &chain)])).unwrap_err().status(), 400);
    }

    #[test]
    fn a_single_value_header_must_be_there_once_and_hold_an_address() {
        let extractor = behind().single_header("x-real-ip");
        assert_eq!(client(&extractor, PROXY, &[("x-real-ip", "192.0.2.1")]), key("192.0.2.1"));
        for lines in [
            &[][..],
            &[("x-real-ip", "")],
            &[("x-real-ip", "nobody")],
            &[("x-real-ip", "192.0.2.1, 198.51.100.1")],
            &[("x-real-ip", "192.0.2.1"), ("x-real-ip", "192.0.2.1")],
        ] {
            assert_eq!(extractor.extract(&from(PROXY, lines)).unwrap_err().status(), 400, "{lines:?}");
        }
    }

    #[test]
    fn without_a_peer_no_header_is_believed() {
        assert_eq!(behind().extract(&with(&[("x-forwarded-for", "192.0.2.1")])).unwrap_err().status(), 500);
    }

    #[test]
    fn a_single_address_is_a_range_and_nonsense_is_refused_by_value() {
        let one = ClientIp::behind(["10.0.0.1", " 10.0.0.3/32 "]).unwrap();
        assert_eq!(client(&one, "10.0.0.2", &[("x-forwarded-for", "192.0.2.1")]), key("10.0.0.2"));
        for range in ["10.0.0.0/33", "10.0.0", "", "localhost", "10.0.0.0/8/8"] {
            assert!(ClientIp::behind([range]).unwrap_err().to_string().starts_with(&format!("{range:?}")));
        }
    }
}

mod headers {
    use super::*;

    fn tenant(lines: &[(&str, &str)]) -> Result<Key, KeyError> {
        Header::new("X-Tenant").extract(&with(lines))
    }

    #[test]
    fn the_value_is_the_key_without_the_space_around_it() {
        assert_eq!(tenant(&[("x-tenant", "seven")]).unwrap(), tenant(&[("x-tenant", "  seven\t")]).unwrap());
        assert_ne!(tenant(&[("x-tenant", "seven")]).unwrap(), tenant(&[("x-tenant", "Seven")]).unwrap());
    }

    #[test]
    fn two_headers_never_give_one_key() {
        let request = with(&[("x-tenant", "7"), ("x-user", "7")]);
        let keys = ["x-tenant", "x-user"].map(|name| Header::new(name).extract(&request).unwrap());
        assert_ne!(keys[0], keys[1]);
    }

    #[test]
    fn what_is_missing_or_malformed_is_rejected() {
        let long = "x".repeat(4097);
        for (lines, problem) in [
            (&[][..], "missing"),
            (&[("x-tenant", "")], "empty"),
            (&[("x-tenant", "  ")], "empty"),
            (&[("x-tenant", "7"), ("x-tenant", "8")], "repeated"),
            (&[("x-tenant", &long)], "longer than 4 KiB"),
        ] {
            let error = tenant(lines).unwrap_err();
            assert_eq!((error.status().as_u16(), error.to_string()), (400, format!("x-tenant: {problem}")));
        }
        assert!(tenant(&[("x-tenant", &long[1..])]).is_ok());
        let mut request = with(&[]);
        request.headers.insert("x-tenant", HeaderValue::from_bytes(b"\xff\xfe").unwrap());
        assert_eq!(Header::new("x-tenant").extract(&request).unwrap_err().to_string(), "x-tenant: not UTF-8");
    }

    #[test]
    #[should_panic = "a header name must be a token"]
    fn a_name_that_is_none_fails_where_the_layer_is_built() {
        let _ = Header::new("x tenant");
    }
}

mod api_key {
    use super::*;

    fn bearer(value: &str) -> Result<Key, KeyError> {
        ApiKey::bearer(&secret()).extract(&with(&[("authorization", value)]))
    }

    #[test]
    fn the_key_is_a_keyed_hash_of_128_bits() {
        let extract =
            |secret: &Secret| ApiKey::header("x-api-key", secret).extract(&with(&[("x-api-key", "k3y")])).unwrap();
        let key = extract(&secret());
        assert_eq!(key.value().len(), 16);
        assert_eq!(key, extract(&secret()), "the same on every instance");
        // HMAC-SHA-256 over "tower-sliding-window api key v1\0k3y", and the same in the next version.
        assert_eq!(u128::from_be_bytes(key.value().try_into().unwrap()), 0x53859960b3ff35b3f7d0f99874ddb7ed);
        assert_ne!(key, extract(&Secret::new("another secret of ours").unwrap()));
    }

    /// Whatever a lenient authentication takes for the same token has to be one key, or it multiplies the quota.
    #[test]
    fn every_spelling_of_a_bearer_token_is_one_key() {
        for spelling in ["bearer t0ken", "BEARER t0ken", "Bearer   t0ken", "Bearer t0ken  ", "Bearer\tt0ken"] {
            assert_eq!(bearer(spelling).unwrap(), bearer("Bearer t0ken").unwrap(), "{spelling:?}");
        }
        assert_ne!(bearer("Bearer T0ken").unwrap(), bearer("Bearer t0ken").unwrap());
    }

    #[test]
    fn what_is_missing_or_malformed_is_a_401_with_a_challenge() {
        for value in ["", "Bearer", "Bearer ", "Bearer a b", "Basic dXNlcjpwYXNz", "t0ken"] {
            let error = bearer(value).unwrap_err();
            assert_eq!((error.status().as_u16(), error.challenge().unwrap().to_str().unwrap()), (401, "Bearer"));
            assert!(!error.to_string().contains("t0ken"), "the value is nobody's business: {error}");
        }
        let key = ApiKey::header("x-api-key", &secret());
        for lines in [&[][..], &[("x-api-key", "a"), ("x-api-key", "a")], &[("x-api-key", &"a".repeat(4097))]] {
            assert_eq!(key.extract(&with(lines)).unwrap_err().status(), 401);
        }
    }

    #[test]
    fn a_secret_is_long_enough_and_never_shown() {
        let error = Secret::new("too short").unwrap_err();
        assert_eq!(error.to_string(), "a secret must have at least 16 bytes, not 9");
        let shown = format!("{:?} {:?}", secret(), ApiKey::header("x-api-key", &secret()));
        assert!(!shown.contains("0123456789abcdef"));
    }
}

mod upstream_host {
    use super::*;

    fn host(uri: &str) -> Result<Key, KeyError> {
        UpstreamHost.key(&uri.parse().unwrap())
    }

    /// Or an upstream that is told to wait is called by another name.
    #[test]
    fn every_spelling_of_a_host_is_one_key() {
        for (spellings, host_itself) in [
            (
                &["http://Example.ORG/a?b", "http://example.org:80", "ws://example.org./", "http://u:p@example.org/"][..],
                "http://example.org/",
            ),
            (&["https://example.org:443/", "wss://EXAMPLE.org", "http://example.org:443/"], "https://example.org/"),
            (&["http://[2001:DB8:0::1]/", "http://[2001:db8::1]:80/"], "http://[2001:db8::1]/"),
            (&["http://192.0.2.1:80/"], "http://192.0.2.1/"),
        ] {
            for spelling in spellings {
                assert_eq!(host(spelling).unwrap(), host(host_itself).unwrap(), "{spelling}");
            }
        }
    }

    #[test]
    fn no_two_hosts_share_a_key() {
        let hosts = [
            "http://example.org/",
            "http://example.org:8080/",
            "https://example.org/",
            "http://www.example.org/",
            "http://example.com/",
            "http://192.0.2.1/",
            "http://[2001:db8::1]/",
        ];
        let keys: HashSet<_> = hosts.iter().map(|uri| host(uri).unwrap()).collect();
        assert_eq!(keys.len(), hosts.len());
    }

    /// A server's requests name theirs in a header, which their clients choose.
    #[test]
    fn without_a_host_there_is_no_key() {
        let error = UpstreamHost.extract(&with(&[("host", "example.org")])).unwrap_err();
        assert!(error.is_missing() && error.status() == 400, "{error}");
        assert!(host("http://./").is_err());
    }
}

mod combinations {
    use super::*;

    #[test]
    fn and_needs_both_and_keeps_them_apart() {
        let both = Header::new("x-a").and(Header::new("x-b"));
        let of = |a: &str, b: &str| both.extract(&with(&[("x-a", a), ("x-b", b)])).unwrap();
        assert_eq!(of("1", "2"), of("1", "2"));
        assert_ne!(of("1", "2"), of("2", "1"));
        assert_ne!(of("12", "3"), of("1", "23"));
        assert!(both.extract(&with(&[("x-a", "1")])).is_err());
    }

    #[test]
    fn or_falls_back_into_another_namespace_and_only_if_the_first_is_absent() {
        let either = ApiKey::header("x-api-key", &secret()).or(PeerIp::new());
        let peer = IpAddr::from([192, 0, 2, 1]).to_string();
        assert_eq!(either.extract(&from(&peer, &[])).unwrap(), key(&peer));
        let keyed = either.extract(&from(&peer, &[("x-api-key", "k3y")])).unwrap();
        assert_eq!((keyed.namespace(), key(&peer).namespace()), ("api-key", "ip"));
        // A malformed key must not be a way into the budget of its address.
        assert!(either.extract(&from(&peer, &[("x-api-key", "")])).is_err());
    }

    #[test]
    fn everyone_is_one() {
        assert_eq!(Everyone.extract(&from("192.0.2.1", &[])).unwrap(), Everyone.extract(&with(&[])).unwrap());
    }

    #[test]
    fn a_closure_is_an_extractor() {
        let tenant = |parts: &Parts| match parts.uri.path().strip_prefix("/tenants/") {
            Some(tenant) => Ok(Key::new("tenant", tenant)),
            None => Err(KeyError::missing("tenant")),
        };
        let parts = Request::get("/tenants/7").body(()).unwrap().into_parts().0;
        assert_eq!(tenant.extract(&parts).unwrap(), Key::new("tenant", "7"));
        assert_eq!(tenant.extract(&with(&[])).unwrap_err().status(), 400);
    }
}
