//! Fallbacks: a limit in the place of one that cannot be chosen.

use std::{convert::Infallible, future::pending};

use http::request::Parts;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    KeyedLimit, Limit, MemoryStore, RateLimitLayer, Rejection, Store,
    limiter::{FailureMode, Share},
    middleware::{Degraded, ShadowRefusals},
};

use super::{
    BURST, FREE, PRO, chosen,
    failed_choices::{degraded, failing_choice, fallback_names, used},
};
use crate::support::{
    Fixture, for_every_store,
    log::Log,
    requests::{anyone, figures, hello, request},
    stores::failing,
};

async fn a_fallback_is_charged_with_the_others_in_every_mode<S: Store + Clone>(fixture: Fixture<S>) {
    let modes = [FailureMode::Open, FailureMode::Closed, FailureMode::Local(Share::one_of(2))];
    for (number, mode) in modes.into_iter().enumerate() {
        let named = |name: &str, units| Limit::new(format!("{name}-{number}"), units, PRO.window()).unwrap();
        let (burst, fallback) = (named("burst", 10), named("fallback", 3));
        let layer = RateLimitLayer::new(fixture.limiter.clone())
            .limit(burst.clone().by(anyone))
            .limit(failing_choice().fallback(fallback.clone()))
            .failure_mode_by(move |_, _| mode);
        let app = layer.layer(service_fn(hello));
        for (status, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0"), (429, "0")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)));
            assert_eq!(degraded(&response), (None, "no plans today".to_owned()));
            assert_eq!(fallback_names(&response), [fallback.name()]);
        }
        let key = || anyone(&request().into_parts().0).unwrap();
        let used = async |limit: &Limit| fixture.limiter.peek(limit, key()).await.unwrap().used();
        assert_eq!((used(&burst).await, used(&fallback).await), (3, 3), "a refusal costs nothing");
    }
}

for_every_store! {
    a_fallback_is_charged_with_the_others_in_every_mode
}

#[tokio::test(start_paused = true)]
async fn a_fallback_is_charged_when_the_choice_is_too_slow() {
    let hanging = KeyedLimit::chosen(anyone, |_: &Parts| pending::<Result<Limit, Infallible>>());
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(hanging.fallback(FREE)).fail_closed();
    let app = layer.layer(service_fn(hello));
    for status in [200, 429] {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), fallback_names(&response)), (status, vec!["calls"]));
        assert_eq!(degraded(&response), (None, "choosing a limit took longer than 50ms".to_owned()));
    }
}

/// A choice that succeeds, one that yields no limit, and a fixed limit.
#[tokio::test]
async fn a_fallback_is_ignored_when_the_choice_succeeds() {
    let limits = [chosen(Some(PRO)), PRO.by(anyone), chosen(None::<Limit>)];
    for (limit, remaining) in limits.into_iter().zip([Some("2"), Some("2"), None]) {
        let layer = RateLimitLayer::new(MemoryStore::new()).limit(limit.fallback(FREE));
        let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
        assert_eq!(figures(response.headers())[1], remaining);
        assert!(response.extensions().get::<Degraded>().is_none());
    }
}

