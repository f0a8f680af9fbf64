//! Units that were spent before the check: they count beyond the limit, whatever their number.

use std::time::Duration;

use super::trial::{MICROSECOND, Trial, seconds, to_the_start_of_a_window};
use crate::support::is_refused_by_reservations;
use tower_sliding_window::{Algorithm, Charge, Check, Limit};

const FAILURES: Limit = Limit::per_minute("failures", 5);

/// A check for any units left, and charges of spent units, by every algorithm.
pub(super) async fn spent_units_count_beyond_the_limit_and_refuse_until_they_leave(test: Trial) {
    for algorithm in test.algorithms() {
        to_the_start_of_a_window(&test.clock, FAILURES.window());
        let limit = FAILURES.with_algorithm(algorithm);
        let any_left = async || {
            test.limiter
                .check_all(Check::new(Charge::any_left(limit.clone(), "ada").unwrap()))
                .await
                .unwrap()
        };
        let spent = async |cost| {
            let check = Check::new(Charge::spent(limit.clone(), "ada", cost));
            test.limiter.check_all(check).await.unwrap()
        };
        for used in 0..5 {
            assert_eq!(
                (
                    any_left().await.is_allowed(),
                    any_left().await.binding().used
                ),
                (true, used),
                "{algorithm:?}"
            );
            assert_eq!(
                (spent(1).await.is_allowed(), spent(0).await.binding().used),
                (true, used + 1)
            );
        }
        let refused = any_left().await;
        assert_eq!(
            (refused.is_allowed(), is_refused_by_reservations(&refused)),
            (false, false)
        );
        test.clock.advance(Duration::from_secs(20));
        let beyond = spent(8).await;
        assert_eq!(
            (
                beyond.is_allowed(),
                beyond.binding().used,
                beyond.remaining()
            ),
            (true, 13, 0)
        );

        // The retry time is exact. The refusal cache is off, so that the store itself decides.
        let limiter = test.limiter.clone().refusal_cache(Duration::ZERO);
        let ask = async || {
            limiter
                .check_all(Check::new(Charge::any_left(limit.clone(), "ada").unwrap()))
                .await
                .unwrap()
        };
        let wait = ask().await.retry_after().unwrap();
        assert!(wait >= Duration::from_secs(39), "{algorithm:?}: {wait:?}");
        test.clock.advance(wait - MICROSECOND);
        assert_eq!(
            ask().await.retry_after(),
            Some(MICROSECOND),
            "{algorithm:?}"
        );
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
        assert!(
            test.limiter
                .check(&limit, "ada", 5)
                .await
                .unwrap()
                .is_allowed(),
            "{algorithm:?}"
        );
    }
}

pub(super) async fn endless_spending_never_admits_again(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = Limit::per_day("huge", Limit::MAX_UNITS).with_algorithm(algorithm);
        for _ in 0..4_100 {
            let spent = Check::new(Charge::spent(limit.clone(), "ada", u64::MAX));
            let _ = test.limiter.check_all(spent).await.unwrap();
        }
        assert!(
            !test
                .limiter
                .check(&limit, "ada", 1)
                .await
                .unwrap()
                .is_allowed(),
            "{algorithm:?}"
        );
        test.limiter.reset(&limit, "ada").await.unwrap();
    }
}

/// A store may count up to 2^53 units exactly. Units beyond that are never admitted, and all leave.
pub(super) async fn spent_units_of_the_largest_limit_leave(test: Trial) {
    let test = test.without_refusal_cache();
    for algorithm in test.algorithms() {
        let limit = Limit::per_minute("huge", Limit::MAX_UNITS).with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, limit.window());
        for _ in 0..2 {
            let spent = Check::new(Charge::spent(limit.clone(), "ada", Limit::MAX_UNITS));
            let _ = test.limiter.check_all(spent).await.unwrap();
        }
        // A quarter of the earlier units of a counter still counts. A store may refuse until they
        // have left.
        test.clock.advance(seconds(105));
        let mut admitted = 0;
        for _ in 0..4 {
            let half = test
                .limiter
                .check(&limit, "ada", Limit::MAX_UNITS / 2)
                .await
                .unwrap();
            admitted += u32::from(half.is_allowed());
        }
        let is_counter = algorithm == Algorithm::SLIDING_WINDOW_COUNTER;
        assert!(
            if is_counter {
                admitted <= 1
            } else {
                admitted == 2
            },
            "{algorithm:?}: {admitted}"
        );
        test.clock.advance(seconds(130));
        assert_eq!(
            test.limiter
                .check(&limit, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            1,
            "{algorithm:?}"
        );
    }
}
