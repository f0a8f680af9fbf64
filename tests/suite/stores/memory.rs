//! The capacity of the in-process store: what it stores, and for how long.

use std::time::Duration;

use proptest::{
    collection::vec,
    prop_assert, prop_assert_eq,
    test_runner::{Config, TestRunner},
};
use tower_sliding_window::{
    Algorithm, Charge, Check, Error, Limit, Limiter, MemoryStore, check::AdmissionId,
    settlement::Settlement, store::ManualClock,
};

pub(super) const CALLS: Limit = Limit::per_minute("calls", 3);

pub(super) fn store(capacity: usize) -> (MemoryStore, Limiter, ManualClock) {
    let clock = ManualClock::new();
    let store = MemoryStore::new().capacity(capacity).clock(&clock);
    (store.clone(), Limiter::new(store), clock)
}

/// How many admissions the store holds, and of how many limits.
pub(super) fn capacity_in_use(store: &MemoryStore) -> (usize, usize) {
    let text = format!("{store:?}");
    let figure = |name: &str| {
        let behind = text.split_once(name).unwrap().1;
        behind[..behind.find(',').unwrap()].parse().unwrap()
    };
    (figure("admissions: "), figure("limits: "))
}

/// Whatever operations a key has seen, it is removed a window and a sweep later, as long as checks
/// arrive.
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
    assert!(
        matches!(limiter.check(&CALLS, "ada", 4).await, Err(Error::NeverFits(error)) if error.cost == 4)
    );
    assert_eq!(store.keys(), 0);
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

