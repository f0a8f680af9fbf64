//! Layers around layers: what one request waits for, and what they know of one store.

use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, Response};
use tokio::time::{self, sleep};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneService};
use tower_sliding_window::{
    Breaker, Degraded, Error, KeyedLimit, Limit, MemoryStore, RateLimitLayer, RedisStore, Store,
};

use crate::support::{
    log::Log,
    outage::{millis, row},
    redis_server::RedisServer,
    requests::{anyone, hello, request},
    stores::Silent,
    switched::{State, Switched},
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

/// The time of a machine that is busy.
const SLACK: Duration = Duration::from_secs(5);

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

type App = BoxCloneService<Request<Body>, Response<Body>, Infallible>;

fn handler() -> App {
    BoxCloneService::new(service_fn(hello))
}

fn layer<S: Store>(store: &S, deadline: Duration) -> RateLimitLayer<S> {
    RateLimitLayer::new(store.clone()).limit(CALLS.by(anyone)).deadline(deadline)
}

fn around<S: Store>(layer: &RateLimitLayer<S>, app: App) -> App
where
    S::Decide: Send,
{
    BoxCloneService::new(layer.layer(app))
}

/// The deadlines are those of the layers from the outside in.
fn stacked<S: Store>(store: &S, deadlines: &[Duration]) -> App {
    deadlines.iter().rev().fold(handler(), |app, deadline| around(&layer(store, *deadline), app))
}

fn error(response: &Response<Body>) -> Option<&Error> {
    response.extensions().get::<Degraded>().map(Degraded::error)
}

/// Three layers on one server that stands still: a request waits for the longest deadline, not for the sum of them, and one
/// breaker opens.
#[tokio::test]
async fn layers_on_a_server_that_hangs_wait_for_the_longest_deadline_together() {
    let mut seen = Vec::new();
    for deadlines in [[200, 200, 200], [60, 120, 200], [200, 120, 60]] {
        let (server, log) = (RedisServer::start(), Log::start());
        let app = stacked(&RedisStore::builder(&server.url()).build().unwrap(), &deadlines.map(ms));
        while error(&app.clone().oneshot(request()).await.unwrap()).is_some() {}
        server.pause();
        let mut waits = Vec::new();
        for _ in 0..40 {
            let asked = Instant::now();
            let response = app.clone().oneshot(request()).await.unwrap();
            waits.push(asked.elapsed());
            assert_eq!(response.status(), 200);
            assert!(error(&response).is_some());
        }
        server.resume();
        // On a busy machine two may be late. The five before the breaker opens would wait for the sum of the deadlines.
        waits.sort();
        let [.., third, _, worst] = waits[..] else { panic!("{waits:?}") };
        assert!(third < ms(350), "{deadlines:?}: {waits:?}");
        let text = log.text();
        let lines = text.matches("the breaker opens").count();
        assert_eq!(lines, 1, "{text}");
        seen.push(format!("{deadlines:?} ms: {}", millis(worst)));
    }
    row(
        "Redis hangs (`SIGSTOP`) behind three layers, one around the other",
        format!("worst answer with deadlines of {}; one line `the breaker opens` each time", seen.join(", ")),
        "worst answer at most the longest deadline + 20 ms; one line",
    );
}

/// Whatever stores they are on, and in whichever order.
#[tokio::test(start_paused = true)]
async fn a_request_waits_for_the_longest_deadline_of_its_layers() {
    for deadlines in [[30, 50, 40], [50, 30, 40], [40, 30, 50], [50, 50, 50]] {
        let [outer, middle, inner] = deadlines.map(ms);
        let app = around(&layer(&Silent, inner), handler());
        let app = around(&layer(&Switched::new(State::Hangs), middle), app);
        let app = around(&layer(&Silent, outer), app);
        let asked = time::Instant::now();
        let response = app.oneshot(request()).await.unwrap();
        // A layer with nothing left has 5 ms.
        assert_eq!(response.status(), 200);
        assert!((ms(50)..=ms(60)).contains(&asked.elapsed()), "{deadlines:?}: {:?}", asked.elapsed());
    }
}

/// Also where the first decision comes, but late.
#[tokio::test(start_paused = true)]
async fn what_one_layer_has_waited_the_next_has_less() {
    let inner = Switched::new(State::Hangs);
    let app = around(&layer(&inner, ms(50)).fail_closed(), handler());
    let app = around(&layer(&Switched::new(State::Takes(ms(20))), ms(50)), app);
    let asked = time::Instant::now();
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), asked.elapsed(), inner.asked()), (503, ms(50), 1));
}

