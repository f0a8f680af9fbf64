//! The capacity of the in-process store: what it stores, and for how long.

use std::time::Duration;

use axum::body::Body;
use http::{Request, request::Parts};
use proptest::{
    collection::vec,
    prop_assert, prop_assert_eq,
    test_runner::{Config, TestRunner},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Algorithm, Charge, Check, Error, Key, Limit, Limiter, MemoryStore, RateLimitLayer, check::AdmissionId,
    settlement::Settlement, store::ManualClock,
};

use crate::support::requests::hello;

const CALLS: Limit = Limit::per_minute("calls", 3);
const SEARCH: Limit = Limit::per_minute("search", 100);
const LOGIN: Limit = Limit::per_minute("login", 5);

fn store(capacity: usize) -> (MemoryStore, Limiter, ManualClock) {
    let clock = ManualClock::new();
    let store = MemoryStore::new().capacity(capacity).clock(&clock);
    (store.clone(), Limiter::new(store), clock)
}

/// How many admissions the store holds, and of how many limits.
fn capacity_in_use(store: &MemoryStore) -> (usize, usize) {
    let text = format!("{store:?}");
    let figure = |name: &str| {
        let behind = text.split_once(name).unwrap().1;
        behind[..behind.find(',').unwrap()].parse().unwrap()
    };
    (figure("admissions: "), figure("limits: "))
}

