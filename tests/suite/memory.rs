//! What the in-process store remembers, and for how long.

use std::time::Duration;

use tower_sliding_window::{AdmissionId, Charge, Check, Error, Limit, Limiter, ManualClock, MemoryStore};

const CALLS: Limit = Limit::per_minute("calls", 3);

fn store(capacity: usize) -> (MemoryStore, Limiter<MemoryStore>, ManualClock) {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().capacity(capacity).clock(&clock).build();
    (store.clone(), Limiter::new(store), clock)
}

/// Rule 9: whatever was done to the keys, they are gone a window and a sweep later, as long as checks arrive.
#[tokio::test]
async fn nothing_stays_after_the_window_and_one_sweep() {
    let (store, limiter, clock) = store(1_000_000);
    for key in 0..1_000 {
        for _ in 0..1 + key % 5 {
            let _ = limiter.check(&CALLS, key.to_string(), 1).await.unwrap();
        }
    }
    assert_eq!(store.keys(), 1_000);
    clock.advance(CALLS.window());
    for _ in 0..100 {
        clock.advance(Duration::from_millis(20));
        assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    }
    assert_eq!(store.keys(), 0);
}

#[tokio::test]
async fn a_refusal_or_a_peek_remembers_nothing_of_a_new_key() {
    let (store, limiter, _) = store(1_000_000);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    assert!(limiter.check(&CALLS, "ada", 0).await.unwrap().is_allowed());
    assert!(matches!(limiter.check(&CALLS, "ada", 4).await, Err(Error::NeverFits(error)) if error.cost() == 4));
    assert_eq!(store.keys(), 0);
}

/// Forgetting somebody's admissions to make room would let them be spent twice.
#[tokio::test]
async fn a_full_store_is_unavailable_until_something_expires() {
    let (_, limiter, clock) = store(10);
    for key in ["a", "a", "a", "b", "b", "b", "c", "c", "c", "d"] {
        assert!(limiter.check(&CALLS, key, 1).await.unwrap().is_allowed());
    }
    assert!(!limiter.check(&CALLS, "a", 1).await.unwrap().is_allowed(), "a refusal needs no room");
    assert_eq!(limiter.peek(&CALLS, "d").await.unwrap().used(), 1);
    let Err(Error::Unavailable(error)) = limiter.check(&CALLS, "more", 1).await else { panic!("not full") };
    assert!(format!("{error:?}").contains("Full"), "{error:?}");

    clock.advance(CALLS.window());
    for _ in 0..100 {
        clock.advance(Duration::from_millis(20));
        // Still full at first: the sweep takes its time.
        let _ = limiter.peek(&CALLS, "ada").await;
    }
    assert!(limiter.check(&CALLS, "more", 1).await.unwrap().is_allowed());
}

/// All or nothing holds for the room as well, and what is counted already needs none.
#[tokio::test]
async fn a_check_takes_room_for_all_of_its_charges_or_none() {
    let (store, limiter, _) = store(2);
    let charge = |key| Charge::new(CALLS, key, 1).unwrap();
    let two = || Check::new(charge("a")).and(charge("b")).unwrap().with_id(AdmissionId::from(7));
    assert!(limiter.check_all(two().and(charge("c")).unwrap()).await.is_err());
    assert_eq!(store.keys(), 0);

    for _ in 0..2 {
        assert!(limiter.check_all(two()).await.unwrap().is_allowed());
    }
    assert!(limiter.check(&CALLS, "c", 1).await.is_err());
}

#[tokio::test]
async fn a_reset_makes_room() {
    let (_, limiter, _) = store(2);
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    assert!(limiter.check(&CALLS, "ada", 1).await.is_err());
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), 1);
}

/// What has expired makes room as soon as its key is asked for, and not only when it is swept.
#[tokio::test]
async fn what_has_expired_makes_room() {
    let (_, limiter, clock) = store(3);
    for _ in 0..50 {
        assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), 1);
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        clock.advance(CALLS.window());
    }
}
