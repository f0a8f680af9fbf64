//! Limits that are chosen for each request.

use std::{
    convert::Infallible,
    error::Error as _,
    future::{Ready, ready},
    net::SocketAddr,
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
    ClientIp, Decision, Degraded, Header, Key, KeyError, KeyedLimit, Limit, Limiter, ManualClock, MemoryStore, PeerIp,
    RateLimitLayer, RedisStore, Rejection, ShadowRefusals, Store,
};

use crate::support::{
    Fixture, PATIENCE, for_every_store,
    log::Log,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, json, request},
};

const FREE: Limit = Limit::per_hour("calls", 1);
const PRO: Limit = Limit::per_hour("calls", 3);
const BURST: Limit = Limit::per_second("burst", 10);

/// By the plan in a header: `x-plan: free`, `pro`, or no limit.
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

/// Chooses one and the same limit.
fn always(limit: Limit) -> impl Fn(&Parts) -> Ready<Result<Limit, Infallible>> {
    move |_| ready(Ok(limit.clone()))
}

/// A choice that needs no time.
fn at_once(limit: Limit) -> KeyedLimit {
    KeyedLimit::chosen(anyone, always(limit))
}

fn of_plan(plan: &str) -> Request<Body> {
    Request::get("/").header("x-plan", plan).body(Body::empty()).unwrap()
}

fn refusals(response: &Response<Body>) -> Vec<String> {
    let refusals: Option<&ShadowRefusals> = response.extensions().get();
    let left_out = refusals.into_iter().flat_map(ShadowRefusals::left_out);
    left_out.map(|left_out| format!("{:?} {:?}", left_out.limit().map(Limit::name), left_out.rejection())).collect()
}

#[tokio::test]
async fn a_request_is_held_to_the_limit_of_its_plan() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(KeyedLimit::chosen(Header::new("x-user"), by_plan));
    let app = layer.layer(service_fn(hello));
    let call = |plan: &str, user: &str| {
        let request = Request::get("/").header("x-plan", plan).header("x-user", user).body(Body::empty()).unwrap();
        app.clone().oneshot(request)
    };
    let mut seen = Vec::new();
    // The last one has moved to another plan of the same name, and takes along what is used.
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
async fn no_limit_leaves_the_others_and_without_others_nothing_is_decided() {
    let store = MemoryStore::new();
    let service = service_fn(|request: Request<Body>| async move {
        let is_decided = request.extensions().get::<Decision>().is_some();
        Ok::<_, Infallible>(Response::new(Body::from(is_decided.to_string())))
    });
    let free = RateLimitLayer::new(store.clone()).limit(KeyedLimit::chosen(anyone, by_plan));
    let response = free.clone().layer(service).oneshot(of_plan("own")).await.unwrap();
    assert_eq!((response.status().as_u16(), figures(response.headers())), (200, [None; 4]));
    assert!(response.extensions().get::<Degraded>().is_none());
    assert_eq!(json(response).await, "false");
    assert_eq!(store.keys(), 0);

    let response = free.limit(BURST.by(anyone)).layer(service).oneshot(of_plan("own")).await.unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("10"), Some("9")]);
    assert_eq!(json(response).await, "true");
    assert_eq!(store.keys(), 1);
}

#[tokio::test(start_paused = true)]
async fn all_limits_are_chosen_at_once_within_the_deadline() {
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

for_every_store! {
    of_two_windows_under_one_name_the_shorter_holds_and_the_longer_forgets
}

/// One request after the other, for one key: what the docs warn of.
async fn of_two_windows_under_one_name_the_shorter_holds_and_the_longer_forgets<S: Store>(fixture: Fixture<S>) {
    let fixture = fixture.asking_every_time();
    let by_plan = KeyedLimit::chosen(anyone, |parts: &Parts| {
        let is_short = parts.headers["x-plan"] == "short";
        async move {
            Ok::<_, Infallible>(if is_short { Limit::per_minute("calls", 2) } else { Limit::per_hour("calls", 4) })
        }
    });
    let app = RateLimitLayer::on(fixture.limiter.clone()).limit(by_plan).layer(service_fn(hello));
    for (seconds, plan, status, remaining) in [
        (0, "long", 200, "3"),
        (0, "long", 200, "2"),
        (0, "long", 200, "1"),
        (0, "long", 200, "0"),
        (59, "short", 429, "0"),
        (2, "long", 429, "0"),
        // Here those of the first second are forgotten.
        (0, "short", 200, "1"),
        (0, "long", 200, "2"),
        (0, "short", 429, "0"),
    ] {
        fixture.clock.advance(Duration::from_secs(seconds));
        let response = app.clone().oneshot(of_plan(plan)).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)), "{plan}");
    }
}

