//! What is refused without asking Redis, and when it is asked.
//!
//! That they are right in random histories is shown in `properties.rs`.

use std::time::Duration;

use tokio::time::{sleep, timeout};
use tower_sliding_window::{
    AdmissionId, Charge, Check, DenyCache, Limit, Limiter, ManualClock, RedisStore, store::RedisStoreBuilder,
};

use crate::support::{PATIENCE, redis_server::RedisServer};

const CALLS: Limit = Limit::per_minute("calls", 2);

struct Test {
    server: RedisServer,
    clock: ManualClock,
    store: RedisStore,
}

impl Test {
    fn start() -> Self {
        let (server, clock) = (RedisServer::start(), ManualClock::new());
        let store = by(&clock, RedisStore::builder(&server.url()));
        Self { server, clock, store }
    }

    fn limiter(&self) -> Limiter<RedisStore> {
        Limiter::new(self.store.clone()).deadline(PATIENCE)
    }

    /// A limiter that has been refused a check of cost 1.
    async fn refused(&self) -> Limiter<RedisStore> {
        let limiter = self.limiter();
        for admitted in [true, true, false] {
            assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed(), admitted);
        }
        limiter
    }

    /// The scripts that ran since the last call.
    fn scripts(&self) -> u64 {
        let stats: String = self.server.run("INFO commandstats");
        self.server.run::<()>("CONFIG RESETSTAT");
        let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
        stats.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(calls).sum()
    }
}

fn by(clock: &ManualClock, builder: RedisStoreBuilder) -> RedisStore {
    builder.clock(clock).build().unwrap()
}

#[tokio::test]
async fn a_refusal_is_repeated_and_counts_down_without_asking() {
    let test = Test::start();
    let limiter = test.refused().await;
    let first = limiter.check(&CALLS, "ada", 1).await.unwrap();
    test.scripts();
    for elapsed in 1..100 {
        test.clock.advance(Duration::from_millis(10));
        let again = limiter.check(&CALLS, "ada", 1).await.unwrap();
        let elapsed = Duration::from_millis(10 * elapsed);
        assert_eq!(again.retry_after(), Some(first.retry_after().unwrap() - elapsed));
        assert_eq!((again.used(), again.reset_after()), (2, first.reset_after() - elapsed));
        assert_eq!(again.at(), first.at() + elapsed);
    }
    assert_eq!(test.scripts(), 0);
    test.clock.advance(Duration::from_millis(10));
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 1, "one second is its greatest age");
}

#[tokio::test]
async fn a_refusal_ends_with_the_window_of_its_oldest_unit() {
    let test = Test::start();
    let limiter = test.limiter().deny_cache(DenyCache::new().max_age(Duration::MAX));
    for (cost, admitted) in [(1, true), (1, true), (2, false), (2, false)] {
        assert_eq!(limiter.check(&CALLS, "ada", cost).await.unwrap().is_allowed(), admitted);
        test.clock.advance(Duration::from_secs(1));
    }
    test.clock.advance(Duration::from_secs(56) - Duration::from_micros(1));
    test.scripts();
    assert_eq!(limiter.check(&CALLS, "ada", 2).await.unwrap().used(), 2);
    assert_eq!(test.scripts(), 0);
    test.clock.advance(Duration::from_micros(1));
    assert_eq!(limiter.check(&CALLS, "ada", 2).await.unwrap().used(), 1, "still refused, but no longer so much used");
    test.clock.advance(Duration::from_secs(1));
    assert!(limiter.check(&CALLS, "ada", 2).await.unwrap().is_allowed());
}

#[tokio::test]
async fn what_is_not_known_to_be_refused_is_asked() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.scripts();
    let (raised, longer) = (Limit::per_minute("calls", 3), Limit::per_hour("calls", 2));
    assert!(limiter.check(&CALLS, "bob", 1).await.unwrap().is_allowed());
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    assert!(limiter.check(&raised, "ada", 1).await.unwrap().is_allowed());
    assert!(!limiter.check(&longer, "ada", 1).await.unwrap().is_allowed());
    let shadow = Check::new(Charge::new(CALLS, "ada", 1).unwrap().in_shadow());
    assert!(limiter.check_all(shadow).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 5);
}

