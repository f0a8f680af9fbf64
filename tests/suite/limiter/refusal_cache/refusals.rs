//! Refusals that the cache repeats, and the checks that ask Redis all the same.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tower_sliding_window::{Algorithm, Charge, Check, Limit, Limiter, check::AdmissionId};

use super::{CALLS, Test};
use crate::support::{TEST_TIMEOUT, redis_server::RedisServer};

#[tokio::test]
async fn a_cached_refusal_counts_down_without_asking_redis() {
    let test = Test::start();
    let limiter = test.refused().await;
    let first = limiter.check(&CALLS, "ada", 1).await.unwrap();
    test.scripts();
    for elapsed in 1..100 {
        test.clock.advance(Duration::from_millis(10));
        let again = limiter.check(&CALLS, "ada", 1).await.unwrap();
        let elapsed = Duration::from_millis(10 * elapsed);
        assert_eq!(
            again.retry_after(),
            Some(first.retry_after().unwrap() - elapsed)
        );
        assert_eq!(
            (again.binding().used, again.binding().reset_after()),
            (2, first.binding().reset_after() - elapsed)
        );
        assert_eq!(again.at(), first.at() + elapsed);
    }
    assert_eq!(test.scripts(), 0);
    test.clock.advance(Duration::from_millis(10));
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 1, "max_age is one second");
}

#[tokio::test]
async fn a_cached_refusal_ends_when_its_oldest_unit_leaves() {
    let test = Test::start();
    let limiter = test.limiter().refusal_cache(Duration::MAX);
    for (cost, admitted) in [(1, true), (1, true), (2, false), (2, false)] {
        assert_eq!(
            limiter
                .check(&CALLS, "ada", cost)
                .await
                .unwrap()
                .is_allowed(),
            admitted
        );
        test.clock.advance(Duration::from_secs(1));
    }
    test.clock
        .advance(Duration::from_secs(56) - Duration::from_micros(1));
    test.scripts();
    assert_eq!(
        limiter
            .check(&CALLS, "ada", 2)
            .await
            .unwrap()
            .binding()
            .used,
        2
    );
    assert_eq!(test.scripts(), 0);
    test.clock.advance(Duration::from_micros(1));
    assert_eq!(
        limiter
            .check(&CALLS, "ada", 2)
            .await
            .unwrap()
            .binding()
            .used,
        1,
        "still refused, with fewer units used"
    );
    test.clock.advance(Duration::from_secs(1));
    assert!(limiter.check(&CALLS, "ada", 2).await.unwrap().is_allowed());
}

#[tokio::test]
async fn checks_without_a_cached_refusal_ask_redis() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.scripts();
    let (raised, longer) = (Limit::per_minute("calls", 3), Limit::per_hour("calls", 2));
    assert!(limiter.check(&CALLS, "bob", 1).await.unwrap().is_allowed());
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    assert!(limiter.check(&raised, "ada", 1).await.unwrap().is_allowed());
    assert!(limiter.check(&longer, "ada", 1).await.unwrap().is_allowed());
    let shadow = Check::new(Charge::new(CALLS, "ada", 1).unwrap().in_shadow());
    assert!(limiter.check_all(shadow).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 5);
}

/// Clients that vary their costs: 64 refusals cost Redis one script call.
#[tokio::test]
async fn a_cost_above_the_remaining_units_is_refused_without_asking() {
    let test = Test::start();
    let (limiter, limit) = (test.limiter(), Limit::per_minute("calls", 100));
    for _ in 0..98 {
        test.clock.advance(Duration::from_millis(10));
        assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    }
    test.scripts();
    let mut reported = Vec::new();
    for cost in 3..67 {
        let refused = limiter.check(&limit, "ada", cost).await.unwrap();
        assert_eq!(
            (
                refused.is_allowed(),
                refused.binding().used,
                refused.remaining()
            ),
            (false, 98, 2)
        );
        reported.push(refused.retry_after().unwrap());
    }
    assert_eq!(test.scripts(), 1);

    let every_time = limiter.clone().refusal_cache(Duration::ZERO);
    for (cost, reported) in (3..67).zip(reported) {
        let exact = every_time
            .check(&limit, "ada", cost)
            .await
            .unwrap()
            .retry_after()
            .unwrap();
        assert!(
            reported <= exact && reported >= limit.window() - Duration::from_secs(1),
            "{cost}: {reported:?}, not {exact:?}"
        );
        assert_eq!(
            reported == exact,
            cost == 3,
            "other costs get a lower bound"
        );
    }
    assert!(
        limiter.check(&limit, "ada", 2).await.unwrap().is_allowed(),
        "a check that fits asks Redis"
    );
}

