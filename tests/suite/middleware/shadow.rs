//! Shadow limits: they count and report, and refuse nothing.

use std::convert::Infallible;

use axum::body::Body;
use http::{Request, Response};
use http_body_util::BodyExt;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Decision, Header, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer, Rejection,
    middleware::{Degraded, ShadowRefusals},
};

use crate::support::{
    log::Log,
    requests::{anyone, figures, hello, json, request},
    services::{around, handler},
    stores::{Watched, failing, settled_costs},
};

const TRIED: Limit = Limit::per_minute("tried", 1);
const REAL: Limit = Limit::per_minute("real", 2);

fn names(response: &Response<Body>) -> Vec<String> {
    let refusals: Option<&ShadowRefusals> = response.extensions().get();
    refusals
        .into_iter()
        .flat_map(ShadowRefusals::names)
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn a_shadow_limit_counts_and_reports_but_refuses_nothing() {
    let log = Log::start();
    let service = |request: Request<Body>| async move {
        let decision: &Decision = request.extensions().get().unwrap();
        Ok::<_, Infallible>(Response::new(Body::from(
            decision.shadow_refusals().count().to_string(),
        )))
    };
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(TRIED.by(anyone).in_shadow())
        .layer(service_fn(service));
    let first = app.clone().oneshot(request()).await.unwrap();
    assert!(names(&first).is_empty());
    for _ in 0..5 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), names(&response)),
            (200, vec!["tried".to_owned()])
        );
        // It is the only limit, so it sets the headers.
        assert_eq!(
            figures(response.headers()),
            [Some("1"), Some("0"), Some("60"), None]
        );
        let refusals: &ShadowRefusals = response.extensions().get().unwrap();
        let refused = refusals.decisions[0].shadow_refusals().next().unwrap();
        assert_eq!((&refused.limit, refused.used), (&TRIED, 1));
        assert_eq!(refusals.left_out.len(), 0);
        assert_eq!(json(response).await, "1");
    }
    let reported = log
        .text()
        .lines()
        .filter(|line| line.contains("would have refused") && line.contains("tried"))
        .count();
    assert_eq!(reported, 1, "{}", log.text());
}

#[tokio::test]
async fn headers_show_only_enforced_limits() {
    let tight = Limit::per_hour("tight", 1);
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(TRIED.by(anyone).in_shadow())
        .limit(REAL.by(anyone))
        .limit(tight.by(anyone).in_shadow())
        .layer(service_fn(hello));
    let mut seen = Vec::new();
    for _ in 0..3 {
        let response = app.clone().oneshot(request()).await.unwrap();
        let [limit, remaining, ..] = figures(response.headers());
        assert_eq!(limit, Some("2"));
        seen.push((
            response.status().as_u16(),
            remaining.unwrap().to_owned(),
            names(&response).join(", "),
        ));
    }
    let expected = [
        (200, "1", ""),
        (200, "0", "tried, tight"),
        (429, "0", "tried, tight"),
    ];
    assert_eq!(
        seen,
        expected.map(|(status, remaining, names)| (status, remaining.to_owned(), names.to_owned()))
    );
}

#[tokio::test]
async fn a_shadow_limit_without_a_key_or_a_fitting_cost_is_left_out() {
    let log = Log::start();
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(TRIED.by(Header::new("x-tenant")).in_shadow())
        .limit(
            Limit::per_minute("costly", 5)
                .by(anyone)
                .cost(|_| 6)
                .in_shadow(),
        )
        .limit(Limit::per_minute("peer", 5).by(PeerIp::new()).in_shadow())
        .limit(REAL.by(anyone))
        .layer(service_fn(hello));
    for status in [200, 200, 429] {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), status);
        assert_eq!(names(&response), ["tried", "costly", "peer"]);
        let refusals: &ShadowRefusals = response.extensions().get().unwrap();
        assert_eq!(refusals.decisions.len(), 0);
        let rejections: Vec<&Rejection> = refusals
            .left_out
            .iter()
            .map(|(_, rejection)| rejection)
            .collect();
        assert!(
            matches!(
                rejections[..],
                [
                    Rejection::NoKey(_),
                    Rejection::NeverFits(_),
                    Rejection::NoKey(_)
                ]
            ),
            "{rejections:?}"
        );
    }
    assert!(
        log.text().contains("a cost of 6 never fits"),
        "{}",
        log.text()
    );
    assert!(
        log.text().contains("into_make_service_with_connect_info"),
        "{}",
        log.text()
    );
}

