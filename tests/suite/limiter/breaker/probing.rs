//! When a breaker opens and closes, and how it probes the store.

use std::{
    future::ready,
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime,
    time::{advance, sleep},
};
use tower_sliding_window::{
    Algorithm, Check, Decision, Error, Key, Limit, Limiter, MemoryStore, Store,
    error::{StoreError, StoreErrorKind},
    limiter::Breaker,
    settlement::{Settled, Settlement},
    store::StoreFuture,
    testing::{Fault, FaultyStore},
};

use super::{CALLS, INTERVAL, at_once, is_open, limiter_with_open_breaker};
use crate::support::{TEST_TIMEOUT, let_tasks_run, log::Log, stores::with_fault};

#[tokio::test(start_paused = true)]
async fn an_open_breaker_sends_the_store_only_probes() {
    for fault in [Fault::Fails, Fault::Hangs] {
        let (limiter, store) = limiter_with_open_breaker(fault).await;
        for _ in 0..1_000 {
            match (at_once(limiter.check(&CALLS, "ada", 1)), fault) {
                (Err(Error::BreakerOpen(cause)), Fault::Fails) => {
                    assert!(matches!(*cause, Error::Unavailable(_)));
                }
                (Err(Error::BreakerOpen(cause)), _) => {
                    assert!(matches!(*cause, Error::TimedOut { .. }));
                }
                (answer, _) => panic!("{answer:?}"),
            }
        }
        let_tasks_run().await;
        assert_eq!(store.calls(), 6, "one probe");

        for probes in 2..10 {
            advance(INTERVAL - Duration::from_millis(1)).await;
            assert!(is_open(&limiter) && store.calls() == 4 + probes);
            advance(Duration::from_millis(1)).await;
            assert!(is_open(&limiter) && is_open(&limiter));
            let_tasks_run().await;
            assert_eq!(store.calls(), 5 + probes);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_successful_probe_closes_the_breaker_and_spends_nothing() {
    let (limiter, store) = limiter_with_open_breaker(Fault::Fails).await;
    store.set(Fault::None);
    assert!(is_open(&limiter), "the caller does not wait for its probe");
    let_tasks_run().await;
    let decision = limiter.check(&CALLS, "ada", 1).await.unwrap();
    assert_eq!(decision.binding().used, 1);
}

/// No caller has come since it opened, so nothing has probed the store.
#[tokio::test(start_paused = true)]
async fn the_first_check_long_after_it_has_opened_asks_the_store() {
    for failures in [5, 6] {
        let store = with_fault(Fault::Fails);
        let limiter = Limiter::new(store.clone());
        for _ in 0..failures {
            assert!(limiter.check(&CALLS, "ada", 1).await.is_err());
        }
        store.set(Fault::None);
        advance(Duration::from_secs(3_600)).await;
        let_tasks_run().await;
        assert!(
            limiter.check(&CALLS, "ada", 1).await.is_ok(),
            "after {failures} failures"
        );
    }
}

/// The first check after an outage is decided, however long the limiter was idle.
#[tokio::test(start_paused = true)]
async fn after_the_first_caller_probes_continue_until_the_breaker_closes() {
    for fault in [Fault::Fails, Fault::Hangs] {
        let (limiter, store) = limiter_with_open_breaker(fault).await;
        assert!(is_open(&limiter));
        sleep(10 * INTERVAL - Duration::from_millis(1)).await;
        assert_eq!(store.calls(), 5 + 10);
        store.set(Fault::None);
        sleep(INTERVAL).await;
        assert_eq!(store.calls(), 5 + 11);
        sleep(10 * INTERVAL).await;
        assert_eq!(
            store.calls(),
            5 + 11,
            "the breaker is closed and sends no more probes"
        );
        assert_eq!(
            limiter
                .check(&CALLS, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            1
        );
    }
}

/// A probe writes nothing, so it may succeed while writes fail.
#[tokio::test(start_paused = true)]
async fn one_failure_after_a_probe_reopens_the_breaker_and_five_after_a_reply() {
    let (limiter, store) = limiter_with_open_breaker(Fault::Fails).await;
    store.set(Fault::None);
    assert!(is_open(&limiter));
    let_tasks_run().await;
    store.set(Fault::Fails);
    assert!(matches!(
        limiter.check(&CALLS, "ada", 1).await,
        Err(Error::Unavailable(_))
    ));
    assert!(is_open(&limiter));

    store.set(Fault::None);
    sleep(2 * INTERVAL).await;
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    store.set(Fault::Fails);
    for _ in 0..5 {
        assert!(matches!(
            limiter.check(&CALLS, "ada", 1).await,
            Err(Error::Unavailable(_))
        ));
    }
    assert!(is_open(&limiter));
}

#[tokio::test]
async fn a_success_restarts_the_failure_count() {
    let store = with_fault(Fault::Fails);
    let limiter = Limiter::new(store.clone());
    for round in 0..100 {
        store.set(if round % 5 == 4 {
            Fault::None
        } else {
            Fault::Fails
        });
        let answer = limiter.check(&CALLS, "ada", 1).await;
        assert!(!matches!(answer, Err(Error::BreakerOpen(_))), "{round}");
    }
    assert_eq!(store.calls(), 100);
}

#[tokio::test(start_paused = true)]
async fn only_one_probe_is_in_flight() {
    let store = with_fault(Fault::Hangs);
    let limiter = Limiter::new(store.clone()).deadline(Duration::from_secs(10));
    let limiter = limiter.breaker(Breaker::new(1, Duration::from_millis(1)));
    limiter.check(&CALLS, "ada", 1).await.unwrap_err();
    for _ in 0..100 {
        assert!(is_open(&limiter));
        advance(Duration::from_millis(10)).await;
    }
    assert_eq!((store.calls(), store.hanging()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_probe_is_dropped_with_the_last_clone_of_its_limiter() {
    let (limiter, store) = limiter_with_open_breaker(Fault::Hangs).await;
    let clone = limiter.clone();
    assert!(is_open(&limiter));
    let_tasks_run().await;
    drop(limiter);
    let_tasks_run().await;
    assert_eq!(store.hanging(), 1);
    assert!(is_open(&clone), "clones have one breaker");
    drop(clone);
    let_tasks_run().await;
    assert_eq!(store.hanging(), 0, "well before its deadline");
}

#[tokio::test(start_paused = true)]
async fn settlements_and_resets_fail_at_once_while_the_breaker_is_open() {
    let store = FaultyStore::new(MemoryStore::new());
    let limiter = Limiter::new(store.clone());
    let reservation = limiter
        .reserve(&CALLS, "ada", 10, Duration::MAX)
        .await
        .unwrap()
        .unwrap();
    store.set(Fault::Hangs);
    for _ in 0..3 {
        assert!(matches!(
            reservation.settle(1).await,
            Err(Error::TimedOut { .. })
        ));
    }
    for _ in 0..2 {
        assert!(matches!(
            limiter.reset(&CALLS, "ada").await,
            Err(Error::TimedOut { .. })
        ));
    }
    assert!(matches!(
        at_once(reservation.settle(1)),
        Err(Error::BreakerOpen(_))
    ));
    assert!(matches!(
        at_once(limiter.reset(&CALLS, "ada")),
        Err(Error::BreakerOpen(_))
    ));

    // A caller that only settles also gets the breaker closed.
    let_tasks_run().await;
    store.set(Fault::None);
    assert!(matches!(
        at_once(reservation.settle(1)),
        Err(Error::BreakerOpen(_))
    ));
    sleep(2 * INTERVAL).await;
    assert!(reservation.settle(1).await.unwrap().was_applied);
}

/// A store that counts by exact logs only.
struct LogsOnly(MemoryStore);

impl Store for LogsOnly {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        if check
            .charges()
            .all(|charge| charge.limit().algorithm() == Algorithm::SLIDING_LOG)
        {
            return self.0.decide(check);
        }
        let error = StoreError::new(
            "deciding a check",
            StoreErrorKind::Other,
            "this store counts by exact logs only",
        );
        Box::pin(ready(Err(error.of_one_check())))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

#[tokio::test]
async fn errors_that_are_not_store_failures_do_not_count() {
    let limiter = Limiter::new(FaultyStore::new(MemoryStore::new()));
    for _ in 0..10 {
        let never = limiter.check(&CALLS, "ada", 1_000_001).await;
        assert!(matches!(never, Err(Error::NeverFits(_))));
    }
    assert!(limiter.check(&CALLS, "ada", 1).await.is_ok());

    // A store that fails some checks decides the others.
    let limiter = Limiter::new(LogsOnly(MemoryStore::new()));
    let counted = CALLS.with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
    for _ in 0..10 {
        assert!(matches!(
            limiter.check(&counted, "ada", 1).await,
            Err(Error::Unavailable(_))
        ));
    }
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
}

#[tokio::test]
async fn the_breaker_can_be_configured_and_switched_off() {
    let store = with_fault(Fault::Fails);
    for breaker in [Breaker::OFF, Breaker::new(21, Duration::from_millis(200))] {
        let limiter = Limiter::new(store.clone()).breaker(breaker);
        for _ in 0..21 {
            assert!(matches!(
                limiter.check(&CALLS, "ada", 1).await,
                Err(Error::Unavailable(_))
            ));
        }
        assert_eq!(is_open(&limiter), breaker != Breaker::OFF);
    }
}

/// It keeps its failures, so their number is bounded.
#[tokio::test]
async fn a_breaker_opens_after_ten_thousand_failures_at_the_latest() {
    let store = with_fault(Fault::Fails);
    let limiter =
        Limiter::new(store.clone()).breaker(Breaker::new(u32::MAX, Duration::from_millis(200)));
    for _ in 0..10_000 {
        assert!(matches!(
            limiter.check(&CALLS, "ada", 1).await,
            Err(Error::Unavailable(_))
        ));
    }
    assert!(is_open(&limiter) && store.calls() == 10_000);
}

#[test]
fn without_a_runtime_the_callers_own_check_is_the_probe() {
    let store = with_fault(Fault::Fails);
    let limiter = Limiter::new(store.clone())
        .deadline(INTERVAL)
        .breaker(Breaker::new(1, INTERVAL));
    assert!(matches!(
        at_once(limiter.check(&CALLS, "ada", 1)),
        Err(Error::Unavailable(_))
    ));
    assert!(is_open(&limiter));
    store.set(Fault::None);
    // Twice the sum of the interval and the deadline.
    thread::sleep(4 * INTERVAL);
    assert!(
        at_once(limiter.check(&CALLS, "ada", 1))
            .unwrap()
            .is_allowed()
    );
    assert!(!is_open(&limiter));
}

/// A program that blocks on each check, and whose runtime stands still in between.
#[test]
fn a_callers_own_check_is_the_probe_when_no_runtime_drives_one() {
    let store = with_fault(Fault::Fails);
    let limiter = Limiter::new(store.clone()).deadline(Duration::from_millis(1));
    let limiter = limiter.breaker(Breaker::new(1, Duration::from_millis(1)));
    let runtime = runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let check = || runtime.block_on(limiter.check(&CALLS, "ada", 1));
    assert!(matches!(check(), Err(Error::Unavailable(_))));
    store.set(Fault::None);
    let begun = Instant::now();
    while check().is_err() {
        assert!(
            begun.elapsed() < TEST_TIMEOUT,
            "asked {} times",
            store.calls()
        );
        thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test(start_paused = true)]
async fn opening_and_closing_are_logged_once_a_second() {
    let log = Log::start();
    let store = with_fault(Fault::Fails);
    let limiter = Limiter::new(store.clone()).breaker(Breaker::new(1, Duration::from_millis(200)));
    for _ in 0..3 {
        store.set(Fault::Fails);
        limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        store.set(Fault::None);
        advance(INTERVAL).await;
        assert!(is_open(&limiter));
        let_tasks_run().await;
        assert!(!is_open(&limiter));
    }
    let text = log.text();
    let count = |what| text.matches(what).count();
    assert_eq!(
        (count("the breaker opens"), count("the breaker closes")),
        (1, 1),
        "{text}"
    );
    assert!(text.contains("out of order"), "with the cause: {text}");
}
