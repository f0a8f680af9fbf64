//! Requests that are forwarded uncounted, and requests that a deny list rejects.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
};

use axum::{
    Router,
    body::{Body, Bytes},
    routing::any,
};
use futures_util::stream;
use http::{HeaderValue, Method, Request, StatusCode, request::Parts};
use http_body_util::BodyExt;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tower::{Layer, ServiceExt, service_fn};
use tower_http::cors::CorsLayer;
use tower_sliding_window::{
    ApiKey, ClientIp, Decision, Header, KeyExtractor, Limit, Limiter, MemoryStore, PeerIp,
    RateLimitLayer, Rejection, Secret,
    extract::{AddressList, KeyError},
};

use crate::support::{
    http_server::serve,
    log::Log,
    requests::{anyone, figures, hello, json, request},
};

const CALLS: Limit = Limit::per_minute("calls", 5);

type Layered = RateLimitLayer;

fn layer() -> Layered {
    RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone))
}

/// The status, and whether the request was counted.
async fn outcome(layer: &Layered, request: Request<Body>) -> (u16, bool) {
    let service = service_fn(|request: Request<Body>| {
        let is_decided = request.extensions().get::<Decision>().is_some();
        assert_eq!(is_decided, request.headers().contains_key("x-counted"));
        hello(request)
    });
    let response = layer.clone().layer(service).oneshot(request).await.unwrap();
    (
        response.status().as_u16(),
        figures(response.headers())[0].is_some(),
    )
}

fn to(path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let request = headers
        .iter()
        .fold(Request::get(path), |request, (name, value)| {
            request.header(*name, *value)
        });
    request.body(Body::empty()).unwrap()
}

#[tokio::test]
async fn a_skipped_request_is_not_counted() {
    let layer = layer()
        .exempt(|request| request.uri.path() == "/health")
        .exempt(|request| request.uri.path() == "/ready");
    assert_eq!(outcome(&layer, to("/health", &[])).await, (200, false));
    assert_eq!(outcome(&layer, to("/ready", &[])).await, (200, false));
    assert_eq!(
        outcome(&layer, to("/", &[("x-counted", "")])).await,
        (200, true)
    );
}

/// Skipping needs neither a key nor a store.
#[tokio::test]
async fn a_skipped_request_needs_no_key() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(Header::new("x-tenant")));
    assert_eq!(outcome(&layer, request()).await, (400, false));
    assert_eq!(
        outcome(&layer.exempt(|_| true), request()).await,
        (200, false)
    );
}

const COUNTED: (&str, &str) = ("x-counted", "");

/// Any client can send a preflight, over HTTP/2 with a body that no header announces.
#[tokio::test]
async fn a_preflight_is_counted_and_stopped_by_cors_outside() {
    let app = |layer: RateLimitLayer| {
        Router::new()
            .route("/", any(async |body: Bytes| body))
            .layer(layer)
    };
    let limits =
        || RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_minute("calls", 1).by(anyone));
    for (app, answers) in [
        (app(limits()), [(200, 5), (429, 0), (429, 0)]),
        (
            app(limits().exempt(|request| request.method == Method::OPTIONS)),
            [(200, 5), (200, 5), (200, 5)],
        ),
        (
            app(limits()).layer(CorsLayer::permissive()),
            [(200, 0), (200, 0), (200, 0)],
        ),
    ] {
        let url = serve(app).await;
        let client = Client::builder(TokioExecutor::new())
            .http2_only(true)
            .build_http::<Body>();
        for (status, echoed) in answers {
            let preflight = Request::options(&url)
                .header("origin", "https://example.org")
                .header("access-control-request-method", "PUT")
                .body(Body::from_stream(stream::iter([Ok::<_, Infallible>(
                    "12345",
                )])));
            let answer = client.request(preflight.unwrap()).await.unwrap();
            assert_eq!(answer.status(), status);
            if status == 200 {
                assert_eq!(
                    answer.into_body().collect().await.unwrap().to_bytes().len(),
                    echoed
                );
            }
        }
    }
}

