//! Failure modes: the response while the store fails, and the `Degraded` that it carries.

use std::{convert::Infallible, time::Duration};

use axum::body::Body;
use http::{Response, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Decision, Error, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection,
    limiter::{Breaker, FailureMode, Share},
    middleware::Degraded,
    store::ManualClock,
};

use crate::support::{
    in_mode,
    log::Log,
    requests::{anyone, figures, hello, json, request, unavailable_body},
    stores::{failing, silent},
};

const CALLS: Limit = Limit::per_minute("calls", 2);
const MODES: [FailureMode; 3] = [
    FailureMode::Open,
    FailureMode::Closed,
    FailureMode::Local(Share::one_of(2)),
];

fn degraded(response: &Response<Body>) -> Option<(FailureMode, &Error)> {
    response
        .extensions()
        .get::<Degraded>()
        .map(|degraded| (degraded.mode, &degraded.error))
}

#[tokio::test(start_paused = true)]
async fn every_degraded_response_names_its_cause_and_mode() {
    for mode in MODES {
        let failing = Limiter::new(failing()).breaker(Breaker::new(1, Duration::from_millis(200)));
        let failing = in_mode(RateLimitLayer::new(failing).limit(CALLS.by(anyone)), mode);
        let failing = failing.layer(service_fn(hello));
        let silent = in_mode(RateLimitLayer::new(silent()).limit(CALLS.by(anyone)), mode)
            .layer(service_fn(hello));
        let statuses = match mode {
            FailureMode::Open => [200; 2],
            FailureMode::Closed => [503; 2],
            // The share of one of two processes is one unit.
            _ => [200, 429],
        };
        for (number, status) in statuses.into_iter().enumerate() {
            let response = failing.clone().oneshot(request()).await.unwrap();
            assert_eq!(response.status(), status, "{mode:?}");
            let (shown, error) = degraded(&response).unwrap();
            assert_eq!(shown, mode);
            match (number, error) {
                (0, Error::Unavailable(_)) => {}
                (1, Error::BreakerOpen(last)) => assert!(matches!(**last, Error::Unavailable(_))),
                (_, error) => panic!("{error:?}"),
            }
            let response = silent.clone().oneshot(request()).await.unwrap();
            assert!(
                matches!(degraded(&response), Some((shown, Error::TimedOut { .. })) if shown == mode)
            );
        }
    }
}

#[tokio::test]
async fn a_decided_response_is_not_degraded() {
    for mode in MODES {
        let clock = ManualClock::new();
        let store = MemoryStore::new().clock(&clock);
        let app = in_mode(RateLimitLayer::new(store).limit(CALLS.by(anyone)), mode)
            .layer(service_fn(hello));
        for status in [200, 200, 429] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!(
                (response.status().as_u16(), degraded(&response).is_some()),
                (status, false)
            );
        }
    }
}

/// The handler finds the cause in the decision, and the client gets the figures of the share.
#[tokio::test]
async fn a_local_decision_is_marked() {
    let service = |request: http::Request<Body>| async move {
        let decision: &Decision = request.extensions().get().unwrap();
        let is_local = decision.local_cause().is_some();
        Ok::<_, Infallible>(Response::new(Body::from(is_local.to_string())))
    };
    let layer = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .fail_local(Share::one_of(2));
    let response = layer
        .layer(service_fn(service))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("1"), Some("0")]);
    assert_eq!(crate::support::requests::json(response).await, "true");
}

#[tokio::test]
async fn each_mode_is_logged_at_most_once_a_second() {
    for (mode, shown) in MODES
        .into_iter()
        .zip(["mode=Open", "mode=Closed", "mode=Local"])
    {
        let log = Log::start();
        let limiter = Limiter::new(failing()).breaker(Breaker::OFF);
        let layer = in_mode(RateLimitLayer::new(limiter).limit(CALLS.by(anyone)), mode);
        let app = layer.layer(service_fn(hello));
        for _ in 0..10 {
            app.clone().oneshot(request()).await.unwrap();
        }
        let text = log.text();
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("no rate-limit decision"))
            .collect();
        let [line] = lines[..] else { panic!("{text}") };
        assert!(
            line.contains(shown)
                && line.contains("out of order")
                && line.contains("limits=\"calls\""),
            "{text}"
        );
    }
}

/// Both layers are degraded, and the inner one has made the response.
#[tokio::test(start_paused = true)]
async fn the_outermost_degraded_layer_is_reported() {
    let inner = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .fail_closed();
    let outer = RateLimitLayer::new(silent())
        .limit(CALLS.by(anyone))
        .fail_open()
        .deadline(Duration::from_millis(1));
    let response = outer
        .layer(inner.layer(service_fn(hello)))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(response.status(), 503);
    assert!(matches!(
        degraded(&response),
        Some((FailureMode::Open, Error::TimedOut { .. }))
    ));
}

#[tokio::test]
async fn fail_open_forwards_the_request_without_headers() {
    let app = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .fail_open()
        .layer(service_fn(hello));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!(
        (response.status(), figures(response.headers())),
        (StatusCode::OK, [None; 4])
    );
    let degraded: &Degraded = response.extensions().get().unwrap();
    assert!(matches!(&degraded.error, Error::Unavailable(_)));
}

#[tokio::test]
async fn fail_open_is_the_default() {
    let app = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .layer(service_fn(hello));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!(
        (response.status(), figures(response.headers())),
        (StatusCode::OK, [None; 4])
    );
}

#[tokio::test]
async fn fail_closed_rejects_with_503_and_a_jittered_retry_after() {
    let app = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .fail_closed()
        .layer(service_fn(hello));
    let mut waits = Vec::new();
    for _ in 0..100 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert!(matches!(
            response.extensions().get(),
            Some(Rejection::Unavailable(_))
        ));
        let [None, None, None, Some(wait)] = figures(response.headers()) else {
            panic!("{:?}", response.headers())
        };
        waits.push(wait.parse::<u64>().unwrap());
        let expected = unavailable_body(wait);
        assert_eq!(json(response).await, expected);
    }
    waits.sort_unstable();
    waits.dedup();
    assert_eq!(waits, [1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn a_hanging_store_is_abandoned_at_the_deadline() {
    for deadline in [Duration::from_millis(50), Duration::from_millis(7)] {
        let asked = tokio::time::Instant::now();
        let layer = RateLimitLayer::new(silent())
            .limit(CALLS.by(anyone))
            .fail_closed();
        let layer = if deadline.as_millis() == 50 {
            layer
        } else {
            layer.deadline(deadline)
        };
        let response = layer
            .layer(service_fn(hello))
            .oneshot(request())
            .await
            .unwrap();
        assert_eq!(
            (response.status(), asked.elapsed()),
            (StatusCode::SERVICE_UNAVAILABLE, deadline)
        );
    }
}
