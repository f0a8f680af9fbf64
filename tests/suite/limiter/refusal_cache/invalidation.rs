//! Events after which a refusal is not repeated: a reset, a step back of the clock, the end of its
//! age, returned units.

use std::time::Duration;

use tokio::time::sleep;
use tower_sliding_window::{Charge, Check, Limit, Limiter, store::ManualClock};

use super::{CALLS, Test, build_with_clock};
use crate::support::{TEST_TIMEOUT, is_refused_by_reservations, ms, redis_server::RedisServer};

/// A check counts from its first poll, not from the call that makes it.
#[tokio::test]
async fn a_check_first_polled_after_a_reset_is_admitted() {
    let test = Test::start();
    let limiter = test.refused().await;
    let made = limiter.check(&CALLS, "ada", 1);
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(made.await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_reset_through_any_limiter_on_the_store_is_seen_at_once() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.limiter().reset(&CALLS, "ada").await.unwrap();
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_reset_by_another_process_is_seen_within_max_age() {
    let test = Test::start();
    let limiter = test.refused().await;
    let elsewhere = build_with_clock(&test.clock, test.server.store());
    Limiter::new(elsewhere)
        .deadline(TEST_TIMEOUT)
        .reset(&CALLS, "ada")
        .await
        .unwrap();
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    test.clock.advance(Duration::from_secs(1));
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
}

/// The refusal was decided before the reset, and its reply arrives after the reset was called.
#[tokio::test]
async fn a_refusal_overtaken_by_a_reset_is_not_cached() {
    let test = Test::start();
    let limiter = test.limiter();
    for _ in 0..2 {
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    }
    test.server.pause();
    let refused = tokio::spawn(limiter.check(&CALLS, "ada", 1));
    sleep(Duration::from_millis(50)).await;
    let resetting = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.reset(&CALLS, "ada").await }
    });
    sleep(Duration::from_millis(50)).await;
    test.server.resume();
    resetting.await.unwrap().unwrap();
    let _ = refused.await.unwrap().unwrap();
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_clock_that_steps_back_invalidates_cached_refusals() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.clock.step_back(Duration::from_secs(3_600));
    let refused = limiter.check(&CALLS, "ada", 1).await.unwrap();
    assert_eq!(refused.retry_after(), Some(CALLS.window()));
}

/// Another process may return reserved units at any time, so their refusal asks again after
/// `retry_reserved_after`.
#[tokio::test]
async fn a_refusal_by_reservations_is_cached_no_longer_than_retry_reserved_after() {
    let (second, forever) = (Duration::from_secs(1), Duration::MAX);
    for (setting, cache, remembered) in [
        (second, second, second),
        (ms(200), second, ms(200)),
        (5 * second, second, second),
        (second, forever, second),
        (5 * second, forever, 5 * second),
        (Duration::ZERO, forever, Duration::ZERO),
    ] {
        for by_settled_as_well in [false, true] {
            let test = Test::start();
            let limiter = test
                .limiter()
                .refusal_cache(cache)
                .retry_reserved_after(setting);
            let elsewhere = Limiter::new(build_with_clock(&test.clock, test.server.store()))
                .deadline(TEST_TIMEOUT);
            let other = Limit::per_minute("other", 1);
            let check = match by_settled_as_well {
                true => {
                    assert!(
                        elsewhere
                            .check(&other, "ada", 1)
                            .await
                            .unwrap()
                            .is_allowed()
                    );
                    let charge = Charge::new(other.clone(), "ada", 1).unwrap();
                    Check::new(Charge::new(CALLS, "ada", 1).unwrap())
                        .and(charge)
                        .unwrap()
                }
                false => Check::new(Charge::new(CALLS, "ada", 1).unwrap()),
            };
            let reservation = elsewhere
                .reserve(&CALLS, "ada", 2, Duration::MAX)
                .await
                .unwrap()
                .unwrap();
            let first = limiter.check_all(check.clone()).await.unwrap();
            assert_eq!(is_refused_by_reservations(&first), !by_settled_as_well);
            test.scripts();
            reservation.settle(0).await.unwrap();
            test.scripts();
            if !remembered.is_zero() {
                test.clock.advance(remembered - Duration::from_micros(1));
                let again = limiter.check_all(check.clone()).await.unwrap();
                let wait = if by_settled_as_well {
                    CALLS.window() - remembered
                } else {
                    setting
                };
                let late = again.retry_after().unwrap() - wait;
                assert!(
                    !again.is_allowed() && late <= Duration::from_micros(1),
                    "{setting:?} {cache:?}: {again:?}"
                );
                assert_eq!(again.statuses().next().unwrap().reserved, 2);
                assert_eq!(test.scripts(), 0, "{setting:?} {cache:?}");
                test.clock.advance(Duration::from_micros(1));
            }
            let then = limiter.check_all(check.clone()).await.unwrap();
            // The refusal of the other limit is enough, for as long as it is not asked about again.
            let scripts = u64::from(!by_settled_as_well || remembered == cache);
            assert_eq!(
                (then.is_allowed(), test.scripts()),
                (!by_settled_as_well, scripts),
                "{setting:?} {cache:?}"
            );
            assert!(!is_refused_by_reservations(&then));
        }
    }
}

