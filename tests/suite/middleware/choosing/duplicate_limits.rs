//! Limits that turn out to be one for one key, which only the request tells.

use std::net::SocketAddr;

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    ClientIp, Key, KeyedLimit, Limit, MemoryStore, PeerIp, RateLimitLayer, Rejection,
    extract::KeyError, middleware::ShadowRefusals,
};

use super::{FREE, PRO, always, chosen};
use crate::support::{
    log::Log,
    requests::{anyone, figures, hello, request},
};

fn refusals(response: &Response<Body>) -> Vec<String> {
    let refusals: Option<&ShadowRefusals> = response.extensions().get();
    let left_out = refusals.into_iter().flat_map(|refusals| &refusals.left_out);
    left_out
        .map(|(limit, rejection)| format!("{:?} {rejection:?}", limit.as_ref().map(Limit::name)))
        .collect()
}

const TWICE: &str = "charges the limit \"calls\" twice";

/// A client without a proxy has the same key by both extractors, so only the request shows that the
/// limits are duplicates.
#[tokio::test]
async fn a_request_whose_limits_are_duplicates_is_rejected_and_charges_nothing() {
    let (few, many) = (
        Limit::per_minute("calls", 2),
        Limit::per_minute("calls", 10),
    );
    let from = |peer: [u8; 4]| {
        let mut request = Request::get("/")
            .header("x-forwarded-for", "192.0.2.1")
            .body(Body::empty())
            .unwrap();
        request
            .extensions_mut()
            .insert(SocketAddr::from((peer, 50_000)));
        request
    };
    for (one, other) in [(&few, &many), (&many, &few), (&few, &few)] {
        for is_fixed in [true, false] {
            let (log, store) = (Log::start(), MemoryStore::new());
            let behind = KeyedLimit::chosen(
                ClientIp::behind(["10.0.0.0/8"]).unwrap(),
                always(other.clone()),
            );
            let direct = if is_fixed {
                one.clone().by(PeerIp::new())
            } else {
                KeyedLimit::chosen(PeerIp::new(), always(one.clone()))
            };
            let app = RateLimitLayer::new(store.clone())
                .limits([direct, behind])
                .unwrap()
                .layer(service_fn(hello));
            for _ in 0..3 {
                let response = app.clone().oneshot(from([192, 0, 2, 1])).await.unwrap();
                assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
                assert!(
                    matches!(response.extensions().get(), Some(Rejection::NotSetUp(_))),
                    "{response:?}"
                );
            }
            assert!(
                log.text().contains(TWICE) && store.keys() == 0,
                "{}",
                log.text()
            );
            assert_eq!(
                app.oneshot(from([10, 0, 0, 1])).await.unwrap().status(),
                200
            );
            assert_eq!(store.keys(), 2);
        }
    }
}

#[tokio::test]
async fn limits_of_one_name_and_key_with_different_windows_are_not_duplicates() {
    let store = MemoryStore::new();
    let limits = [
        Limit::per_minute("calls", 2).by(anyone),
        chosen(Limit::per_hour("calls", 2)),
    ];
    let app = RateLimitLayer::new(store.clone())
        .limits(limits)
        .unwrap()
        .layer(service_fn(hello));
    for status in [200, 200, 429] {
        assert_eq!(
            app.clone().oneshot(request()).await.unwrap().status(),
            status
        );
    }
    assert_eq!(store.keys(), 2);
}

#[tokio::test]
async fn limits_of_one_name_with_different_keys_are_not_duplicates() {
    let store = MemoryStore::new();
    let other = |_: &Parts| Ok::<_, KeyError>(Key::new("test", "other"));
    let layer = RateLimitLayer::new(store.clone())
        .limit(chosen(PRO))
        .limit(FREE.by(other));
    assert_eq!(
        layer
            .layer(service_fn(hello))
            .oneshot(request())
            .await
            .unwrap()
            .status(),
        200
    );
    assert_eq!(store.keys(), 2);

    // Names that are known in advance are still compared where the layer is built.
    let layer = RateLimitLayer::new(store)
        .limit(chosen(PRO))
        .limit(FREE.by(anyone))
        .limit(chosen(PRO));
    assert!(layer.limits([PRO.by(anyone)]).is_err());
}

/// In either order, and beside another one in the shadow.
#[tokio::test]
async fn a_duplicate_in_the_shadow_is_left_out() {
    let log = Log::start();
    let shadow = || chosen(FREE).in_shadow().settle(|_| 3);
    for limits in [
        vec![shadow(), chosen(PRO)],
        vec![chosen(PRO), shadow()],
        vec![shadow(), chosen(PRO), shadow()],
    ] {
        let left_out = limits.len() - 1;
        let layer = RateLimitLayer::new(MemoryStore::new())
            .fail_closed()
            .limits(limits)
            .unwrap();
        let app = layer.layer(service_fn(hello));
        for (status, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!(
                (response.status().as_u16(), figures(response.headers())[1]),
                (status, Some(remaining))
            );
            let refusals = refusals(&response);
            assert_eq!(refusals.len(), left_out, "{refusals:?}");
            assert!(
                refusals
                    .iter()
                    .all(|text| text.contains("\\\"calls\\\" twice")),
                "{refusals:?}"
            );
        }
    }
    assert!(log.text().contains(TWICE), "{}", log.text());
    // Of two in the shadow, the first counts.
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(chosen(PRO).in_shadow())
        .limit(chosen(FREE).in_shadow());
    let response = layer
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(
        (response.status().as_u16(), refusals(&response).len()),
        (200, 1)
    );
    assert_eq!(figures(response.headers())[0], Some("3"));
}