/// As a client without a proxy is found by both of its addresses: only at run time is it known that two limits are one.
#[tokio::test]
async fn two_limits_that_are_one_are_decided_once_by_the_stricter() {
    let (few, many) = (Limit::per_minute("calls", 2), Limit::per_minute("calls", 10));
    let longer = Limit::per_hour("calls", 2);
    let direct = || {
        let mut request = request();
        request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 50_000)));
        request
    };
    for (fixed, choice, stricter) in [
        (&few, &many, &few),
        (&many, &few, &few),
        (&few, &longer, &longer),
        (&longer, &few, &longer),
        (&few, &few, &few),
    ] {
        for (is_chosen_first, are_both_chosen) in [(false, false), (true, false), (false, true)] {
            let store = MemoryStore::new();
            let chosen = KeyedLimit::chosen(ClientIp::behind(["10.0.0.0/8"]).unwrap(), always(choice.clone()));
            let fixed = if are_both_chosen {
                KeyedLimit::chosen(PeerIp::new(), always(fixed.clone()))
            } else {
                fixed.clone().by(PeerIp::new())
            };
            let limits = if is_chosen_first { [chosen, fixed] } else { [fixed, chosen] };
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service_fn(hello));
            let mut statuses = Vec::new();
            for _ in 0..50 {
                let response = app.clone().oneshot(direct()).await.unwrap();
                assert!(response.extensions().get::<Degraded>().is_none(), "{response:?}");
                statuses.push(response.status().as_u16());
            }
            assert_eq!((&statuses[..2], statuses[2..].iter().all(|status| *status == 429)), (&[200; 2][..], true));
            let key = PeerIp::new().key([192, 0, 2, 1].into());
            let decision = Limiter::new(store.clone()).check(stricter, key, 1).await.unwrap();
            let longest_wait = decision.retry_after().unwrap();
            assert!(longest_wait > stricter.window() - Duration::from_secs(50), "{longest_wait:?}");
            assert_eq!(store.keys(), 1);
        }
    }
}

#[tokio::test]
async fn of_two_limits_that_are_one_the_larger_cost_counts() {
    for costs in [[1, 2], [2, 1]] {
        let limits = [PRO.by(anyone).cost(move |_| costs[0]), at_once(PRO).cost(move |_| costs[1])];
        let app = RateLimitLayer::new(MemoryStore::new()).limits(limits).unwrap().layer(service_fn(hello));
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(figures(response.headers())[..2], [Some("3"), Some("1")]);
        assert_eq!(app.oneshot(request()).await.unwrap().status(), 429);
    }
    // One that is above the stricter never fits.
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(FREE.by(anyone)).limit(at_once(PRO).cost(|_| 2));
    let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert!(matches!(response.extensions().get(), Some(Rejection::NeverFits(_))), "{response:?}");
}

/// At the larger of what both say that it has cost. One that does not settle says what it charges.
#[tokio::test]
async fn two_limits_that_are_one_are_settled_together() {
    let plain = |limit: KeyedLimit| limit;
    let settled: fn(KeyedLimit) -> KeyedLimit = |limit| limit.cost(|_| 9).settle(|_| 4);
    let free: fn(KeyedLimit) -> KeyedLimit = |limit| limit.settle(|_| 0);
    let fixed = Limit::per_hour("calls", 20);
    for (one, other, used) in
        [(plain as fn(_) -> _, settled, 4), (plain, free, 1), (settled, free, 4), (free, free, 0), (plain, plain, 1)]
    {
        for (first, second) in [(one, other), (other, one)] {
            let store = MemoryStore::new();
            let limits = [first(fixed.clone().by(anyone)), second(at_once(fixed.clone()))];
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service_fn(hello));
            assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
            let key = anyone(&request().into_parts().0).unwrap();
            assert_eq!(Limiter::new(store).peek(&fixed, key).await.unwrap().used(), used);
        }
    }
}

