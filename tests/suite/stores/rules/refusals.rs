//! Refusals: they take nothing, and their retry time is the first moment at which the check would
//! pass.

use std::time::Duration;

use super::trial::{MICROSECOND, Trial};
use tower_sliding_window::Limit;

const BURST: Limit = Limit::per("burst", 100, Duration::from_secs(10));
const HOURLY: Limit = Limit::per_hour("hourly", 250);
const DAILY: Limit = Limit::per_day("daily", 400);

/// More checks than any of these limits admits without waiting.
const TRIES: usize = 500;

/// A refused check spends nothing that could refuse a later one.
pub(super) async fn refusals_cost_nothing(test: Trial) {
    let limit = Limit::per_minute("login", 2);
    assert!(test.spend(&limit, 2).await.is_allowed());
    for _ in 0..100 {
        test.clock.advance(Duration::from_millis(10));
        assert!(!test.spend(&limit, 1).await.is_allowed());
    }
    test.clock.advance(Duration::from_secs(59));
    assert!(test.spend(&limit, 2).await.is_allowed());
}

/// For costs from 1 to 100 and one to three limits: refused at `retry_after − 1 µs`, admitted at
/// `retry_after`.
pub(super) async fn retry_after_is_exact_to_the_microsecond(test: Trial) {
    let test = test.without_refusal_cache();
    for cost in 1..=100 {
        let limits = &[BURST, HOURLY, DAILY][..usize::try_from(cost % 3).unwrap() + 1];
        // Different costs at different times, until the cost under test does not fit either.
        let mut is_full = false;
        for uneven in (1..=13).cycle().take(TRIES) {
            test.clock.advance(Duration::from_micros(cost * 331));
            is_full = !test.spend_all(limits, uneven).await.is_allowed();
            if is_full {
                break;
            }
        }
        assert!(is_full, "{TRIES} checks in a row were admitted");
        let mut retry_after = None;
        for _ in 0..TRIES {
            retry_after = test.spend_all(limits, cost).await.retry_after();
            if retry_after.is_some() {
                break;
            }
        }
        let Some(retry_after) = retry_after else {
            panic!("{TRIES} checks of cost {cost} in a row were admitted")
        };
        assert!(
            !retry_after.is_zero(),
            "cost {cost} refused with a retry time of zero"
        );
        test.clock.advance(retry_after - MICROSECOND);
        assert!(
            !test.spend_all(limits, cost).await.is_allowed(),
            "cost {cost} admitted early"
        );
        test.clock.advance(MICROSECOND);
        assert!(
            test.spend_all(limits, cost).await.is_allowed(),
            "cost {cost} refused at its time"
        );
    }
}

/// The retry time waits for the entry that frees enough units, not for the oldest one.
pub(super) async fn retry_after_waits_for_enough_units(test: Trial) {
    let test = test.without_refusal_cache();
    let limit = Limit::per_minute("calls", 10);
    for cost in [2, 3, 5] {
        assert!(test.spend(&limit, cost).await.is_allowed());
        test.clock.advance(Duration::from_secs(1));
    }
    for (cost, wait) in [(1, 57), (2, 57), (3, 58), (5, 58), (6, 59), (10, 59)] {
        let refused = test.spend(&limit, cost).await;
        assert_eq!(
            refused.retry_after(),
            Some(Duration::from_secs(wait)),
            "cost {cost}"
        );
    }
}