#[tokio::test]
async fn a_lower_cost_asks_again_once_a_unit_may_have_left() {
    let test = Test::start();
    let limiter = test.limiter().refusal_cache(Duration::MAX);
    let limit = Limit::per_minute("calls", 10);
    for (cost, admitted) in [(1, true), (8, true), (9, false)] {
        assert_eq!(
            limiter
                .check(&limit, "ada", cost)
                .await
                .unwrap()
                .is_allowed(),
            admitted
        );
        test.clock.advance(Duration::from_secs(1));
    }
    test.scripts();
    // The first unit leaves in 57 s and frees 2 units. All costs below the refused one get that
    // time.
    for (cost, wait) in [(2, 57), (3, 57), (8, 57), (9, 58), (10, 58)] {
        let refused = limiter.check(&limit, "ada", cost).await.unwrap();
        assert_eq!(
            refused.retry_after(),
            Some(Duration::from_secs(wait)),
            "{cost}"
        );
    }
    // A store may report up to a millisecond late when a unit leaves.
    test.clock
        .advance(Duration::from_millis(56_999) - Duration::from_micros(1));
    assert!(!limiter.check(&limit, "ada", 2).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 0);
    test.clock.advance(Duration::from_micros(1));
    assert!(!limiter.check(&limit, "ada", 2).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 1);
    test.clock.advance(Duration::from_millis(1));
    assert!(limiter.check(&limit, "ada", 2).await.unwrap().is_allowed());
}

