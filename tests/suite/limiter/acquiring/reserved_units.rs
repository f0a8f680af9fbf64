//! Callers that wait for reserved units: another process may return them at any time, so they ask
//! again.

use std::time::Duration;

use tokio::{
    task::JoinSet,
    time::{Instant, advance, sleep},
};
use tower_sliding_window::{Decision, Limit, Limiter, MemoryStore, store::ManualClock};

use super::lines;
use crate::support::{
    TEST_TIMEOUT, is_refused_by_reservations, let_tasks_run, ms, redis_server::RedisServer, seconds,
};

const SECOND: Duration = Duration::from_secs(1);
const TOKENS: Limit = Limit::per_minute("tokens", 100);

/// The units are settled by another process, or through a limiter with another line.
#[tokio::test(start_paused = true)]
async fn a_caller_that_waits_for_others_reservations_asks_again_after_the_setting() {
    for (setting, max_wait, given_back_after, admitted_after) in [
        (SECOND, TEST_TIMEOUT, ms(300), Ok(SECOND)),
        (ms(200), TEST_TIMEOUT, ms(300), Ok(ms(400))),
        (SECOND, TEST_TIMEOUT, ms(2_500), Ok(seconds(3))),
        (seconds(10), seconds(2), ms(300), Ok(seconds(2))),
        (SECOND, ms(500), ms(300), Ok(ms(500))),
        (seconds(3_600), ms(500), ms(300), Ok(ms(500))),
        (Duration::MAX, ms(500), ms(300), Ok(ms(500))),
        (Duration::ZERO, TEST_TIMEOUT, ms(300), Ok(ms(300))),
        (SECOND, ms(300), ms(500), Err(ms(300))),
        (SECOND, ms(1_500), seconds(2), Err(ms(1_500))),
        (SECOND, Duration::ZERO, ms(500), Err(Duration::ZERO)),
    ] {
        let clock = ManualClock::new();
        let store = MemoryStore::new().clock(&clock);
        let (limiter, elsewhere) = (
            Limiter::new(store.clone()).retry_reserved_after(setting),
            Limiter::new(store),
        );
        let reservation = elsewhere
            .reserve(&TOKENS, "ada", 100, Duration::MAX)
            .await
            .unwrap()
            .unwrap();
        let begun = Instant::now();
        let waiting = tokio::spawn(async move {
            let decision = limiter.acquire(&TOKENS, "ada", 1, max_wait).await.unwrap();
            (decision, begun.elapsed())
        });
        sleep(given_back_after).await;
        reservation.settle(0).await.unwrap();
        let (decision, elapsed) = waiting.await.unwrap();
        let case = format!("{setting:?} {max_wait:?} {given_back_after:?}");
        assert_eq!(decision.is_allowed(), admitted_after.is_ok(), "{case}");
        assert_eq!(
            is_refused_by_reservations(&decision),
            admitted_after.is_err(),
            "{case}"
        );
        let (Ok(expected) | Err(expected)) = admitted_after;
        // Between two checks there is a pause of at least a millisecond.
        assert!(
            (expected..=expected + ms(2)).contains(&elapsed),
            "{case}: {elapsed:?}"
        );
    }
}

/// A settlement through the limiter or its clone is seen at once, however long the setting is.
#[tokio::test(start_paused = true)]
async fn a_caller_sees_units_returned_through_its_limiter_at_once() {
    for setting in [ms(50), SECOND, seconds(3_600)] {
        let limiter = Limiter::new(MemoryStore::new()).retry_reserved_after(setting);
        let reservation = limiter
            .reserve(&TOKENS, "ada", 100, Duration::MAX)
            .await
            .unwrap()
            .unwrap();
        let mut waiting = JoinSet::new();
        let begun = Instant::now();
        for _ in 0..3 {
            let limiter = limiter.clone();
            waiting.spawn(async move {
                limiter
                    .acquire(&TOKENS, "ada", 10, TEST_TIMEOUT)
                    .await
                    .unwrap()
            });
        }
        sleep(ms(20)).await;
        reservation.settle(30).await.unwrap();
        assert!(waiting.join_all().await.iter().all(Decision::is_allowed));
        assert_eq!(begun.elapsed(), ms(20), "{setting:?}");
    }
}

