//! A store that fails on command, behind limiters and layers.

use std::time::Duration;

use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Algorithm, Error, Limit, Limiter, MemoryStore, RateLimitLayer, Store,
    limiter::Breaker,
    testing::{Fault, FaultyStore},
};
use tower_sliding_window_conformance::Conformance;

use crate::support::{
    let_tasks_run, ms,
    requests::{anyone, figures, hello, request},
    seconds,
};

const CALLS: Limit = Limit::per_minute("calls", 3);

fn store() -> FaultyStore {
    FaultyStore::new(MemoryStore::new())
}

#[tokio::test]
async fn each_fault_holds_until_the_next_one_is_set() {
    let store = store();
    let limiter = Limiter::new(store.clone())
        .breaker(Breaker::OFF)
        .deadline(ms(20));
    for _ in 0..3 {
        store.set(Fault::Fails);
        assert!(matches!(
            limiter.check(&CALLS, "ada", 1).await,
            Err(Error::Unavailable(_))
        ));
        assert!(matches!(
            limiter.reset(&CALLS, "bob").await,
            Err(Error::Unavailable(_))
        ));
        store.set(Fault::Hangs);
        assert!(matches!(
            limiter.check(&CALLS, "ada", 1).await,
            Err(Error::TimedOut { .. })
        ));
        store.set(Fault::None);
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    }
    assert_eq!(
        limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
        3,
        "failed checks count nothing"
    );
    assert_eq!((store.calls(), store.hanging()), (3 * 4 + 1, 0));
}

#[tokio::test]
async fn a_check_whose_reply_is_lost_has_counted() {
    let store = store();
    let limiter = Limiter::new(store.clone());
    store.set(Fault::LosesReplies);
    assert!(matches!(
        limiter.check(&CALLS, "ada", 2).await,
        Err(Error::Unavailable(_))
    ));
    store.set(Fault::None);
    assert_eq!(limiter.peek(&CALLS, "ada").await.unwrap().binding().used, 2);
    store.set(Fault::LosesReplies);
    assert!(limiter.reset(&CALLS, "ada").await.is_err());
    store.set(Fault::None);
    assert_eq!(limiter.peek(&CALLS, "ada").await.unwrap().binding().used, 0);
}

#[tokio::test(start_paused = true)]
async fn a_slow_store_replies_after_its_delay_or_counts_nothing() {
    let store = store();
    store.set(Fault::Slow(ms(30)));
    let begun = Instant::now();
    assert_eq!(
        Limiter::new(store.clone())
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .binding()
            .used,
        1
    );
    assert_eq!(begun.elapsed(), ms(30));
    let hasty = Limiter::new(store.clone()).deadline(ms(29));
    assert!(matches!(
        hasty.check(&CALLS, "ada", 1).await,
        Err(Error::TimedOut { .. })
    ));
    store.set(Fault::None);
    assert_eq!(hasty.peek(&CALLS, "ada").await.unwrap().binding().used, 1);
}

#[tokio::test]
async fn a_settlement_that_fails_settles_nothing() {
    let store = store();
    let limiter = Limiter::new(store.clone());
    let reservation = limiter
        .reserve(&CALLS, "ada", 3, seconds(30))
        .await
        .unwrap()
        .unwrap();
    store.set(Fault::Fails);
    assert!(reservation.settle(1).await.is_err());
    store.set(Fault::None);
    assert_eq!(limiter.peek(&CALLS, "ada").await.unwrap().binding().used, 3);
    assert!(reservation.settle(1).await.unwrap().was_applied);
    assert_eq!(
        (
            limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
            store.calls()
        ),
        (1, 5),
        "both were asked for"
    );
}

/// After five failures the store is not called, until a probe finds that it works.
#[tokio::test(start_paused = true)]
async fn a_breaker_keeps_calls_from_a_failing_store() {
    let store = store();
    let layer = RateLimitLayer::new(store.clone())
        .limit(CALLS.by(anyone))
        .fail_closed();
    let app = layer.layer(service_fn(hello));
    store.set(Fault::Fails);
    for _ in 0..20 {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 503);
    }
    let_tasks_run().await;
    assert_eq!(store.calls(), 5 + 1, "five failures and a probe");
    store.set(Fault::None);
    assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 503);
    tokio::time::sleep(ms(250)).await;
    assert_eq!(
        figures(app.oneshot(request()).await.unwrap().headers())[1],
        Some("2")
    );
}

/// With a local state, a refusal is remembered while the store fails, and forgotten when units are
/// given back.
#[tokio::test]
async fn a_refusal_cache_refuses_in_place_of_a_failing_store() {
    let store = store().with_local_state();
    let limiter = Limiter::new(store.clone());
    let reservation = limiter
        .reserve(&CALLS, "ada", 3, seconds(30))
        .await
        .unwrap()
        .unwrap();
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    store.set(Fault::Fails);
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    assert_eq!(store.calls(), 2);
    store.set(Fault::None);
    reservation.settle(0).await.unwrap();
    assert!(limiter.check(&CALLS, "ada", 3).await.unwrap().is_allowed());
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(limiter.check(&CALLS, "ada", 3).await.unwrap().is_allowed());
}

#[test]
fn it_has_the_local_state_of_the_store_inside_or_its_own() {
    assert!(store().local_state().is_none());
    assert!(store().with_local_state().local_state().is_some());
    assert!(
        FaultyStore::new(store().with_local_state())
            .local_state()
            .is_some()
    );
}

#[tokio::test]
async fn a_faulty_store_without_a_fault_keeps_the_rules() {
    let exact = Conformance::new().algorithms([Algorithm::SLIDING_LOG]);
    let make = async |clock| FaultyStore::new(MemoryStore::new().clock(&clock));
    exact.run(make).await;
}

/// The calls that hang end when their callers give up.
#[tokio::test]
async fn hanging_calls_are_counted_until_their_callers_give_up() {
    let store = store();
    store.set(Fault::Hangs);
    let limiter = Limiter::new(store.clone()).deadline(Duration::MAX);
    let caller = tokio::spawn(async move { limiter.check(&CALLS, "ada", 1).await });
    let_tasks_run().await;
    assert_eq!(store.hanging(), 1);
    caller.abort();
    let _ = caller.await;
    assert_eq!(store.hanging(), 0);
}