/// The lease of the other gives nothing of it back.
#[tokio::test]
async fn two_limits_that_are_one_stay_charged_by_the_one_that_does_not_settle() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(&clock).build();
    let limits = [PRO.by(anyone), at_once(PRO).settle(|_| 0).lease(Duration::from_secs(1)).settle_dropped(0)];
    let broken = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("broken") });
    let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(broken);
    assert!(app.oneshot(request()).await.is_err());
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let limiter = Limiter::new(store);
    let key = || anyone(&request().into_parts().0).unwrap();
    for used in [1, 1, 0] {
        assert_eq!(limiter.peek(&PRO, key()).await.unwrap().used(), used);
        clock.advance(PRO.window() / 2);
    }
}

/// Whichever part of it is charged.
#[tokio::test]
async fn two_split_limits_that_are_one_are_charged_once() {
    let store = MemoryStore::new();
    let (whole, plan) = (Limit::per_hour("calls", 64), Limit::per_hour("calls", 640));
    let layer = RateLimitLayer::new(store.clone())
        .limit(whole.clone().by(anyone).split(8))
        .limit(at_once(plan).split(8))
        .layer(service_fn(hello));
    let mut admitted = 0;
    for _ in 0..200 {
        admitted += u64::from(layer.clone().oneshot(request()).await.unwrap().status() == 200);
    }
    let (limiter, split) = (Limiter::new(store), whole.split(8));
    let mut used = 0;
    for key in split.keys(anyone(&request().into_parts().0).unwrap()) {
        used += limiter.peek(split.limit(), key).await.unwrap().used();
    }
    assert_eq!((admitted, used), (64, 64));
}

#[tokio::test]
async fn limits_of_one_name_for_different_keys_are_two() {
    let store = MemoryStore::new();
    let other = |_: &Parts| Ok::<_, KeyError>(Key::new("test", "other"));
    let layer = RateLimitLayer::new(store.clone()).limit(at_once(PRO)).limit(FREE.by(other));
    assert_eq!(layer.layer(service_fn(hello)).oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(store.keys(), 2);

    // Names that are known beforehand are still compared where the layer is built.
    let layer = RateLimitLayer::new(store).limit(at_once(PRO)).limit(FREE.by(anyone)).limit(at_once(PRO));
    assert!(layer.try_limit(PRO.by(anyone)).is_err());
}

/// One that never fits is left out.
#[tokio::test]
async fn two_limits_in_the_shadow_that_are_one_are_decided_by_the_stricter() {
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(BURST.by(anyone))
        .limit(at_once(PRO).in_shadow())
        .limit(at_once(FREE).in_shadow())
        .layer(service_fn(hello));
    for refusals in [0, 1] {
        let response = app.clone().oneshot(request()).await.unwrap();
        let shadow: Option<&ShadowRefusals> = response.extensions().get();
        let names = shadow.map_or(0, |shadow| shadow.names().count());
        assert_eq!((response.status().as_u16(), names), (200, refusals));
    }
    let layer = RateLimitLayer::new(MemoryStore::new());
    let layer = layer.limit(at_once(PRO).in_shadow().cost(|_| 2)).limit(at_once(FREE).in_shadow());
    let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert!(refusals(&response)[0].contains("NeverFits"), "{:?}", refusals(&response));
}

#[tokio::test]
async fn without_a_key_nothing_is_chosen() {
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

/// A layer of 5 a minute by address and a limit that is looked up for each request, and how many look-ups there were.
fn looked_up<S: Store>(store: S) -> (RateLimitLayer<S>, Arc<AtomicUsize>) {
    let look_ups = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&look_ups);
    let plan = KeyedLimit::chosen(anyone, move |_: &Parts| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Infallible>(Limit::per_hour("plan", 10_000)) }
    });
    let trial = Limit::per_minute("trial", 3).by(anyone).in_shadow();
    let layer = RateLimitLayer::new(store).limit(plan).limit(Limit::per_minute("address", 5).by(anyone)).limit(trial);
    (layer.deadline(PATIENCE), look_ups)
}

/// How many of so many requests are admitted. The refusals tell of the limit by address.
async fn admitted<S: Store>(layer: &RateLimitLayer<S>, requests: usize) -> usize {
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
async fn nothing_is_chosen_for_requests_that_another_limit_refuses() {
    let clock = ManualClock::new();
    let (layer, look_ups) = looked_up(MemoryStore::builder().clock(&clock).build());
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 5));
    clock.advance(Duration::from_secs(60));
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 10));
}

