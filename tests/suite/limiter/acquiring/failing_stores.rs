//! A store that fails between the return of units and the next check.

use std::{sync::atomic::Ordering, time::Duration};

use tokio::time::{sleep, timeout};
use tower_sliding_window::{
    Charge, Check, Error, Limit, Limiter, MemoryStore, RedisStore,
    error::StoreErrorKind,
    limiter::Share,
    testing::{Fault, FaultyStore},
};

use super::Test;
use crate::support::{TEST_TIMEOUT, check_of, let_tasks_run, ms, redis_server::RedisServer};

/// The check of a caller under a limit that all share, and one that is its own.
fn shared_by_all(name: &'static str, shared: &Limit) -> Check {
    let own = Limit::per_hour("own", 9);
    check_of([Charge::new(shared.clone(), "all", 1).unwrap(), Charge::new(own, name, 1).unwrap()])
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
    let failed = timeout(TEST_TIMEOUT, limiter.acquire(&Limit::per_hour("calls", 1), "ada", 1, Duration::MAX)).await;
    let Ok(Err(Error::Unavailable(error))) = failed else { panic!("{failed:?}") };
    assert_eq!(error.kind, StoreErrorKind::Denied);
}

/// The share has one unit, and so has the store after the reset.
#[tokio::test(start_paused = true)]
async fn a_reply_of_a_share_hides_no_unit_of_the_store() {
    let test = Test::start();
    let test = Test { limiter: test.limiter.clone().fail_local(Share::one_of(1)), ..test };
    let shared = Limit::per_hour("shared", 1);
    assert!(test.limiter.check(&shared, "all", 1).await.unwrap().is_allowed());
    for name in ["a", "b"] {
        test.wait(name, shared_by_all(name, &shared), Duration::MAX).await;
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

/// A share has decided a reservation. Its settlement says nothing of what the store has left.
#[tokio::test(start_paused = true)]
async fn a_settled_unit_of_a_share_sends_one_caller_and_no_more() {
    const CALLERS: usize = 50;
    let test = Test::start();
    let test = Test { limiter: test.limiter.clone().fail_local(Share::one_of(1)), ..test };
    let shared = Limit::per_hour("shared", 100);
    assert!(test.limiter.check(&shared, "all", 100).await.unwrap().is_allowed());
    test.store.fails.store(true, Ordering::SeqCst);
    let reservation = test.limiter.reserve(&shared, "all", 1, ms(10_000)).await.unwrap().unwrap();
    let _other = test.limiter.reserve(&shared, "all", 1, ms(10_000)).await.unwrap().unwrap();
    test.store.fails.store(false, Ordering::SeqCst);
    for number in 0..CALLERS {
        let name = &*format!("{number}").leak();
        test.wait(name, shared_by_all(name, &shared), Duration::MAX).await;
    }
    assert_eq!(test.lines(), CALLERS);
    test.checks_sent();
    reservation.settle(0).await.unwrap();
    let_tasks_run().await;
    assert!(test.checks_sent() <= 1, "{CALLERS} wait");
}

/// A settlement times out, so nobody knows when its units are back. It is sent again, and succeeds.
#[tokio::test(start_paused = true)]
async fn a_settlement_that_succeeds_at_last_is_not_waited_for_any_more() {
    let store = FaultyStore::new(MemoryStore::new());
    let limiter = Limiter::new(store.clone()).deadline(ms(800)).retry_reserved_after(Duration::MAX);
    let limit = Limit::per_hour("calls", 1);
    let reservation = limiter.reserve(&limit, "ada", 1, Duration::MAX).await.unwrap().unwrap();
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