/// Whatever operations a key has seen, it is removed a window and a sweep later, as long as checks arrive.
#[tokio::test]
async fn keys_are_removed_after_the_window_and_one_sweep() {
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
async fn a_refusal_or_a_peek_stores_no_new_key() {
    let (store, limiter, _) = store(1_000_000);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    assert!(limiter.check(&CALLS, "ada", 0).await.unwrap().is_allowed());
    assert!(matches!(limiter.check(&CALLS, "ada", 4).await, Err(Error::NeverFits(error)) if error.cost == 4));
    assert_eq!(store.keys(), 0);
}

/// Forgetting an admission to free capacity would let its units be spent twice.
#[tokio::test]
async fn a_key_without_room_is_counted_in_cells_until_an_admission_expires() {
    let (store, limiter, clock) = store(20);
    for key in ["a", "a", "a", "b", "b", "b", "c", "c", "c", "d"] {
        assert!(limiter.check(&CALLS, key, 1).await.unwrap().is_allowed());
    }
    assert!(!limiter.check(&CALLS, "a", 1).await.unwrap().is_allowed(), "a refusal needs no capacity");
    assert_eq!(limiter.peek(&CALLS, "d").await.unwrap().used(), 1);
    for used in 1..=3 {
        assert_eq!(limiter.check(&CALLS, "more", 1).await.unwrap().used(), used);
    }
    let refused = limiter.check(&CALLS, "more", 1).await.unwrap();
    assert!(refused.retry_after().is_some_and(|wait| wait >= CALLS.window() && wait < CALLS.window() * 3 / 2));
    assert_eq!((store.keys(), capacity_in_use(&store)), (4, (10, 1)));
    assert!(limiter.check(&LOGIN, "a", 1).await.unwrap().is_allowed(), "another limit has capacity");
    assert_eq!((store.keys(), capacity_in_use(&store)), (5, (11, 2)));

    clock.advance(CALLS.window() - Duration::from_micros(1));
    assert!(limiter.check(&CALLS, "still more", 1).await.unwrap().is_allowed());
    assert_eq!((store.keys(), capacity_in_use(&store)), (5, (11, 2)));
    // After a check without room, expired admissions are swept, whichever key holds them. The cells are empty, too.
    clock.advance(2 * CALLS.window());
    for key in 0..10 {
        assert!(limiter.check(&CALLS, format!("more-{key}"), 1).await.unwrap().is_allowed(), "{key}");
    }
    assert_eq!((store.keys(), capacity_in_use(&store).0), (10, 10), "all expired admissions are swept");
}

/// A client with endless keys, such as the addresses of an IPv6 network, fills all the capacity that the limit can get.
#[tokio::test]
async fn a_limit_that_fills_its_share_leaves_other_limits_enforced() {
    let (store, _, _) = store(1_000);
    let by_path = |request: &Parts| Ok(Key::new("path", request.uri.path()));
    let search = RateLimitLayer::new(store.clone()).limit(SEARCH.by(by_path)).fail_open().layer(service_fn(hello));
    let login = RateLimitLayer::new(store.clone()).limit(LOGIN.by(by_path)).fail_open().layer(service_fn(hello));
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    for key in 0..5_000 {
        assert_eq!(search.clone().oneshot(get(&format!("/{key}"))).await.unwrap().status(), 200);
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
    let greedy = [Limit::per_hour("one", 1), Limit::per_hour("two", 1), Limit::per_hour("three", 1)];
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
        assert_eq!((store.keys(), capacity_in_use(&store).0), (expected, expected), "of {capacity}");
    }
}

/// The names of limits may come from a database, so there may be many.
#[tokio::test]
async fn a_limit_without_admissions_is_forgotten() {
    let (store, limiter, clock) = store(1_000_000);
    for number in 0..1_000 {
        let limit = Limit::new(format!("of-{number}"), 3, CALLS.window()).unwrap();
        assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
        assert!(limiter.check(&limit, "bob", 1).await.unwrap().is_allowed());
        if number % 2 == 0 {
            limiter.reset(&limit, "ada").await.unwrap();
        }
    }
    assert_eq!(capacity_in_use(&store), (1_500, 1_000));
    clock.advance(CALLS.window());
    for _ in 0..200 {
        clock.advance(Duration::from_millis(20));
        assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    }
    assert_eq!(capacity_in_use(&store), (0, 0));
}

/// Some charges of a check have records, others are counted in cells: all of them or none. A repeated check counts once.
#[tokio::test]
async fn a_check_counts_all_of_its_charges_or_none_with_and_without_room() {
    let (store, limiter, _) = store(4);
    let charge = |key| Charge::new(CALLS, key, 1).unwrap();
    let three = |id| {
        let all = Check::new(charge("a")).and(charge("b")).unwrap().and(charge("c")).unwrap();
        all.with_id(AdmissionId::from(id))
    };
    let used = async || {
        let mut used = Vec::new();
        for key in ["a", "b", "c"] {
            used.push(limiter.peek(&CALLS, key).await.unwrap().used());
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
        let check = Check::new(Charge::new(CALLS, "ada", 1).unwrap()).and(Charge::new(SEARCH, "ada", 1).unwrap());
        assert!(limiter.check_all(check.unwrap()).await.unwrap().is_allowed());
        assert_eq!(capacity_in_use(&store).0, capacity);
    }
}

#[tokio::test]
async fn a_sweep_leaves_a_counter_as_it_is() {
    let (store, limiter, clock) = store(1_000);
    let counted = Limit::per_minute("counted", 10).with_algorithm(Algorithm::sliding_window_counter());
    let at = limiter.peek(&counted, "ada").await.unwrap().at().duration_since(std::time::UNIX_EPOCH).unwrap();
    clock.advance(counted.window() - Duration::from_micros(at.as_micros() as u64 % 60_000_000));
    assert!(limiter.check(&counted, "ada", 10).await.unwrap().is_allowed());
    clock.advance(Duration::from_secs(75));
    for _ in 0..100 {
        clock.advance(Duration::from_millis(20));
        assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    }
    // 43 of 60 seconds of the previous window count.
    assert_eq!(limiter.peek(&counted, "ada").await.unwrap().used(), 8);
    clock.advance(Duration::from_secs(44));
    for _ in 0..100 {
        clock.advance(Duration::from_millis(20));
        assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    }
    assert_eq!(store.keys(), 0);
}

#[tokio::test]
async fn a_reset_frees_capacity() {
    let (store, limiter, _) = store(4);
    for (used, held) in [(1, 1), (2, 2), (3, 2)] {
        assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), used);
        assert_eq!(capacity_in_use(&store).0, held);
    }
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert_eq!(capacity_in_use(&store).0, 0);
    assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), 1);
}

