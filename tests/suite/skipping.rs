//! Who is let through uncounted, and who not at all.

use std::net::{IpAddr, SocketAddr};

use axum::body::Body;
use http::{Request, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    ApiKey, ClientIp, Decision, Header, Key, KeyError, KeyExtractor, Limit, Limiter, MemoryStore, PeerIp,
    RateLimitLayer, Rejection, Secret,
};

use crate::support::{
    log::Log,
    requests::{anyone, figures, hello, json, request},
};

const CALLS: Limit = Limit::per_minute("calls", 5);

type Layered = RateLimitLayer<MemoryStore>;

fn layer() -> Layered {
    RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone))
}

/// The status, and whether it was counted.
async fn outcome(layer: &Layered, request: Request<Body>) -> (u16, bool) {
    let service = service_fn(|request: Request<Body>| {
        let is_decided = request.extensions().get::<Decision>().is_some();
        assert_eq!(is_decided, request.headers().contains_key("x-counted"));
        hello(request)
    });
    let response = layer.clone().layer(service).oneshot(request).await.unwrap();
    (response.status().as_u16(), figures(response.headers())[0].is_some())
}

fn to(path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let request = headers.iter().fold(Request::get(path), |request, (name, value)| request.header(*name, *value));
    request.body(Body::empty()).unwrap()
}

#[tokio::test]
async fn what_is_skipped_is_not_counted() {
    let layer = layer().skip(|request| request.uri.path() == "/health").skip(|request| request.uri.path() == "/ready");
    assert_eq!(outcome(&layer, to("/health", &[])).await, (200, false));
    assert_eq!(outcome(&layer, to("/ready", &[])).await, (200, false));
    assert_eq!(outcome(&layer, to("/", &[("x-counted", "")])).await, (200, true));
}

/// Neither a key nor a store is needed for it.
#[tokio::test]
async fn what_is_skipped_needs_no_key() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(Header::new("x-tenant")));
    assert_eq!(outcome(&layer, request()).await, (400, false));
    assert_eq!(outcome(&layer.skip(|_| true), request()).await, (200, false));
}

#[tokio::test]
async fn preflights_are_let_through_unless_they_are_to_be_counted() {
    let options = |headers: &[(&str, &str)]| {
        let mut request = to("/", headers);
        *request.method_mut() = http::Method::OPTIONS;
        request
    };
    let (origin, method) = (("origin", "https://example.org"), ("access-control-request-method", "PUT"));
    let counted = ("x-counted", "");
    assert_eq!(outcome(&layer(), options(&[origin, method])).await, (200, false));
    for headers in [&[origin, counted][..], &[method, counted], &[counted]] {
        assert_eq!(outcome(&layer(), options(headers)).await, (200, true));
    }
    assert_eq!(outcome(&layer(), to("/", &[origin, method, counted])).await, (200, true));
    assert_eq!(outcome(&layer().count_preflights(), options(&[origin, method, counted])).await, (200, true));
}

