//! The in-process store without room: how limits share its capacity, and how further units are
//! counted.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use axum::body::Body;
use http::{Request, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Key, Limit, Limiter, MemoryStore, RateLimitLayer, check::AdmissionId,
    store::ManualClock,
};

use super::memory::{CALLS, capacity_in_use, store};
use crate::support::requests::hello;

const SEARCH: Limit = Limit::per_minute("search", 100);
const LOGIN: Limit = Limit::per_minute("login", 5);

/// The clock moves on while a check waits for the cells, and the units in them leave. The decision
/// has the later time, so that no window of decisions has more units than the limit.
#[tokio::test]
async fn a_decision_is_no_earlier_than_what_it_has_read() {
    for (keys, reading) in [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)] {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::new().capacity(0).clock(&clock));
        let decide = || {
            let once = Limit::per_minute("once", 1);
            let charge = |key: u64| Charge::new(once.clone(), key, 1).unwrap();
            let first = Check::new(charge(0));
            limiter.check_all((1..keys).fold(first, |check, key| check.and(charge(key)).unwrap()))
        };
        let first = decide().await.unwrap();
        let (readings, moved) = (AtomicU32::new(0), clock.clone());
        clock.after_reading(move || {
            if readings.fetch_add(1, Ordering::SeqCst) == reading {
                moved.advance(Duration::from_secs(120));
            }
        });
        let second = decide().await.unwrap();
        let apart = second.at().duration_since(first.at()).unwrap();
        let is_late = apart >= Duration::from_secs(60);
        assert_eq!(second.is_allowed(), is_late, "{keys}, {reading}: {apart:?}");
    }
}

/// Forgetting an admission to free capacity would let its units be spent twice.
#[tokio::test]
async fn a_key_without_room_is_counted_in_cells_until_an_admission_expires() {
    let (store, limiter, clock) = store(20);
    for key in ["a", "a", "a", "b", "b", "b", "c", "c", "c", "d"] {
        assert!(limiter.check(&CALLS, key, 1).await.unwrap().is_allowed());
    }
    assert!(
        !limiter.check(&CALLS, "a", 1).await.unwrap().is_allowed(),
        "a refusal needs no capacity"
    );
    assert_eq!(limiter.peek(&CALLS, "d").await.unwrap().binding().used, 1);
    for used in 1..=3 {
        assert_eq!(
            limiter
                .check(&CALLS, "more", 1)
                .await
                .unwrap()
                .binding()
                .used,
            used
        );
    }
    let refused = limiter.check(&CALLS, "more", 1).await.unwrap();
    assert!(
        refused
            .retry_after()
            .is_some_and(|wait| wait >= CALLS.window() && wait < CALLS.window() * 3 / 2)
    );
    assert_eq!((store.keys(), capacity_in_use(&store)), (4, (10, 1)));
    assert!(
        limiter.check(&LOGIN, "a", 1).await.unwrap().is_allowed(),
        "another limit has capacity"
    );
    assert_eq!((store.keys(), capacity_in_use(&store)), (5, (11, 2)));

    clock.advance(CALLS.window() - Duration::from_micros(1));
    // Few keys have the same cells as another, but each may. Such a key is refused, and a refusal
    // looks for no room.
    let mut key = 0;
    while !limiter
        .check(&CALLS, format!("still more {key}"), 1)
        .await
        .unwrap()
        .is_allowed()
    {
        key += 1;
        assert!(key < 10, "few keys share all of their cells");
    }
    assert_eq!((store.keys(), capacity_in_use(&store)), (5, (11, 2)));
    // After a check without room, expired admissions are swept, whichever key holds them. The cells
    // are empty, too.
    clock.advance(2 * CALLS.window());
    for key in 0..10 {
        assert!(
            limiter
                .check(&CALLS, format!("more-{key}"), 1)
                .await
                .unwrap()
                .is_allowed(),
            "{key}"
        );
    }
    assert_eq!(
        (store.keys(), capacity_in_use(&store).0),
        (10, 10),
        "all expired admissions are swept"
    );
}

