//! Limits that cannot be chosen for a request: what is decided without them, and what in their place.

use std::{
    convert::Infallible,
    future::{Ready, pending, ready},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    ChoiceError, Degraded, Error, FailureMode, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection,
    ShadowRefusals, Share, Store,
};

use crate::support::{
    Fixture, PATIENCE, for_every_store,
    log::Log,
    requests::{anyone, figures, hello, request},
    stores::Failing,
    switched::{State, Switched},
};

const FREE: Limit = Limit::per_hour("calls", 1);
const PRO: Limit = Limit::per_hour("calls", 3);
const BURST: Limit = Limit::per_second("burst", 10);

/// A choice that is an error.
fn failing() -> KeyedLimit {
    KeyedLimit::chosen(anyone, |_: &Parts| async { Err::<Limit, _>("no plans today") })
}

/// What a response tells of a decision without all of its limits: the failure mode, and the innermost cause.
fn degraded(response: &Response<Body>) -> (Option<FailureMode>, String) {
    let degraded: &Degraded = response.extensions().get().unwrap();
    let mut cause: &dyn std::error::Error = degraded.error();
    while let Some(source) = cause.source() {
        cause = source;
    }
    (degraded.mode(), cause.to_string())
}

/// The limits in the place of those that could not be chosen.
fn fallbacks(response: &Response<Body>) -> Vec<&str> {
    let degraded: &Degraded = response.extensions().get().unwrap();
    degraded.fallbacks().map(Limit::name).collect()
}

/// What everybody has used.
async fn used(store: &MemoryStore, limit: &Limit) -> u64 {
    let key = anyone(&request().into_parts().0).unwrap();
    Limiter::new(store.clone()).peek(limit, key).await.unwrap().used()
}

/// A choice that is made.
fn at_once(limit: Option<Limit>) -> KeyedLimit {
    KeyedLimit::chosen(anyone, move |_: &Parts| -> Ready<Result<_, Infallible>> { ready(Ok(limit.clone())) })
}

fn of_plan(plan: &str) -> Request<Body> {
    Request::get("/").header("x-plan", plan).body(Body::empty()).unwrap()
}

for_every_store! {
    a_choice_that_fails_leaves_the_other_limits_in_force
    a_fallback_is_charged_with_the_others_in_every_mode
}

async fn a_choice_that_fails_leaves_the_other_limits_in_force<S: Store>(fixture: Fixture<S>) {
    let layer = RateLimitLayer::on(fixture.limiter).limit(BURST.by(anyone)).limit(failing()).fail_open();
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
            assert_eq!(refusal.limit().name(), "burst");
        }
    }
}

/// Nobody is charged for a 503.
#[tokio::test]
async fn a_choice_that_fails_ends_a_request_that_is_not_to_be_let_through() {
    for mode in [FailureMode::Closed, FailureMode::Local(Share::one_of(1))] {
        let store = Switched::new(State::Works);
        let layer = RateLimitLayer::new(store.clone()).limit(BURST.by(anyone)).limit(failing());
        // By the request's mode, where requests differ.
        let by_request = layer.clone().failure_mode_by(move |request, _| match request.headers.get("x-plan") {
            Some(_) => FailureMode::Open,
            None => mode,
        });
        for layer in [layer.failure_mode(mode), by_request.clone()] {
            let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), store.asked()), (503, 0));
            assert!(matches!(response.extensions().get(), Some(Rejection::Unavailable(Error::LimitNotChosen(_)))));
            assert_eq!(degraded(&response), (Some(mode), "no plans today".to_owned()));
        }
        let response = by_request.layer(service_fn(hello)).oneshot(of_plan("any")).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some("9")));
        assert_eq!(degraded(&response).0, Some(FailureMode::Open));
    }
}

/// With nobody to decide, it is let through; the log has the error.
#[tokio::test]
async fn a_choice_that_fails_leaves_nothing_to_decide_where_there_is_no_other_limit() {
    let log = Log::start();
    let app = RateLimitLayer::new(MemoryStore::new()).limit(failing()).layer(service_fn(hello));
    for _ in 0..3 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())), (200, [None; 4]));
        assert_eq!(degraded(&response), (Some(FailureMode::Open), "no plans today".to_owned()));
    }
    let text = log.text();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("could not be chosen")).collect();
    let [line] = lines[..] else { panic!("{text}") };
    assert!(line.contains("no rate limit could be chosen: choosing a limit failed: no plans today"), "{line}");
    assert!(line.contains("mode=Open") && line.contains("limits=\"a chosen one\""), "{line}");
}

