//! `ClientIp`: the address of the client behind trusted proxies, and the headers with which
//! attackers try to change it.

use http::HeaderValue;
use tower_sliding_window::{ClientIp, Everyone, Key, KeyExtractor, PeerIp};

use super::{PROXY, behind, from, key, with};

fn client(extractor: &ClientIp, peer: &str, lines: &[(&str, &str)]) -> Key {
    extractor.extract(&from(peer, lines)).unwrap()
}

#[test]
fn an_untrusted_peer_is_the_client_whatever_it_claims() {
    let claims = [
        ("x-forwarded-for", "198.51.100.1"),
        ("forwarded", "for=198.51.100.1"),
        ("x-real-ip", "198.51.100.1"),
    ];
    for extractor in [
        behind(),
        behind().forwarded(),
        behind().single_header("x-real-ip"),
    ] {
        assert_eq!(client(&extractor, "192.0.2.1", &claims), key("192.0.2.1"));
    }
}

#[test]
fn the_first_untrusted_hop_from_the_right_is_the_client() {
    for (chain, expected) in [
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1, 10.9.9.9", "192.0.2.1"),
        (
            "198.51.100.1, 192.0.2.1, 10.9.9.9, 2001:db8:ffff::1",
            "192.0.2.1",
        ),
        ("192.0.2.1:4711, 10.9.9.9:80", "192.0.2.1"),
        ("10.3.3.3, 10.2.2.2", "10.3.3.3"),
        ("::ffff:192.0.2.1, ::ffff:10.9.9.9", "192.0.2.1"),
    ] {
        assert_eq!(
            client(&behind(), PROXY, &[("x-forwarded-for", chain)]),
            key(expected),
            "{chain}"
        );
    }
}

/// A probe of the proxy's own has no client behind it.
#[test]
fn a_proxy_without_the_header_is_counted_itself() {
    for extractor in [behind(), behind().forwarded()] {
        assert_eq!(client(&extractor, PROXY, &[]), key(PROXY));
    }
    assert!(
        behind()
            .single_header("x-real-ip")
            .extract(&from(PROXY, &[]))
            .is_err()
    );
}

/// The client writes the left end. Rotating it has no effect, and naming another address does not
/// lock that one out.
#[test]
fn the_left_end_is_not_trusted() {
    for claimed in [
        "198.51.100.1",
        "198.51.100.2",
        "127.0.0.1",
        "unknown",
        "garbage",
        "10.1.1.1",
        "\"",
        ",",
    ] {
        let chain = format!("{claimed}, 192.0.2.1");
        assert_eq!(
            client(&behind(), PROXY, &[("x-forwarded-for", &chain)]),
            key("192.0.2.1"),
            "{claimed}"
        );
        let chain = format!("for={claimed}, for=192.0.2.1");
        assert_eq!(
            client(&behind().forwarded(), PROXY, &[("forwarded", &chain)]),
            key("192.0.2.1"),
            "{claimed}"
        );
    }
}

/// HAProxy appends its own line. A reader of only the first line would trust the client.
#[test]
fn the_last_header_line_is_read_first() {
    let lines = [
        ("x-forwarded-for", "198.51.100.1"),
        ("x-forwarded-for", "192.0.2.1"),
    ];
    assert_eq!(client(&behind(), PROXY, &lines), key("192.0.2.1"));
    let lines = [
        ("forwarded", "for=198.51.100.1"),
        ("forwarded", "for=192.0.2.1"),
    ];
    assert_eq!(
        client(&behind().forwarded(), PROXY, &lines),
        key("192.0.2.1")
    );
}

/// A proxy that sets one header forwards the others as the client sent them.
#[test]
fn only_the_chosen_header_is_read() {
    let lines = [
        ("forwarded", "for=198.51.100.1"),
        ("x-real-ip", "198.51.100.2"),
        ("cf-connecting-ip", "198.51.100.3"),
        ("x-forwarded-for", "192.0.2.1"),
    ];
    assert_eq!(client(&behind(), PROXY, &lines), key("192.0.2.1"));
    assert_eq!(
        client(&behind().forwarded(), PROXY, &lines),
        key("198.51.100.1")
    );
    assert_eq!(
        client(&behind().single_header("cf-connecting-ip"), PROXY, &lines),
        key("198.51.100.3")
    );
}

