//! Algorithms: how many units each admits across the boundary of two windows.

use std::time::Duration;

use super::trial::{MICROSECOND, Trial, charge, check_of, to_next_window};
use tower_sliding_window::{Algorithm, Limit};

/// Tries to spend `units` one by one, and returns how many were admitted.
async fn admitted(test: &Trial, limit: &Limit, units: u64) -> u64 {
    let mut admitted = 0;
    for _ in 0..units {
        admitted += u64::from(
            test.limiter
                .check(limit, "ada", 1)
                .await
                .unwrap()
                .is_allowed(),
        );
    }
    admitted
}

/// Across the boundary of two windows, a fixed window admits twice the limit. Sliding ones admit it
/// once.
pub(super) async fn only_a_fixed_window_admits_twice_the_limit_across_a_boundary(test: Trial) {
    for algorithm in test.algorithms() {
        let expected = if algorithm == Algorithm::FIXED_WINDOW {
            50 + 50
        } else {
            50
        };
        let limit = Limit::per_minute("calls", 50).with_algorithm(algorithm);
        to_next_window(&test.clock, limit.window());
        test.clock.advance(limit.window() - MICROSECOND);
        let before = admitted(&test, &limit, 100).await;
        test.clock.advance(MICROSECOND);
        assert_eq!(
            before + admitted(&test, &limit, 100).await,
            expected,
            "{algorithm:?}"
        );
    }
}

/// The last window used 8 units, this one 3, and 45 s of 60 s have passed: the estimate is 8/4 + 3
/// = 5. A limit of 5 refuses one more. With 4 units in the last window the estimate is 4, and one
/// more is admitted.
pub(super) async fn a_counter_weights_the_previous_window(test: Trial) {
    if !test.counts_by(Algorithm::SLIDING_WINDOW_COUNTER) {
        return;
    }
    for (previous, is_allowed) in [(8, false), (4, true)] {
        let limit = |units| {
            Limit::per_minute("calls", units).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER)
        };
        to_next_window(&test.clock, limit(100).window());
        assert_eq!(admitted(&test, &limit(100), previous).await, previous);
        test.clock.advance(Duration::from_secs(60));
        assert_eq!(admitted(&test, &limit(100), 3).await, 3);
        test.clock.advance(Duration::from_secs(45));
        let used = test
            .limiter
            .peek(&limit(5), "ada")
            .await
            .unwrap()
            .binding()
            .used;
        assert_eq!(used, previous / 4 + 3);
        assert_eq!(
            test.limiter
                .check(&limit(5), "ada", 1)
                .await
                .unwrap()
                .is_allowed(),
            is_allowed
        );
        test.limiter.reset(&limit(5), "ada").await.unwrap();
    }
}

/// The largest errors of a counter: nearly twice the limit within one window, and a refusal after
/// all units have left.
pub(super) async fn a_counter_errs_by_at_most_one_limit(test: Trial) {
    if !test.counts_by(Algorithm::SLIDING_WINDOW_COUNTER) {
        return;
    }
    let limit = Limit::per_minute("calls", 50).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
    to_next_window(&test.clock, limit.window());
    test.clock.advance(limit.window() - MICROSECOND);
    assert_eq!(admitted(&test, &limit, 100).await, 50);
    // At the last moment of the next window, the counter has nearly forgotten the late units.
    test.clock.advance(limit.window() - MICROSECOND);
    assert_eq!(
        admitted(&test, &limit, 100).await,
        49,
        "99 within less than a window"
    );

    to_next_window(&test.clock, limit.window());
    test.clock.advance(2 * limit.window());
    assert_eq!(admitted(&test, &limit, 100).await, 50);
    test.clock.advance(limit.window());
    assert_eq!(admitted(&test, &limit, 100).await, 0, "a window after them");
    let wait = test
        .limiter
        .check(&limit, "ada", 1)
        .await
        .unwrap()
        .retry_after()
        .unwrap();
    assert!(
        wait <= limit.window() / 50,
        "the estimate frees one unit each fiftieth of the window"
    );
}

/// One check may hold limits of different algorithms.
pub(super) async fn limits_of_different_algorithms_are_decided_together(test: Trial) {
    let names = ["first", "second", "third", "fourth"];
    let algorithms = test.algorithms();
    // The later a limit is in the list, the fewer units it has.
    let limit = |(place, algorithm)| {
        let units = u64::try_from(algorithms.len() - place).unwrap();
        Limit::per_minute(names[place], units).with_algorithm(algorithm)
    };
    let limits: Vec<Limit> = algorithms.iter().copied().enumerate().map(limit).collect();
    to_next_window(&test.clock, limits[0].window());
    for (place, limit) in limits.iter().enumerate().rev() {
        let check = check_of(limits[..=place].iter().map(|limit| charge(limit, 1)));
        assert!(test.decide(&check).await.is_allowed());
        let refused = test.decide(&check).await;
        assert_eq!(
            (refused.is_allowed(), &refused.binding().limit),
            (false, limit),
            "the last limit is exhausted"
        );
    }
}
