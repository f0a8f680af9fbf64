//! Extractors that are combined, and closures as extractors.

use std::net::IpAddr;

use http::{Request, request::Parts};
use tower_sliding_window::{
    ApiKey, Everyone, Header, Key, KeyExtractor, PeerIp, extract::KeyError,
};

use super::{from, key, secret, with};

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
fn or_falls_back_into_another_namespace_only_if_the_first_is_absent() {
    let either = ApiKey::header("x-api-key", &secret()).or(PeerIp::new());
    let peer = IpAddr::from([192, 0, 2, 1]).to_string();
    assert_eq!(either.extract(&from(&peer, &[])).unwrap(), key(&peer));
    let keyed = either
        .extract(&from(&peer, &[("x-api-key", "k3y")]))
        .unwrap();
    assert_eq!(
        (keyed.namespace(), key(&peer).namespace()),
        ("api-key", "ip")
    );
    // A malformed API key must not fall back to the limit of its address.
    assert!(either.extract(&from(&peer, &[("x-api-key", "")])).is_err());
}

#[test]
fn everyone_has_one_key() {
    assert_eq!(
        Everyone.extract(&from("192.0.2.1", &[])).unwrap(),
        Everyone.extract(&with(&[])).unwrap()
    );
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