/// Its error follows the mode as ever, and the log has both.
#[tokio::test]
async fn a_store_that_fails_as_well_tells_its_own_error() {
    let share = FailureMode::Local(Share::one_of(1));
    for (mode, status) in [(FailureMode::Open, 200), (FailureMode::Closed, 503), (share, 503)] {
        let log = Log::start();
        let layer = RateLimitLayer::new(Failing).limit(failing()).limit(BURST.by(anyone)).failure_mode(mode);
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

/// The one that was chosen counts, refuses, and never fits as ever.
#[tokio::test]
async fn of_several_choices_one_that_fails_takes_none_along() {
    for limits in [[failing(), at_once(Some(PRO))], [at_once(Some(PRO)), failing()]] {
        let [one, other] = limits;
        let app = RateLimitLayer::new(MemoryStore::new()).limit(one.clone()).limit(other.clone());
        let app = app.layer(service_fn(hello));
        for (status, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)));
            assert_eq!(degraded(&response), (Some(FailureMode::Open), "no plans today".to_owned()));
        }
        let dear = RateLimitLayer::new(MemoryStore::new()).limit(one).limit(other).cost(|_| 4).layer(service_fn(hello));
        let response = dear.oneshot(request()).await.unwrap();
        assert!(matches!(response.extensions().get(), Some(Rejection::NeverFits(_))), "{response:?}");
    }
}

/// Whichever place in the layer the choice has that fails.
#[tokio::test]
async fn beside_a_choice_that_fails_the_others_are_settled_by_their_own_rules() {
    for is_failing_first in [false, true] {
        for fails in [false, true] {
            let store = MemoryStore::new();
            let settled = BURST.by(anyone).cost(|_| 5).settle(|_| 2).settle_dropped(3);
            let limits = if is_failing_first { [failing(), settled] } else { [settled, failing()] };
            let service = service_fn(move |request: Request<Body>| async move {
                if fails { Err("broken") } else { hello(request).await.map_err(|_| "never") }
            });
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service);
            assert_eq!(app.oneshot(request()).await.is_err(), fails);
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(used(&store, &BURST).await, if fails { 3 } else { 2 });
        }
    }
}

#[tokio::test]
async fn beside_a_choice_that_fails_room_is_waited_for() {
    let tight = Limit::per("tight", 1, Duration::from_millis(300));
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(tight.by(anyone)).limit(failing()).wait_up_to(PATIENCE);
    let app = layer.layer(service_fn(hello));
    let asked = Instant::now();
    for _ in 0..2 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), degraded(&response).0), (200, Some(FailureMode::Open)));
    }
    assert!(asked.elapsed() >= Duration::from_millis(300));
}

/// It is given up at the deadline, and by then the others are decided.
#[tokio::test(start_paused = true)]
async fn a_choice_that_hangs_ends_with_the_deadline() {
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
            let told: &Degraded = response.extensions().get().unwrap();
            assert!(matches!(told.error(), Error::LimitNotChosen(ChoiceError::TimedOut { .. })));
        }
    }
}

