//! `UpstreamHost`: the host that a client calls.

use std::collections::HashSet;

use tower_sliding_window::{
    Key, KeyExtractor,
    extract::{KeyError, UpstreamHost},
};

use super::with;

fn host(uri: &str) -> Result<Key, KeyError> {
    UpstreamHost.key(&uri.parse().unwrap())
}

/// Otherwise a client could call a paused upstream under another name.
#[test]
fn every_spelling_of_a_host_is_one_key() {
    for (spellings, host_itself) in [
        (
            &[
                "http://Example.ORG/a?b",
                "http://example.org:80",
                "ws://example.org./",
                "http://u:p@example.org/",
            ][..],
            "http://example.org/",
        ),
        (
            &[
                "https://example.org:443/",
                "wss://EXAMPLE.org",
                "http://example.org:443/",
            ],
            "https://example.org/",
        ),
        (
            &["http://[2001:DB8:0::1]/", "http://[2001:db8::1]:80/"],
            "http://[2001:db8::1]/",
        ),
        (
            &[
                "http://192.0.2.1:80/",
                "http://192.0.2.1./",
                "http://[::ffff:192.0.2.1]/",
                "http://[::FFFF:c000:201]:080",
            ],
            "http://192.0.2.1/",
        ),
        (
            &["WSS://example.org", "HTTPS://example.org"],
            "https://example.org/",
        ),
    ] {
        for spelling in spellings {
            assert_eq!(
                host(spelling).unwrap(),
                host(host_itself).unwrap(),
                "{spelling}"
            );
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

/// Requests of a server carry their host in a header, which clients choose.
#[test]
fn without_a_host_there_is_no_key() {
    let error = UpstreamHost
        .extract(&with(&[("host", "example.org")]))
        .unwrap_err();
    assert!(
        error.to_string().ends_with(": missing") && error.status() == 400,
        "{error}"
    );
    assert!(host("http://./").is_err());
}

/// A client connects to all of these as to 192.0.2.1, or to an address of a link. Whoever gives a
/// crawler its URLs could write one host in many ways.
#[test]
fn an_address_in_another_spelling_is_no_key() {
    for uri in [
        "http://3221225985/",
        "http://0xC0000201/",
        "http://0300.0.2.1/",
        "http://192.0.513/",
        "http://192.0.2.01/",
        "http://192.0.2.0x1:8080/",
        "http://192.0.2.0x/",
        "http://example.1/",
        "http://192.0.2.256/",
        "http://[fe80::1%25eth0]/",
        "http://[v1.a]/",
    ] {
        // The parser of URIs refuses some of them.
        if let Ok(uri) = uri.parse() {
            let error = UpstreamHost.key(&uri).expect_err(&uri.to_string());
            assert_eq!(error.status(), 400, "{uri}");
        }
    }
    for uri in ["http://example.org1/", "http://7zip/", "http://0x.example/"] {
        assert!(host(uri).is_ok(), "{uri}");
    }
}