#[tokio::test]
async fn lists_deny_first_and_then_allow() {
    let tenant = Header::new("x-tenant");
    let [good, bad, both] = ["good", "bad", "both"].map(|tenant_name| tenant.key(tenant_name));
    let layer = layer()
        .allow(tenant.clone(), [good, both.clone()])
        .deny(tenant, [bad, both])
        .skip(|request| request.uri.path() == "/health");
    let cases = [("/", "good", 200), ("/", "bad", 403), ("/", "both", 403), ("/health", "bad", 403)];
    for (path, tenant, status) in cases {
        assert_eq!(outcome(&layer, to(path, &[("x-tenant", tenant)])).await, (status, false), "{path} {tenant}");
    }
    assert_eq!(outcome(&layer, to("/", &[("x-tenant", "other"), ("x-counted", "")])).await, (200, true));

    let denied = layer.layer(service_fn(hello)).oneshot(to("/", &[("x-tenant", "bad")])).await.unwrap();
    assert!(matches!(denied.extensions().get(), Some(Rejection::Denied)));
    assert_eq!(denied.headers()["cache-control"], "no-store");
    assert_eq!(json(denied).await, r#"{"error":"denied"}"#);
}

/// Whether it is missing or of no use; a server that does not know its peers is told so.
#[tokio::test]
async fn who_has_no_key_is_on_no_list() {
    let log = Log::start();
    let everybody = |_: &Parts| Err(KeyError::invalid("key", "of no use"));
    let here = PeerIp::new().key(IpAddr::from([127, 0, 0, 1]));
    let tenant = Header::new("x-tenant");
    let layer = layer()
        .deny(tenant.clone(), [tenant.key("")])
        .deny(everybody, [Key::new("test", "")])
        .allow(tenant.clone(), [tenant.key("")])
        .allow(PeerIp::new(), [here.clone()]);
    assert_eq!(outcome(&layer, to("/", &[("x-counted", "")])).await, (200, true));
    assert!(log.text().contains("into_make_service_with_connect_info"), "{}", log.text());

    let mut known = request();
    known.extensions_mut().insert(SocketAddr::from(([127, 0, 0, 1], 1)));
    assert_eq!(outcome(&layer, known).await, (200, false));
}

/// A key that is written down is the key that a request has, so it can be listed, and reset.
#[tokio::test]
async fn extractors_make_the_keys_of_values_that_are_known() {
    let secret = Secret::new("32 random bytes out of the vault").unwrap();
    let (header, bearer) = (ApiKey::header("x-api-key", &secret), ApiKey::bearer(&secret));
    let (peer, client) = (PeerIp::new(), ClientIp::behind(["127.0.0.0/8"]).unwrap());
    let headers = [
        ("x-api-key", "t0ken"),
        ("authorization", "Bearer t0ken"),
        ("x-tenant", " 7 "),
        ("x-forwarded-for", "2001:db8:1:2::3"),
    ];
    let mut request = to("/", &headers);
    request.extensions_mut().insert(SocketAddr::from(([127, 0, 0, 1], 1)));
    let (parts, _) = request.into_parts();
    assert_eq!(header.extract(&parts).unwrap(), header.key("t0ken"));
    assert_eq!(header.key(" t0ken\n"), header.key("t0ken"));
    assert_ne!(header.key("t0ken"), header.key("other"));
    assert_eq!(bearer.extract(&parts).unwrap(), bearer.key("t0ken"));
    assert_eq!(Header::new("x-tenant").extract(&parts).unwrap(), Header::new("x-tenant").key("7 "));
    assert_ne!(Header::new("x-tenant").key("7"), Header::new("x-other").key("7"));
    assert_eq!(peer.extract(&parts).unwrap(), peer.key(IpAddr::from([127, 0, 0, 1])));
    assert_eq!(client.extract(&parts).unwrap(), client.key("2001:db8:1:2::4".parse().unwrap()));
    let whole = client.clone().ipv6_prefix(128).unwrap();
    assert_ne!(whole.extract(&parts).unwrap(), whole.key("2001:db8:1:2::4".parse().unwrap()));

    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(store.clone()).limit(CALLS.by(header.clone()));
    layer.layer(service_fn(hello)).oneshot(Request::from_parts(parts, Body::empty())).await.unwrap();
    let limiter = Limiter::new(store);
    assert_eq!(limiter.peek(&CALLS, header.key("t0ken")).await.unwrap().used(), 1);
    limiter.reset(&CALLS, header.key("t0ken")).await.unwrap();
    assert_eq!(limiter.peek(&CALLS, header.key("t0ken")).await.unwrap().used(), 0);
}

#[test]
fn debug_shows_no_key_of_a_list() {
    let tenant = Header::new("x-tenant");
    let layer = layer().deny(tenant.clone(), [tenant.key("a-name")]);
    assert!(!format!("{layer:?}").contains("a-name"), "{layer:?}");
    assert!(format!("{layer:?}").contains("denied: 1"), "{layer:?}");
}