/// A lease that ends earlier is waited for exactly, and so are settled units.
#[tokio::test(start_paused = true)]
async fn a_caller_asks_again_when_a_lease_ends() {
    let clock = ManualClock::new();
    let store = MemoryStore::new().clock(&clock);
    let limiter = Limiter::new(store.clone());
    let elsewhere = Limiter::new(store);
    let pass = async |time| {
        clock.advance(time);
        advance(time).await;
        let_tasks_run().await;
    };
    // 60 units leave after 60 s, and the others are reserved for 5.7 s.
    assert!(
        elsewhere
            .check(&TOKENS, "ada", 60)
            .await
            .unwrap()
            .is_allowed()
    );
    let _kept = elsewhere
        .reserve(&TOKENS, "ada", 40, ms(5_700))
        .await
        .unwrap()
        .unwrap();
    let waiting = |cost, max_wait| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            limiter
                .acquire(&TOKENS, "ada", cost, max_wait)
                .await
                .unwrap()
        })
    };
    let sure = waiting(50, seconds(30)).await.unwrap();
    let reported = (
        sure.is_allowed(),
        sure.retry_after(),
        is_refused_by_reservations(&sure),
    );
    assert_eq!(
        reported,
        (false, Some(seconds(60)), false),
        "a wait longer than max_wait is refused at once"
    );

    let first = waiting(10, seconds(30));
    let_tasks_run().await;
    for _ in 0..5 {
        pass(SECOND).await;
        assert!(!first.is_finished());
    }
    pass(ms(699)).await;
    assert!(!first.is_finished());
    pass(ms(1)).await;
    assert!(first.await.unwrap().is_allowed());
}

/// Another process returns the units on the same server.
#[tokio::test]
async fn a_caller_on_redis_asks_again_after_the_setting() {
    let server = RedisServer::start();
    let limiter = || Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    for (setting, max_wait) in [(ms(300), TEST_TIMEOUT), (seconds(60), ms(300))] {
        let (here, there) = (limiter().retry_reserved_after(setting), limiter());
        let reservation = there
            .reserve(&TOKENS, "ada", 100, Duration::MAX)
            .await
            .unwrap()
            .unwrap();
        // A caller asks earlier by a part of the round trip, so that its check arrives in time. On
        // a busy machine that takes many milliseconds.
        let asked = std::time::Instant::now();
        let _ = here.peek(&TOKENS, "ada").await.unwrap();
        let round_trip = asked.elapsed();
        let begun = std::time::Instant::now();
        let waiting = tokio::spawn({
            let here = here.clone();
            async move { here.acquire(&TOKENS, "ada", 1, max_wait).await.unwrap() }
        });
        // Settled before the caller's first check, the units would admit it at once.
        while lines(&here) == 0 {
            sleep(ms(1)).await;
        }
        reservation.settle(0).await.unwrap();
        let decision = waiting.await.unwrap();
        let elapsed = begun.elapsed();
        assert!(
            decision.is_allowed(),
            "{setting:?} {max_wait:?}: {decision:?}"
        );
        let earliest = ms(299).saturating_sub(round_trip);
        assert!(
            elapsed >= earliest && elapsed < seconds(10),
            "{setting:?} {max_wait:?}: {elapsed:?}"
        );

        // A settlement through the same limiter wakes the caller, which would ask again after a
        // minute otherwise.
        here.reset(&TOKENS, "ada").await.unwrap();
        let here = here.retry_reserved_after(seconds(60));
        let reservation = here
            .reserve(&TOKENS, "ada", 100, Duration::MAX)
            .await
            .unwrap()
            .unwrap();
        let begun = std::time::Instant::now();
        let waiting = tokio::spawn({
            let here = here.clone();
            async move { here.acquire(&TOKENS, "ada", 1, TEST_TIMEOUT).await.unwrap() }
        });
        // Settled before the caller's first check, the units would admit it at once.
        while lines(&here) == 0 {
            sleep(ms(1)).await;
        }
        reservation.settle(0).await.unwrap();
        assert!(waiting.await.unwrap().is_allowed());
        assert!(
            begun.elapsed() < seconds(10),
            "{setting:?}: {:?}",
            begun.elapsed()
        );
        here.reset(&TOKENS, "ada").await.unwrap();
    }
}