/// The walk never continues to the left of an unreadable hop.
#[test]
fn the_walk_stops_at_an_unreadable_address() {
    for unreadable in [
        "unknown",
        "_hidden",
        "300.1.1.1",
        "fe80::1%eth0",
        "192.0.2.1:port",
        "for=192.0.2.1",
    ] {
        let chain = format!("198.51.100.1, {unreadable}, 10.9.9.9");
        assert_eq!(
            client(&behind(), PROXY, &[("x-forwarded-for", &chain)]),
            key("10.9.9.9"),
            "{unreadable}"
        );
        let chain = format!("198.51.100.1, {unreadable}");
        assert_eq!(
            client(&behind(), PROXY, &[("x-forwarded-for", &chain)]),
            key(PROXY),
            "{unreadable}"
        );
    }
    let mut request = from(PROXY, &[]);
    request.headers.insert(
        "x-forwarded-for",
        HeaderValue::from_bytes(b"198.51.100.1, \xff").unwrap(),
    );
    assert_eq!(behind().extract(&request).unwrap(), key(PROXY));
}

#[test]
fn a_chain_is_followed_for_32_hops() {
    let chain = |hops| format!("192.0.2.1{}", ", 10.0.0.2".repeat(hops));
    assert_eq!(
        client(&behind(), PROXY, &[("x-forwarded-for", &chain(31))]),
        key("192.0.2.1")
    );
    assert_eq!(
        client(&behind(), PROXY, &[("x-forwarded-for", &chain(32))]),
        key("10.0.0.2")
    );
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
        assert_eq!(
            client(&behind().forwarded(), PROXY, &[("forwarded", line)]),
            key("192.0.2.1"),
            "{line}"
        );
    }
    for line in [
        "for=\"[2001:db8:1:1::7]:4711\"",
        "for=\"[2001:db8:1:1::7]:_p\"",
    ] {
        assert_eq!(
            client(&behind().forwarded(), PROXY, &[("forwarded", line)]),
            key("2001:db8:1:1::1"),
            "{line}"
        );
    }
}

/// A dual-stack listener shows the IPv4 proxy as `::ffff:10.0.0.1`.
#[test]
fn an_ipv4_mapped_proxy_is_trusted() {
    assert_eq!(
        client(
            &behind(),
            "::ffff:10.0.0.1",
            &[("x-forwarded-for", "192.0.2.1")]
        ),
        key("192.0.2.1")
    );
}

/// Also if the range itself is written in another form.
#[test]
fn a_trusted_range_matches_in_every_spelling() {
    for range in [
        "::ffff:10.0.0.1",
        "::ffff:10.0.0.0/104",
        "::ffff:0.0.0.0/96",
        "64:ff9b::10.0.0.1",
        "64:ff9b::10.0.0.0/104",
        "::ffff:0:10.0.0.0/104",
        "2002:a00::/24",
    ] {
        let extractor = ClientIp::behind([range]).unwrap();
        for peer in [
            "10.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "2002:a00:1::7",
        ] {
            let lines = [("x-forwarded-for", "2001:db8:1:1::7")];
            assert_eq!(
                client(&extractor, peer, &lines),
                key("2001:db8:1:1::1"),
                "{range} {peer}"
            );
        }
        assert_eq!(
            client(
                &extractor,
                "2001:db8::1",
                &[("x-forwarded-for", "192.0.2.1")]
            ),
            key("2001:db8::1")
        );
    }
    let other =
        ClientIp::behind(["::ffff:10.0.0.2", "::ffff:11.0.0.0/104", "64:ff9b:1::/48"]).unwrap();
    assert_eq!(
        client(&other, PROXY, &[("x-forwarded-for", "192.0.2.1")]),
        key(PROXY)
    );
    assert_eq!(
        client(&other, "64:ff9b:1::1", &[("x-forwarded-for", "192.0.2.1")]),
        key("192.0.2.1")
    );
    // Who trusts a translator does not trust every peer that connects by IPv4.
    let translator = ClientIp::behind(["64:ff9b::/96"]).unwrap();
    assert_eq!(
        client(&translator, PROXY, &[("x-forwarded-for", "192.0.2.1")]),
        key(PROXY)
    );
    assert_eq!(
        client(
            &translator,
            "64:ff9b::10.0.0.1",
            &[("x-forwarded-for", "192.0.2.1")]
        ),
        key("192.0.2.1")
    );
}

