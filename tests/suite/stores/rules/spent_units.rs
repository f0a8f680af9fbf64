//! Units that were spent before the check: they count beyond the limit, whatever their number.

use std::time::Duration;

use super::trial::{MICROSECOND, Trial, to_the_start_of_a_window};
use crate::support::is_refused_by_reservations;
use tower_sliding_window::{Charge, Check, Limit};

const FAILURES: Limit = Limit::per_minute("failures", 5);

/// A check for any units left, and charges of spent units, by every algorithm.
pub(super) async fn spent_units_count_beyond_the_limit_and_refuse_until_they_leave(test: Trial) {
    for algorithm in test.algorithms() {
        to_the_start_of_a_window(&test.clock, FAILURES.window());
        let limit = FAILURES.with_algorithm(algorithm);
        let any_left =
            async || test.limiter.check_all(Check::new(Charge::any_left(limit.clone(), "ada").unwrap())).await.unwrap();
        let spent = async |cost| {
            let check = Check::new(Charge::spent(limit.clone(), "ada", cost));
            test.limiter.check_all(check).await.unwrap()
        };
        for used in 0..5 {
            assert_eq!((any_left().await.is_allowed(), any_left().await.used()), (true, used), "{algorithm:?}");
            assert_eq!((spent(1).await.is_allowed(), spent(0).await.used()), (true, used + 1));
        }
        let refused = any_left().await;
        assert_eq!((refused.is_allowed(), is_refused_by_reservations(&refused)), (false, false));
        test.clock.advance(Duration::from_secs(20));
        let beyond = spent(8).await;
        assert_eq!((beyond.is_allowed(), beyond.used(), beyond.remaining()), (true, 13, 0));

        // The retry time is exact. The refusal cache is off, so that the store itself decides.
        let limiter = test.limiter.clone().refusal_cache(Duration::ZERO);
        let ask =
            async || limiter.check_all(Check::new(Charge::any_left(limit.clone(), "ada").unwrap())).await.unwrap();
        let wait = ask().await.retry_after().unwrap();
        assert!(wait >= Duration::from_secs(39), "{algorithm:?}: {wait:?}");
        test.clock.advance(wait - MICROSECOND);
        assert_eq!(ask().await.retry_after(), Some(MICROSECOND), "{algorithm:?}");
        test.clock.advance(MICROSECOND);
        assert!(ask().await.is_allowed(), "{algorithm:?}");
        test.clock.advance(3 * limit.window());
    }
}

/// An impossible cost refuses the key, and does not overflow.
pub(super) async fn absurd_costs_are_counted_without_overflow(test: Trial) {
    for algorithm in test.algorithms() {
        to_the_start_of_a_window(&test.clock, FAILURES.window());
        let limit = FAILURES.with_algorithm(algorithm);
        for _ in 0..3 {
            let spent = Check::new(Charge::spent(limit.clone(), "ada", u64::MAX));
            assert!(test.limiter.check_all(spent).await.unwrap().is_allowed());
        }
        let refused = test.limiter.check(&limit, "ada", 1).await.unwrap();
        assert!(refused.retry_after().unwrap() <= 2 * limit.window());
        test.clock.advance(3 * limit.window());
        assert!(test.limiter.check(&limit, "ada", 5).await.unwrap().is_allowed(), "{algorithm:?}");
    }
}

pub(super) async fn endless_spending_never_admits_again(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = Limit::per_day("huge", Limit::MAX_UNITS).with_algorithm(algorithm);
        for _ in 0..4_100 {
            let spent = Check::new(Charge::spent(limit.clone(), "ada", u64::MAX));
            let _ = test.limiter.check_all(spent).await.unwrap();
        }
        assert!(!test.limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(), "{algorithm:?}");
        test.limiter.reset(&limit, "ada").await.unwrap();
    }
}
