//! Checks that travel together have outcomes of their own: a server without memory, or a key that holds something else,
//! fails the checks that it concerns, and no others.

use std::time::Duration;

use tokio::task::JoinSet;
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, DenyCache, Error, Limit, Limiter, ManualClock, RedisStore,
};

use crate::support::{PATIENCE, redis_server::RedisServer};

const LOGIN: Limit = Limit::per("login", 3, Duration::from_secs(10));

/// One batch at a time, so that checks travel together.
fn limiter(server: &RedisServer) -> Limiter<RedisStore> {
    let store = RedisStore::builder(&server.url()).connections(1).build().unwrap();
    Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off())
}

/// An error and its causes.
fn chain(error: &Error) -> String {
    let (mut text, mut cause) = (error.to_string(), std::error::Error::source(error));
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[tokio::test]
async fn a_server_without_memory_answers_what_writes_nothing() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.check(&LOGIN, "spent", 3).await.unwrap().is_allowed());
    server.run::<()>("CONFIG SET maxmemory 1");
    // More rounds than failures that would open a breaker.
    for round in 0..10 {
        let charge = |limit: &Limit| Charge::new(limit.clone(), "new", 1).unwrap();
        let several = Check::new(charge(&Limit::per_day("daily", 9))).and(charge(&LOGIN)).unwrap();
        let (refused, admitted, peeked, several, dear) = tokio::join!(
            limiter.check(&LOGIN, "spent", 1),
            limiter.check(&LOGIN, "new", 1),
            limiter.peek(&LOGIN, "spent"),
            limiter.check_all(several),
            limiter.check(&LOGIN, "new", 2),
        );
        assert!(refused.unwrap().retry_after().is_some(), "round {round}");
        assert_eq!(peeked.unwrap().used(), 3);
        for (failed, name) in [(admitted, "login"), (several, "daily"), (dear, "login")] {
            let text = chain(&failed.unwrap_err());
            assert!(text.contains("OOM") && text.contains(&format!("limit {name:?}")), "{text}");
        }
    }
    server.run::<()>("CONFIG SET maxmemory 0");
    assert_eq!(limiter.check(&LOGIN, "new", 1).await.unwrap().used(), 1, "what has failed was not counted");
}

/// By every algorithm, whatever somebody else has written to its key: numbers that no key of ours has, and no numbers.
#[tokio::test]
async fn foreign_content_fails_nobody_elses_check() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let algorithms = [Algorithm::log(), Algorithm::compact(16), Algorithm::counter(), Algorithm::fixed()];
    for algorithm in algorithms {
        let limit = LOGIN.with_algorithm(algorithm);
        let suffix = |key: &String| key.contains(":login");
        assert!(limiter.check(&limit, "mallory", 1).await.unwrap().is_allowed());
        let key = server.keys().into_iter().find(suffix).unwrap();
        for foreign in [
            "9223372036854775807 used",
            "-9223372036854775808 used",
            "1e300 used 5 abcdefgh",
            "inf used",
            "-inf abcdefgh",
            "-inf abcdefgh9223372036854775807",
            "inf 9223372036854775807:9223372036854775807:9223372036854775807",
            "inf 1:2:3 inf 4:5:6",
            "-1e18 abcdefgh9007199254740993*9007199254740993",
            "9.5 used -1.5 abcdefgh0.5",
            "-1 x",
        ] {
            server.run::<()>(&format!("DEL {key}"));
            server.run::<()>(&format!("ZADD {key} {foreign}"));
            for round in 0..8 {
                let (foreign, own) = tokio::join!(both(&limiter, &limit, "mallory"), both(&limiter, &limit, "ada"));
                let case = format!("{algorithm:?} {foreign:?} round {round}");
                assert!(own.into_iter().all(|outcome| outcome.is_ok()), "{case}");
                for failed in foreign.into_iter().filter_map(Result::err) {
                    assert!(chain(&failed).contains("\"login\""), "{case}");
                }
                limiter.reset(&limit, "ada").await.unwrap();
            }
        }
        server.run::<()>(&format!("SET {key} text"));
        for _ in 0..10 {
            let (foreign, own) = tokio::join!(both(&limiter, &limit, "mallory"), both(&limiter, &limit, "ada"));
            assert!(own.into_iter().all(|outcome| outcome.is_ok()));
            assert!(foreign.into_iter().all(|outcome| chain(&outcome.unwrap_err()).contains("WRONGTYPE")));
        }
        server.run::<()>("FLUSHALL");
    }
}

/// Asks, spends, and reserves.
async fn both(limiter: &Limiter<RedisStore>, limit: &Limit, key: &'static str) -> Vec<Result<Decision, Error>> {
    let reserved = Charge::new(limit.clone(), key, 1).unwrap().reserve(Duration::from_secs(5));
    let (peeked, spent, all, reserved) = tokio::join!(
        limiter.peek(limit, key),
        limiter.check(limit, key, 1),
        limiter.check(limit, key, 3),
        limiter.check_all(Check::new(reserved)),
    );
    vec![peeked, spent, all, reserved]
}

/// A retry time is at most the window, or two of a counter, whatever stands in the key.
#[tokio::test]
async fn numbers_near_the_largest_are_told_as_they_can_be() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = RedisStore::builder(&server.url()).clock(&clock).build().unwrap();
    let limiter = Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off());
    assert!(limiter.check(&LOGIN, "ada", 2).await.unwrap().is_allowed());
    let key = server.keys().remove(0);
    server.run::<()>(&format!("ZADD {key} 9223372036854775807 used"));
    let refused = limiter.check(&LOGIN, "ada", 1).await.unwrap();
    assert!(refused.retry_after().is_some_and(|wait| wait <= LOGIN.window()), "{refused:?}");
    assert_eq!(refused.remaining(), 0);
}

/// Everybody asks at once, and one in three asks for a key that cannot be read.
#[tokio::test]
async fn one_bad_key_in_full_batches_costs_nobody_else() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.check(&LOGIN, "bad", 1).await.unwrap().is_allowed());
    let key = server.keys().remove(0);
    server.run::<()>(&format!("SET {key} text"));
    let mut tasks = JoinSet::new();
    for number in 0..600 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let is_bad = number % 3 == 0;
            let key = if is_bad { "bad".to_owned() } else { number.to_string() };
            let outcome = limiter.check(&LOGIN, key, 1).await;
            assert_eq!(outcome.is_err(), is_bad, "{outcome:?}");
        });
    }
    tasks.join_all().await;
}