/// Trusted hops are read up to a bound. A client that makes them longer gets no other key.
#[test]
fn at_most_16_kib_of_a_header_are_read() {
    let (forwarded, padded) = (behind().forwarded(), |bytes| {
        format!("for=192.0.2.1;host={}", "x".repeat(bytes))
    });
    let extract = |line: &str| forwarded.extract(&from(PROXY, &[("forwarded", line)]));
    assert_eq!(extract(&padded(16_000)).unwrap(), key("192.0.2.1"));
    let error = extract(&padded(17_000)).unwrap_err();
    assert_eq!(
        (error.status().as_u16(), error.to_string()),
        (400, "forwarded: longer than 16 KiB".to_owned())
    );
    let or_everyone = forwarded.clone().or(Everyone);
    let request = from(PROXY, &[("forwarded", &*padded(17_000))]);
    assert!(or_everyone.extract(&request).is_err(), "it is not missing");
    // Text to the left of the client's address is not read.
    assert_eq!(
        extract(&format!("{}, for=192.0.2.1", "x".repeat(100_000))).unwrap(),
        key("192.0.2.1")
    );
    let chain = format!("192.0.2.1{}", ", 10.0.0.2".repeat(20)) + &" ".repeat(17_000);
    assert_eq!(
        behind()
            .extract(&from(PROXY, &[("x-forwarded-for", &chain)]))
            .unwrap_err()
            .status(),
        400
    );
}

/// As a list is read (RFC 9110, section 5.6.1). What the proxies have written decides all the same.
#[test]
fn empty_elements_of_a_list_are_ignored() {
    for list in [
        "192.0.2.1,",
        "192.0.2.1, ,",
        "198.51.100.1, 192.0.2.1,, 10.9.9.9 ,",
        ",,192.0.2.1\t,",
    ] {
        assert_eq!(
            client(&behind(), PROXY, &[("x-forwarded-for", list)]),
            key("192.0.2.1"),
            "{list:?}"
        );
    }
    let lines = [
        ("x-forwarded-for", "198.51.100.1, 192.0.2.1"),
        ("x-forwarded-for", ""),
        ("x-forwarded-for", ", "),
    ];
    assert_eq!(client(&behind(), PROXY, &lines), key("192.0.2.1"));
    let lines = [("forwarded", "for=198.51.100.1, for=192.0.2.1, , ")];
    assert_eq!(
        client(&behind().forwarded(), PROXY, &lines),
        key("192.0.2.1")
    );
    // Each of them is one of the 16 KiB that are read.
    let chain = format!("192.0.2.1{}", ",".repeat(17_000));
    assert_eq!(
        behind()
            .extract(&from(PROXY, &[("x-forwarded-for", &chain)]))
            .unwrap_err()
            .status(),
        400
    );
}

/// It always ends with a port, after an IPv6 address, too.
#[test]
fn the_viewer_address_of_cloudfront_is_read_without_its_port() {
    const NAME: &str = "cloudfront-viewer-address";
    let extractor = behind()
        .single_header("CloudFront-Viewer-Address")
        .ipv6_prefix(128)
        .unwrap();
    for (value, address) in [
        ("203.0.113.7:46532", "203.0.113.7"),
        ("203.0.113.7:1", "203.0.113.7"),
        ("2600:300:f:abcd::9:9985", "2600:300:f:abcd::9"),
        ("2600:300:f:abcd::9:80", "2600:300:f:abcd::9"),
    ] {
        let found = extractor
            .address(&from(PROXY, &[(NAME, value)]))
            .map(|found| found.to_string());
        assert_eq!(found.ok().as_deref(), Some(address), "{value}");
    }
    for value in [
        "203.0.113.7",
        "2600:300:f:abcd::beef",
        "203.0.113.7:46532, 203.0.113.8:46532",
    ] {
        assert_eq!(
            extractor
                .extract(&from(PROXY, &[(NAME, value)]))
                .unwrap_err()
                .status(),
            400,
            "{value}"
        );
    }
}

