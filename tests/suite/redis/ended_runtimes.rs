//! Futures that outlive their runtime: each ends at its next polls, none panics, and a future that
//! is kept holds up no other.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::atomic::{AtomicBool, Ordering},
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use tokio::{runtime::Handle, task::yield_now, time::timeout};
use tower::ServiceExt;
use tower_sliding_window::{
    Charge, Check, Decision, Key, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore, Store,
    limit::prefetch::DEFAULT_LIFE,
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use crate::support::{
    TEST_TIMEOUT, ms, one_thread,
    redis_server::RedisServer,
    requests::{anyone, request},
    seconds,
    services::{around, handler},
    two_threads,
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
const ONE: Limit = Limit::per("one", 1, ms(200));
const API: Limit = Limit::per_minute("api", 1_000_000).prefetch(DEFAULT_LIFE);

/// Much longer than any of these futures takes, and much shorter than the deadline of the limiters.
const BOUND: Duration = seconds(8);

/// How far the futures have come when their runtime ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    NotPolled,
    Queued,
    InFlight,
}

/// What polls them afterwards.
#[derive(Clone, Copy, Debug)]
enum Poller {
    Living,
    /// Without a runtime.
    Plain,
    /// With the context of the runtime that has ended.
    Ended,
}

type Asked = Pin<Box<dyn Future<Output = bool> + Send>>;

fn asked<T: Send + 'static, E: 'static>(
    future: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Asked {
    Box::pin(async { future.await.is_ok() })
}

/// The acquire is the first, because it needs a refusal before it waits in line.
const KINDS: [&str; 13] = [
    "acquire",
    "lone check",
    "queued check",
    "settlement",
    "reset",
    "limiter's check",
    "limiter's reset",
    "give back",
    "check of several charges",
    "peek",
    "reservation",
    "limiter's settlement",
    "layer",
];

/// One future of each kind.
fn ask_all(store: &RedisStore, limiter: &Limiter, admitted: &Decision) -> [Asked; KINDS.len()] {
    let check = || Check::new(Charge::new(CALLS, "ada", 1).unwrap());
    let settlement = Settlement::new(check(), admitted, |_| Some(0));
    let [resetting, acquiring, giving_back, reserving, settling] =
        [(); 5].map(|()| limiter.clone());
    let settled = settlement.clone();
    let app = around(
        &RateLimitLayer::new(limiter.clone())
            .limit(CALLS.by(anyone))
            .fail_closed(),
        handler(),
    );
    [
        asked(async move { acquiring.acquire(&ONE, "ada", 1, seconds(2)).await }),
        asked(store.decide(check())),
        asked(store.decide(check())),
        asked(store.settle(settlement)),
        asked(store.reset(CALLS, Key::from("eve"))),
        asked(limiter.check(&CALLS, "bob", 1)),
        asked(async move { resetting.reset(&CALLS, "joe").await }),
        Box::pin(async move {
            let _ = giving_back.shutdown(seconds(10)).await;
            true
        }),
        asked(limiter.check_all(check().and(Charge::new(ONE, "eve", 1).unwrap()).unwrap())),
        asked(limiter.peek(&CALLS, "ada")),
        asked(async move { reserving.reserve(&CALLS, "ada", 1, seconds(2)).await }),
        asked(async move { settling.settle(settled).await }),
        asked(app.oneshot(request())),
    ]
}

fn poll_now(future: &mut Asked) -> Poll<bool> {
    future
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
}

fn plainly(mut future: Asked) -> Option<bool> {
    let begun = Instant::now();
    while begun.elapsed() < BOUND {
        if let Poll::Ready(outcome) = poll_now(&mut future) {
            return Some(outcome);
        }
        thread::sleep(ms(5));
    }
    None
}

/// Each of the futures is the first to be polled once, while the others are kept.
fn outlive(moment: Moment, poller: Poller, connections: u32) {
    let (server, living) = (RedisServer::start(), two_threads());
    for first in 0..KINDS.len() {
        let store = server.store().connections(connections).build().unwrap();
        let limiter = Limiter::new(store.clone()).deadline(TEST_TIMEOUT);
        let ending = one_thread();
        let mut kept: Vec<_> = ending.block_on(async {
            let admitted = store
                .decide(Check::new(Charge::new(CALLS, "ada", 1).unwrap()))
                .await
                .unwrap();
            let all = ask_all(&store, &limiter, &admitted);
            let mut kept: Vec<_> = KINDS.into_iter().zip(all).collect();
            if moment == Moment::NotPolled {
                return kept;
            }
            let _ = limiter.check(&ONE, "ada", 1).await;
            if timeout(ms(20), &mut kept[0].1).await.is_ok() {
                drop(kept.remove(0));
            }
            for _ in 0..16 {
                assert!(limiter.check(&API, "ada", 1).await.unwrap().is_allowed());
            }
            server.pause();
            poll_fn(|cx| {
                kept.retain_mut(|(kind, one)| {
                    *kind == "acquire" || one.as_mut().poll(cx).is_pending()
                });
                Poll::Ready(())
            })
            .await;
            for _ in 0..if moment == Moment::InFlight { 30 } else { 0 } {
                yield_now().await;
            }
            kept
        });
        let context = ending.handle().clone();
        drop(ending);
        server.resume();
        let place = first % kept.len();
        kept.rotate_left(place);
        while !kept.is_empty() {
            let (kind, future) = kept.remove(0);
            let ended = match poller {
                Poller::Living => living.block_on(async { timeout(BOUND, future).await.ok() }),
                Poller::Plain => plainly(future),
                Poller::Ended => {
                    let _entered = context.enter();
                    plainly(future)
                }
            };
            assert!(
                ended.is_some(),
                "the {kind} never ends: {moment:?}, {poller:?}, {connections}"
            );
            let other = living.block_on(limiter.check(&CALLS, "someone else", 1));
            assert!(
                other.as_ref().is_ok_and(Decision::is_allowed),
                "after the {kind}, {moment:?}: {other:?}"
            );
        }
    }
}

fn outlive_at(moment: Moment, poller: Poller) {
    for connections in [1, 2] {
        outlive(moment, poller, connections);
    }
}

macro_rules! matrix {
    ($($test:ident: $moment:ident, $poller:ident;)*) => {
        $(#[test] fn $test() { outlive_at(Moment::$moment, Poller::$poller); })*
    };
}

matrix! {
    not_polled_before_and_then_by_a_living_runtime: NotPolled, Living;
    not_polled_before_and_then_by_no_runtime: NotPolled, Plain;
    not_polled_before_and_then_within_the_ended_runtime: NotPolled, Ended;
    queued_and_then_polled_by_a_living_runtime: Queued, Living;
    queued_and_then_polled_by_no_runtime: Queued, Plain;
    queued_and_then_polled_within_the_ended_runtime: Queued, Ended;
    in_flight_and_then_polled_by_a_living_runtime: InFlight, Living;
    in_flight_and_then_polled_by_no_runtime: InFlight, Plain;
    in_flight_and_then_polled_within_the_ended_runtime: InFlight, Ended;
}

/// A store that never answers.
struct Silent;

impl Store for Silent {
    fn decide(&self, _: Check) -> StoreFuture<Decision> {
        Box::pin(std::future::pending())
    }

    fn settle(&self, _: Settlement) -> StoreFuture<Settled> {
        Box::pin(std::future::pending())
    }

    fn reset(&self, _: Limit, _: Key) -> StoreFuture<()> {
        Box::pin(std::future::pending())
    }
}

/// A check that waits for a store's reply when its runtime ends, whatever polls it then.
#[test]
fn a_deadline_outlives_its_runtime() {
    let limiter = Limiter::new(Silent).deadline(ms(300));
    let begin = || {
        let ending = one_thread();
        let mut check: Asked = asked(limiter.check(&CALLS, "ada", 1));
        assert!(ending.block_on(poll_fn(|cx| Poll::Ready(
            check.as_mut().poll(cx).is_pending()
        ))));
        (ending, check)
    };
    let (ended, check) = begin();
    drop(ended);
    assert_eq!(
        one_thread().block_on(async { timeout(BOUND, check).await }),
        Ok(false),
        "by another runtime"
    );
    let (ended, check) = begin();
    drop(ended);
    assert_eq!(plainly(check), Some(false), "without a runtime");
    let (ended, check) = begin();
    let context = ended.handle().clone();
    drop(ended);
    let entered = context.enter();
    assert_eq!(plainly(check), Some(false), "within the ended runtime");
    assert_eq!(
        plainly(asked(limiter.check(&CALLS, "ada", 1))),
        Some(false),
        "begun within the ended runtime"
    );
    drop(entered);
    assert_eq!(
        plainly(asked(limiter.check(&CALLS, "ada", 1))),
        Some(false),
        "begun without a runtime"
    );
    // A runtime that is not driven fires no timer.
    let (idle, check) = begin();
    let outcome = one_thread().block_on(async { timeout(BOUND, check).await });
    assert_eq!(outcome, Ok(false), "by another, while one is idle");
    drop(idle);
}

/// A caller in line whose runtime ends gets an error.
#[test]
fn a_place_in_line_ends_with_its_runtime() {
    let limiter = Limiter::new(MemoryStore::new());
    let begin = |behind: bool| {
        let ending = one_thread();
        let mut acquire = [(); 2].map(|()| {
            let limiter = limiter.clone();
            asked(async move { limiter.acquire(&ONE, "ada", 1, seconds(5)).await })
        });
        ending.block_on(async {
            let _ = limiter.check(&ONE, "ada", 1).await;
            poll_fn(|cx| {
                Poll::Ready(
                    acquire
                        .each_mut()
                        .map(|one| one.as_mut().poll(cx).is_pending()),
                )
            })
            .await;
        });
        let [first, second] = acquire;
        (ending, if behind { second } else { first })
    };
    for behind in [false, true] {
        let (ended, acquire) = begin(behind);
        drop(ended);
        assert_eq!(
            one_thread().block_on(async { timeout(BOUND, acquire).await }),
            Ok(false),
            "by another runtime"
        );
        let (ended, acquire) = begin(behind);
        drop(ended);
        assert_eq!(plainly(acquire), Some(false), "without a runtime");
        let (ended, acquire) = begin(behind);
        let context = ended.handle().clone();
        drop(ended);
        let _entered = context.enter();
        assert_eq!(plainly(acquire), Some(false), "within the ended runtime");
    }
}

/// A thread polls while another ends the runtime.
#[test]
fn a_runtime_may_end_during_a_poll() {
    let limiter = Limiter::new(Silent).deadline(ms(500));
    for _ in 0..50 {
        let ending = two_threads();
        let mut check: Asked = asked(limiter.check(&CALLS, "ada", 1));
        assert!(ending.block_on(poll_fn(|cx| Poll::Ready(
            check.as_mut().poll(cx).is_pending()
        ))));
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let living = one_thread();
                let _entered = living.enter();
                while !is_over.load(Ordering::Relaxed) && poll_now(&mut check).is_pending() {
                    assert!(Handle::try_current().is_ok());
                }
            });
            drop(ending);
            thread::sleep(ms(1));
            is_over.store(true, Ordering::Relaxed);
        });
    }
}