#[tokio::test]
async fn deny_lists_come_before_exempt_lists() {
    let tenant = Header::new("x-tenant");
    let [good, bad, both] = ["good", "bad", "both"].map(|tenant_name| tenant.key(tenant_name));
    let layer = layer()
        .exempt(tenant.clone().one_of([good, both.clone()]))
        .deny(tenant.one_of([bad, both]))
        .exempt(|request| request.uri.path() == "/health");
    let cases = [
        ("/", "good", 200),
        ("/", "bad", 403),
        ("/", "both", 403),
        ("/health", "bad", 403),
    ];
    for (path, tenant, status) in cases {
        assert_eq!(
            outcome(&layer, to(path, &[("x-tenant", tenant)])).await,
            (status, false),
            "{path} {tenant}"
        );
    }
    assert_eq!(
        outcome(&layer, to("/", &[("x-tenant", "other"), ("x-counted", "")])).await,
        (200, true)
    );

    let denied = layer
        .layer(service_fn(hello))
        .oneshot(to("/", &[("x-tenant", "bad")]))
        .await
        .unwrap();
    assert!(matches!(denied.extensions().get(), Some(Rejection::Denied)));
    assert_eq!(denied.headers()["cache-control"], "no-store");
    assert_eq!(
        json(denied).await,
        r#"{"title":"Forbidden","status":403,"detail":"The server does not take requests from this client."}"#
    );
}

/// A request has no key only if the header is absent.
#[tokio::test]
async fn a_request_without_a_key_is_on_no_list() {
    let tenant = Header::new("x-tenant");
    let layer = layer()
        .deny(tenant.clone().one_of([tenant.key("")]))
        .exempt(tenant.clone().one_of([tenant.key("")]));
    assert_eq!(
        outcome(&layer, to("/", &[("x-counted", "")])).await,
        (200, true)
    );
}

const LEAKED: &str = "t0ken";

/// An authentication layer might accept the token in any of these spellings.
#[tokio::test]
async fn a_denied_token_is_denied_in_every_spelling() {
    let secret = Secret::new("a secret that only the tests know").unwrap();
    let (bearer, header) = (
        ApiKey::bearer(&secret),
        ApiKey::header("x-api-key", &secret),
    );
    let layer = layer()
        .deny(bearer.clone().one_of([bearer.key(LEAKED)]))
        .deny(header.clone().one_of([header.key(LEAKED)]));
    let authorized = |lines: &[&str]| {
        let mut request = request();
        for line in lines {
            request.headers_mut().append(
                "authorization",
                HeaderValue::from_bytes(line.as_bytes()).unwrap(),
            );
        }
        request
    };
    for spelling in [
        "Bearer t0ken",
        "bEARER  t0ken ",
        " Bearer\tt0ken",
        "Bearer\u{a0}t0ken",
        "\tBearer \t t0ken\t",
    ] {
        assert_eq!(
            outcome(&layer, authorized(&[spelling])).await,
            (403, false),
            "{spelling:?}"
        );
    }
    for lines in [
        &["Bearer t0ken", "Bearer t0ken"][..],
        &["Bearer t0ken", "Bearer other"],
        &["Bearer other", "Bearer t0ken"],
        &["Basic dXNlcjpwYXNz", "Bearer t0ken"],
        &["", "Bearer t0ken"],
        &["Basic dXNlcjpwYXNz, Bearer t0ken"],
        &["Bearer t0ken, Basic dXNlcjpwYXNz"],
        &["Bearer t0ken,Basic"],
        &["Bearer \"t0ken\""],
        &["Bearer Bearer t0ken"],
        &["Bearer: t0ken"],
        &["Bearer=t0ken"],
        &["Bearert0ken"],
        &["Basic t0ken"],
        &["Token t0ken"],
        &["t0ken"],
        &["Bearer"],
        &[""],
        &["Bearer t0ken\u{feff}"],
        &["Bearer t0ken \u{ff}\u{200b}"],
    ] {
        assert_eq!(
            outcome(&layer, authorized(lines)).await,
            (401, false),
            "{lines:?}"
        );
    }
    let twice = to("/", &[("x-api-key", LEAKED), ("x-api-key", LEAKED)]);
    let response = layer
        .clone()
        .layer(service_fn(hello))
        .oneshot(twice)
        .await
        .unwrap();
    assert!(
        matches!(response.extensions().get(), Some(Rejection::NoKey(_))),
        "{response:?}"
    );
    assert_eq!(
        (
            response.status().as_u16(),
            response.headers()["www-authenticate"].as_bytes()
        ),
        (401, &b"ApiKey"[..])
    );
    assert_eq!(
        json(response).await,
        r#"{"title":"Unauthorized","status":401,"detail":"The request cannot be counted: x-api-key: repeated."}"#
    );
    for other in [&[][..], &["Bearer other"]] {
        let mut request = authorized(other);
        request
            .headers_mut()
            .insert("x-counted", HeaderValue::from_static(""));
        assert_eq!(outcome(&layer, request).await, (200, true), "{other:?}");
    }
}