/// A client with endless keys, such as the addresses of an IPv6 network, fills all the capacity
/// that the limit can get.
#[tokio::test]
async fn a_limit_that_fills_its_share_leaves_other_limits_enforced() {
    let (store, _, _) = store(1_000);
    let by_path = |request: &Parts| Ok(Key::new("path", request.uri.path()));
    let search = RateLimitLayer::new(store.clone())
        .limit(SEARCH.by(by_path))
        .fail_open()
        .layer(service_fn(hello));
    let login = RateLimitLayer::new(store.clone())
        .limit(LOGIN.by(by_path))
        .fail_open()
        .layer(service_fn(hello));
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    for key in 0..5_000 {
        assert_eq!(
            search
                .clone()
                .oneshot(get(&format!("/{key}")))
                .await
                .unwrap()
                .status(),
            200
        );
    }
    let mut admitted = 0;
    for _ in 0..200 {
        admitted += u64::from(login.clone().oneshot(get("/ada")).await.unwrap().status() == 200);
    }
    assert_eq!(admitted, LOGIN.units(), "of 200");
    assert_eq!(store.keys(), 500 + 1);
}

/// Limits that fill their shares get equal shares, and as much is left for the next limit.
#[tokio::test]
async fn limits_that_fill_their_shares_get_equal_capacity() {
    let greedy = [
        Limit::per_hour("one", 1),
        Limit::per_hour("two", 1),
        Limit::per_hour("three", 1),
    ];
    for limits in 1..=3 {
        let ((store, limiter, _), mut held) = (store(1_200), vec![0; limits]);
        for key in 0..2_000 {
            for (limit, held) in greedy.iter().zip(&mut held) {
                let before = store.keys() as u64;
                drop(limiter.check(limit, key.to_string(), 1).await.unwrap());
                *held += store.keys() as u64 - before;
            }
        }
        assert_eq!(held, vec![1_200 / (limits as u64 + 1); limits]);
        assert!(limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
        limiter.reset(&LOGIN, "ada").await.unwrap();
        assert_eq!(capacity_in_use(&store).0, 1_200 / (limits + 1) * limits);
    }
}

/// Even the smallest store has capacity for one admission.
#[tokio::test]
async fn a_single_limit_gets_half_of_the_capacity_rounded_up() {
    for (capacity, expected) in [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (1_000, 500)] {
        let (store, limiter, _) = store(capacity);
        for key in 0..1_000 {
            drop(limiter.check(&CALLS, key.to_string(), 1).await.unwrap());
        }
        assert_eq!(
            (store.keys(), capacity_in_use(&store).0),
            (expected, expected),
            "of {capacity}"
        );
    }
}

/// Some charges of a check have records, others are counted in cells: all of them or none. A
/// repeated check counts once.
#[tokio::test]
async fn a_check_counts_all_of_its_charges_or_none_with_and_without_room() {
    let (store, limiter, _) = store(4);
    let charge = |key| Charge::new(CALLS, key, 1).unwrap();
    let three = |id| {
        let all = Check::new(charge("a"))
            .and(charge("b"))
            .unwrap()
            .and(charge("c"))
            .unwrap();
        all.with_id(AdmissionId(id))
    };
    let used = async || {
        let mut used = Vec::new();
        for key in ["a", "b", "c"] {
            used.push(limiter.peek(&CALLS, key).await.unwrap().binding().used);
        }
        used
    };
    for id in [7, 7, 8] {
        assert!(limiter.check_all(three(id)).await.unwrap().is_allowed());
        assert_eq!((store.keys(), capacity_in_use(&store).0), (2, 2));
    }
    assert_eq!(used().await, [2, 2, 2]);
    assert!(limiter.check(&CALLS, "c", 1).await.unwrap().is_allowed());
    assert!(!limiter.check_all(three(9)).await.unwrap().is_allowed());
    assert_eq!(used().await, [2, 2, 3]);
}

/// The second charge finds as much as is free after the first.
#[tokio::test]
async fn the_charges_of_a_check_get_capacity_one_after_the_other() {
    for capacity in [1, 2] {
        let (store, limiter, _) = store(capacity);
        let check = Check::new(Charge::new(CALLS, "ada", 1).unwrap())
            .and(Charge::new(SEARCH, "ada", 1).unwrap());
        assert!(
            limiter
                .check_all(check.unwrap())
                .await
                .unwrap()
                .is_allowed()
        );
        assert_eq!(capacity_in_use(&store).0, capacity);
    }
}

/// A key with an entry adds up its further units, as of the last of them.
#[tokio::test]
async fn a_key_without_room_for_more_adds_up_its_units() {
    let (store, limiter, clock) = store(2);
    for used in 1..=3 {
        assert_eq!(
            limiter
                .check(&CALLS, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            used
        );
        clock.advance(Duration::from_millis(1));
    }
    assert_eq!((store.keys(), capacity_in_use(&store).0), (1, 1));
    clock.advance(CALLS.window() - Duration::from_millis(3));
    for used in [2, 2, 0] {
        assert_eq!(
            limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
            used
        );
        clock.advance(Duration::from_millis(1));
    }
}

/// A reset does not change cells, which other keys share.
#[tokio::test]
async fn a_reset_leaves_cells() {
    let (_, limiter, clock) = store(4);
    for key in ["a", "b", "ada", "ada", "ada"] {
        assert!(limiter.check(&CALLS, key, 1).await.unwrap().is_allowed());
    }
    limiter.reset(&CALLS, "ada").await.unwrap();
    let refused = limiter.check(&CALLS, "ada", 1).await.unwrap();
    clock.advance(refused.retry_after().unwrap() - Duration::from_micros(1));
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    clock.advance(Duration::from_micros(1));
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

/// A late settlement counts returned units again, with room for a record and without.
#[tokio::test]
async fn a_settlement_after_its_lease_counts_without_room() {
    let (store, limiter, clock) = store(2);
    let reservation = limiter
        .reserve(&CALLS, "ada", 2, Duration::from_secs(5))
        .await
        .unwrap()
        .unwrap();
    clock.advance(Duration::from_secs(5));
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(limiter.check(&CALLS, "bob", 1).await.unwrap().is_allowed());
    assert!(reservation.settle(3).await.unwrap().was_applied);
    assert_eq!(
        (
            limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
            capacity_in_use(&store).0
        ),
        (3, 1)
    );
}

/// No settlement finds a reservation in cells. After the lease it counts in addition, as one does
/// whose units were given back.
#[tokio::test]
async fn a_settlement_after_the_lease_of_a_reservation_without_room_counts_in_addition() {
    let (_, limiter, clock) = store(4);
    for key in ["a", "b"] {
        assert!(limiter.check(&SEARCH, key, 1).await.unwrap().is_allowed());
    }
    let reservation = limiter
        .reserve(&SEARCH, "ada", 2, Duration::from_millis(1))
        .await
        .unwrap()
        .unwrap();
    clock.advance(Duration::from_millis(1));
    assert!(!reservation.settle(0).await.unwrap().was_applied);
    assert_eq!(
        limiter.peek(&SEARCH, "ada").await.unwrap().binding().used,
        2
    );
    assert!(reservation.settle(1).await.unwrap().was_applied);
    assert_eq!(
        limiter.peek(&SEARCH, "ada").await.unwrap().binding().used,
        3
    );
}

/// A reservation in cells is found by no settlement, so it counts in full. What was spent above it
/// counts as well.
#[tokio::test]
async fn a_settlement_above_a_reservation_without_room_counts() {
    let (store, limiter, _) = store(4);
    for key in ["a", "b"] {
        assert!(limiter.check(&SEARCH, key, 1).await.unwrap().is_allowed());
    }
    for key in ["ada", "b"] {
        let before = limiter.peek(&SEARCH, key).await.unwrap().binding().used;
        for (cost, used) in [(2, 2), (0, 4), (90, 94)] {
            let reservation = limiter
                .reserve(&SEARCH, key, 2, Duration::from_secs(5))
                .await
                .unwrap()
                .unwrap();
            assert!(!reservation.settle(cost).await.unwrap().was_applied);
            assert_eq!(
                limiter.peek(&SEARCH, key).await.unwrap().binding().used,
                before + used
            );
        }
        assert!(!limiter.check(&SEARCH, key, 7).await.unwrap().is_allowed());
    }
    assert_eq!((store.keys(), capacity_in_use(&store).0), (2, 2));
}