/// A key with an entry adds up its further units, as of the last of them.
#[tokio::test]
async fn a_key_without_room_for_more_adds_up_its_units() {
    let (store, limiter, clock) = store(2);
    for used in 1..=3 {
        assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), used);
        clock.advance(Duration::from_millis(1));
    }
    assert_eq!((store.keys(), capacity_in_use(&store).0), (1, 1));
    clock.advance(CALLS.window() - Duration::from_millis(3));
    for used in [2, 2, 0] {
        assert_eq!(limiter.peek(&CALLS, "ada").await.unwrap().used(), used);
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
    assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), 1);
}

/// A late settlement counts returned units again, with room for a record and without.
#[tokio::test]
async fn a_settlement_after_its_lease_counts_without_room() {
    let (store, limiter, clock) = store(2);
    let reservation = limiter.reserve(&CALLS, "ada", 2, Duration::from_secs(5)).await.unwrap().unwrap();
    clock.advance(Duration::from_secs(5));
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(limiter.check(&CALLS, "bob", 1).await.unwrap().is_allowed());
    assert!(reservation.settle(3).await.unwrap().was_applied);
    assert_eq!((limiter.peek(&CALLS, "ada").await.unwrap().used(), capacity_in_use(&store).0), (3, 1));
}

/// A reservation in cells is found by no settlement, so it counts in full. What was spent above it counts as well.
#[tokio::test]
async fn a_settlement_above_a_reservation_without_room_counts() {
    let (store, limiter, _) = store(4);
    for key in ["a", "b"] {
        assert!(limiter.check(&SEARCH, key, 1).await.unwrap().is_allowed());
    }
    for key in ["ada", "b"] {
        let before = limiter.peek(&SEARCH, key).await.unwrap().used();
        for (cost, used) in [(2, 2), (0, 4), (90, 94)] {
            let reservation = limiter.reserve(&SEARCH, key, 2, Duration::from_secs(5)).await.unwrap().unwrap();
            assert!(!reservation.settle(cost).await.unwrap().was_applied);
            assert_eq!(limiter.peek(&SEARCH, key).await.unwrap().used(), before + used);
        }
        assert!(!limiter.check(&SEARCH, key, 7).await.unwrap().is_allowed());
    }
    assert_eq!((store.keys(), capacity_in_use(&store).0), (2, 2));
}

/// Whatever the operations, the capacity in use equals the stored admissions, and is zero in the end.
#[test]
fn all_capacity_is_free_after_the_last_admission_expires() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let step = (0..8usize, 0..5usize, 0..4u64, 0..4u64, 0..30_000u64);
    let mut random = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    let outcome = random.run(&vec(step, 1..200), |steps| {
        let (store, limiter, clock) = store(60);
        let limit = |place: usize| {
            let algorithm = [
                Algorithm::sliding_log(),
                Algorithm::compact_log(5),
                Algorithm::sliding_window_counter(),
                Algorithm::fixed_window(),
            ][place % 4];
            Limit::new(format!("l{place}"), 20, CALLS.window()).unwrap().with_algorithm(algorithm)
        };
        let mut reservations = Vec::new();
        for (kind, place, key, cost, time) in steps {
            let charge = |place: usize| Charge::new(limit(place % 5), key.to_string(), cost).unwrap();
            let lease = Duration::from_millis(1 + time);
            match kind {
                0 | 1 => {
                    let check =
                        Check::new(charge(place)).and(charge(place + 1)).unwrap().and(charge(place + 2)).unwrap();
                    let check = if kind == 0 { check } else { check.with_id(AdmissionId::from(cost)) };
                    drop(runtime.block_on(limiter.check_all(check)));
                }
                2 => drop(runtime.block_on(limiter.check(&limit(place), key.to_string(), cost))),
                3 | 4 => {
                    let reserved =
                        runtime.block_on(limiter.reserve(&limit(place), key.to_string(), cost.max(1), lease));
                    reservations.extend(reserved.ok().and_then(Result::ok));
                }
                5 if !reservations.is_empty() => {
                    let reservation = reservations.remove(time as usize % reservations.len());
                    for _ in 0..2 {
                        drop(runtime.block_on(reservation.settle(cost)));
                    }
                }
                6 => runtime.block_on(limiter.reset(&limit(place), key.to_string())).unwrap(),
                _ => clock.advance(Duration::from_millis(time)),
            }
            prop_assert!(capacity_in_use(&store).0 <= 60, "{:?}", capacity_in_use(&store));
        }
        clock.advance(3 * CALLS.window());
        for _ in 0..130 {
            clock.advance(Duration::from_millis(20));
            assert!(runtime.block_on(limiter.peek(&CALLS, "ada")).unwrap().is_allowed());
        }
        prop_assert_eq!((store.keys(), capacity_in_use(&store)), (0, (0, 0)));
        Ok(())
    });
    outcome.unwrap();
}

