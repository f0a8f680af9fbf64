//! `RateLimitLayer::peek` and `reset`: how the limits of a layer stand for the client of a request.

use std::{convert::Infallible, future::ready};

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Check, Decision, Header, Key, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection, Store,
    error::{StoreError, StoreErrorKind},
    limiter::Share,
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use crate::support::{
    Fixture, TEST_TIMEOUT, for_every_store,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, request},
    seconds,
    stores::failing,
};

fn of(user: &str) -> Parts {
    Request::get("/").header("x-user", user).body(()).unwrap().into_parts().0
}

/// Name, used and left of each limit.
async fn usage(layer: &RateLimitLayer, user: &str) -> Vec<(String, u64, u64)> {
    let statuses = layer.peek(&of(user)).await.unwrap();
    statuses.iter().map(|status| (status.limit().name().to_owned(), status.used(), status.remaining())).collect()
}

async fn call(layer: &RateLimitLayer, user: &str) -> Response<Body> {
    let request = Request::from_parts(of(user), Body::empty());
    layer.clone().layer(service_fn(hello)).oneshot(request).await.unwrap()
}

fn owned<const N: usize>(expected: [(&str, u64, u64); N]) -> Vec<(String, u64, u64)> {
    expected.map(|(name, used, left)| (name.to_owned(), used, left)).to_vec()
}

async fn peek_shows_every_limit_and_spends_nothing<S: Store>(fixture: Fixture<S>) {
    let by_user = || Header::new("x-user");
    let chosen = |parts: &Parts| (parts.headers["x-user"] != "root").then(|| Limit::per_minute("plan", 9));
    let layer = RateLimitLayer::new(fixture.limiter)
        .limit(Limit::per_minute("calls", 5).by(by_user()))
        .limit(Limit::per_minute("hidden", 20).by(anyone).hidden())
        .limit(Limit::per_minute("split", 30).by(by_user()).split(3))
        .limit(KeyedLimit::chosen(by_user(), chosen))
        .limit(KeyedLimit::chosen(by_user(), |_: &Parts| Limit::per_hour("now", 8)).cost(|_| 2))
        .limit(Limit::per_minute("shadow", 1).by(by_user()).in_shadow())
        .limit(Limit::per_minute("settled", 7).by(by_user()).settle(|_| 3))
        .limit(Limit::per_minute("afterwards", 7).by(by_user()).count_afterwards(|_| 2));
    assert_eq!(usage(&layer, "ada").await[0], ("calls".to_owned(), 0, 5));
    for _ in 0..2 {
        assert_eq!(call(&layer, "ada").await.status(), 200);
        fixture.clock.advance(seconds(1));
    }
    let expected = owned([
        ("calls", 2, 3),
        ("hidden", 2, 18),
        ("split", 2, 28),
        ("plan", 2, 7),
        ("now", 4, 4),
        ("shadow", 1, 0),
        ("settled", 6, 1),
        ("afterwards", 4, 3),
    ]);
    for _ in 0..3 {
        assert_eq!(usage(&layer, "ada").await, expected);
    }
    let statuses = layer.peek(&of("ada")).await.unwrap();
    let flags: Vec<_> = statuses.iter().map(|status| (status.is_hidden(), status.is_shadow())).collect();
    assert_eq!((flags[1], flags[2], flags[5]), ((true, false), (false, false), (false, true)));
    // Until the first unit of any part leaves.
    assert_eq!((statuses[2].limit().units(), statuses[2].reset_after().as_secs()), (30, 58));
    assert!(statuses.iter().all(|status| status.retry_after().is_none()));

    // Another client, and one without a plan.
    assert_eq!(usage(&layer, "bob").await[..2], owned([("calls", 0, 5), ("hidden", 2, 18)]));
    let names: Vec<_> = usage(&layer, "root").await.into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["calls", "hidden", "split", "now", "shadow", "settled", "afterwards"]);
}

async fn reset_forgets_what_every_limit_counts<S: Store>(fixture: Fixture<S>) {
    let by_user = || Header::new("x-user");
    let layer = RateLimitLayer::new(fixture.limiter)
        .limit(Limit::per_minute("calls", 2).by(by_user()))
        .limit(Limit::per_hour("split", 30).by(by_user()).split(3))
        .limit(KeyedLimit::chosen(by_user(), |_: &Parts| Limit::per_hour("chosen", 8)));
    for user in ["ada", "bob"] {
        for status in [200, 200, 429, 429] {
            assert_eq!(call(&layer, user).await.status(), status);
        }
    }
    layer.reset(&of("ada")).await.unwrap();
    let unused = owned([("calls", 0, 2), ("split", 0, 30), ("chosen", 0, 8)]);
    assert_eq!(usage(&layer, "ada").await, unused);
    // This process does not remember the refusal either.
    assert_eq!(figures(call(&layer, "ada").await.headers())[1], Some("1"));
    assert_eq!(call(&layer, "bob").await.status(), 429);
    // Again, and of a client that has never called.
    layer.reset(&of("ada")).await.unwrap();
    layer.reset(&of("eve")).await.unwrap();
    assert_eq!(usage(&layer, "ada").await, unused);
}

