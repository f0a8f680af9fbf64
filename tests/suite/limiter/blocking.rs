//! Blocked limits: they refuse everything until the end of the block, and then count as before.

use std::time::Duration;

use tower_sliding_window::{Algorithm, Error, Limit, Limiter, Store};

use crate::support::{
    Fixture, MICROSECOND, for_every_store, is_refused_by_reservations, seconds,
    stores::{failing, silent},
    to_the_start_of_a_window,
};

const CALLS: Limit = Limit::per_minute("calls", 10);

/// Units that leave during the block free no capacity. Units that stay count afterwards.
async fn a_blocked_limit_refuses_until_exactly_the_end_of_the_block(
    test: Fixture<impl Store + Clone>,
) {
    for cost in [3, 2] {
        assert!(
            test.limiter
                .check(&CALLS, "ada", cost)
                .await
                .unwrap()
                .is_allowed()
        );
        test.clock.advance(seconds(25));
    }
    // The three units leave in 10 s, the two in 35 s.
    test.limiter
        .block(&CALLS, "ada", seconds(30))
        .await
        .unwrap();
    for elapsed in [0, 9, 10, 11, 29] {
        let refused = test.limiter.check(&CALLS, "ada", 1).await.unwrap();
        assert_eq!(
            refused.retry_after(),
            Some(seconds(30 - elapsed)),
            "after {elapsed} s"
        );
        test.clock.advance(match elapsed {
            0 => seconds(9),
            9 | 10 => seconds(1),
            11 => seconds(18),
            _ => seconds(1) - MICROSECOND,
        });
    }
    assert_eq!(
        test.limiter
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .retry_after(),
        Some(MICROSECOND)
    );
    test.clock.advance(MICROSECOND);
    assert_eq!(
        test.limiter
            .check(&CALLS, "ada", 8)
            .await
            .unwrap()
            .binding()
            .used,
        10
    );
    assert!(
        test.limiter
            .check(&CALLS, "bob", 10)
            .await
            .unwrap()
            .is_allowed(),
        "nobody else's was closed"
    );
}

async fn a_block_lasts_at_most_one_window_and_zero_blocks_nothing(
    test: Fixture<impl Store + Clone>,
) {
    test.limiter
        .block(&CALLS, "ada", Duration::ZERO)
        .await
        .unwrap();
    assert_eq!(
        test.limiter
            .peek(&CALLS, "ada")
            .await
            .unwrap()
            .binding()
            .used,
        0
    );
    test.limiter
        .block(&CALLS, "ada", Duration::MAX)
        .await
        .unwrap();
    assert_eq!(
        test.limiter
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .retry_after(),
        Some(CALLS.window())
    );
    test.clock.advance(CALLS.window());
    assert!(
        test.limiter
            .check(&CALLS, "ada", 10)
            .await
            .unwrap()
            .is_allowed()
    );
}

async fn an_exhausted_limit_can_be_blocked(test: Fixture<impl Store + Clone>) {
    assert!(
        test.limiter
            .check(&CALLS, "ada", 10)
            .await
            .unwrap()
            .is_allowed()
    );
    test.clock.advance(seconds(50));
    for (time, wait) in [(5, 10), (30, 30), (20, 30)] {
        test.limiter
            .block(&CALLS, "ada", seconds(time))
            .await
            .unwrap();
        assert_eq!(
            test.limiter
                .check(&CALLS, "ada", 1)
                .await
                .unwrap()
                .retry_after(),
            Some(seconds(wait)),
            "{time}"
        );
    }
    test.clock.advance(seconds(30));
    assert!(
        test.limiter
            .check(&CALLS, "ada", 10)
            .await
            .unwrap()
            .is_allowed()
    );
}

async fn a_reset_ends_a_block(test: Fixture<impl Store + Clone>) {
    test.limiter
        .block(&CALLS, "ada", seconds(30))
        .await
        .unwrap();
    test.limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(
        test.limiter
            .check(&CALLS, "ada", 10)
            .await
            .unwrap()
            .is_allowed()
    );
}

/// A block is not a reservation, which might be returned at any time.
async fn every_algorithm_can_be_blocked(test: Fixture<impl Store + Clone>) {
    for algorithm in [
        Algorithm::compact_log(16),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ] {
        to_the_start_of_a_window(&test.clock, CALLS.window());
        let limit = CALLS.with_algorithm(algorithm);
        assert!(
            test.limiter
                .check(&limit, "ada", 4)
                .await
                .unwrap()
                .is_allowed()
        );
        test.clock.advance(seconds(1));
        test.limiter
            .block(&limit, "ada", seconds(30))
            .await
            .unwrap();
        let refused = test.limiter.check(&limit, "ada", 1).await.unwrap();
        assert_eq!(
            (refused.retry_after(), is_refused_by_reservations(&refused)),
            (Some(seconds(30)), false)
        );
    }
}

for_every_store! {
    a_blocked_limit_refuses_until_exactly_the_end_of_the_block
    a_block_lasts_at_most_one_window_and_zero_blocks_nothing
    an_exhausted_limit_can_be_blocked
    a_reset_ends_a_block
    every_algorithm_can_be_blocked
}

#[tokio::test(start_paused = true)]
async fn a_block_without_a_working_store_is_an_error() {
    let failing = Limiter::new(failing())
        .block(&CALLS, "ada", seconds(30))
        .await;
    assert!(matches!(failing, Err(Error::Unavailable(_))));
    let silent = Limiter::new(silent())
        .block(&CALLS, "ada", seconds(30))
        .await;
    assert!(matches!(silent, Err(Error::TimedOut { .. })));
}
