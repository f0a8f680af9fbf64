//! Callers that ask beside the first in line, of a store that is far away.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_sliding_window::{
    Check, Decision, Key, Limit, Limiter, MemoryStore, Store,
    settlement::{Settled, Settlement},
    store::StoreFuture,
    testing::Fault,
};

use crate::support::{TEST_TIMEOUT, ms, stores::with_fault};

/// A store that is 80 ms away. Some replies take longer.
#[derive(Clone, Default)]
struct Far {
    store: MemoryStore,
    checks_sent: Arc<AtomicU64>,
}

impl Store for Far {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let (store, number) = (
            self.store.clone(),
            self.checks_sent.fetch_add(1, Ordering::SeqCst),
        );
        Box::pin(async move {
            sleep(ms(40)).await;
            let reply = store.decide(check).await;
            sleep(ms(40 + number * 7 % 40)).await;
            reply
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }
}

/// The units leave the window one after the other, and cheaper callers arrive more often than that.
#[tokio::test(start_paused = true)]
async fn callers_beside_the_first_do_not_starve_one_that_needs_more() {
    let limit = Limit::per("far", 100, Duration::from_secs(1));
    for cost in [50, 100] {
        let limiter = Limiter::new(with_fault(Fault::Slow(ms(80)))).deadline(TEST_TIMEOUT);
        let acquire = |cost| {
            let (limiter, limit) = (limiter.clone(), limit.clone());
            async move {
                limiter
                    .acquire(&limit, "ada", cost, Duration::MAX)
                    .await
                    .unwrap()
                    .is_allowed()
            }
        };
        let mut cheap = JoinSet::new();
        for number in 0..160 {
            cheap.spawn(acquire(1));
            sleep(ms(if number < 100 { 10 } else { 5 })).await;
        }
        let (costly, arrived) = (tokio::spawn(acquire(cost)), Instant::now());
        while !costly.is_finished() {
            assert!(
                arrived.elapsed() < Duration::from_secs(5),
                "it waits for {cost} units for ever"
            );
            cheap.spawn(acquire(1));
            sleep(ms(5)).await;
        }
    }
}

/// A hundred are left from time to time. Replies arrive one by one, and each tells of the same
/// units.
#[tokio::test(start_paused = true)]
async fn no_more_callers_ask_beside_the_first_than_there_are_units() {
    let (store, limit) = (
        Far::default(),
        Limit::per("far", 100, Duration::from_secs(1)),
    );
    let limiter = Limiter::new(store.clone()).deadline(TEST_TIMEOUT);
    assert!(
        limiter
            .check(&limit, "ada", 100)
            .await
            .unwrap()
            .is_allowed()
    );
    let mut waiting = JoinSet::new();
    for number in 0..1_000 {
        let (limiter, limit) = (limiter.clone(), limit.clone());
        waiting.spawn(async move {
            limiter
                .acquire(&limit, "ada", 1, Duration::MAX)
                .await
                .unwrap()
                .is_allowed()
        });
        // Until the first caller is refused there is no line, so new callers would also ask.
        sleep(ms(if number == 0 { 200 } else { 0 })).await;
    }
    let begun = Instant::now();
    assert!(
        waiting
            .join_all()
            .await
            .iter()
            .all(|is_allowed| *is_allowed)
    );
    assert!(
        begun.elapsed() < Duration::from_secs(13),
        "{:?} for ten windows",
        begun.elapsed()
    );
    let checks_sent = store.checks_sent.load(Ordering::SeqCst);
    assert!(
        checks_sent < 1_100,
        "{checks_sent} checks for 1,001 admissions"
    );
}

/// On one thread, many replies are read before the next callers ask.
#[tokio::test(start_paused = true)]
async fn a_line_moves_as_quickly_as_a_large_limit_allows() {
    let limit = Limit::per("far", 1_000, Duration::from_secs(1));
    let limiter = Limiter::new(with_fault(Fault::Slow(ms(200)))).deadline(TEST_TIMEOUT);
    assert!(
        limiter
            .check(&limit, "ada", 1_000)
            .await
            .unwrap()
            .is_allowed()
    );
    let mut waiting = JoinSet::new();
    for number in 0..3_000 {
        let (limiter, limit) = (limiter.clone(), limit.clone());
        waiting.spawn(async move {
            limiter
                .acquire(&limit, "ada", 1, Duration::MAX)
                .await
                .unwrap()
                .is_allowed()
        });
        sleep(ms(if number == 0 { 300 } else { 0 })).await;
    }
    let begun = Instant::now();
    assert!(
        waiting
            .join_all()
            .await
            .iter()
            .all(|is_allowed| *is_allowed)
    );
    assert!(
        begun.elapsed() < Duration::from_secs(6),
        "{:?} for three windows",
        begun.elapsed()
    );
}