/// As a handler that panics: it ends its own request.
#[tokio::test]
async fn a_choice_that_panics_ends_its_own_request_and_charges_nothing() {
    let chosen = KeyedLimit::chosen(anyone, |parts: &Parts| {
        let plan = parts.headers.get("x-plan").cloned();
        assert!(plan.as_ref().is_none_or(|plan| plan != "at once"), "as choices do");
        async move {
            tokio::task::yield_now().await;
            assert!(plan.is_none(), "as choices do");
            Ok::<_, Infallible>(PRO)
        }
    });
    for dropped in [None, Some(0)] {
        for mode in [FailureMode::Open, FailureMode::Closed, FailureMode::Local(Share::one_of(1))] {
            let store = MemoryStore::new();
            let chosen = dropped.into_iter().fold(chosen.clone().settle(|_| 1), KeyedLimit::settle_dropped);
            let layer = RateLimitLayer::new(store.clone()).limit(BURST.by(anyone)).limit(chosen).failure_mode(mode);
            let app = layer.layer(service_fn(hello));
            for plan in ["at once", "later"] {
                let mut broken = app.clone();
                let ended = tokio::spawn(async move { broken.ready().await.unwrap().call(of_plan(plan)).await }).await;
                assert!(ended.unwrap_err().is_panic());
            }
            // One whose client leaves while the choice goes on, which ends without it.
            let mut service = app.clone();
            let leaves = tokio::spawn(async move { service.ready().await.unwrap().call(of_plan("later")).await });
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
}

async fn a_fallback_is_charged_with_the_others_in_every_mode<S: Store>(fixture: Fixture<S>) {
    let modes = [FailureMode::Open, FailureMode::Closed, FailureMode::Local(Share::one_of(2))];
    for (number, mode) in modes.into_iter().enumerate() {
        let named = |name: &str, units| Limit::new(format!("{name}-{number}"), units, PRO.window()).unwrap();
        let (burst, fallback) = (named("burst", 10), named("fallback", 3));
        let layer = RateLimitLayer::on(fixture.limiter.clone())
            .limit(burst.clone().by(anyone))
            .limit(failing().fallback(fallback.clone()))
            .failure_mode(mode);
        let app = layer.layer(service_fn(hello));
        for (status, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0"), (429, "0")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)));
            assert_eq!(degraded(&response), (None, "no plans today".to_owned()));
            assert_eq!(fallbacks(&response), [fallback.name()]);
        }
        let key = || anyone(&request().into_parts().0).unwrap();
        let used = async |limit: &Limit| fixture.limiter.peek(limit, key()).await.unwrap().used();
        assert_eq!((used(&burst).await, used(&fallback).await), (3, 3), "a refusal costs nothing");
    }
}

#[tokio::test(start_paused = true)]
async fn a_fallback_is_charged_where_the_choice_is_too_slow() {
    let hanging = KeyedLimit::chosen(anyone, |_: &Parts| pending::<Result<Limit, Infallible>>());
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(hanging.fallback(FREE)).fail_closed();
    let app = layer.layer(service_fn(hello));
    for status in [200, 429] {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), fallbacks(&response)), (status, vec!["calls"]));
        assert_eq!(degraded(&response), (None, "choosing a limit took longer than 50ms".to_owned()));
    }
}

/// A choice that is made, also of no limit, and a limit that is no choice.
#[tokio::test]
async fn where_nothing_fails_a_fallback_means_nothing() {
    let limits = [at_once(Some(PRO)), PRO.by(anyone), at_once(None)];
    for (limit, remaining) in limits.into_iter().zip([Some("2"), Some("2"), None]) {
        let layer = RateLimitLayer::new(MemoryStore::new()).limit(limit.fallback(FREE));
        let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
        assert_eq!(figures(response.headers())[1], remaining);
        assert!(response.extensions().get::<Degraded>().is_none());
    }
}