/// Another cost gets a retry time that is never too late, and is marked if only reservations refuse
/// it.
#[tokio::test]
async fn a_cached_refusal_by_reservations_also_refuses_other_costs() {
    let test = Test::start();
    let (limiter, limit) = (test.limiter(), Limit::per_minute("calls", 10));
    for lease in [
        Duration::from_secs(30),
        Duration::from_millis(600),
        Duration::MAX,
    ] {
        assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
        test.clock.advance(Duration::from_secs(10));
        let reservation = limiter
            .reserve(&limit, "ada", 6, lease)
            .await
            .unwrap()
            .unwrap();
        assert!(is_refused_by_reservations(
            &limiter.check(&limit, "ada", 5).await.unwrap()
        ));
        test.scripts();
        test.clock.advance(Duration::from_millis(100));
        let mut reported = Vec::new();
        for cost in 2..=10 {
            reported.push(limiter.check(&limit, "ada", cost).await.unwrap());
        }
        assert_eq!(test.scripts(), 0, "{lease:?}");
        let every_time = limiter.clone().refusal_cache(Duration::ZERO);
        for (cost, reported) in (2..=10).zip(reported) {
            let exact = every_time.check(&limit, "ada", cost).await.unwrap();
            let figures = |decision: &tower_sliding_window::Decision| {
                (
                    decision.is_allowed(),
                    decision.binding().used,
                    decision.binding().reserved,
                    decision.binding().reset_after(),
                )
            };
            assert_eq!(figures(&reported), figures(&exact), "{cost} {lease:?}");
            assert_eq!(
                is_refused_by_reservations(&reported),
                cost <= 7,
                "{cost} {lease:?}"
            );
            assert_eq!(
                is_refused_by_reservations(&exact),
                cost <= 7,
                "{cost} {lease:?}"
            );
            assert!(
                reported.retry_after() <= exact.retry_after(),
                "{cost} {lease:?}: {reported:?} {exact:?}"
            );
            let is_exact = reported.retry_after() == exact.retry_after();
            assert!(
                is_exact || cost > 7,
                "{cost} {lease:?}: {reported:?} {exact:?}"
            );
        }
        assert!(
            limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(),
            "a check that fits asks Redis"
        );
        reservation.settle(0).await.unwrap();
        test.clock.advance(limit.window());
    }
}

/// Two limits of one name have different windows: the cache refuses none of them because of the
/// other, and none for longer than its own window.
#[tokio::test]
async fn a_refusal_is_cached_no_longer_than_its_own_window() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    let cached = Limiter::new(store.clone()).deadline(TEST_TIMEOUT);
    let asking = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    let (long, short) = (Limit::per_hour("calls", 3), Limit::per_minute("calls", 3));
    assert!(asking.check(&long, "ada", 3).await.unwrap().is_allowed());
    assert!(!cached.check(&long, "ada", 1).await.unwrap().is_allowed());
    assert!(
        cached.check(&short, "ada", 3).await.unwrap().is_allowed(),
        "nothing is used in its window"
    );
    assert!(!cached.check(&short, "ada", 1).await.unwrap().is_allowed());
    assert!(!cached.check(&long, "ada", 1).await.unwrap().is_allowed());
    clock.advance(short.window());
    assert!(cached.check(&short, "ada", 3).await.unwrap().is_allowed());
    assert!(!asking.check(&long, "ada", 1).await.unwrap().is_allowed());
}