/// An unreadable key may be a denied one, and is not an allowed one.
#[tokio::test]
async fn an_unreadable_key_is_rejected_by_a_deny_list_and_counted_by_an_exempt_list() {
    let (tenant, counted) = (Header::new("x-tenant"), ("x-counted", ""));
    let twice = [("x-tenant", "7"), ("x-tenant", "7"), counted];
    let denies = layer().deny(tenant.clone().one_of([tenant.key("7")]));
    assert_eq!(outcome(&denies, to("/", &twice)).await, (400, false));
    let exempts = layer().exempt(tenant.clone().one_of([tenant.key("7")]));
    assert_eq!(outcome(&exempts, to("/", &twice[..1])).await, (200, false));
    assert_eq!(outcome(&exempts, to("/", &twice)).await, (200, true));

    let teapot =
        |_: &Parts| Err(KeyError::invalid("key", "of no use").with_status(StatusCode::IM_A_TEAPOT));
    assert_eq!(
        outcome(&layer().deny(teapot.one_of([])), request()).await,
        (418, false)
    );
}

/// The log names the missing set-up.
#[tokio::test]
async fn an_unknown_peer_is_an_error_for_a_deny_list_and_counted_by_an_exempt_list() {
    let here = PeerIp::new().key(IpAddr::from([127, 0, 0, 1]));
    let known = || {
        let mut request = request();
        request
            .extensions_mut()
            .insert(SocketAddr::from(([127, 0, 0, 1], 1)));
        request
    };
    for (layer, unknown, at_home) in [
        (
            layer().deny(PeerIp::new().one_of([here.clone()])),
            (500, false),
            (403, false),
        ),
        (
            layer().exempt(PeerIp::new().one_of([here.clone()])),
            (200, true),
            (200, false),
        ),
    ] {
        let log = Log::start();
        assert_eq!(
            outcome(&layer, to("/", &[("x-counted", "")])).await,
            unknown
        );
        assert!(
            log.text().contains("into_make_service_with_connect_info"),
            "{}",
            log.text()
        );
        assert_eq!(outcome(&layer, known()).await, at_home);
    }
}

/// A request of this peer.
fn from(peer: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = to("/", headers);
    request
        .extensions_mut()
        .insert(SocketAddr::new(peer.parse().unwrap(), 1));
    request
}

#[tokio::test]
async fn ranges_of_addresses_are_exempt_or_denied() {
    let office = AddressList::new(["203.0.113.0/28", "2001:db8:7::/48"]).unwrap();
    let abusers = AddressList::new(["198.51.100.0/24", "203.0.113.5", " 192.0.2.64/26 "]).unwrap();
    let layer = layer()
        .exempt(PeerIp::new().within(&office))
        .deny(PeerIp::new().within(&abusers));
    for (peer, expected) in [
        ("203.0.113.1", (200, false)),
        ("::ffff:203.0.113.1", (200, false)),
        ("64:ff9b::203.0.113.1", (200, false)),
        ("2001:db8:7:ffff::1", (200, false)),
        // A list of denied addresses goes before.
        ("203.0.113.5", (403, false)),
        ("198.51.100.255", (403, false)),
        ("::ffff:198.51.100.0", (403, false)),
        ("192.0.2.127", (403, false)),
    ] {
        assert_eq!(outcome(&layer, from(peer, &[])).await, expected, "{peer}");
    }
    for peer in [
        "203.0.113.16",
        "203.0.112.255",
        "198.51.101.0",
        "198.51.99.255",
        "192.0.2.63",
    ] {
        assert_eq!(
            outcome(&layer, from(peer, &[COUNTED])).await,
            (200, true),
            "{peer}"
        );
    }
}