/// A store that hangs further out turns no limit off on one that answers.
#[tokio::test(start_paused = true)]
async fn with_no_time_left_a_store_that_answers_still_decides() {
    let inner = Switched::new(State::Works);
    for fails_closed in [true, false] {
        let guard = layer(&inner, ms(50));
        let app = around(&if fails_closed { guard.fail_closed() } else { guard }, handler());
        let begun = time::Instant::now();
        let response = around(&layer(&Silent, ms(50)), app).oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), begun.elapsed()), (200, ms(50)));
        assert!(matches!(error(&response), Some(Error::TimedOut { deadline }) if *deadline == ms(50)));
    }
    assert_eq!(inner.asked(), 2);

    // What takes no waiting is decided all the same.
    let one = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("one", 1).by(anyone));
    let app = around(&layer(&Silent, ms(50)).breaker(Breaker::off()), around(&one, handler()));
    for status in [200, 429] {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), status);
    }
}

/// Where a request has little time left, that it runs out says nothing of the store.
#[tokio::test(start_paused = true)]
async fn a_slow_layer_opens_no_breaker_of_the_next() {
    let inner = Switched::with_epoch(State::Takes(ms(10)));
    let app = around(&layer(&inner, ms(50)), handler());
    let slow = around(&layer(&Switched::new(State::Takes(ms(45))), ms(50)), app.clone());
    for _ in 0..20 {
        let response = slow.clone().oneshot(request()).await.unwrap();
        assert!(matches!(error(&response), Some(Error::TimedOut { .. })));
        assert!(error(&app.clone().oneshot(request()).await.unwrap()).is_none());
    }
    for _ in 0..20 {
        let response = slow.clone().oneshot(request()).await.unwrap();
        assert!(matches!(error(&response), Some(Error::TimedOut { .. })));
    }
    assert!(error(&app.oneshot(request()).await.unwrap()).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_choice_and_its_decision_have_one_deadline() {
    let chosen_after = |time| {
        KeyedLimit::chosen(anyone, move |_| async move {
            sleep(time).await;
            Ok::<_, Infallible>(Limit::per_hour("chosen", 5))
        })
    };
    let store = Switched::new(State::Hangs);
    let layer_of = |limit| RateLimitLayer::new(store.clone()).limit(limit).breaker(Breaker::off());
    for (takes, waits, asked) in [(30, 80, 2), (60, 100, 3)] {
        // The layer inside has what the decision of this one has left. The choice takes nothing from it.
        let app = around(&layer(&store, ms(50)).breaker(Breaker::off()), handler());
        let app = around(&layer_of(chosen_after(ms(takes))), app);
        let begun = time::Instant::now();
        let response = app.oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), begun.elapsed()), (200, ms(waits)));
        assert_eq!(store.asked(), asked, "in all, after a choice of {takes} ms");
        assert!(matches!(error(&response), Some(Error::TimedOut { .. } | Error::LimitNotChosen(_))));
    }
}

/// To wait for room is not to wait for a decision.
#[tokio::test]
async fn a_wait_for_room_leaves_the_next_layer_its_time() {
    let tight = Limit::per("tight", 1, ms(500));
    let inner = around(&layer(&Switched::new(State::Takes(ms(1))), ms(400)).fail_closed(), handler());
    let waiting = RateLimitLayer::new(MemoryStore::new()).limit(tight.by(anyone)).wait_up_to(SLACK);
    let app = around(&waiting, inner);
    let begun = Instant::now();
    for _ in 0..2 {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
    assert!(begun.elapsed() >= ms(500));
}

/// A store that answers is asked for room, too, with nothing left.
#[tokio::test(start_paused = true)]
async fn with_no_time_left_room_is_asked_for() {
    let store = Switched::new(State::Works);
    let waiting = layer(&store, ms(50)).wait_up_to(ms(1_000));
    let begun = time::Instant::now();
    let app = around(&layer(&Silent, ms(50)), around(&waiting, handler()));
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    assert_eq!((begun.elapsed(), store.asked()), (ms(50), 1));
}