/// However they vary their costs: 64 refusals cost Redis one script.
#[tokio::test]
async fn a_cost_above_what_is_left_is_refused_without_asking() {
    let test = Test::start();
    let (limiter, limit) = (test.limiter(), Limit::per_minute("calls", 100));
    for _ in 0..98 {
        test.clock.advance(Duration::from_millis(10));
        assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    }
    test.scripts();
    let mut told = Vec::new();
    for cost in 3..67 {
        let refused = limiter.check(&limit, "ada", cost).await.unwrap();
        assert_eq!((refused.is_allowed(), refused.used(), refused.remaining()), (false, 98, 2));
        told.push(refused.retry_after().unwrap());
    }
    assert_eq!(test.scripts(), 1);

    let every_time = limiter.clone().deny_cache(DenyCache::off());
    for (cost, told) in (3..67).zip(told) {
        let exact = every_time.check(&limit, "ada", cost).await.unwrap().retry_after().unwrap();
        assert!(told <= exact && told >= limit.window() - Duration::from_secs(1), "{cost}: {told:?}, not {exact:?}");
        assert_eq!(told == exact, cost == 3, "the others are told when to come at the earliest");
    }
    assert!(limiter.check(&limit, "ada", 2).await.unwrap().is_allowed(), "what fits is asked");
}

#[tokio::test]
async fn a_lower_cost_is_asked_again_when_something_may_have_left() {
    let test = Test::start();
    let limiter = test.limiter().deny_cache(DenyCache::new().max_age(Duration::MAX));
    let limit = Limit::per_minute("calls", 10);
    for (cost, admitted) in [(1, true), (8, true), (9, false)] {
        assert_eq!(limiter.check(&limit, "ada", cost).await.unwrap().is_allowed(), admitted);
        test.clock.advance(Duration::from_secs(1));
    }
    test.scripts();
    // The first unit leaves in 57 s, and makes room for 2. That is told of all costs but the refused one and higher ones.
    for (cost, wait) in [(2, 57), (3, 57), (8, 57), (9, 58), (10, 58)] {
        let refused = limiter.check(&limit, "ada", cost).await.unwrap();
        assert_eq!(refused.retry_after(), Some(Duration::from_secs(wait)), "{cost}");
    }
    // A store may tell up to a millisecond late when something leaves.
    test.clock.advance(Duration::from_millis(56_999) - Duration::from_micros(1));
    assert!(!limiter.check(&limit, "ada", 2).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 0);
    test.clock.advance(Duration::from_micros(1));
    assert!(!limiter.check(&limit, "ada", 2).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 1);
    test.clock.advance(Duration::from_millis(1));
    assert!(limiter.check(&limit, "ada", 2).await.unwrap().is_allowed());
}

/// What a limiter with one set of limits has learned serves one with another set.
#[tokio::test]
async fn limiters_on_clones_of_a_store_know_the_same_of_it() {
    let test = Test::start();
    let both = |cost, key| {
        let other = Charge::new(Limit::per_hour("hourly", 100), key, 1).unwrap();
        Check::new(Charge::new(CALLS, "ada", cost).unwrap()).and(other).unwrap()
    };
    for admitted in [true, true, false] {
        assert_eq!(test.limiter().check_all(both(1, "ada")).await.unwrap().is_allowed(), admitted);
    }
    test.scripts();
    let refused = test.limiter().check(&CALLS, "ada", 2).await.unwrap();
    assert_eq!((refused.is_allowed(), refused.retry_after()), (false, Some(CALLS.window())));
    let refused = test.limiter().check_all(both(2, "ada")).await.unwrap();
    let statuses: Vec<_> = refused.statuses().map(|status| (status.used(), status.retry_after().is_some())).collect();
    assert_eq!(statuses, [(2, true), (2, false)]);
    assert_eq!(test.scripts(), 0);

    // How the other limit stands for another key is not known.
    assert!(!test.limiter().check_all(both(1, "bob")).await.unwrap().is_allowed());
    assert!(test.limiter().check(&Limit::per_hour("hourly", 100), "ada", 1).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 2, "what is remembered to fit is asked");
    let own = test.limiter().deny_cache(DenyCache::new());
    assert!(!own.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 1, "one of its own knows nothing yet");
}

/// A limit in the shadow would have refused, and another did.
#[tokio::test]
async fn a_limit_in_the_shadow_refuses_nothing_out_of_memory_either() {
    let test = Test::start();
    let limiter = test.limiter();
    let trial = Limit::per_minute("trial", 1);
    let both = || {
        let shadow = Charge::new(trial.clone(), "ada", 1).unwrap().in_shadow();
        Check::new(Charge::new(CALLS, "ada", 1).unwrap()).and(shadow).unwrap()
    };
    for admitted in [true, true, false] {
        assert_eq!(limiter.check_all(both()).await.unwrap().is_allowed(), admitted);
    }
    test.scripts();
    let again = limiter.check_all(both()).await.unwrap();
    assert_eq!((again.is_allowed(), again.shadow_refusals().count()), (false, 1));
    assert!(!limiter.check(&trial, "ada", 1).await.unwrap().is_allowed(), "by itself it is not in the shadow");
    assert_eq!(test.scripts(), 0);
}