/// Redis has to refuse once. That is remembered for a second.
#[tokio::test]
async fn nothing_is_chosen_for_requests_that_are_known_to_be_refused_by_redis() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let (layer, look_ups) = looked_up(RedisStore::builder(&server.url()).clock(&clock).build().unwrap());
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 6));
    clock.advance(Duration::from_secs(1));
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (0, 7));
    clock.advance(Duration::from_secs(59));
    assert_eq!((admitted(&layer, 1_000).await, look_ups.load(Ordering::Relaxed)), (5, 13));
}

/// What it waits for depends on the choice.
#[tokio::test(start_paused = true)]
async fn a_layer_that_waits_for_room_chooses() {
    let clock = ManualClock::new();
    let (layer, look_ups) = looked_up(MemoryStore::builder().clock(&clock).build());
    let layer = layer.wait_up_to(Duration::from_secs(1));
    assert_eq!((admitted(&layer, 10).await, look_ups.load(Ordering::Relaxed)), (5, 10));
}

#[tokio::test]
async fn a_chosen_limit_charges_settles_and_refuses_like_any_other() {
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(BURST.by(anyone).settle(|_| 7))
        .limit(at_once(PRO).cost(|_| 2).settle(|_| 1))
        .layer(service_fn(hello));
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("3"), Some("2")]);
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(figures(response.headers())[..2], [Some("10"), Some("0")]);
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 429);

    let dear = RateLimitLayer::new(MemoryStore::new()).limit(at_once(PRO)).cost(|_| 4).layer(service_fn(hello));
    let response = dear.oneshot(request()).await.unwrap();
    assert!(matches!(response.extensions().get(), Some(Rejection::NeverFits(_))), "{response:?}");
}

#[tokio::test(start_paused = true)]
async fn in_the_shadow_no_choice_is_wrong() {
    let log = Log::start();
    let failing = KeyedLimit::chosen(anyone, |_: &Parts| async { Err::<Limit, _>("no plans today") });
    let slow = KeyedLimit::chosen(anyone, |_: &Parts| async {
        sleep(Duration::from_secs(3_600)).await;
        Ok::<Limit, Infallible>(BURST)
    });
    let layer = RateLimitLayer::new(MemoryStore::new())
        .fail_closed()
        .limit(BURST.by(anyone))
        .limit(failing.in_shadow())
        .limit(slow.in_shadow())
        .limit(at_once(PRO).cost(|_| 4).in_shadow());
    let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some("9")));
    let [failed, late, dear] = &refusals(&response)[..] else { panic!("{:?}", refusals(&response)) };
    let is_so =
        failed.contains("Failed") && late.contains("TimedOut") && dear.starts_with(r#"Some("calls") NeverFits"#);
    assert!(is_so, "{failed}\n{late}\n{dear}");
    assert!(log.text().contains("choosing a limit failed: no plans today"), "{}", log.text());

    // Of two that are the same, the one in the shadow gives way, whichever comes first.
    for limits in [[at_once(FREE).in_shadow(), at_once(PRO)], [at_once(PRO), at_once(FREE).in_shadow()]] {
        let layer = RateLimitLayer::new(MemoryStore::new()).fail_closed().limits(limits).unwrap();
        let app = layer.layer(service_fn(hello));
        for (status, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)));
            if status == 200 {
                assert!(refusals(&response)[0].contains("Duplicate"), "{:?}", refusals(&response));
            }
        }
    }
}

/// Whose settlement is whose, when a later limit has taken the place of an earlier one.
#[tokio::test]
async fn a_limit_that_takes_anothers_place_is_settled_by_its_own_rule() {
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(at_once(PRO).in_shadow().settle(|_| 3))
        .limit(at_once(PRO).settle(|_| 0))
        .layer(service_fn(hello));
    for _ in 0..5 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some("3")));
    }
}

#[test]
fn a_future_that_chooses_can_be_sent() {
    fn is_sent<T: Send>(_: T) {}
    let mut app = RateLimitLayer::new(MemoryStore::new()).limit(at_once(PRO)).layer(service_fn(hello));
    is_sent(tower::Service::call(&mut app, request()));
}