/// The rules for two limits that are one are those of chosen limits, and so are those of parts, settlements and the shadow.
#[tokio::test]
async fn a_fallback_charges_as_the_limit_would_in_whose_place_it_is() {
    // Whichever is the stricter, and whichever comes first.
    for (one, other) in [(FREE, PRO), (PRO, FREE)] {
        for is_first in [false, true] {
            let store = MemoryStore::new();
            let (fixed, fallback) = (one.clone().by(anyone), failing().fallback(other.clone()));
            let limits = if is_first { [fallback, fixed] } else { [fixed, fallback] };
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service_fn(hello));
            for status in [200, 429] {
                let response = app.clone().oneshot(request()).await.unwrap();
                assert_eq!(response.status(), status);
            }
            assert_eq!(store.keys(), 1);
        }
    }

    // At its own cost, and in as many parts as it has units at most.
    let store = MemoryStore::new();
    let split = failing().fallback(PRO).split(8).cost(|_| 1);
    let app = RateLimitLayer::new(store.clone()).limit(split).cost(|_| 2).layer(service_fn(hello));
    let mut admitted = 0;
    for _ in 0..20 {
        admitted += u32::from(app.clone().oneshot(request()).await.unwrap().status() == 200);
    }
    assert_eq!((admitted, store.keys()), (3, 3));

    let store = MemoryStore::new();
    let settled = failing().fallback(PRO).cost(|_| 3).settle(|outcome| outcome.cost() - 1);
    let app = RateLimitLayer::new(store.clone()).limit(settled).layer(service_fn(hello));
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(used(&store, &PRO).await, 2);

    // In the shadow it counts and refuses nothing.
    let shadow = failing().fallback(FREE).in_shadow();
    let app = RateLimitLayer::new(MemoryStore::new()).limit(BURST.by(anyone)).limit(shadow).layer(service_fn(hello));
    for (remaining, would_refuse) in [("9", vec![]), ("8", vec!["calls"])] {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some(remaining)));
        let shadow: Option<&ShadowRefusals> = response.extensions().get();
        assert_eq!(shadow.map(|shadow| shadow.names().collect()).unwrap_or(vec![]), would_refuse);
        assert_eq!((degraded(&response).0, fallbacks(&response)), (None, vec!["calls"]));
    }

    // One that is too small says so, and that it is a fallback.
    for is_shadow in [false, true] {
        let dear = failing().fallback(PRO).cost(|_| 4);
        let dear = if is_shadow { dear.in_shadow() } else { dear };
        let app = RateLimitLayer::new(MemoryStore::new()).limit(dear).layer(service_fn(hello));
        let response = app.oneshot(request()).await.unwrap();
        let is_refused = matches!(response.extensions().get(), Some(Rejection::NeverFits(_)));
        let shadow: Option<&ShadowRefusals> = response.extensions().get();
        let left_out = shadow.map_or(0, |shadow| shadow.left_out().count());
        assert_eq!((is_refused, left_out), (!is_shadow, usize::from(is_shadow)));
        assert_eq!(fallbacks(&response), ["calls"]);
    }
}

/// The one without follows the failure mode.
#[tokio::test]
async fn of_two_choices_that_fail_one_may_have_a_fallback() {
    let other = || KeyedLimit::chosen(anyone, |_: &Parts| async { Err::<Limit, _>("no tenants today") });
    for is_first in [false, true] {
        let limits = [failing().fallback(PRO), other()];
        let limits = if is_first { limits } else { limits.into_iter().rev().collect::<Vec<_>>().try_into().unwrap() };
        for (mode, status, counted) in [(FailureMode::Open, 200, 1), (FailureMode::Closed, 503, 0)] {
            let store = MemoryStore::new();
            let layer = RateLimitLayer::new(store.clone()).limits(limits.clone()).unwrap().failure_mode(mode);
            let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), used(&store, &PRO).await), (status, counted));
            assert_eq!(degraded(&response), (Some(mode), "no tenants today".to_owned()));
        }
    }
    let both = [failing().fallback(PRO), other().fallback(BURST)];
    let app = RateLimitLayer::new(MemoryStore::new()).limits(both).unwrap().layer(service_fn(hello));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!((degraded(&response).0, fallbacks(&response)), (None, vec!["calls", "burst"]));
}

/// It is one of the limits that the store cannot decide.
#[tokio::test]
async fn without_a_store_a_fallback_follows_the_mode_with_the_others() {
    let local = FailureMode::Local(Share::one_of(3));
    for (mode, expected) in [(FailureMode::Open, [200, 200]), (FailureMode::Closed, [503, 503]), (local, [200, 429])] {
        let layer = RateLimitLayer::new(Failing).limit(failing().fallback(PRO)).failure_mode(mode);
        let app = layer.layer(service_fn(hello));
        for status in expected {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), fallbacks(&response)), (status, vec!["calls"]));
            assert_eq!(degraded(&response), (Some(mode), "out of order".to_owned()));
        }
    }
}

#[tokio::test]
async fn a_fallback_is_logged_at_most_once_a_second() {
    let log = Log::start();
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(BURST.by(anyone)).limit(failing().fallback(PRO));
    let app = layer.layer(service_fn(hello));
    for _ in 0..10 {
        app.clone().oneshot(request()).await.unwrap();
    }
    let text = log.text();
    let lines: Vec<_> = text.lines().filter(|line| line.contains("WARN")).collect();
    let [line] = lines[..] else { panic!("{text}") };
    assert!(line.contains("could not be chosen") && line.contains("no plans today"), "{line}");
    assert!(line.contains("fallbacks=\"calls\"") && !line.contains("mode="), "{line}");
}
