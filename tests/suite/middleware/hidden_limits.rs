//! Hidden limits: clients learn nothing of them but when to retry.

use std::{convert::Infallible, future::ready, time::Duration};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Request};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Decision, HeaderSets, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer,
    Rejection, limiter::Share, middleware::ShadowRefusals, store::ManualClock,
};

use crate::support::{
    TEST_TIMEOUT,
    redis_server::RedisServer,
    requests::{QUOTA_EXCEEDED, anyone, figures, json, refusal_body, request},
    services::{App, around, handler},
    stores::failing,
};

/// A limit on the load of the whole service.
const TOTAL: Limit = Limit::per_hour("total", 1);

const MINE: Limit = Limit::per_minute("mine", 5);

fn layer(limit: KeyedLimit) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new()).limit(limit)
}

async fn ask(app: &App) -> Response {
    app.clone().oneshot(request()).await.unwrap()
}

/// A limit that is chosen for every request.
fn chosen(limit: Limit) -> KeyedLimit {
    KeyedLimit::chosen(anyone, move |_| limit.clone())
}

/// One request is admitted and the next one refused, and neither response reveals the limit.
async fn assert_reveals_nothing(app: &App) {
    let admitted = ask(app).await;
    assert_eq!(
        (admitted.status().as_u16(), figures(admitted.headers())),
        (200, [None; 4])
    );
    let refused = ask(app).await;
    let Some(Rejection::Limited(decision)) = refused.extensions().get() else {
        panic!("{refused:?}")
    };
    assert!(decision.binding().is_hidden() && decision.visible().is_none());
    assert_eq!(
        (refused.status().as_u16(), figures(refused.headers())),
        (429, [None, None, None, Some("3600")])
    );
    assert_eq!(json(refused).await, refusal_body(None, 3600));
}

#[tokio::test]
async fn a_hidden_limit_shows_clients_nothing() {
    for status in [200, 401, 404] {
        let app = layer(TOTAL.by(anyone).hidden()).layer(service_fn(move |_: Request<Body>| {
            ready(Ok::<_, Infallible>(
                Response::builder()
                    .status(status)
                    .body(Body::empty())
                    .unwrap(),
            ))
        }));
        let response = app.oneshot(request()).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())),
            (status, [None; 4])
        );
    }
    assert_reveals_nothing(&around(&layer(TOTAL.by(anyone).hidden()), handler())).await;
}

/// The handler still finds the hidden limit in the decision.
#[tokio::test]
async fn headers_show_only_visible_limits() {
    let total = Limit::per_hour("total", 2);
    let service = service_fn(|request: Request<Body>| {
        let decision: &Decision = request.extensions().get().unwrap();
        let seen = format!(
            "{} {}",
            decision.binding().limit.name(),
            decision.binding().used
        );
        ready(Ok::<_, Infallible>(Response::new(Body::from(seen))))
    });
    for limits in [
        [total.clone().by(anyone).hidden(), MINE.by(anyone)],
        [MINE.by(anyone), total.by(anyone).hidden()],
    ] {
        let app = RateLimitLayer::new(MemoryStore::new())
            .limits(limits)
            .unwrap()
            .layer(service);
        for (remaining, body) in [("4", "total 1"), ("3", "total 2")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!(
                figures(response.headers()),
                [Some("5"), Some(remaining), Some("60"), None]
            );
            assert_eq!(json(response).await, body);
        }
        // The visible limit has three units left, so its figures would not explain the refusal.
        let refused = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            (refused.status().as_u16(), figures(refused.headers())),
            (429, [None, None, None, Some("3600")])
        );
        assert_eq!(json(refused).await, refusal_body(None, 3600));
    }
}

#[tokio::test]
async fn a_visible_limit_reports_its_own_refusals() {
    let few = Limit::per_minute("few", 1);
    for (hidden, wait) in [(Limit::per_hour("total", 5), "60"), (TOTAL, "3600")] {
        let layer = layer(hidden.by(anyone).hidden()).limit(few.clone().by(anyone));
        let app = around(&layer, handler());
        ask(&app).await;
        let refused = ask(&app).await;
        assert_eq!(
            figures(refused.headers()),
            [Some("1"), Some("0"), Some("60"), Some(wait)]
        );
        assert_eq!(
            json(refused).await,
            refusal_body(Some("few"), wait.parse().unwrap())
        );
    }
}

#[tokio::test]
async fn a_cost_above_a_hidden_limit_reveals_no_number() {
    let never_fits = format!(
        r#"{{{QUOTA_EXCEEDED},"detail":"The request costs more than a limit ever admits."}}"#
    );
    let costly = |limit: KeyedLimit| limit.cost(|_| 2).hidden();
    for layer in [
        layer(costly(TOTAL.by(anyone))),
        layer(costly(chosen(TOTAL))),
    ] {
        let response = ask(&around(&layer, handler())).await;
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())),
            (429, [None; 4])
        );
        assert!(
            matches!(response.extensions().get(), Some(Rejection::NeverFits(error)) if error.is_hidden)
        );
        assert_eq!(json(response).await, never_fits);
    }
    let mut error = Charge::new(TOTAL, "all", 2).unwrap_err();
    error.is_hidden = true;
    assert_eq!(
        json(Rejection::NeverFits(error).into_response()).await,
        never_fits
    );
}

