//! A store that fails between the return of units and the next check.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Key, Limit, Limiter, MemoryStore, RedisStore, Store,
    error::StoreErrorKind,
    limiter::{Breaker, Share},
    settlement::{Settled, Settlement},
    store::StoreFuture,
    testing::{Fault, FaultyStore},
};

use super::Test;
use crate::support::{
    TEST_TIMEOUT, check_of, let_tasks_run, ms, redis_server::RedisServer, seconds, stores::failing,
};

/// The check of a caller under a limit that all share, and one that is its own.
fn shared_by_all(name: &'static str, shared: &Limit) -> Check {
    let own = Limit::per_hour("own", 9);
    check_of([
        Charge::new(shared.clone(), "all", 1).unwrap(),
        Charge::new(own, name, 1).unwrap(),
    ])
}

/// With a store that remembers refusals.
#[tokio::test(start_paused = true)]
async fn a_failure_at_the_moment_of_a_reset_is_asked_about_again() {
    let store = FaultyStore::new(MemoryStore::new()).with_local_state();
    let limiter = Limiter::new(store.clone());
    let limit = Limit::per_hour("calls", 1);
    assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        let limit = limit.clone();
        async move { limiter.acquire(&limit, "ada", 1, Duration::MAX).await }
    });
    let_tasks_run().await;
    limiter.reset(&limit, "ada").await.unwrap();
    // Before the caller that was woken is polled.
    store.set(Fault::Fails);
    let_tasks_run().await;
    store.set(Fault::None);
    sleep(ms(500)).await;
    assert!(waiting.is_finished());
}

/// A wrong password fails every later check, too.
#[tokio::test]
async fn a_wait_ends_at_once_where_waiting_does_not_help() {
    let server = RedisServer::start();
    server.run::<()>("CONFIG SET requirepass s3cret");
    let wrong = server.url().replace("redis://", "redis://:wrong@");
    let limiter = Limiter::new(RedisStore::builder(&wrong).build().unwrap()).deadline(TEST_TIMEOUT);
    let failed = timeout(
        TEST_TIMEOUT,
        limiter.acquire(&Limit::per_hour("calls", 1), "ada", 1, Duration::MAX),
    )
    .await;
    let Ok(Err(Error::Unavailable(error))) = failed else {
        panic!("{failed:?}")
    };
    assert_eq!(error.kind, StoreErrorKind::Denied);
}

