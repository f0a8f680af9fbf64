//! Closing a limit: until when everybody is refused, and what counts afterwards.

use std::time::{Duration, UNIX_EPOCH};

use tower_sliding_window::{Algorithm, Error, Limit, Limiter, Store};

use crate::support::{
    Fixture, for_every_store,
    stores::{Failing, Silent},
};

const CALLS: Limit = Limit::per_minute("calls", 10);
const MICRO: Duration = Duration::from_micros(1);

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Units that leave meanwhile make no room, and those that do not leave count afterwards.
async fn a_closed_limit_refuses_everybody_until_exactly_then(test: Fixture<impl Store>) {
    for cost in [3, 2] {
        assert!(test.limiter.check(&CALLS, "ada", cost).await.unwrap().is_allowed());
        test.clock.advance(seconds(25));
    }
    // The three leave in 10 s, the two in 35 s.
    test.limiter.pause(&CALLS, "ada", seconds(30)).await.unwrap();
    for elapsed in [0, 9, 10, 11, 29] {
        let refused = test.limiter.check(&CALLS, "ada", 1).await.unwrap();
        assert_eq!(refused.retry_after(), Some(seconds(30 - elapsed)), "after {elapsed} s");
        test.clock.advance(match elapsed {
            0 => seconds(9),
            9 | 10 => seconds(1),
            11 => seconds(18),
            _ => seconds(1) - MICRO,
        });
    }
    assert_eq!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after(), Some(MICRO));
    test.clock.advance(MICRO);
    assert_eq!(test.limiter.check(&CALLS, "ada", 8).await.unwrap().used(), 10);
    assert!(test.limiter.check(&CALLS, "bob", 10).await.unwrap().is_allowed(), "nobody else's was closed");
}

async fn a_limit_is_closed_for_its_window_at_most_and_for_no_time_not_at_all(test: Fixture<impl Store>) {
    test.limiter.pause(&CALLS, "ada", Duration::ZERO).await.unwrap();
    assert_eq!(test.limiter.peek(&CALLS, "ada").await.unwrap().used(), 0);
    test.limiter.pause(&CALLS, "ada", Duration::MAX).await.unwrap();
    assert_eq!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after(), Some(CALLS.window()));
    test.clock.advance(CALLS.window());
    assert!(test.limiter.check(&CALLS, "ada", 10).await.unwrap().is_allowed());
}

async fn a_limit_that_is_used_up_is_closed_as_well(test: Fixture<impl Store>) {
    assert!(test.limiter.check(&CALLS, "ada", 10).await.unwrap().is_allowed());
    test.clock.advance(seconds(50));
    for (time, wait) in [(5, 10), (30, 30), (20, 30)] {
        test.limiter.pause(&CALLS, "ada", seconds(time)).await.unwrap();
        assert_eq!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after(), Some(seconds(wait)), "{time}");
    }
    test.clock.advance(seconds(30));
    assert!(test.limiter.check(&CALLS, "ada", 10).await.unwrap().is_allowed());
}

async fn a_reset_opens_what_is_closed(test: Fixture<impl Store>) {
    test.limiter.pause(&CALLS, "ada", seconds(30)).await.unwrap();
    test.limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(test.limiter.check(&CALLS, "ada", 10).await.unwrap().is_allowed());
}

/// Nothing of it is a reservation, which might be given back at any time.
async fn every_algorithm_closes(test: Fixture<impl Store>) {
    for algorithm in [Algorithm::compact(16), Algorithm::counter(), Algorithm::fixed()] {
        let since = test.clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros() % 60_000_000;
        // A second after the clock's window has begun.
        test.clock.advance(seconds(61) - Duration::from_micros(since as u64));
        let limit = CALLS.with_algorithm(algorithm);
        assert!(test.limiter.check(&limit, "ada", 4).await.unwrap().is_allowed());
        test.clock.advance(seconds(1));
        test.limiter.pause(&limit, "ada", seconds(30)).await.unwrap();
        let refused = test.limiter.check(&limit, "ada", 1).await.unwrap();
        assert_eq!((refused.retry_after(), refused.is_refused_by_reservations()), (Some(seconds(30)), false));
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_store_nothing_is_closed_and_the_error_says_so() {
    let failing = Limiter::new(Failing).pause(&CALLS, "ada", seconds(30)).await;
    assert!(matches!(failing, Err(Error::Unavailable(_))));
    let silent = Limiter::new(Silent).pause(&CALLS, "ada", seconds(30)).await;
    assert!(matches!(silent, Err(Error::TimedOut { .. })));
}

for_every_store! {
    a_closed_limit_refuses_everybody_until_exactly_then
    a_limit_is_closed_for_its_window_at_most_and_for_no_time_not_at_all
    a_limit_that_is_used_up_is_closed_as_well
    a_reset_opens_what_is_closed
    every_algorithm_closes
}
