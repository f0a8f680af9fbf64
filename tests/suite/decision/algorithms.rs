//! The error of a compact log stays within its documented bound.

use std::{
    collections::VecDeque,
    time::{Duration, UNIX_EPOCH},
};

use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};
use tower_sliding_window::{Algorithm, Limit, Limiter, MemoryStore, store::ManualClock};

fn micros(clock: &ManualClock) -> u64 {
    u64::try_from(clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

/// A compact log compared to the exact log: it never admits more, and it refuses only checks that
/// the exact log would refuse if its units stayed for one sub-window longer.
fn a_compact_log_errs_to_one_side(entries: u16, operations: u32) {
    let limit = Limit::per("calls", 40, Duration::from_micros(100_003))
        .with_algorithm(Algorithm::compact_log(entries));
    let (window, part) = (100_003, 100_003_u64.div_ceil(u64::from(entries) - 2));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::new().clock(&clock));
    let (mut log, mut early, mut refused): (VecDeque<(u64, u64)>, u32, u32) =
        (VecDeque::new(), 0, 0);
    let operation = (
        prop_oneof![5 => 0..500u64, 3 => 0..8_000u64, 1 => 0..120_000u64],
        1..=6u64,
    );
    let mut random = TestRunner::new(Config::default());
    for _ in 0..operations {
        let (pause, cost) = operation.new_tree(&mut random).unwrap().current();
        clock.advance(Duration::from_micros(pause));
        let now = micros(&clock);
        while log.front().is_some_and(|(at, _)| at + window + part <= now) {
            log.pop_front();
        }
        let within = |span: u64| {
            log.iter()
                .filter(|(at, _)| at + span > now)
                .map(|(_, cost)| cost)
                .sum::<u64>()
        };
        let decision = runtime
            .block_on(limiter.check(&limit, "ada", cost))
            .unwrap();
        if decision.is_allowed() {
            assert!(within(window) + cost <= 40, "over-admitted");
            log.push_back((now, cost));
        } else {
            refused += 1;
            early += u32::from(within(window) + cost <= 40);
            assert!(
                within(window + part) + cost > 40,
                "refused early by more than a sub-window"
            );
        }
    }
    println!("{entries} entries: {refused} of {operations} refused, {early} of these early");
    assert!(
        refused > operations / 10 && early > 0,
        "the limit was reached, and the bound too"
    );
}

#[test]
fn a_compact_log_of_16_never_over_admits_and_refuses_early_by_a_sub_window_at_most() {
    a_compact_log_errs_to_one_side(16, 1_000_000);
}

#[test]
fn a_compact_log_of_128_never_over_admits_and_refuses_early_by_a_sub_window_at_most() {
    a_compact_log_errs_to_one_side(128, 1_000_000);
}
