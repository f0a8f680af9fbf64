//! Refusals that are repeated without asking Redis, and when they are not.
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
async fn what_is_not_the_same_check_is_asked() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.scripts();
    let raised = Limit::per_minute("calls", 3);
    assert!(limiter.check(&CALLS, "bob", 1).await.unwrap().is_allowed());
    assert!(!limiter.check(&CALLS, "ada", 2).await.unwrap().is_allowed());
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    assert!(limiter.check(&raised, "ada", 1).await.unwrap().is_allowed());
    assert_eq!(test.scripts(), 4);
}

/// While something is left, somebody may spend it, and the wait become longer.
#[tokio::test]
async fn a_refusal_that_leaves_something_is_asked() {
    let test = Test::start();
    let limiter = test.limiter();
    let limit = Limit::per_minute("calls", 3);
    for (cost, admitted, remaining) in [(1, true, 2), (3, false, 2), (2, true, 0), (3, false, 0)] {
        test.clock.advance(Duration::from_millis(1));
        let decision = limiter.check(&limit, "ada", cost).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.remaining()), (admitted, remaining));
    }
    test.scripts();
    assert_eq!(limiter.check(&limit, "ada", 3).await.unwrap().remaining(), 0);
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
