//! Limits that cannot be chosen: the others are decided without them.

use std::{convert::Infallible, future::pending, time::Duration};

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    Error, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection, Store,
    limiter::{FailureMode, Share},
    middleware::Degraded,
    testing::FaultyStore,
};

use super::{BURST, PRO, chosen, request_of_plan};
use crate::support::{
    Fixture, TEST_TIMEOUT, for_every_store,
    log::Log,
    requests::{anyone, figures, hello, request},
    stores::failing,
};

/// A choice that fails.
pub(super) fn failing_choice() -> KeyedLimit {
    KeyedLimit::chosen(anyone, |_: &Parts| async { Err::<Limit, _>("no plans today") })
}

/// The failure mode and the innermost cause of a degraded response.
pub(super) fn degraded(response: &Response<Body>) -> (Option<FailureMode>, String) {
    let degraded: &Degraded = response.extensions().get().unwrap();
    let mut cause: &dyn std::error::Error = &degraded.error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    (degraded.mode, cause.to_string())
}

/// The names of the fallbacks that were used.
pub(super) fn fallback_names(response: &Response<Body>) -> Vec<&str> {
    let degraded: &Degraded = response.extensions().get().unwrap();
    degraded.fallbacks.iter().map(Limit::name).collect()
}

/// The units used by the key `anyone`.
pub(super) async fn used(store: &MemoryStore, limit: &Limit) -> u64 {
    let key = anyone(&request().into_parts().0).unwrap();
    Limiter::new(store.clone()).peek(limit, key).await.unwrap().used()
}

async fn a_failed_choice_leaves_the_other_limits_in_force<S: Store + Clone>(fixture: Fixture<S>) {
    let layer = RateLimitLayer::new(fixture.limiter).limit(BURST.by(anyone)).limit(failing_choice()).fail_open();
    let app = layer.layer(service_fn(hello));
    let mut responses = Vec::new();
    for _ in 0..30 {
        responses.push(app.clone().oneshot(request()).await.unwrap());
    }
    let answered = |status| responses.iter().filter(|response| response.status() == status).count();
    assert_eq!((answered(StatusCode::OK), answered(StatusCode::TOO_MANY_REQUESTS)), (10, 20));
    for (number, response) in responses.iter().enumerate() {
        let left = 9_usize.saturating_sub(number).to_string();
        let retry = (number >= 10).then_some("1");
        assert_eq!(figures(response.headers()), [Some("10"), Some(&*left), Some("1"), retry]);
        if number < 10 {
            assert_eq!(degraded(response), (Some(FailureMode::Open), "no plans today".to_owned()));
        } else {
            let Some(Rejection::Limited(refusal)) = response.extensions().get() else { panic!("{response:?}") };
            assert_eq!(refusal.binding().limit().name(), "burst");
        }
    }
}

for_every_store! {
    a_failed_choice_leaves_the_other_limits_in_force
}

/// A request that gets a 503 is not charged.
#[tokio::test]
async fn a_failed_choice_rejects_the_request_unless_it_fails_open() {
    for mode in [FailureMode::Closed, FailureMode::Local(Share::one_of(1))] {
        let store = FaultyStore::new(MemoryStore::new());
        let layer = RateLimitLayer::new(store.clone()).limit(BURST.by(anyone)).limit(failing_choice());
        // The mode may depend on the request.
        let by_request = layer.clone().failure_mode_by(move |request, _| match request.headers.get("x-plan") {
            Some(_) => FailureMode::Open,
            None => mode,
        });
        for layer in [layer.failure_mode_by(move |_, _| mode), by_request.clone()] {
            let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), store.calls()), (503, 0));
            assert!(matches!(response.extensions().get(), Some(Rejection::Unavailable(Error::LimitNotChosen(_)))));
            assert_eq!(degraded(&response), (Some(mode), "no plans today".to_owned()));
        }
        let response = by_request.layer(service_fn(hello)).oneshot(request_of_plan("any")).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some("9")));
        assert_eq!(degraded(&response).0, Some(FailureMode::Open));
    }
}

/// Without any limit to decide, the request is forwarded, and the error is logged.
#[tokio::test]
async fn a_failed_choice_of_the_only_limit_forwards_the_request_and_is_logged() {
    let log = Log::start();
    let app = RateLimitLayer::new(MemoryStore::new()).limit(failing_choice()).layer(service_fn(hello));
    for _ in 0..3 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())), (200, [None; 4]));
        assert_eq!(degraded(&response), (Some(FailureMode::Open), "no plans today".to_owned()));
    }
    let text = log.text();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("could not be chosen")).collect();
    let [line] = lines[..] else { panic!("{text}") };
    assert!(line.contains("no rate limit could be chosen: no plans today"), "{line}");
    assert!(line.contains("mode=Open") && line.contains("limits=\"a chosen one\""), "{line}");
}

/// The store's error follows the failure mode, and both errors are logged.
#[tokio::test]
async fn a_failing_store_reports_its_own_error_beside_a_failed_choice() {
    let share = FailureMode::Local(Share::one_of(1));
    for (mode, status) in [(FailureMode::Open, 200), (FailureMode::Closed, 503), (share, 503)] {
        let log = Log::start();
        let layer = RateLimitLayer::new(failing())
            .limit(failing_choice())
            .limit(BURST.by(anyone))
            .failure_mode_by(move |_, _| mode);
        let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, None));
        let is_asked = mode == FailureMode::Open;
        let cause = if is_asked { "out of order" } else { "no plans today" };
        assert_eq!(degraded(&response), (Some(mode), cause.to_owned()));
        let text = log.text();
        assert!(text.contains("no plans today"), "{text}");
        assert_eq!(text.contains("no rate-limit decision"), is_asked, "{text}");
    }
}