#[tokio::test]
async fn a_hidden_limit_stays_hidden_however_it_is_counted() {
    for layer in [
        layer(TOTAL.split(1).by(anyone).hidden()),
        layer(chosen(TOTAL).hidden()),
        layer(TOTAL.by(anyone).hidden().settle(|outcome| outcome.cost)),
        layer(TOTAL.by(anyone).hidden()).wait_up_to(Duration::from_millis(1)),
        // The second limit is not chosen.
        layer(TOTAL.by(anyone).hidden()).limit(chosen(MINE).hidden()),
    ] {
        assert_reveals_nothing(&around(&layer, handler())).await;
    }
    let share = Limit::per_hour("total", 4).by(anyone).hidden();
    assert_reveals_nothing(&around(
        &RateLimitLayer::new(failing())
            .limit(share)
            .fail_local(Share::one_of(4)),
        handler(),
    ))
    .await;
}

/// Another layer, whose limit is visible, may use the same cached refusal.
#[tokio::test]
async fn a_cached_refusal_keeps_a_hidden_limit_hidden() {
    let server = RedisServer::start();
    for refusal_cache in [Duration::ZERO, Duration::from_secs(1)] {
        let store = server.store().clock(&ManualClock::new()).build().unwrap();
        let layer = RateLimitLayer::new(
            Limiter::new(store.clone())
                .deadline(TEST_TIMEOUT)
                .refusal_cache(refusal_cache),
        );
        let hidden = layer.clone().limit(TOTAL.by(anyone).hidden());
        assert_reveals_nothing(&around(&hidden, handler())).await;
        server.pause();
        let asked = around(
            &hidden
                .clone()
                .deadline(Duration::from_millis(50))
                .fail_closed(),
            handler(),
        );
        let refused = ask(&asked).await;
        server.resume();
        // Also if Redis is asked each time, a known refusal stands while it does not answer.
        assert_eq!(
            (refused.status().as_u16(), &figures(refused.headers())[..3]),
            (429, &[None; 3][..])
        );
        assert_eq!(json(refused).await, refusal_body(None, 3600));

        let refused = ask(&around(&layer.limit(TOTAL.by(anyone)), handler())).await;
        assert_eq!(figures(refused.headers())[..2], [Some("1"), Some("0")]);
        assert_eq!(
            figures(ask(&around(&hidden, handler())).await.headers())[..3],
            [None; 3]
        );
        server.run::<()>("FLUSHALL");
    }
}

#[tokio::test]
async fn a_hidden_shadow_limit_is_in_no_header() {
    let shadow = |name, cost| {
        Limit::per_minute(name, 1)
            .by(anyone)
            .cost(move |_| cost)
            .in_shadow()
    };
    let hidden = || {
        layer(MINE.by(anyone))
            .limit(shadow("tried", 1).hidden())
            .limit(shadow("costly", 2).hidden())
    };
    for layer in [hidden(), hidden().limit(shadow("seen", 1))] {
        let layer = layer.headers(HeaderSets::BOTH);
        let app = around(&layer, handler());
        ask(&app).await;
        let response = ask(&app).await;
        let headers = format!("{:?}", response.headers());
        assert!(
            ["tried", "costly"]
                .iter()
                .all(|name| !headers.contains(name)),
            "{headers}"
        );
        let refusals: &ShadowRefusals = response.extensions().get().unwrap();
        let names: Vec<_> = refusals.names().collect();
        assert!(
            names.contains(&"tried") && names.contains(&"costly"),
            "{names:?}"
        );
    }
}

#[tokio::test]
async fn a_handler_that_checks_by_itself_hides_limits_as_a_layer_does() {
    let check = |limit: Limit| Check::new(Charge::new(limit, "all", 1).unwrap().hidden());
    let limiter = Limiter::new(MemoryStore::new());
    let both = || {
        check(TOTAL)
            .and(Charge::new(MINE, "ada", 1).unwrap())
            .unwrap()
    };
    let mut headers = HeaderMap::new();
    limiter
        .check_all(check(Limit::per_hour("other", 1)))
        .await
        .unwrap()
        .write_headers(HeaderSets::X_RATE_LIMIT, &mut headers);
    assert!(headers.is_empty());
    limiter
        .check_all(both())
        .await
        .unwrap()
        .write_headers(HeaderSets::X_RATE_LIMIT, &mut headers);
    assert_eq!(figures(&headers), [Some("5"), Some("4"), Some("60"), None]);

    let refused = limiter.check_all(both()).await.unwrap();
    headers.clear();
    refused.write_headers(HeaderSets::X_RATE_LIMIT, &mut headers);
    assert!(headers.is_empty());
    assert_eq!(
        (&refused.binding().limit, refused.remaining()),
        (&TOTAL, 0),
        "the server sees it"
    );
    let response = Rejection::Limited(refused).into_response();
    assert_eq!(
        figures(response.headers()),
        [None, None, None, Some("3600")]
    );
    assert_eq!(json(response).await, refusal_body(None, 3600));
}

/// The hidden limit is tighter, and refuses the second request.
#[tokio::test]
async fn stacked_layers_show_only_visible_limits() {
    let hidden = || layer(TOTAL.by(anyone).hidden());
    let silent = || layer(TOTAL.by(anyone)).headers(HeaderSets::NONE);
    let seen = || layer(MINE.by(anyone));
    for app in [
        around(&hidden(), around(&seen(), handler())),
        around(&seen(), around(&hidden(), handler())),
        around(&silent(), around(&seen(), handler())),
        around(&seen(), around(&silent(), handler())),
    ] {
        assert_eq!(
            figures(ask(&app).await.headers()),
            [Some("5"), Some("4"), Some("60"), None]
        );
        let refused = ask(&app).await;
        assert_eq!(
            (refused.status().as_u16(), figures(refused.headers())),
            (429, [None, None, None, Some("3600")])
        );
    }
}