#[tokio::test]
async fn a_sweep_leaves_a_counter_as_it_is() {
    let (store, limiter, clock) = store(1_000);
    let counted =
        Limit::per_minute("counted", 10).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
    let at = limiter
        .peek(&counted, "ada")
        .await
        .unwrap()
        .at()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    clock.advance(counted.window() - Duration::from_micros(at.as_micros() as u64 % 60_000_000));
    assert!(
        limiter
            .check(&counted, "ada", 10)
            .await
            .unwrap()
            .is_allowed()
    );
    clock.advance(Duration::from_secs(75));
    for _ in 0..100 {
        clock.advance(Duration::from_millis(20));
        assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    }
    // 43 of 60 seconds of the previous window count.
    assert_eq!(
        limiter.peek(&counted, "ada").await.unwrap().binding().used,
        8
    );
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
        assert_eq!(
            limiter
                .check(&CALLS, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            used
        );
        assert_eq!(capacity_in_use(&store).0, held);
    }
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert_eq!(capacity_in_use(&store).0, 0);
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

/// Whatever the operations, the capacity in use equals the stored admissions, and is zero in the
/// end.
#[test]
fn all_capacity_is_free_after_the_last_admission_expires() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let step = (0..8usize, 0..5usize, 0..4u64, 0..4u64, 0..30_000u64);
    let mut random = TestRunner::new(Config {
        cases: 200,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = random.run(&vec(step, 1..200), |steps| {
        let (store, limiter, clock) = store(60);
        let limit = |place: usize| {
            let algorithm = [
                Algorithm::SLIDING_LOG,
                Algorithm::compact_log(5),
                Algorithm::SLIDING_WINDOW_COUNTER,
                Algorithm::FIXED_WINDOW,
            ][place % 4];
            Limit::new(format!("l{place}"), 20, CALLS.window())
                .unwrap()
                .with_algorithm(algorithm)
        };
        let mut reservations = Vec::new();
        for (kind, place, key, cost, time) in steps {
            let charge =
                |place: usize| Charge::new(limit(place % 5), key.to_string(), cost).unwrap();
            let lease = Duration::from_millis(1 + time);
            match kind {
                0 | 1 => {
                    let check = Check::new(charge(place))
                        .and(charge(place + 1))
                        .unwrap()
                        .and(charge(place + 2))
                        .unwrap();
                    let check = if kind == 0 {
                        check
                    } else {
                        check.with_id(AdmissionId(cost))
                    };
                    drop(runtime.block_on(limiter.check_all(check)));
                }
                2 => drop(runtime.block_on(limiter.check(&limit(place), key.to_string(), cost))),
                3 | 4 => {
                    let reserved = runtime.block_on(limiter.reserve(
                        &limit(place),
                        key.to_string(),
                        cost.max(1),
                        lease,
                    ));
                    reservations.extend(reserved.ok().and_then(Result::ok));
                }
                5 if !reservations.is_empty() => {
                    let reservation = reservations.remove(time as usize % reservations.len());
                    for _ in 0..2 {
                        drop(runtime.block_on(reservation.settle(cost)));
                    }
                }
                6 => runtime
                    .block_on(limiter.reset(&limit(place), key.to_string()))
                    .unwrap(),
                _ => clock.advance(Duration::from_millis(time)),
            }
            prop_assert!(
                capacity_in_use(&store).0 <= 60,
                "{:?}",
                capacity_in_use(&store)
            );
        }
        clock.advance(3 * CALLS.window());
        for _ in 0..130 {
            clock.advance(Duration::from_millis(20));
            assert!(
                runtime
                    .block_on(limiter.peek(&CALLS, "ada"))
                    .unwrap()
                    .is_allowed()
            );
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
        Check::new(Charge::new(limit.clone(), "ada", cost).unwrap()).with_id(AdmissionId(number))
    };
    let (mut admitted, mut used) = (Vec::new(), 0);
    for number in 0..10_000 {
        let check = if number % 3 == 0 {
            take(1 + number % 7, number)
        } else {
            take(1, number)
        };
        admitted.push((limiter.check_all(check.clone()).await.unwrap(), check));
        clock.advance(Duration::from_millis(1));
    }
    for (decision, check) in &admitted {
        let cost = check.charges().map(Charge::cost).sum::<u64>();
        used += cost;
        assert_eq!(decision.binding().used, used);
    }
    let (first, last) = (&admitted[0], &admitted[9_999]);
    for (_, check) in [first, last] {
        assert_eq!(
            limiter
                .check_all(check.clone())
                .await
                .unwrap()
                .binding()
                .used,
            used,
            "the repeated check counts once"
        );
    }
    // All entries up to one in the middle must leave.
    let up_to: u64 = admitted[..=5_000]
        .iter()
        .map(|(_, check)| check.charges().map(Charge::cost).sum::<u64>())
        .sum();
    assert!(
        limiter
            .check(&limit, "ada", limit.units() - used)
            .await
            .unwrap()
            .is_allowed()
    );
    let refused = limiter.check(&limit, "ada", up_to).await.unwrap();
    assert_eq!(
        refused.retry_after(),
        Some(limit.window() - Duration::from_millis(10_000 - 5_000))
    );
    let refused = limiter.check(&limit, "ada", up_to + 1).await.unwrap();
    assert_eq!(
        refused.retry_after(),
        Some(limit.window() - Duration::from_millis(10_000 - 5_001))
    );

    for (decision, check) in admitted.iter().step_by(101) {
        let refund = Settlement::new(check.clone(), decision, |_| Some(0));
        used = limit.units() - limiter.settle(refund).await.unwrap().decision.remaining();
        let again = limiter
            .settle(Settlement::new(check.clone(), decision, |_| Some(0)))
            .await
            .unwrap();
        assert_eq!(
            (again.was_applied, again.decision.binding().used),
            (false, used)
        );
    }
    clock.advance(limit.window());
    assert_eq!(limiter.peek(&limit, "ada").await.unwrap().binding().used, 0);
}

/// Expired admissions free capacity when their key is checked, not only when they are swept.
#[tokio::test]
async fn an_expired_admission_frees_capacity() {
    let (_, limiter, clock) = store(6);
    for _ in 0..50 {
        assert_eq!(
            limiter
                .check(&CALLS, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            1
        );
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        clock.advance(CALLS.window());
    }
}
