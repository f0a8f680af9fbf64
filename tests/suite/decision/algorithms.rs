//! The error of each algorithm: the exact ones have none, the others stay within their documented bounds.

use std::{
    collections::VecDeque,
    time::{Duration, UNIX_EPOCH},
};

use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};
use tower_sliding_window::{Algorithm, Limit, Limiter, ManualClock, MemoryStore, Store};

use crate::support::{Fixture, MICROSECOND, for_every_store, to_next_window};

fn micros(clock: &ManualClock) -> u64 {
    u64::try_from(clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

/// Tries to spend `units` one by one, and returns how many were admitted.
async fn admitted(test: &Fixture<impl Store>, limit: &Limit, units: u64) -> u64 {
    let mut admitted = 0;
    for _ in 0..units {
        admitted += u64::from(test.limiter.check(limit, "ada", 1).await.unwrap().is_allowed());
    }
    admitted
}

/// Across the boundary of two windows, a fixed window admits twice the limit. Sliding ones admit it once.
async fn only_a_fixed_window_admits_twice_the_limit_across_a_boundary(test: Fixture<impl Store>) {
    for (algorithm, expected) in [
        (Algorithm::fixed(), 50 + 50),
        (Algorithm::log(), 50),
        (Algorithm::compact(16), 50),
        (Algorithm::counter(), 50),
    ] {
        let limit = Limit::per_minute("calls", 50).with_algorithm(algorithm);
        to_next_window(&test.clock, limit.window());
        test.clock.advance(limit.window() - MICROSECOND);
        let before = admitted(&test, &limit, 100).await;
        test.clock.advance(MICROSECOND);
        assert_eq!(before + admitted(&test, &limit, 100).await, expected, "{algorithm:?}");
    }
}

/// The last window used 8 units, this one 3, and 45 s of 60 s have passed: the estimate is 8/4 + 3 = 5. A limit of 5
/// refuses one more. With 4 units in the last window the estimate is 4, and one more is admitted.
async fn a_counter_weights_the_previous_window(test: Fixture<impl Store>) {
    for (previous, is_allowed) in [(8, false), (4, true)] {
        let limit = |units| Limit::per_minute("calls", units).with_algorithm(Algorithm::counter());
        to_next_window(&test.clock, limit(100).window());
        assert_eq!(admitted(&test, &limit(100), previous).await, previous);
        test.clock.advance(Duration::from_secs(60));
        assert_eq!(admitted(&test, &limit(100), 3).await, 3);
        test.clock.advance(Duration::from_secs(45));
        let used = test.limiter.peek(&limit(5), "ada").await.unwrap().used();
        assert_eq!(used, previous / 4 + 3);
        assert_eq!(test.limiter.check(&limit(5), "ada", 1).await.unwrap().is_allowed(), is_allowed);
        test.limiter.reset(&limit(5), "ada").await.unwrap();
    }
}

/// The largest errors of a counter: nearly twice the limit within one window, and a refusal after all units have left.
async fn a_counter_errs_by_at_most_one_limit(test: Fixture<impl Store>) {
    let limit = Limit::per_minute("calls", 50).with_algorithm(Algorithm::counter());
    to_next_window(&test.clock, limit.window());
    test.clock.advance(limit.window() - MICROSECOND);
    assert_eq!(admitted(&test, &limit, 100).await, 50);
    // At the last moment of the next window, the counter has nearly forgotten the late units.
    test.clock.advance(limit.window() - MICROSECOND);
    assert_eq!(admitted(&test, &limit, 100).await, 49, "99 within less than a window");

    to_next_window(&test.clock, limit.window());
    test.clock.advance(2 * limit.window());
    assert_eq!(admitted(&test, &limit, 100).await, 50);
    test.clock.advance(limit.window());
    assert_eq!(admitted(&test, &limit, 100).await, 0, "a window after them");
    let wait = test.limiter.check(&limit, "ada", 1).await.unwrap().retry_after().unwrap();
    assert!(wait <= limit.window() / 50, "the estimate frees one unit each fiftieth of the window");
}

/// A compact log compared to the exact log: it never admits more, and it refuses only checks that the exact log would
/// refuse if its units stayed for one sub-window longer.
fn a_compact_log_errs_to_one_side(entries: u16, operations: u32) {
    let limit = Limit::per("calls", 40, Duration::from_micros(100_003)).with_algorithm(Algorithm::compact(entries));
    let (window, part) = (100_003, 100_003_u64.div_ceil(u64::from(entries) - 2));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::builder().clock(&clock).build());
    let (mut log, mut early, mut refused): (VecDeque<(u64, u64)>, u32, u32) = (VecDeque::new(), 0, 0);
    let operation = (prop_oneof![5 => 0..500u64, 3 => 0..8_000u64, 1 => 0..120_000u64], 1..=6u64);
    let mut random = TestRunner::new(Config::default());
    for _ in 0..operations {
        let (pause, cost) = operation.new_tree(&mut random).unwrap().current();
        clock.advance(Duration::from_micros(pause));
        let now = micros(&clock);
        while log.front().is_some_and(|(at, _)| at + window + part <= now) {
            log.pop_front();
        }
        let within = |span: u64| log.iter().filter(|(at, _)| at + span > now).map(|(_, cost)| cost).sum::<u64>();
        let decision = runtime.block_on(limiter.check(&limit, "ada", cost)).unwrap();
        if decision.is_allowed() {
            assert!(within(window) + cost <= 40, "over-admitted");
            log.push_back((now, cost));
        } else {
            refused += 1;
            early += u32::from(within(window) + cost <= 40);
            assert!(within(window + part) + cost > 40, "refused early by more than a sub-window");
        }
    }
    println!("{entries} entries: {refused} of {operations} refused, {early} of these early");
    assert!(refused > operations / 10 && early > 0, "the limit was reached, and the bound too");
}

#[test]
fn a_compact_log_of_16_never_over_admits_and_refuses_early_by_a_sub_window_at_most() {
    a_compact_log_errs_to_one_side(16, 1_000_000);
}

#[test]
fn a_compact_log_of_128_never_over_admits_and_refuses_early_by_a_sub_window_at_most() {
    a_compact_log_errs_to_one_side(128, 1_000_000);
}

/// One check may hold limits of different algorithms.
async fn limits_of_different_algorithms_are_decided_together(test: Fixture<impl Store>) {
    use tower_sliding_window::{Charge, Check};

    let limit = |name: &'static str, units, algorithm| Limit::per_minute(name, units).with_algorithm(algorithm);
    let limits = [
        limit("log", 4, Algorithm::log()),
        limit("compact", 3, Algorithm::compact(16)),
        limit("counter", 2, Algorithm::counter()),
        limit("fixed", 1, Algorithm::fixed()),
    ];
    to_next_window(&test.clock, limits[0].window());
    let charge = |limit: &Limit| Charge::new(limit.clone(), "ada", 1).unwrap();
    for (place, limit) in limits.iter().enumerate().rev() {
        let mut check = Check::new(charge(&limits[0]));
        for other in limits[1..].iter().take(place) {
            check = check.and(charge(other)).unwrap();
        }
        assert!(test.limiter.check_all(check.clone()).await.unwrap().is_allowed());
        let refused = test.limiter.check_all(check).await.unwrap();
        assert_eq!((refused.is_allowed(), refused.limit()), (false, limit), "the last limit is exhausted");
    }
}

for_every_store! {
    only_a_fixed_window_admits_twice_the_limit_across_a_boundary
    a_counter_weights_the_previous_window
    a_counter_errs_by_at_most_one_limit
    limits_of_different_algorithms_are_decided_together
}
