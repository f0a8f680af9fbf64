//! Timers that threads use again: each request ends at its own deadline, wherever it is polled.

use std::{
    cell::RefCell,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::Runtime,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_sliding_window::{
    Error, Limit, Limiter, MemoryStore, RedisStore,
    limiter::Breaker,
    testing::{Fault, FaultyStore},
};

use crate::support::{
    Numbers, TEST_TIMEOUT, ms, one_thread,
    proxy::Proxy,
    redis_server::{RedisServer, store_at},
    seconds, two_threads,
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000_000);

/// A limiter whose checks their callers send.
async fn used(server: &RedisServer) -> Limiter {
    let store = server.store().reply_timeout(seconds(3)).connect();
    let limiter = Limiter::new(store.await.unwrap()).breaker(Breaker::OFF);
    let patient = limiter.clone().deadline(TEST_TIMEOUT);
    for _ in 0..20 {
        let outcome = patient.check(&CALLS, "first", 1).await.unwrap();
        assert!(outcome.is_allowed());
    }
    limiter
}

/// Waves of requests while the server is silent. Some leave timers behind.
#[test]
fn each_request_ends_at_its_own_deadline() {
    let server = RedisServer::start();
    for runtime in [one_thread(), two_threads()] {
        let mut numbers = Numbers(7);
        let limiter = runtime.block_on(used(&server));
        server.pause();
        for wave in 0..12 {
            let mut all = JoinSet::new();
            for number in 0..[3, 60, 400][wave % 3] {
                let deadline = ms(numbers.below([1, 3, 30, 300][number % 4]));
                let limiter = limiter.clone().deadline(deadline);
                let leaves = numbers.below(3) == 0;
                let asks = async move {
                    if leaves {
                        let _ = timeout(deadline / 3, limiter.check(&CALLS, "ada", 1)).await;
                    }
                    let begun = Instant::now();
                    let outcome = limiter.check(&CALLS, "ada", 1).await;
                    (outcome, begun.elapsed(), deadline)
                };
                all.spawn_on(asks, runtime.handle());
            }
            for (outcome, took, deadline) in runtime.block_on(all.join_all()) {
                assert!(
                    matches!(outcome, Err(Error::TimedOut { .. })),
                    "{outcome:?}"
                );
                assert!(took >= deadline, "{took:?} of {deadline:?}");
            }
        }
        server.resume();
    }
}

/// A value of a thread that asks when the thread ends.
struct AsksAtTheEnd {
    runtime: Arc<Runtime>,
    limiter: Limiter,
    told: mpsc::Sender<bool>,
}

impl Drop for AsksAtTheEnd {
    fn drop(&mut self) {
        let asked = self.limiter.check(&CALLS, "ada", 1);
        let outcome = self.runtime.block_on(asked);
        let _ = self.told.send(outcome.is_ok());
    }
}

thread_local! {
    static LAST: RefCell<Option<AsksAtTheEnd>> = const { RefCell::new(None) };
}

#[test]
fn a_thread_that_ends_may_still_ask() {
    let server = RedisServer::start();
    let (told, outcome) = mpsc::channel();
    let runtime = Arc::new(two_threads());
    let limiter = runtime.block_on(used(&server)).deadline(ms(900));
    thread::spawn(move || {
        runtime.clone().block_on(async {
            LAST.set(Some(AsksAtTheEnd {
                runtime,
                limiter: limiter.clone(),
                told,
            }));
            let outcome = limiter.check(&CALLS, "ada", 1).await.unwrap();
            assert!(outcome.is_allowed());
        });
    });
    assert_eq!(outcome.recv_timeout(TEST_TIMEOUT), Ok(true));
}

/// The reply to the check that takes the place takes most of the life of the place.
#[tokio::test]
async fn a_place_whose_reply_is_late_is_renewed_in_time_under_any_deadline() {
    let place = Limit::concurrent("short", 1).freed_after(seconds(1));
    for deadline in [seconds(10), seconds(40 * 365 * 86_400), Duration::MAX] {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server).await;
        let store = store_at(proxy.url()).reply_timeout(seconds(10));
        let limiter = Limiter::new(store.connect().await.unwrap()).deadline(deadline);
        let near = RedisStore::connect(&server.url()).await.unwrap();
        let near = Limiter::new(near).deadline(TEST_TIMEOUT);
        for _ in 0..20 {
            let outcome = limiter.check(&CALLS, "first", 1).await.unwrap();
            assert!(outcome.is_allowed());
        }
        proxy.delay_replies(ms(650));
        let held = limiter.check(&place, "ada", 1).await.unwrap();
        proxy.delay_replies(Duration::ZERO);
        assert!(held.is_allowed() && !held.has_lost_place(), "{deadline:?}");
        for _ in 0..60 {
            let other = near.check(&place, "ada", 1).await.unwrap();
            assert!(!other.is_allowed(), "{deadline:?}: both hold the place");
            sleep(ms(20)).await;
        }
        assert!(!held.has_lost_place());
    }
}

/// A paused clock moves to the end of any deadline.
#[tokio::test(start_paused = true)]
async fn a_deadline_without_end_that_a_paused_clock_reaches_is_a_timeout() {
    let store = FaultyStore::new(MemoryStore::new());
    store.set(Fault::Hangs);
    let limiter = Limiter::new(store).deadline(Duration::MAX);
    let outcome = limiter.check(&CALLS, "ada", 1).await;
    assert!(
        matches!(outcome, Err(Error::TimedOut { .. })),
        "{outcome:?}"
    );
}
