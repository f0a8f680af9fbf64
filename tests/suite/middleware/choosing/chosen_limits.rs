//! When a limit is chosen, and how it is decided.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Decision, Header, KeyedLimit, Limit, MemoryStore, RateLimitLayer, Rejection, Store,
    middleware::Degraded,
};

use super::{BURST, PRO, by_plan, chosen, request_of_plan};
use crate::support::{
    Fixture, for_every_store,
    requests::{anyone, figures, hello, json, request},
};

#[tokio::test]
async fn a_request_gets_the_limit_of_its_plan() {
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(KeyedLimit::chosen(Header::new("x-user"), by_plan));
    let app = layer.layer(service_fn(hello));
    let call = |plan: &str, user: &str| {
        let request = Request::get("/")
            .header("x-plan", plan)
            .header("x-user", user)
            .body(Body::empty())
            .unwrap();
        app.clone().oneshot(request)
    };
    let mut seen = Vec::new();
    // The last user has moved to another plan of the same name. The units used so far still count.
    for (plan, user) in [
        ("free", "ada"),
        ("free", "ada"),
        ("pro", "bob"),
        ("pro", "bob"),
        ("pro", "bob"),
        ("pro", "bob"),
        ("pro", "ada"),
    ] {
        let response = call(plan, user).await.unwrap();
        let [limit, remaining, ..] =
            figures(response.headers()).map(|figure| figure.unwrap_or_default().to_owned());
        seen.push((response.status().as_u16(), limit, remaining));
    }
    let seen: Vec<_> = seen
        .iter()
        .map(|(status, limit, remaining)| (*status, &**limit, &**remaining))
        .collect();
    let bob = [
        (200, "3", "2"),
        (200, "3", "1"),
        (200, "3", "0"),
        (429, "3", "0"),
    ];
    assert_eq!(seen[..2], [(200, "1", "0"), (429, "1", "0")]);
    assert_eq!(seen[2..6], bob);
    assert_eq!(seen[6], (200, "3", "1"));
}

#[tokio::test]
async fn choosing_no_limit_leaves_the_other_limits_in_force() {
    let store = MemoryStore::new();
    let service = service_fn(|request: Request<Body>| async move {
        let is_decided = request.extensions().get::<Decision>().is_some();
        Ok::<_, Infallible>(Response::new(Body::from(is_decided.to_string())))
    });
    let free = RateLimitLayer::new(store.clone()).limit(KeyedLimit::chosen(anyone, by_plan));
    let response = free
        .clone()
        .layer(service)
        .oneshot(request_of_plan("own"))
        .await
        .unwrap();
    assert_eq!(
        (response.status().as_u16(), figures(response.headers())),
        (200, [None; 4])
    );
    assert!(response.extensions().get::<Degraded>().is_none());
    assert_eq!(json(response).await, "false");
    assert_eq!(store.keys(), 0);

    let response = free
        .limit(BURST.by(anyone))
        .layer(service)
        .oneshot(request_of_plan("own"))
        .await
        .unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("10"), Some("9")]);
    assert_eq!(json(response).await, "true");
    assert_eq!(store.keys(), 1);
}

/// Requests of one key, one after the other: those of one plan take no unit of the other, and make
/// it forget none.
async fn two_windows_under_one_name_count_apart<S: Store + Clone>(fixture: Fixture<S>) {
    let fixture = fixture.without_refusal_cache();
    let by_plan = KeyedLimit::chosen(anyone, |parts: &Parts| {
        let is_short = parts.headers["x-plan"] == "short";
        if is_short {
            Limit::per_minute("calls", 2)
        } else {
            Limit::per_hour("calls", 4)
        }
    });
    let app = RateLimitLayer::new(fixture.limiter.clone())
        .limit(by_plan)
        .layer(service_fn(hello));
    for (seconds, plan, status, remaining) in [
        (0, "long", 200, "3"),
        (0, "long", 200, "2"),
        (0, "long", 200, "1"),
        (0, "long", 200, "0"),
        (59, "short", 200, "1"),
        (2, "long", 429, "0"),
        (0, "short", 200, "0"),
        (0, "long", 429, "0"),
        (0, "short", 429, "0"),
        (58, "short", 200, "0"),
        (0, "long", 429, "0"),
    ] {
        fixture.clock.advance(Duration::from_secs(seconds));
        let response = app.clone().oneshot(request_of_plan(plan)).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())[1]),
            (status, Some(remaining)),
            "{plan}"
        );
    }
}

for_every_store! {
    two_windows_under_one_name_count_apart
}

#[tokio::test]
async fn a_request_without_a_key_chooses_no_limit() {
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let limit = KeyedLimit::chosen(Header::new("x-user"), move |_: &Parts| {
        counted.fetch_add(1, Ordering::Relaxed);
        None::<Limit>
    });
    let response = RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(
        (response.status().as_u16(), asked.load(Ordering::Relaxed)),
        (400, 0)
    );
}

#[tokio::test]
async fn a_chosen_limit_charges_settles_and_refuses_like_any_other() {
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(BURST.by(anyone).settle(|_| 7))
        .limit(chosen(PRO).cost(|_| 2).settle(|_| 1))
        .layer(service_fn(hello));
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("3"), Some("2")]);
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("10"), Some("0")]);
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 429);

    let costly = RateLimitLayer::new(MemoryStore::new())
        .limit(chosen(PRO))
        .cost(|_| 4)
        .layer(service_fn(hello));
    let response = costly.oneshot(request()).await.unwrap();
    assert!(
        matches!(response.extensions().get(), Some(Rejection::NeverFits(_))),
        "{response:?}"
    );
}