/// A place is held now. Were it forgotten, more would be held than the limit.
async fn reset_frees_no_place<S: Store>(fixture: Fixture<S>) {
    let layer = RateLimitLayer::new(fixture.limiter)
        .limit(Limit::concurrent("streams", 1).by(anyone))
        .limit(Limit::per_minute("calls", 5).by(anyone));
    let service = layer.clone().layer(service_fn(async |request: Request<Body>| {
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(request.extensions().get::<Decision>().unwrap().clone());
        Ok::<_, Infallible>(response)
    }));
    let held = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(usage(&layer, "ada").await, owned([("streams", 1, 0), ("calls", 1, 4)]));
    layer.reset(&of("ada")).await.unwrap();
    assert_eq!(usage(&layer, "ada").await, owned([("streams", 1, 0), ("calls", 0, 5)]));
    assert_eq!(service.oneshot(request()).await.unwrap().status(), 429);
    assert!(!held.extensions().get::<Decision>().unwrap().has_lost_place());
}

for_every_store! {
    peek_shows_every_limit_and_spends_nothing
    reset_forgets_what_every_limit_counts
    reset_frees_no_place
}

#[tokio::test]
async fn a_layer_without_a_limit_for_the_request_shows_none() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(KeyedLimit::chosen(anyone, |_: &Parts| None));
    assert_eq!(usage(&layer, "ada").await, []);
    layer.reset(&of("ada")).await.unwrap();
}

/// More than are decided within a deadline.
#[tokio::test]
async fn many_parts_are_shown_and_reset() {
    const PARTS: u32 = 16_000;
    let server = RedisServer::start();
    let split = Limit::per_hour("split", PARTS.into()).by(anyone).split(PARTS);
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    let layer = RateLimitLayer::new(limiter).limit(split);
    for _ in 0..3 {
        assert_eq!(call(&layer, "ada").await.status(), 200);
    }
    server.run::<()>("CONFIG RESETSTAT");
    assert_eq!(usage(&layer, "ada").await, owned([("split", 3, u64::from(PARTS) - 3)]));
    assert!(server.script_calls() >= 100, "a script that shows thousands of parts keeps others waiting");
    layer.reset(&of("ada")).await.unwrap();
    assert_eq!(server.keys(), [""; 0]);
}

/// Limits that two extractors make one for a request.
#[tokio::test]
async fn duplicate_limits_are_an_error() {
    let few = KeyedLimit::chosen(anyone, |_: &Parts| Limit::per_minute("calls", 2));
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_minute("calls", 9).by(anyone)).limit(few);
    assert!(matches!(layer.peek(&of("ada")).await, Err(Rejection::NotSetUp(_))));
}

/// As fail-closed, whatever the mode of the layer.
#[tokio::test]
async fn what_cannot_be_shown_is_an_error() {
    let by_user = || Limit::per_minute("calls", 5).by(Header::new("x-user"));
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(by_user());
    let nobody = request().into_parts().0;
    for outcome in [layer.peek(&nobody).await.map(drop), layer.reset(&nobody).await] {
        assert!(matches!(outcome, Err(Rejection::NoKey(error)) if error.status() == StatusCode::BAD_REQUEST));
    }
    let failing = RateLimitLayer::new(failing()).limit(by_user());
    for layer in [failing.clone(), failing.clone().fail_closed(), failing.fail_local(Share::one_of(1))] {
        for outcome in [layer.peek(&of("ada")).await.map(drop), layer.reset(&of("ada")).await] {
            assert!(matches!(outcome, Err(Rejection::Unavailable(_))), "{outcome:?}");
        }
    }
}

/// A store that cannot reset one of the limits.
#[derive(Clone)]
struct Stubborn(MemoryStore);

impl Store for Stubborn {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.0.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        if limit.name() == "stubborn" {
            let error = StoreError::new("resetting a key", StoreErrorKind::WrongType, "a string");
            return Box::pin(ready(Err(error)));
        }
        self.0.reset(limit, key)
    }
}

#[tokio::test]
async fn if_one_limit_cannot_be_reset_the_others_are() {
    let by = |name: &'static str| Limit::per_minute(name, 5).by(Header::new("x-user"));
    for names in [["stubborn", "a", "b"], ["a", "stubborn", "b"], ["a", "b", "stubborn"]] {
        let layer = RateLimitLayer::new(Stubborn(MemoryStore::new())).limits(names.map(by)).unwrap();
        call(&layer, "ada").await;
        assert!(matches!(layer.reset(&of("ada")).await, Err(Rejection::Unavailable(_))));
        let used = names.map(|name| (name, u64::from(name == "stubborn")));
        assert_eq!(usage(&layer, "ada").await, owned(used.map(|(name, used)| (name, used, 5 - used))));
    }
}

/// The limits stand as they do, whether or not the request would be let in.
#[tokio::test]
async fn denied_and_exempt_clients_are_shown_too() {
    let by_user = Header::new("x-user");
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_minute("calls", 5).by(by_user.clone()));
    call(&layer, "ada").await;
    for layer in [
        layer.clone().deny(by_user.clone(), [by_user.key("ada")]),
        layer.clone().exempt(by_user.clone(), [by_user.key("ada")]),
        layer.skip(|_| true),
    ] {
        assert_eq!(usage(&layer, "ada").await, owned([("calls", 1, 4)]));
    }
    // A key that no layer has made is a client that has not called.
    assert_ne!(by_user.key("ada"), Key::from("ada"));
}
