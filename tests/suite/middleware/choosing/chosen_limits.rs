//! When a limit is chosen, and how it is decided.

use std::{
    convert::Infallible,
    error::Error as _,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, request::Parts};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Decision, Header, KeyedLimit, Limit, MemoryStore, RateLimitLayer, Rejection, Store,
    middleware::{Degraded, ShadowRefusals},
    store::ManualClock,
};

use super::{BURST, FREE, PRO, chosen, request_of_plan};
use crate::support::{
    Fixture, TEST_TIMEOUT, for_every_store,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, json, request},
};

/// Chooses by the header `x-plan`: `free`, `pro`, or no limit.
fn by_plan(parts: &Parts) -> impl Future<Output = Result<Option<Limit>, Infallible>> + Send + use<> {
    let plan = parts.headers.get("x-plan").map(|plan| plan.to_str().unwrap().to_owned());
    async move {
        tokio::task::yield_now().await;
        Ok(match plan.as_deref() {
            Some("free") => Some(FREE),
            Some("pro") => Some(PRO),
            _ => None,
        })
    }
}

#[tokio::test]
async fn a_request_gets_the_limit_of_its_plan() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(KeyedLimit::chosen(Header::new("x-user"), by_plan));
    let app = layer.layer(service_fn(hello));
    let call = |plan: &str, user: &str| {
        let request = Request::get("/").header("x-plan", plan).header("x-user", user).body(Body::empty()).unwrap();
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
        let [limit, remaining, ..] = figures(response.headers()).map(|figure| figure.unwrap_or_default().to_owned());
        seen.push((response.status().as_u16(), limit, remaining));
    }
    let seen: Vec<_> = seen.iter().map(|(status, limit, remaining)| (*status, &**limit, &**remaining)).collect();
    let bob = [(200, "3", "2"), (200, "3", "1"), (200, "3", "0"), (429, "3", "0")];
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
    let response = free.clone().layer(service).oneshot(request_of_plan("own")).await.unwrap();
    assert_eq!((response.status().as_u16(), figures(response.headers())), (200, [None; 4]));
    assert!(response.extensions().get::<Degraded>().is_none());
    assert_eq!(json(response).await, "false");
    assert_eq!(store.keys(), 0);

    let response = free.limit(BURST.by(anyone)).layer(service).oneshot(request_of_plan("own")).await.unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("10"), Some("9")]);
    assert_eq!(json(response).await, "true");
    assert_eq!(store.keys(), 1);
}

#[tokio::test(start_paused = true)]
async fn limits_are_chosen_concurrently_within_the_deadline() {
    let after = |millis: u64, name: &'static str| {
        KeyedLimit::chosen(anyone, move |_: &Parts| async move {
            sleep(Duration::from_millis(millis)).await;
            Ok::<_, Infallible>(Limit::per_minute(name, 5))
        })
    };
    let layer = RateLimitLayer::new(MemoryStore::new()).deadline(Duration::from_millis(40)).fail_closed();
    let asked = Instant::now();
    let app = layer.clone().limit(after(30, "a")).limit(after(30, "b")).layer(service_fn(hello));
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(asked.elapsed(), Duration::from_millis(30));

    let asked = Instant::now();
    let app = layer.limit(after(30, "a")).limit(after(50, "b")).layer(service_fn(hello));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), asked.elapsed()), (503, Duration::from_millis(40)));
    let Some(Rejection::Unavailable(error)) = response.extensions().get() else { panic!("{response:?}") };
    assert_eq!(error.source().unwrap().to_string(), "choosing a limit took longer than 40ms");
}