#[tokio::test]
async fn a_range_means_what_it_says() {
    for (range, within, beside) in [
        (
            "0.0.0.0/0",
            &["0.0.0.0", "255.255.255.255", "::ffff:192.0.2.1"][..],
            &["2001:db8::1"][..],
        ),
        ("::/0", &["2001:db8::1", "ffff::"], &["192.0.2.1"]),
        ("::ffff:0:0/96", &["192.0.2.1"], &["2001:db8::1"]),
        (
            "::ffff:192.0.2.0/120",
            &["192.0.2.1", "::ffff:192.0.2.1"],
            &["192.0.3.1"],
        ),
        // All addresses of a translator are not all of IPv4.
        (
            "2002::/16",
            &["2002:c000:201::1"],
            &["192.0.2.1", "::ffff:192.0.2.1"],
        ),
        (
            "64:ff9b::/96",
            &["64:ff9b::192.0.2.1"],
            &["192.0.2.1", "2002:c000:201::1"],
        ),
        // Of an address within a range, its range.
        (
            "192.0.2.77/24",
            &["192.0.2.0", "192.0.2.255"],
            &["192.0.3.0", "192.0.1.255"],
        ),
    ] {
        let list = AddressList::new([range]).unwrap();
        for (addresses, is_within) in [(within, true), (beside, false)] {
            for address in addresses {
                assert_eq!(
                    list.contains(address.parse().unwrap()),
                    is_within,
                    "{range} {address}"
                );
            }
        }
    }
    // Overlapping, in any order, and twice.
    let list = AddressList::new([
        "10.1.2.0/28",
        "10.0.0.0/8",
        "10.1.2.3",
        "10.0.0.0/8",
        "::1",
        "9.0.0.0/8",
    ])
    .unwrap();
    for (address, is_within) in [
        ("10.200.0.0", true),
        ("9.255.255.255", true),
        ("11.0.0.0", false),
        ("8.255.255.255", false),
    ] {
        assert_eq!(
            list.contains(address.parse().unwrap()),
            is_within,
            "{address}"
        );
    }
    assert!(!AddressList::default().contains("192.0.2.1".parse().unwrap()));
}

#[tokio::test]
async fn a_list_that_is_replaced_holds_for_every_layer_at_once() {
    let list = AddressList::new(["198.51.100.0/24"]).unwrap();
    let layers = [
        layer().deny(PeerIp::new().within(&list)),
        layer().deny(PeerIp::new().within(&list.clone())),
    ];
    let statuses = async |peer: &str| {
        let mut statuses = Vec::new();
        for layer in &layers {
            let request = from(peer, &[]);
            statuses.push(
                layer
                    .clone()
                    .layer(service_fn(hello))
                    .oneshot(request)
                    .await
                    .unwrap()
                    .status()
                    .as_u16(),
            );
        }
        statuses
    };
    assert_eq!(
        (statuses("198.51.100.1").await, statuses("192.0.2.1").await),
        (vec![403; 2], vec![200; 2])
    );
    list.replace(["192.0.2.1"]).unwrap();
    assert_eq!(
        (statuses("198.51.100.1").await, statuses("192.0.2.1").await),
        (vec![200; 2], vec![403; 2])
    );

    // The list stays if a range of the new one cannot be read.
    for mistake in [
        "192.0.2.0/33",
        "example.org",
        "",
        "10.1",
        "010.0.0.0/8",
        "fe80::1%eth0",
        "fe80::%1/64",
        "/8",
    ] {
        let error = list
            .clone()
            .replace(["198.51.100.0/24", mistake])
            .unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with(&format!("{mistake:?} is not an address range")),
            "{error}"
        );
        assert_eq!(AddressList::new([mistake]).unwrap_err(), error);
    }
    assert_eq!(statuses("192.0.2.1").await, [403; 2]);
    list.replace::<&str>([]).unwrap();
    assert_eq!(statuses("192.0.2.1").await, [200; 2]);
    assert_eq!(
        format!("{:?}", AddressList::new(["192.0.2.1"]).unwrap()),
        "AddressList(1)"
    );
}