#[test]
fn a_single_value_header_must_be_there_once_and_hold_an_address() {
    let extractor = behind().single_header("x-real-ip");
    // In every form in which other headers write an address.
    for value in [
        "192.0.2.1",
        "192.0.2.1:443",
        "[::ffff:192.0.2.1]",
        "[::ffff:192.0.2.1]:443",
        "192.0.2.1:_p",
    ] {
        assert_eq!(
            client(&extractor, PROXY, &[("x-real-ip", value)]),
            key("192.0.2.1"),
            "{value}"
        );
    }
    for lines in [
        &[][..],
        &[("x-real-ip", "")],
        &[("x-real-ip", "nobody")],
        &[("x-real-ip", "192.0.2.1, 198.51.100.1")],
        &[("x-real-ip", "192.0.2.1"), ("x-real-ip", "192.0.2.1")],
    ] {
        assert_eq!(
            extractor.extract(&from(PROXY, lines)).unwrap_err().status(),
            400,
            "{lines:?}"
        );
    }
}

/// For a log or a handler, by the same walk as the key.
#[test]
fn the_address_of_a_request_is_the_one_that_is_counted() {
    for (peer, header, address) in [
        ("192.0.2.1", "198.51.100.1", "192.0.2.1"),
        (PROXY, "198.51.100.1, 203.0.113.7", "203.0.113.7"),
        (PROXY, "198.51.100.1, 10.0.0.2", "198.51.100.1"),
        (PROXY, "unknown", PROXY),
        // As a dual-stack listener writes them.
        ("::ffff:10.0.0.1", "::ffff:203.0.113.7", "203.0.113.7"),
        ("::ffff:192.0.2.1", "", "192.0.2.1"),
        (PROXY, "2001:db8:1:2::3", "2001:db8:1:2::3"),
        (PROXY, "64:ff9b::203.0.113.7", "64:ff9b::cb00:7107"),
    ] {
        let request = from(peer, &[("x-forwarded-for", header)]);
        let found = behind().address(&request).unwrap();
        assert_eq!(found.to_string(), address);
        assert_eq!(behind().extract(&request).unwrap(), behind().key(found));
    }
    let single = behind().single_header("x-real-ip");
    assert_eq!(single.address(&from(PROXY, &[])).unwrap_err().status(), 400);
    assert_eq!(behind().address(&with(&[])).unwrap_err().status(), 500);
    assert_eq!(
        PeerIp::new()
            .address(&from("192.0.2.1", &[]))
            .unwrap()
            .to_string(),
        "192.0.2.1"
    );
}

#[test]
fn without_a_peer_no_header_is_trusted() {
    assert_eq!(
        behind()
            .extract(&with(&[("x-forwarded-for", "192.0.2.1")]))
            .unwrap_err()
            .status(),
        500
    );
}

#[test]
fn a_single_address_is_a_range_and_an_invalid_one_is_named() {
    let one = ClientIp::behind(["10.0.0.1", " 10.0.0.3/32 "]).unwrap();
    assert_eq!(
        client(&one, "10.0.0.2", &[("x-forwarded-for", "192.0.2.1")]),
        key("10.0.0.2")
    );
    for range in ["10.0.0.0/33", "10.0.0", "", "localhost", "10.0.0.0/8/8"] {
        assert!(
            ClientIp::behind([range])
                .unwrap_err()
                .to_string()
                .starts_with(&format!("{range:?}"))
        );
    }
}