/// Requests of one key, one after the other: those of one plan take no unit of the other, and make it forget none.
async fn two_windows_under_one_name_count_apart<S: Store + Clone>(fixture: Fixture<S>) {
    let fixture = fixture.without_refusal_cache();
    let by_plan = KeyedLimit::chosen(anyone, |parts: &Parts| {
        let is_short = parts.headers["x-plan"] == "short";
        async move {
            Ok::<_, Infallible>(if is_short { Limit::per_minute("calls", 2) } else { Limit::per_hour("calls", 4) })
        }
    });
    let app = RateLimitLayer::new(fixture.limiter.clone()).limit(by_plan).layer(service_fn(hello));
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
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)), "{plan}");
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
        async { Ok::<_, Infallible>(None) }
    });
    let response =
        RateLimitLayer::new(MemoryStore::new()).limit(limit).layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), asked.load(Ordering::Relaxed)), (400, 0));
}

/// A layer of 5 a minute by address, with a limit that is looked up for each request, and the number of look-ups.
fn looked_up<S: Store>(store: S) -> (RateLimitLayer, Arc<AtomicUsize>) {
    let look_ups = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&look_ups);
    let plan = KeyedLimit::chosen(anyone, move |_: &Parts| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Infallible>(Limit::per_hour("plan", 10_000)) }
    });
    let trial = Limit::per_minute("trial", 3).by(anyone).in_shadow();
    let layer = RateLimitLayer::new(store).limit(plan).limit(Limit::per_minute("address", 5).by(anyone)).limit(trial);
    (layer.deadline(TEST_TIMEOUT), look_ups)
}

/// How many of the requests are admitted. Refusals report the limit by address.
async fn admitted(layer: &RateLimitLayer, requests: usize) -> usize {
    let app = layer.layer(service_fn(hello));
    let mut admitted = 0;
    for _ in 0..requests {
        let response = app.clone().oneshot(request()).await.unwrap();
        if response.status() == 200 {
            admitted += 1;
            continue;
        }
        let [limit, remaining, reset, retry] = figures(response.headers());
        assert_eq!((response.status().as_u16(), limit, remaining), (429, Some("5"), Some("0")));
        let seconds = |figure: Option<&str>| figure.unwrap().parse::<u64>().unwrap();
        assert!((1..=60).contains(&seconds(retry)) && seconds(reset) <= seconds(retry));
        let shadow: &ShadowRefusals = response.extensions().get().unwrap();
        assert_eq!(shadow.names().collect::<Vec<_>>(), ["trial"]);
    }
    admitted
}

#[tokio::test]
async fn no_limit_is_chosen_for_a_request_that_another_limit_refuses() {
    let clock = ManualClock::new();
    let (layer, look_ups) = looked_up(MemoryStore::new().clock(&clock));
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 5));
    clock.advance(Duration::from_secs(60));
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 10));
}

/// Redis must refuse once, and the refusal is cached for a second.
#[tokio::test]
async fn no_limit_is_chosen_for_a_request_with_a_cached_refusal() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let (layer, look_ups) = looked_up(server.store().clock(&clock).build().unwrap());
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 6));
    clock.advance(Duration::from_secs(1));
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (0, 7));
    clock.advance(Duration::from_secs(59));
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 13));
}

/// The wait depends on the chosen limit.
#[tokio::test(start_paused = true)]
async fn a_layer_that_waits_for_capacity_chooses_for_every_request() {
    let clock = ManualClock::new();
    let (layer, look_ups) = looked_up(MemoryStore::new().clock(&clock));
    let layer = layer.wait_up_to(Duration::from_secs(1));
    assert_eq!((admitted(&layer, 10).await, look_ups.load(Ordering::Relaxed)), (5, 10));
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

    let costly = RateLimitLayer::new(MemoryStore::new()).limit(chosen(PRO)).cost(|_| 4).layer(service_fn(hello));
    let response = costly.oneshot(request()).await.unwrap();
    assert!(matches!(response.extensions().get(), Some(Rejection::NeverFits(_))), "{response:?}");
}

#[test]
fn a_future_that_chooses_limits_is_send() {
    fn is_sent<T: Send>(_: T) {}
    let mut app = RateLimitLayer::new(MemoryStore::new()).limit(chosen(PRO)).layer(service_fn(hello));
    is_sent(tower::Service::call(&mut app, request()));
}