/// The other choice counts, refuses and never fits as usual.
#[tokio::test]
async fn a_failed_choice_affects_no_other_choice() {
    for limits in [[failing_choice(), chosen(Some(PRO))], [chosen(Some(PRO)), failing_choice()]] {
        let [one, other] = limits;
        let app = RateLimitLayer::new(MemoryStore::new()).limit(one.clone()).limit(other.clone());
        let app = app.layer(service_fn(hello));
        for (status, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)));
            assert_eq!(degraded(&response), (Some(FailureMode::Open), "no plans today".to_owned()));
        }
        let costly =
            RateLimitLayer::new(MemoryStore::new()).limit(one).limit(other).cost(|_| 4).layer(service_fn(hello));
        let response = costly.oneshot(request()).await.unwrap();
        assert!(matches!(response.extensions().get(), Some(Rejection::NeverFits(_))), "{response:?}");
    }
}

/// In either order.
#[tokio::test]
async fn the_other_limits_settle_by_their_own_rules_beside_a_failed_choice() {
    for is_failing_first in [false, true] {
        for fails in [false, true] {
            let store = MemoryStore::new();
            let settled = BURST.by(anyone).cost(|_| 5).settle(|_| 2);
            let limits = if is_failing_first { [failing_choice(), settled] } else { [settled, failing_choice()] };
            let service = service_fn(move |request: Request<Body>| async move {
                if fails { Err("broken") } else { hello(request).await.map_err(|_| "never") }
            });
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service);
            assert_eq!(app.oneshot(request()).await.is_err(), fails);
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(used(&store, &BURST).await, if fails { 5 } else { 2 });
        }
    }
}

#[tokio::test]
async fn a_layer_waits_for_capacity_beside_a_failed_choice() {
    let tight = Limit::per("tight", 1, Duration::from_millis(300));
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(tight.by(anyone))
        .limit(failing_choice())
        .wait_up_to(TEST_TIMEOUT);
    let app = layer.layer(service_fn(hello));
    let asked = Instant::now();
    for _ in 0..2 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), degraded(&response).0), (200, Some(FailureMode::Open)));
    }
    assert!(asked.elapsed() >= Duration::from_millis(300));
}

/// The choice ends at the deadline, and the other limits are still decided.
#[tokio::test(start_paused = true)]
async fn a_hanging_choice_ends_at_the_deadline() {
    let hanging = KeyedLimit::chosen(anyone, |_: &Parts| pending::<Result<Limit, Infallible>>());
    let deadline = Duration::from_millis(40);
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(hanging).limit(BURST.by(anyone)).deadline(deadline);
    let refused = layer.clone().fail_closed().layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert_eq!(refused.status(), 503);
    let app = layer.layer(service_fn(hello));
    for number in 0..12 {
        let asked = Instant::now();
        let response = app.clone().oneshot(request()).await.unwrap();
        let status = if number < 10 { 200 } else { 429 };
        assert_eq!(response.status(), status, "{number}");
        if status == 200 {
            assert_eq!(asked.elapsed(), deadline);
            let reported: &Degraded = response.extensions().get().unwrap();
            assert!(
                matches!(&reported.error, Error::LimitNotChosen(cause) if cause.to_string().ends_with("longer than 40ms"))
            );
        }
    }
}

/// A panic ends only its own request, as in a handler.
#[tokio::test]
async fn a_panicking_choice_ends_its_own_request_and_charges_nothing() {
    let chosen = KeyedLimit::chosen(anyone, |parts: &Parts| {
        let plan = parts.headers.get("x-plan").cloned();
        assert!(plan.as_ref().is_none_or(|plan| plan != "at once"), "as choices do");
        async move {
            tokio::task::yield_now().await;
            assert!(plan.is_none(), "as choices do");
            Ok::<_, Infallible>(PRO)
        }
    });
    for mode in [FailureMode::Open, FailureMode::Closed, FailureMode::Local(Share::one_of(1))] {
        let store = MemoryStore::new();
        let chosen = chosen.clone().settle(|_| 1);
        let layer =
            RateLimitLayer::new(store.clone()).limit(BURST.by(anyone)).limit(chosen).failure_mode_by(move |_, _| mode);
        let app = layer.layer(service_fn(hello));
        for plan in ["at once", "later"] {
            let mut broken = app.clone();
            let ended =
                tokio::spawn(async move { broken.ready().await.unwrap().call(request_of_plan(plan)).await }).await;
            assert!(ended.unwrap_err().is_panic());
        }
        // A client that disconnects during the choice.
        let mut service = app.clone();
        let leaves = tokio::spawn(async move { service.ready().await.unwrap().call(request_of_plan("later")).await });
        tokio::task::yield_now().await;
        leaves.abort();
        assert!(leaves.await.is_err());
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!((used(&store, &BURST).await, used(&store, &PRO).await), (0, 0));
        let response = app.oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some("2")));
        assert!(response.extensions().get::<Degraded>().is_none());
    }
}
