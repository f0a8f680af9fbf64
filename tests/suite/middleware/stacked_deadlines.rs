//! Stacked layers: the deadlines and the breaker that they share.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::body::Body;
use http::Response;
use tokio::time::{self, sleep};
use tower::ServiceExt;
use tower_sliding_window::{
    Charge, Check, Decision, Error, Key, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore,
    Store,
    limiter::Breaker,
    middleware::Degraded,
    settlement::{Settled, Settlement},
    store::StoreFuture,
    testing::{Fault, FaultyStore},
};

use crate::support::{
    log::Log,
    ms,
    outage::{millis, row},
    redis_server::RedisServer,
    requests::{anyone, request},
    services::{App, around, handler},
    stores::{Watched, settled_costs, silent, with_fault},
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

/// Slack for a busy machine.
const SLACK: Duration = Duration::from_secs(5);

fn layer<S: Store + Clone>(store: &S, deadline: Duration) -> RateLimitLayer {
    RateLimitLayer::new(store.clone())
        .limit(CALLS.by(anyone))
        .deadline(deadline)
}

fn layer_without_breaker<S: Store + Clone>(store: &S, deadline: Duration) -> RateLimitLayer {
    let limiter = Limiter::new(store.clone())
        .deadline(deadline)
        .breaker(Breaker::OFF);
    RateLimitLayer::new(limiter).limit(CALLS.by(anyone))
}

/// One layer per deadline, from the outside in.
fn stacked<S: Store + Clone>(store: &S, deadlines: &[Duration]) -> App {
    deadlines.iter().rev().fold(handler(), |app, deadline| {
        around(&layer(store, *deadline), app)
    })
}

fn error(response: &Response<Body>) -> Option<&Error> {
    response
        .extensions()
        .get::<Degraded>()
        .map(|degraded| &degraded.error)
}

/// Three layers on one hanging server: a request waits for the longest deadline, not for their sum,
/// and one breaker opens.
#[tokio::test]
async fn layers_on_a_hanging_server_wait_only_for_the_longest_deadline() {
    let mut seen = Vec::new();
    for deadlines in [[200, 200, 200], [60, 120, 200], [200, 120, 60]] {
        let (server, log) = (RedisServer::start(), Log::start());
        let app = stacked(
            &RedisStore::builder(server.url()).build().unwrap(),
            &deadlines.map(ms),
        );
        while error(&app.clone().oneshot(request()).await.unwrap()).is_some() {}
        server.pause();
        let mut waits = Vec::new();
        for _ in 0..40 {
            let asked = Instant::now();
            // As late as a timer is on this machine.
            let late = tokio::spawn(async move {
                sleep(ms(200)).await;
                asked.elapsed() - ms(200)
            });
            let response = app.clone().oneshot(request()).await.unwrap();
            let waited = asked.elapsed();
            waits.push(if waited > ms(200) {
                waited - late.await.unwrap().min(waited)
            } else {
                waited
            });
            assert_eq!(response.status(), 200);
            assert!(error(&response).is_some());
        }
        server.resume();
        // On a busy machine two requests may be late. Without shared time, the five before the
        // breaker opens would wait for the sum.
        waits.sort();
        let [.., third, _, worst] = waits[..] else {
            panic!("{waits:?}")
        };
        assert!(third < ms(350), "{deadlines:?}: {waits:?}");
        let text = log.text();
        let lines = text.matches("the breaker opens").count();
        assert_eq!(lines, 1, "{text}");
        seen.push(format!("{deadlines:?} ms: {}", millis(worst)));
    }
    row(
        "Redis hangs (`SIGSTOP`) behind three layers, one around the other",
        format!(
            "worst answer with deadlines of {}; one line `the breaker opens` each time",
            seen.join(", ")
        ),
        "worst answer at most the longest deadline + 20 ms; one line",
    );
}

/// Whatever stores the layers use, and in any order.
#[tokio::test(start_paused = true)]
async fn a_request_waits_for_the_longest_deadline_of_its_layers() {
    for deadlines in [[30, 50, 40], [50, 30, 40], [40, 30, 50], [50, 50, 50]] {
        let [outer, middle, inner] = deadlines.map(ms);
        let app = around(&layer(&silent(), inner), handler());
        let app = around(&layer(&with_fault(Fault::Hangs), middle), app);
        let app = around(&layer(&silent(), outer), app);
        let asked = time::Instant::now();
        let response = app.oneshot(request()).await.unwrap();
        // A layer without time left still gets 5 ms.
        assert_eq!(response.status(), 200);
        assert!(
            (ms(50)..=ms(60)).contains(&asked.elapsed()),
            "{deadlines:?}: {:?}",
            asked.elapsed()
        );
    }
}

/// Also if the first decision is made, but late.
#[tokio::test(start_paused = true)]
async fn time_spent_in_one_layer_is_taken_from_the_next() {
    let inner = with_fault(Fault::Hangs);
    let app = around(&layer(&inner, ms(50)).fail_closed(), handler());
    let app = around(&layer(&with_fault(Fault::Slow(ms(20))), ms(50)), app);
    let asked = time::Instant::now();
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!(
        (response.status().as_u16(), asked.elapsed(), inner.calls()),
        (503, ms(50), 1)
    );
}

/// A hanging store of an outer layer does not disable a limit on a working store.
#[tokio::test(start_paused = true)]
async fn a_working_store_still_decides_with_no_time_left() {
    let inner = FaultyStore::new(MemoryStore::new());
    for fails_closed in [true, false] {
        let guard = layer(&inner, ms(50));
        let app = around(
            &if fails_closed {
                guard.fail_closed()
            } else {
                guard
            },
            handler(),
        );
        let begun = time::Instant::now();
        let response = around(&layer(&silent(), ms(50)), app)
            .oneshot(request())
            .await
            .unwrap();
        assert_eq!((response.status().as_u16(), begun.elapsed()), (200, ms(50)));
        assert!(
            matches!(error(&response), Some(Error::TimedOut { deadline, .. }) if *deadline == ms(50))
        );
    }
    assert_eq!(inner.calls(), 2);

    // An immediate decision is made even without time.
    let one = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("one", 1).by(anyone));
    let app = around(
        &layer_without_breaker(&silent(), ms(50)),
        around(&one, handler()),
    );
    for status in [200, 429] {
        assert_eq!(
            app.clone().oneshot(request()).await.unwrap().status(),
            status
        );
    }
}