#[tokio::test]
async fn nothing_is_counted_when_all_limits_are_left_out() {
    let store = MemoryStore::new();
    let app = RateLimitLayer::new(store.clone())
        .limit(TRIED.by(Header::new("x-tenant")).in_shadow())
        .layer(service_fn(hello));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!(
        (response.status().as_u16(), figures(response.headers())),
        (200, [None; 4])
    );
    assert_eq!(
        (names(&response), store.keys()),
        (vec!["tried".to_owned()], 0)
    );
}

#[tokio::test]
async fn a_shadow_layer_rejects_nothing_when_the_store_fails() {
    let layer = RateLimitLayer::new(failing())
        .fail_closed()
        .limit(TRIED.by(anyone).in_shadow());
    let response = layer
        .clone()
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert!(response.status() == 200 && response.extensions().get::<Degraded>().is_some());
    let response = layer
        .limit(REAL.by(anyone))
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(response.status(), 503);
}

#[tokio::test]
async fn stacked_layers_name_their_own_shadow_limits() {
    let layer = |limit: Limit| {
        RateLimitLayer::new(MemoryStore::new())
            .limit(limit.by(anyone).in_shadow())
            .cost(|_| 2)
    };
    let app = layer(TRIED).layer(layer(Limit::per_minute("other", 1)).layer(service_fn(hello)));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!(names(&response), ["tried", "other"]);

    let full =
        |limit: Limit| RateLimitLayer::new(MemoryStore::new()).limit(limit.by(anyone).in_shadow());
    let app = full(TRIED).layer(full(Limit::per_minute("other", 1)).layer(service_fn(hello)));
    assert!(names(&app.clone().oneshot(request()).await.unwrap()).is_empty());
    assert_eq!(
        names(&app.oneshot(request()).await.unwrap()),
        ["tried", "other"]
    );
}

/// A shadow limit does not charge what it would have refused, so there is nothing to settle.
#[tokio::test]
async fn an_uncharged_shadow_limit_is_not_settled() {
    let watched = Watched::new(MemoryStore::new());
    let app = RateLimitLayer::new(watched.clone())
        .limit(TRIED.by(anyone).in_shadow().settle(|o| o.cost + 1))
        .layer(service_fn(hello));
    for _ in 0..3 {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
    assert_eq!(settled_costs(&watched), [[Some(2)]]);

    let free = RateLimitLayer::new(MemoryStore::new())
        .limit(REAL.by(anyone))
        .limit(TRIED.by(anyone).in_shadow().settle(|_| 0))
        .layer(service_fn(hello));
    for _ in 0..2 {
        assert!(names(&free.clone().oneshot(request()).await.unwrap()).is_empty());
    }
}

/// A response may be kept longer than its body, such as in a log or a cache.
#[tokio::test]
async fn a_response_that_reports_shadow_refusals_keeps_no_place() {
    const STREAMS: Limit = Limit::concurrent("streams", 1);
    for is_stacked in [false, true] {
        for frees_with_head in [false, true] {
            let limiter = Limiter::new(MemoryStore::new());
            let layer = RateLimitLayer::new(limiter.clone())
                .limit(STREAMS.by(anyone))
                .limit(TRIED.by(anyone).in_shadow());
            let layer = if frees_with_head {
                layer.free_with_head()
            } else {
                layer
            };
            let outer = RateLimitLayer::new(MemoryStore::new()).limit(TRIED.by(anyone).in_shadow());
            let mut kept = Vec::new();
            for number in 0..3 {
                let app = around(&layer, handler());
                let app = if is_stacked { around(&outer, app) } else { app };
                let response = app.oneshot(request()).await.unwrap();
                assert_eq!(response.status(), 200, "{is_stacked} {frees_with_head}");
                assert_eq!(names(&response).is_empty(), number == 0);
                let (parts, body) = response.into_parts();
                let key = anyone(&request().into_parts().0).unwrap();
                let held = async || limiter.peek(&STREAMS, key.clone()).await.unwrap();
                let used = held().await.binding().used;
                assert_eq!(used, u64::from(!frees_with_head), "{is_stacked}");
                drop(body.collect().await.unwrap());
                assert_eq!(held().await.binding().used, 0, "{is_stacked}");
                kept.push(parts);
            }
        }
    }
}