/// The rules for duplicates, parts, settlements and shadow limits also hold for fallbacks.
#[tokio::test]
async fn a_fallback_is_charged_like_the_limit_it_replaces() {
    // Whichever is stricter, and in either order.
    for (one, other) in [(FREE, PRO), (PRO, FREE)] {
        for is_first in [false, true] {
            let store = MemoryStore::new();
            let (fixed, fallback) = (one.clone().by(anyone), failing_choice().fallback(other.clone()));
            let limits = if is_first { [fallback, fixed] } else { [fixed, fallback] };
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service_fn(hello));
            for status in [200, 429] {
                let response = app.clone().oneshot(request()).await.unwrap();
                assert_eq!(response.status(), status);
            }
            assert_eq!(store.keys(), 1);
        }
    }

    // At its own cost, and in at most as many parts as it has units.
    let store = MemoryStore::new();
    let split = failing_choice().fallback(PRO).split(8).cost(|_| 1);
    let app = RateLimitLayer::new(store.clone()).limit(split).cost(|_| 2).layer(service_fn(hello));
    let mut admitted = 0;
    for _ in 0..20 {
        admitted += u32::from(app.clone().oneshot(request()).await.unwrap().status() == 200);
    }
    assert_eq!((admitted, store.keys()), (3, 3));

    let store = MemoryStore::new();
    let settled = failing_choice().fallback(PRO).cost(|_| 3).settle(|outcome| outcome.cost - 1);
    let app = RateLimitLayer::new(store.clone()).limit(settled).layer(service_fn(hello));
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(used(&store, &PRO).await, 2);

    // In the shadow it counts and refuses nothing.
    let shadow = failing_choice().fallback(FREE).in_shadow();
    let app = RateLimitLayer::new(MemoryStore::new()).limit(BURST.by(anyone)).limit(shadow).layer(service_fn(hello));
    for (remaining, would_refuse) in [("9", vec![]), ("8", vec!["calls"])] {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some(remaining)));
        let shadow: Option<&ShadowRefusals> = response.extensions().get();
        assert_eq!(shadow.map(|shadow| shadow.names().collect()).unwrap_or(vec![]), would_refuse);
        assert_eq!((degraded(&response).0, fallback_names(&response)), (None, vec!["calls"]));
    }

    // A cost above the fallback is reported, with the fallback's name.
    for is_shadow in [false, true] {
        let costly = failing_choice().fallback(PRO).cost(|_| 4);
        let costly = if is_shadow { costly.in_shadow() } else { costly };
        let app = RateLimitLayer::new(MemoryStore::new()).limit(costly).layer(service_fn(hello));
        let response = app.oneshot(request()).await.unwrap();
        let is_refused = matches!(response.extensions().get(), Some(Rejection::NeverFits(_)));
        let shadow: Option<&ShadowRefusals> = response.extensions().get();
        let left_out = shadow.map_or(0, |shadow| shadow.left_out.len());
        assert_eq!((is_refused, left_out), (!is_shadow, usize::from(is_shadow)));
        assert_eq!(fallback_names(&response), ["calls"]);
    }
}

/// The choice without a fallback follows the failure mode.
#[tokio::test]
async fn one_of_two_failed_choices_may_have_a_fallback() {
    let other = || KeyedLimit::chosen(anyone, |_: &Parts| async { Err::<Limit, _>("no tenants today") });
    for is_first in [false, true] {
        let limits = [failing_choice().fallback(PRO), other()];
        let limits = if is_first { limits } else { limits.into_iter().rev().collect::<Vec<_>>().try_into().unwrap() };
        for (mode, status, counted) in [(FailureMode::Open, 200, 1), (FailureMode::Closed, 503, 0)] {
            let store = MemoryStore::new();
            let layer =
                RateLimitLayer::new(store.clone()).limits(limits.clone()).unwrap().failure_mode_by(move |_, _| mode);
            let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), used(&store, &PRO).await), (status, counted));
            assert_eq!(degraded(&response), (Some(mode), "no tenants today".to_owned()));
        }
    }
    let both = [failing_choice().fallback(PRO), other().fallback(BURST)];
    let app = RateLimitLayer::new(MemoryStore::new()).limits(both).unwrap().layer(service_fn(hello));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!((degraded(&response).0, fallback_names(&response)), (None, vec!["calls", "burst"]));
}

/// The store cannot decide the fallback either.
#[tokio::test]
async fn a_fallback_follows_the_failure_mode_when_the_store_fails() {
    let local = FailureMode::Local(Share::one_of(3));
    for (mode, expected) in [(FailureMode::Open, [200, 200]), (FailureMode::Closed, [503, 503]), (local, [200, 429])] {
        let layer =
            RateLimitLayer::new(failing()).limit(failing_choice().fallback(PRO)).failure_mode_by(move |_, _| mode);
        let app = layer.layer(service_fn(hello));
        for status in expected {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), fallback_names(&response)), (status, vec!["calls"]));
            assert_eq!(degraded(&response), (Some(mode), "out of order".to_owned()));
        }
    }
}

#[tokio::test]
async fn a_fallback_is_logged_at_most_once_a_second() {
    let log = Log::start();
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(BURST.by(anyone)).limit(failing_choice().fallback(PRO));
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