/// If a request has little time left, a timeout says nothing about the store.
#[tokio::test(start_paused = true)]
async fn a_slow_layer_opens_no_breaker_of_an_inner_layer() {
    let inner = with_fault(Fault::Slow(ms(10))).with_local_state();
    let app = around(&layer(&inner, ms(50)), handler());
    let slow = around(
        &layer(&with_fault(Fault::Slow(ms(45))), ms(50)),
        app.clone(),
    );
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

/// A wait for capacity does not count as time for a decision.
#[tokio::test]
async fn a_wait_for_capacity_takes_no_time_from_an_inner_layer() {
    let tight = Limit::per("tight", 1, ms(500));
    let inner = around(
        &layer(&with_fault(Fault::Slow(ms(1))), ms(400)).fail_closed(),
        handler(),
    );
    let waiting = RateLimitLayer::new(MemoryStore::new())
        .limit(tight.by(anyone))
        .wait_up_to(SLACK);
    let app = around(&waiting, inner);
    let begun = Instant::now();
    for _ in 0..2 {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
    assert!(begun.elapsed() >= ms(500));
}

/// The store is also asked for capacity when no time is left.
#[tokio::test(start_paused = true)]
async fn a_waiting_layer_still_asks_with_no_time_left() {
    let store = FaultyStore::new(MemoryStore::new());
    let waiting = layer(&store, ms(50)).wait_up_to(ms(1_000));
    let begun = time::Instant::now();
    let app = around(&layer(&silent(), ms(50)), around(&waiting, handler()));
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    assert_eq!((begun.elapsed(), store.calls()), (ms(50), 1));
}

/// Notes how long each check may take.
struct Noting {
    store: MemoryStore,
    deadlines: Arc<Mutex<Vec<Duration>>>,
}

impl Store for Noting {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.decide_within(Arc::new(check), Duration::MAX)
    }

    fn decide_within(&self, check: Arc<Check>, deadline: Duration) -> StoreFuture<Decision> {
        self.deadlines.lock().unwrap().push(deadline);
        self.store.decide(Arc::unwrap_or_clone(check))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }
}

/// Also through stores that wrap it.
#[tokio::test(start_paused = true)]
async fn a_store_knows_how_long_its_caller_waits() {
    let deadlines = Arc::new(Mutex::new(Vec::new()));
    let noting = Noting {
        store: MemoryStore::new(),
        deadlines: Arc::clone(&deadlines),
    };
    let store = Arc::new(FaultyStore::new(noting));
    let asked = || deadlines.lock().unwrap().drain(..).collect::<Vec<_>>();
    assert!(
        Limiter::new(Arc::clone(&store))
            .deadline(ms(70))
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    assert_eq!(asked(), [ms(70)]);
    for (outer, left) in [(30, 20), (60, 5)] {
        let app = around(
            &layer(&silent(), ms(outer)),
            around(&layer(&store, ms(50)), handler()),
        );
        assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
        assert_eq!(asked(), [ms(left)], "after {outer} ms");
    }
    assert!(
        store
            .decide(Check::new(Charge::new(CALLS, "ada", 1).unwrap()))
            .await
            .unwrap()
            .is_allowed()
    );
    assert_eq!(asked(), [Duration::MAX]);
}

/// The settlements and blocks of stacked layers, and those of one layer, have one sum. What is late
/// goes on behind the response.
#[tokio::test(start_paused = true)]
async fn a_response_waits_for_the_longest_deadline_of_its_layers() {
    let limits = ["one", "two", "three", "four"].map(|name| Limit::per_hour(name, 1));
    for deadlines in [
        [300, 300, 300, 300],
        [100, 300, 200, 50],
        [50, 100, 200, 300],
    ] {
        for bans in [false, true] {
            let store = Watched::new(MemoryStore::new());
            let mut app = handler();
            for (limit, deadline) in limits.clone().into_iter().zip(deadlines) {
                let ban = Limit::per_hour("ban", 1);
                let keyed = limit.by(anyone).settle(|_| 1);
                let keyed = if bans { keyed.ban(ban, SLACK) } else { keyed };
                let layer = RateLimitLayer::new(store.clone())
                    .limit(keyed)
                    .deadline(ms(deadline));
                app = around(&layer, app);
            }
            store.set_for_settlements(Fault::Slow(SLACK));
            let begun = time::Instant::now();
            assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
            let waited = begun.elapsed();
            // A layer without time left still gets 5 ms.
            assert!((ms(300)..=ms(315)).contains(&waited), "{waited:?}");
            assert_eq!(settled_costs(&store).len(), 4, "{deadlines:?}");
            // The store's timers end with the test.
            time::sleep(2 * SLACK).await;
        }
    }
}

/// Under one layer: a settlement at the admission, one at the response, a count, and a block.
#[tokio::test(start_paused = true)]
async fn a_response_waits_for_one_deadline_of_its_layer() {
    let [early, late] = ["early", "late"].map(|name| Limit::per_hour(name, 10));
    let store = Watched::new(MemoryStore::new());
    let layer = RateLimitLayer::new(store.clone())
        .limit(early.by(anyone).settle(|_| 1))
        .limit(late.by(anyone).settle(|_| 1).heed_upstream())
        .deadline(ms(300));
    store.set_for_settlements(Fault::Slow(SLACK));
    let begun = time::Instant::now();
    let app = around(&layer, handler());
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(begun.elapsed(), ms(300));
    time::sleep(2 * SLACK).await;
    assert_eq!(settled_costs(&store).len(), 2, "both go on");
}