/// A long log is stored in parts, with the same results.
#[tokio::test]
async fn a_long_log_is_as_exact_as_a_short_one() {
    let (_, limiter, clock) = store(1_000_000);
    let limit = Limit::per_day("log", 100_000);
    let take = |cost: u64, number: u64| {
        Check::new(Charge::new(limit.clone(), "ada", cost).unwrap()).with_id(AdmissionId::from(number))
    };
    let (mut admitted, mut used) = (Vec::new(), 0);
    for number in 0..10_000 {
        let check = if number % 3 == 0 { take(1 + number % 7, number) } else { take(1, number) };
        admitted.push((limiter.check_all(check.clone()).await.unwrap(), check));
        clock.advance(Duration::from_millis(1));
    }
    for (decision, check) in &admitted {
        let cost = check.charges().map(Charge::cost).sum::<u64>();
        used += cost;
        assert_eq!(decision.used(), used);
    }
    let (first, last) = (&admitted[0], &admitted[9_999]);
    for (_, check) in [first, last] {
        assert_eq!(limiter.check_all(check.clone()).await.unwrap().used(), used, "the repeated check counts once");
    }
    // All entries up to one in the middle must leave.
    let up_to: u64 = admitted[..=5_000].iter().map(|(_, check)| check.charges().map(Charge::cost).sum::<u64>()).sum();
    assert!(limiter.check(&limit, "ada", limit.units() - used).await.unwrap().is_allowed());
    let refused = limiter.check(&limit, "ada", up_to).await.unwrap();
    assert_eq!(refused.retry_after(), Some(limit.window() - Duration::from_millis(10_000 - 5_000)));
    let refused = limiter.check(&limit, "ada", up_to + 1).await.unwrap();
    assert_eq!(refused.retry_after(), Some(limit.window() - Duration::from_millis(10_000 - 5_001)));

    for (decision, check) in admitted.iter().step_by(101) {
        let refund = Settlement::new(check.clone(), decision, |_| Some(0));
        used = limit.units() - limiter.settle(refund).await.unwrap().decision.remaining();
        let again = limiter.settle(Settlement::new(check.clone(), decision, |_| Some(0))).await.unwrap();
        assert_eq!((again.was_applied, again.decision.used()), (false, used));
    }
    clock.advance(limit.window());
    assert_eq!(limiter.peek(&limit, "ada").await.unwrap().used(), 0);
}

/// Expired admissions free capacity when their key is checked, not only when they are swept.
#[tokio::test]
async fn an_expired_admission_frees_capacity() {
    let (_, limiter, clock) = store(6);
    for _ in 0..50 {
        assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), 1);
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        clock.advance(CALLS.window());
    }
}