/// A limiter uses the refusals that another limiter on the same store has cached.
#[tokio::test]
async fn limiters_on_clones_of_a_store_share_one_refusal_cache() {
    let test = Test::start();
    let both = |cost, key| {
        let other = Charge::new(Limit::per_hour("hourly", 100), key, 1).unwrap();
        Check::new(Charge::new(CALLS, "ada", cost).unwrap())
            .and(other)
            .unwrap()
    };
    for admitted in [true, true, false] {
        assert_eq!(
            test.limiter()
                .check_all(both(1, "ada"))
                .await
                .unwrap()
                .is_allowed(),
            admitted
        );
    }
    test.scripts();
    let refused = test.limiter().check(&CALLS, "ada", 2).await.unwrap();
    assert_eq!(
        (refused.is_allowed(), refused.retry_after()),
        (false, Some(CALLS.window()))
    );
    let refused = test.limiter().check_all(both(2, "ada")).await.unwrap();
    let statuses: Vec<_> = refused
        .statuses()
        .map(|status| (status.used, status.retry_after().is_some()))
        .collect();
    assert_eq!(statuses, [(2, true), (2, false)]);
    assert_eq!(test.scripts(), 0);

    // The status of the other limit for another key is not known, and one limit that refuses is
    // enough.
    let refused = test.limiter().check_all(both(1, "bob")).await.unwrap();
    let statuses: Vec<_> = refused
        .statuses()
        .map(|status| (status.used, status.is_hidden()))
        .collect();
    assert_eq!(
        (refused.is_allowed(), statuses),
        (false, vec![(2, false), (0, true)])
    );
    assert_eq!(refused.binding().limit, CALLS);
    assert_eq!(test.scripts(), 0);
    assert!(
        test.limiter()
            .check(&Limit::per_hour("hourly", 100), "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    assert_eq!(test.scripts(), 1, "a cached status that fits asks Redis");
    let own = test.limiter().refusal_cache(Duration::from_secs(1));
    assert!(!own.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    assert_eq!(
        test.scripts(),
        0,
        "an age of its own, and the same refusals"
    );
}

/// The shadow limit would have refused, and another limit did refuse.
#[tokio::test]
async fn a_shadow_limit_refuses_nothing_from_the_cache() {
    let test = Test::start();
    let limiter = test.limiter();
    let trial = Limit::per_minute("trial", 1);
    let both = || {
        let shadow = Charge::new(trial.clone(), "ada", 1).unwrap().in_shadow();
        Check::new(Charge::new(CALLS, "ada", 1).unwrap())
            .and(shadow)
            .unwrap()
    };
    for admitted in [true, true, false] {
        assert_eq!(
            limiter.check_all(both()).await.unwrap().is_allowed(),
            admitted
        );
    }
    test.scripts();
    let again = limiter.check_all(both()).await.unwrap();
    assert_eq!(
        (again.is_allowed(), again.shadow_refusals().count()),
        (false, 1)
    );
    assert!(
        !limiter.check(&trial, "ada", 1).await.unwrap().is_allowed(),
        "alone it is not in the shadow"
    );
    assert_eq!(test.scripts(), 0);
}

/// A repeated admission is not refused, whatever has been used since.
#[tokio::test]
async fn a_check_with_an_id_always_asks_redis() {
    let test = Test::start();
    let limiter = test.limiter();
    let check = Check::new(Charge::new(CALLS, "ada", 1).unwrap());
    assert!(
        limiter
            .check_all(check.clone().with_id(AdmissionId(7)))
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(limiter.check_all(check.clone()).await.unwrap().is_allowed());
    assert!(!limiter.check_all(check.clone()).await.unwrap().is_allowed());
    assert!(
        limiter
            .check_all(check.with_id(AdmissionId(7)))
            .await
            .unwrap()
            .is_allowed()
    );
}

#[tokio::test]
async fn without_a_refusal_cache_every_check_asks_redis() {
    let test = Test::start();
    let limiter = test.refused().await.refusal_cache(Duration::ZERO);
    test.scripts();
    for _ in 0..5 {
        assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    }
    assert_eq!(test.scripts(), 5);
}

#[tokio::test]
async fn a_full_refusal_cache_forgets_entries_but_stays_correct() {
    const KEYS: u64 = 30_000;
    let test = Test::start();
    let (limiter, one) = (test.limiter(), Limit::per_minute("one", 1));
    for first in (0..KEYS).step_by(500) {
        let keys = first..first + 500;
        let admitted = join_all(keys.clone().map(|key| limiter.check(&one, key, 1))).await;
        assert!(
            admitted
                .into_iter()
                .all(|decision| decision.unwrap().is_allowed())
        );
        let refused = join_all(keys.map(|key| limiter.check(&one, key, 1))).await;
        assert!(
            refused
                .into_iter()
                .all(|decision| !decision.unwrap().is_allowed())
        );
    }
    test.scripts();
    for key in (0..KEYS).step_by(100) {
        let refused = limiter.check(&one, key, 1).await.unwrap();
        assert!(!refused.is_allowed() && refused.binding().used == 1);
    }
    assert!(
        (150..=250).contains(&test.scripts()),
        "two of three refusals are forgotten"
    );
}

/// Also by the server's own clock.
#[tokio::test]
async fn a_cached_refusal_is_repeated_while_redis_hangs() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    for _ in 0..3 {
        let _ = limiter.check(&CALLS, "ada", 1).await.unwrap();
    }
    server.pause();
    let first = limiter
        .check(&CALLS, "ada", 1)
        .await
        .unwrap()
        .retry_after()
        .unwrap();
    sleep(Duration::from_millis(20)).await;
    let then = limiter
        .check(&CALLS, "ada", 1)
        .await
        .unwrap()
        .retry_after()
        .unwrap();
    assert!(
        first - then >= Duration::from_millis(20) && then > CALLS.window() - TEST_TIMEOUT,
        "{first:?} {then:?}"
    );
    assert!(
        timeout(Duration::from_millis(100), limiter.check(&CALLS, "bob", 1))
            .await
            .is_err()
    );
    server.resume();
}

/// Limits of one name and window that differ in their algorithm or in their units do not replace
/// each other.
#[tokio::test]
async fn refusals_of_limits_of_one_name_are_cached_apart() {
    let test = Test::start();
    let limiter = test.limiter();
    let (more, fixed) = (
        Limit::per_minute("calls", 4),
        CALLS.with_algorithm(Algorithm::FIXED_WINDOW),
    );
    let charge = |limit: &Limit| Charge::new(limit.clone(), "ada", 1).unwrap();
    assert!(limiter.check(&more, "ada", 4).await.unwrap().is_allowed());
    assert!(limiter.check(&fixed, "ada", 2).await.unwrap().is_allowed());
    let all = Check::new(charge(&CALLS)).and(charge(&fixed)).unwrap();
    let checks = [
        Check::new(charge(&CALLS)),
        Check::new(charge(&more)),
        Check::new(charge(&fixed)),
        all,
    ];
    for expected in [4, 0, 0] {
        test.scripts();
        for check in &checks {
            assert!(!limiter.check_all(check.clone()).await.unwrap().is_allowed());
        }
        assert!(test.scripts() <= expected);
    }
}