/// What counts is when a check is first polled, not when it is made.
#[tokio::test]
async fn a_check_that_is_made_before_a_reset_and_polled_after_it_passes() {
    let test = Test::start();
    let limiter = test.refused().await;
    let made = limiter.check(&CALLS, "ada", 1);
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(made.await.unwrap().is_allowed());
}

/// Rule 7: an admission that is repeated with its id is no refusal, however much is used since.
#[tokio::test]
async fn a_check_with_an_id_is_asked() {
    let test = Test::start();
    let limiter = test.limiter();
    let check = Check::new(Charge::new(CALLS, "ada", 1).unwrap());
    assert!(limiter.check_all(check.clone().with_id(AdmissionId::from(7))).await.unwrap().is_allowed());
    assert!(limiter.check_all(check.clone()).await.unwrap().is_allowed());
    assert!(!limiter.check_all(check.clone()).await.unwrap().is_allowed());
    assert!(limiter.check_all(check.with_id(AdmissionId::from(7))).await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_reset_through_any_limiter_on_the_store_is_seen_at_once() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.limiter().reset(&CALLS, "ada").await.unwrap();
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
}

#[tokio::test]
async fn a_reset_by_another_process_is_seen_within_the_greatest_age() {
    let test = Test::start();
    let limiter = test.refused().await;
    let elsewhere = by(&test.clock, RedisStore::builder(&test.server.url()));
    Limiter::new(elsewhere).deadline(PATIENCE).reset(&CALLS, "ada").await.unwrap();
    assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    test.clock.advance(Duration::from_secs(1));
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
}

/// The refusal was decided before the reset, and arrives after it was asked for.
#[tokio::test]
async fn a_refusal_that_a_reset_overtakes_is_not_repeated() {
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
async fn a_clock_that_steps_back_is_asked_for_anew() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.clock.step_back(Duration::from_secs(3_600));
    let refused = limiter.check(&CALLS, "ada", 1).await.unwrap();
    assert_eq!(refused.retry_after(), Some(CALLS.window()));
}

#[tokio::test]
async fn switched_off_every_check_is_asked() {
    let test = Test::start();
    for off in [DenyCache::off(), DenyCache::new().max_age(Duration::ZERO), DenyCache::new().capacity(0)] {
        let limiter = test.refused().await.deny_cache(off);
        test.scripts();
        for _ in 0..5 {
            assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        }
        assert_eq!(test.scripts(), 5, "{off:?}");
        limiter.reset(&CALLS, "ada").await.unwrap();
    }
}

#[tokio::test]
async fn a_full_deny_cache_forgets_but_is_not_wrong() {
    let test = Test::start();
    let limiter = test.limiter().deny_cache(DenyCache::new().capacity(10));
    let one = Limit::per_minute("one", 1);
    for _ in 0..2 {
        for key in 0..100 {
            let allowed = limiter.check(&one, key.to_string(), 1).await.unwrap().is_allowed();
            assert!(!allowed || limiter.peek(&one, key.to_string()).await.unwrap().used() == 1);
        }
    }
    test.scripts();
    for key in 0..100 {
        assert!(!limiter.check(&one, key.to_string(), 1).await.unwrap().is_allowed());
    }
    assert!((80..=100).contains(&test.scripts()), "most are forgotten, and asked again");
}

/// By the server's own clock, too, and while the server is away.
#[tokio::test]
async fn a_refusal_is_repeated_while_redis_is_silent() {
    let server = RedisServer::start();
    let limiter = Limiter::new(RedisStore::builder(&server.url()).build().unwrap()).deadline(PATIENCE);
    for _ in 0..3 {
        let _ = limiter.check(&CALLS, "ada", 1).await.unwrap();
    }
    server.pause();
    let first = limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after().unwrap();
    sleep(Duration::from_millis(20)).await;
    let then = limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after().unwrap();
    assert!(first - then >= Duration::from_millis(20) && then > CALLS.window() - PATIENCE, "{first:?} {then:?}");
    assert!(timeout(Duration::from_millis(100), limiter.check(&CALLS, "bob", 1)).await.is_err());
    server.resume();
}

/// Reserved units may be given back by another process at any time: what they refuse is asked again after that setting.
#[tokio::test]
async fn a_refusal_by_reservations_is_remembered_no_longer_than_that_setting() {
    const MILLISECOND: Duration = Duration::from_millis(1);
    let (second, forever) = (Duration::from_secs(1), DenyCache::new().max_age(Duration::MAX));
    for (setting, cache, remembered) in [
        (second, DenyCache::new(), second),
        (200 * MILLISECOND, DenyCache::new(), 200 * MILLISECOND),
        (5 * second, DenyCache::new(), second),
        (second, forever, second),
        (5 * second, forever, 5 * second),
        (Duration::ZERO, forever, Duration::ZERO),
    ] {
        for by_settled_as_well in [false, true] {
            let test = Test::start();
            let limiter = test.limiter().deny_cache(cache).retry_reserved_after(setting);
            let elsewhere = Limiter::new(by(&test.clock, RedisStore::builder(&test.server.url()))).deadline(PATIENCE);
            let other = Limit::per_minute("other", 1);
            let check = match by_settled_as_well {
                true => {
                    assert!(elsewhere.check(&other, "ada", 1).await.unwrap().is_allowed());
                    let charge = Charge::new(other.clone(), "ada", 1).unwrap();
                    Check::new(Charge::new(CALLS, "ada", 1).unwrap()).and(charge).unwrap()
                }
                false => Check::new(Charge::new(CALLS, "ada", 1).unwrap()),
            };
            let reservation = elsewhere.reserve(&CALLS, "ada", 2, Duration::MAX).await.unwrap().unwrap();
            let first = limiter.check_all(check.clone()).await.unwrap();
            assert_eq!(first.is_refused_by_reservations(), !by_settled_as_well);
            test.scripts();
            reservation.release().await.unwrap();
            test.scripts();
            if !remembered.is_zero() {
                test.clock.advance(remembered - Duration::from_micros(1));
                let again = limiter.check_all(check.clone()).await.unwrap();
                let wait = if by_settled_as_well { CALLS.window() - remembered } else { setting };
                let late = again.retry_after().unwrap() - wait;
                assert!(!again.is_allowed() && late <= Duration::from_micros(1), "{setting:?} {cache:?}: {again:?}");
                assert_eq!(again.statuses().next().unwrap().reserved(), 2);
                assert_eq!(test.scripts(), 0, "{setting:?} {cache:?}");
                test.clock.advance(Duration::from_micros(1));
            }
            let then = limiter.check_all(check.clone()).await.unwrap();
            assert_eq!((then.is_allowed(), test.scripts()), (!by_settled_as_well, 1), "{setting:?} {cache:?}");
            assert!(!then.is_refused_by_reservations());
        }
    }
}

/// Another cost is told when it would pass at the earliest, and whether reservations alone are in its way.
#[tokio::test]
async fn what_reservations_refuse_is_refused_at_other_costs_without_asking() {
    let test = Test::start();
    let (limiter, limit) = (test.limiter(), Limit::per_minute("calls", 10));
    for lease in [Duration::from_secs(30), Duration::from_millis(600), Duration::MAX] {
        assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
        test.clock.advance(Duration::from_secs(10));
        let reservation = limiter.reserve(&limit, "ada", 6, lease).await.unwrap().unwrap();
        assert!(limiter.check(&limit, "ada", 5).await.unwrap().is_refused_by_reservations());
        test.scripts();
        test.clock.advance(Duration::from_millis(100));
        let mut told = Vec::new();
        for cost in 2..=10 {
            told.push(limiter.check(&limit, "ada", cost).await.unwrap());
        }
        assert_eq!(test.scripts(), 0, "{lease:?}");
        let every_time = limiter.clone().deny_cache(DenyCache::off());
        for (cost, told) in (2..=10).zip(told) {
            let exact = every_time.check(&limit, "ada", cost).await.unwrap();
            let figures = |decision: &tower_sliding_window::Decision| {
                (decision.is_allowed(), decision.used(), decision.binding().reserved(), decision.reset_after())
            };
            assert_eq!(figures(&told), figures(&exact), "{cost} {lease:?}");
            assert_eq!(told.is_refused_by_reservations(), cost <= 7, "{cost} {lease:?}");
            assert_eq!(exact.is_refused_by_reservations(), cost <= 7, "{cost} {lease:?}");
            assert!(told.retry_after() <= exact.retry_after(), "{cost} {lease:?}: {told:?} {exact:?}");
            let is_exact = told.retry_after() == exact.retry_after();
            assert!(is_exact || cost > 7, "{cost} {lease:?}: {told:?} {exact:?}");
        }
        assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(), "what fits is asked");
        reservation.release().await.unwrap();
        test.clock.advance(limit.window());
    }
}