/// Not the proxy's address, and not one that the client has made up.
#[tokio::test]
async fn behind_a_proxy_the_address_of_the_client_is_on_the_list() {
    let client_ip = ClientIp::behind(["10.1.2.0/28"]).unwrap();
    let list = AddressList::new(["198.51.100.0/24"]).unwrap();
    let layer = layer()
        .deny(client_ip.clone().within(&list))
        .exempt(client_ip.within(&list));
    let forwarded =
        |peer: &str, clients: &str| from(peer, &[("x-forwarded-for", clients), COUNTED]);
    assert_eq!(
        outcome(&layer, forwarded("10.1.2.3", "198.51.100.1")).await,
        (403, false)
    );
    assert_eq!(
        outcome(&layer, forwarded("10.1.2.3", "198.51.100.1, 192.0.2.1")).await,
        (200, true)
    );
    assert_eq!(
        outcome(&layer, forwarded("192.0.2.1", "198.51.100.1")).await,
        (200, true)
    );
    // The server does not know its peers: no address is off the list.
    assert_eq!(
        outcome(&layer, to("/", &[("x-forwarded-for", "192.0.2.1")])).await,
        (500, false)
    );
}

#[tokio::test]
async fn a_closure_denies() {
    let layer = layer()
        .exempt(|request| request.uri.path() == "/wp-login.php")
        .deny(|request| request.uri.path().ends_with(".php"))
        .deny(|request| request.method == Method::TRACE);
    let mut trace = to("/", &[]);
    *trace.method_mut() = Method::TRACE;
    assert_eq!(
        outcome(&layer, to("/wp-login.php", &[])).await,
        (403, false)
    );
    assert_eq!(outcome(&layer, trace).await, (403, false));
    assert_eq!(outcome(&layer, to("/", &[COUNTED])).await, (200, true));
}

/// An extractor makes the same key from a known value as from a request, so the key can be listed
/// and reset.
#[tokio::test]
async fn extractors_make_keys_from_known_values() {
    let secret = Secret::new("a secret that only the tests know").unwrap();
    let (header, bearer) = (
        ApiKey::header("x-api-key", &secret),
        ApiKey::bearer(&secret),
    );
    let (peer, client) = (PeerIp::new(), ClientIp::behind(["127.0.0.0/8"]).unwrap());
    let headers = [
        ("x-api-key", "t0ken"),
        ("authorization", "Bearer t0ken"),
        ("x-tenant", " 7 "),
        ("x-forwarded-for", "2001:db8:1:2::3"),
    ];
    let mut request = to("/", &headers);
    request
        .extensions_mut()
        .insert(SocketAddr::from(([127, 0, 0, 1], 1)));
    let (parts, _) = request.into_parts();
    assert_eq!(header.extract(&parts).unwrap(), header.key("t0ken"));
    assert_eq!(header.key(" t0ken\n"), header.key("t0ken"));
    assert_ne!(header.key("t0ken"), header.key("other"));
    assert_eq!(bearer.extract(&parts).unwrap(), bearer.key("t0ken"));
    assert_eq!(
        Header::new("x-tenant").extract(&parts).unwrap(),
        Header::new("x-tenant").key("7 ")
    );
    assert_ne!(
        Header::new("x-tenant").key("7"),
        Header::new("x-other").key("7")
    );
    assert_eq!(
        peer.extract(&parts).unwrap(),
        peer.key(IpAddr::from([127, 0, 0, 1]))
    );
    assert_eq!(
        client.extract(&parts).unwrap(),
        client.key("2001:db8:1:2::4".parse().unwrap())
    );
    let whole = client.clone().ipv6_prefix(128).unwrap();
    assert_ne!(
        whole.extract(&parts).unwrap(),
        whole.key("2001:db8:1:2::4".parse().unwrap())
    );

    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(store.clone()).limit(CALLS.by(header.clone()));
    layer
        .layer(service_fn(hello))
        .oneshot(Request::from_parts(parts, Body::empty()))
        .await
        .unwrap();
    let limiter = Limiter::new(store);
    assert_eq!(
        limiter
            .peek(&CALLS, header.key("t0ken"))
            .await
            .unwrap()
            .binding()
            .used,
        1
    );
    limiter.reset(&CALLS, header.key("t0ken")).await.unwrap();
    assert_eq!(
        limiter
            .peek(&CALLS, header.key("t0ken"))
            .await
            .unwrap()
            .binding()
            .used,
        0
    );
}

#[test]
fn debug_output_shows_no_listed_key() {
    let tenant = Header::new("x-tenant");
    let layer = layer().deny(tenant.clone().one_of([tenant.key("a-name")]));
    assert!(!format!("{layer:?}").contains("a-name"), "{layer:?}");
    assert!(format!("{layer:?}").contains("denied: 1"), "{layer:?}");
}