/// The share has one unit, and so has the store after the reset.
#[tokio::test(start_paused = true)]
async fn a_reply_of_a_share_hides_no_unit_of_the_store() {
    let test = Test::start();
    let test = Test {
        limiter: test.limiter.clone().fail_local(Share::one_of(1)),
        ..test
    };
    let shared = Limit::per_hour("shared", 1);
    assert!(
        test.limiter
            .check(&shared, "all", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    for name in ["a", "b"] {
        test.wait(name, shared_by_all(name, &shared), Duration::MAX)
            .await;
    }
    test.limiter.reset(&shared, "all").await.unwrap();
    test.store.fails.store(true, Ordering::SeqCst);
    let_tasks_run().await;
    test.store.fails.store(false, Ordering::SeqCst);
    assert_eq!(test.admitted(), ["a"], "by the share");
    for _ in 0..5 {
        test.pass(ms(100)).await;
    }
    assert_eq!(test.admitted(), ["a", "b"], "by the store");
}

/// A settlement times out, so nobody knows when its units are back. It is sent again, and succeeds.
#[tokio::test(start_paused = true)]
async fn a_settlement_that_succeeds_at_last_is_not_waited_for_any_more() {
    let store = FaultyStore::new(MemoryStore::new());
    let limiter = Limiter::new(store.clone())
        .deadline(ms(800))
        .retry_reserved_after(Duration::MAX);
    let limit = Limit::per_hour("calls", 1);
    let reservation = limiter
        .reserve(&limit, "ada", 1, Duration::MAX)
        .await
        .unwrap()
        .unwrap();
    let waiting = tokio::spawn({
        let limiter = limiter.clone();
        let limit = limit.clone();
        async move { limiter.acquire(&limit, "ada", 1, Duration::MAX).await }
    });
    let_tasks_run().await;
    store.set(Fault::Hangs);
    let _ = reservation.settle(0).await.unwrap_err();
    store.set(Fault::None);
    let _ = reservation.settle(0).await.unwrap();
    sleep(ms(10)).await;
    assert!(waiting.is_finished());
}

/// A store on which the key "bad" fails on command, like one node of a cluster.
#[derive(Clone)]
struct OneNodeDown(MemoryStore, Arc<AtomicBool>);

impl Store for OneNodeDown {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let is_bad = check
            .charges()
            .any(|charge| *charge.key() == Key::from("bad"));
        if is_bad && self.1.load(Ordering::SeqCst) {
            failing().decide(check)
        } else {
            self.0.decide(check)
        }
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

/// A caller whose other key fails takes nothing, so it keeps freed units from nobody.
#[tokio::test(start_paused = true)]
async fn a_caller_is_woken_although_the_calls_of_another_fail() {
    let fails = Arc::new(AtomicBool::new(false));
    let limiter =
        Limiter::new(OneNodeDown(MemoryStore::new(), Arc::clone(&fails))).breaker(Breaker::OFF);
    let limit = Limit::per("calls", 10, seconds(100));
    let five = Check::new(Charge::new(limit.clone(), "ada", 5).unwrap());
    let admitted = limiter.check_all(five.clone()).await.unwrap();
    assert!(limiter.check(&limit, "ada", 4).await.unwrap().is_allowed());
    // A reservation refuses the first caller, which asks again each second.
    let _reserved = limiter
        .reserve(&limit, "ada", 1, seconds(90))
        .await
        .unwrap()
        .unwrap();
    let other = Charge::new(Limit::per_hour("other", 10), "bad", 1).unwrap();
    let both = check_of([Charge::new(limit.clone(), "ada", 1).unwrap(), other]);
    let failing = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire_all(both, seconds(85)).await }
    });
    let_tasks_run().await;
    let waiting = tokio::spawn({
        let (limiter, limit) = (limiter.clone(), limit.clone());
        async move { limiter.acquire(&limit, "ada", 5, seconds(200)).await }
    });
    let_tasks_run().await;
    fails.store(true, Ordering::SeqCst);
    sleep(ms(2_500)).await;
    assert!(!failing.is_finished() && !waiting.is_finished());
    assert!(
        limiter
            .settle(Settlement::new(five, &admitted, |_| Some(0)))
            .await
            .unwrap()
            .was_applied
    );
    sleep(ms(10)).await;
    assert!(waiting.is_finished());
    assert!(waiting.await.unwrap().unwrap().is_allowed());
}

/// Waits until the second caller has its units, which are free already.
async fn gets_its_units(waiting: &JoinHandle<Result<Decision, Error>>) {
    let begun = Instant::now();
    while !waiting.is_finished() {
        assert!(
            begun.elapsed() < seconds(5),
            "five units are free, and the caller that fits waits"
        );
        sleep(ms(10)).await;
    }
}

/// The first caller is woken for units that are freed. Then its call fails, and the units go to the
/// second caller.
#[tokio::test(start_paused = true)]
async fn units_for_which_a_failing_caller_was_woken_go_to_the_next() {
    let fails = Arc::new(AtomicBool::new(false));
    let limiter =
        Limiter::new(OneNodeDown(MemoryStore::new(), Arc::clone(&fails))).breaker(Breaker::OFF);
    let limit = Limit::per("calls", 10, seconds(1_000));
    let five = Check::new(Charge::new(limit.clone(), "ada", 5).unwrap());
    let admitted = limiter.check_all(five.clone()).await.unwrap();
    assert!(limiter.check(&limit, "ada", 5).await.unwrap().is_allowed());
    let other = Charge::new(Limit::per_hour("other", 10), "bad", 1).unwrap();
    let both = check_of([Charge::new(limit.clone(), "ada", 1).unwrap(), other]);
    let first = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire_all(both, seconds(2_000)).await }
    });
    let_tasks_run().await;
    let waiting = tokio::spawn({
        let (limiter, limit) = (limiter.clone(), limit.clone());
        async move { limiter.acquire(&limit, "ada", 5, seconds(3_000)).await }
    });
    let_tasks_run().await;
    assert!(!first.is_finished() && !waiting.is_finished());
    fails.store(true, Ordering::SeqCst);
    assert!(
        limiter
            .settle(Settlement::new(five, &admitted, |_| Some(0)))
            .await
            .unwrap()
            .was_applied
    );
    gets_its_units(&waiting).await;
}
