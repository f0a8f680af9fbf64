//! A server that is far away: default settings suit any round trip, and a deadline that does not suit it is explained.

use std::time::{Duration, Instant};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{Error, Limit, Limiter, RedisStore, limiter::Breaker};

use crate::support::{TEST_TIMEOUT, ms, proxy::Proxy, redis_server::RedisServer};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

/// A limiter through a proxy whose replies arrive so much later.
async fn at_a_distance(millis: u64) -> (RedisServer, Proxy) {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.delay_replies(ms(millis));
    (server, proxy)
}

/// So many checks at once, one for each key. All are decided.
async fn assert_decides(limiter: &Limiter, checks: u64, case: &str) {
    let mut asked = JoinSet::new();
    for key in 0..checks {
        asked.spawn(limiter.check(&CALLS, key, 1));
    }
    for outcome in asked.join_all().await {
        assert!(outcome.as_ref().is_ok_and(|decision| decision.is_allowed()), "{case}: {outcome:?}");
    }
}

/// From the first check on: one that has to connect, a ramp, and a thousand at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn default_settings_decide_at_any_distance() {
    for millis in [0, 5, 40, 80, 200] {
        for is_connected in [false, true] {
            let (_server, proxy) = at_a_distance(millis).await;
            let store = match is_connected {
                true => RedisStore::connect(proxy.url()).await.unwrap(),
                false => RedisStore::builder(proxy.url()).build().unwrap(),
            };
            let limiter = Limiter::new(store);
            for checks in [1, 1, 2, 10, 100, 1_000] {
                assert_decides(&limiter, checks, &format!("{millis} ms, connected: {is_connected}, {checks}")).await;
            }
        }
    }
}

#[tokio::test]
async fn a_store_that_has_connected_has_all_its_connections() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).connections(7).connect().await.unwrap();
    let clients: String = server.run("CLIENT LIST TYPE normal");
    // And the one that asks.
    assert_eq!(clients.lines().count(), 7 + 1, "{clients}");
    drop(store);
}

/// The server moves away while nobody waits for long enough to hear a reply, and comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_deadline_follows_a_round_trip_that_jumps() {
    let (_server, proxy) = at_a_distance(0).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    for millis in [300, 0, 80, 0] {
        proxy.delay_replies(ms(millis));
        let jumped = Instant::now();
        while limiter.check(&CALLS, "ada", 1).await.is_err() {
            assert!(jumped.elapsed() < TEST_TIMEOUT, "{millis} ms");
            sleep(ms(10)).await;
        }
        assert_decides(&limiter, 100, &format!("after a jump to {millis} ms")).await;
    }
}

/// The error of each check says how far away the server is, and what to change.
#[tokio::test]
async fn a_deadline_that_is_too_short_for_the_distance_is_explained() {
    let (_server, proxy) = at_a_distance(80).await;
    let store = RedisStore::builder(proxy.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(ms(50)).breaker(Breaker::OFF);
    let (mut explained, begun) = (String::new(), Instant::now());
    while !explained.contains("away") {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{explained}");
        explained = limiter.check(&CALLS, "ada", 1).await.unwrap_err().to_string();
        sleep(ms(10)).await;
    }
    let rule = "did not answer within 50ms: it is ";
    assert!(explained.contains(rule) && explained.contains("Set a longer `deadline`, or none"), "{explained}");
}

/// Callers that wait for units also wait for a server that hangs for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_waits_outlasts_a_short_outage() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().connect().await.unwrap());
    let limit = Limit::per("upstream", 500, Duration::from_secs(1));
    assert!(limiter.check(&limit, "ada", 500).await.unwrap().is_allowed());
    let mut waiting = JoinSet::new();
    for _ in 0..1_000 {
        let (limiter, limit) = (limiter.clone(), limit.clone());
        waiting.spawn(async move { limiter.acquire(&limit, "ada", 1, TEST_TIMEOUT).await });
    }
    server.pause();
    sleep(ms(1_500)).await;
    server.resume();
    for outcome in waiting.join_all().await {
        assert!(outcome.as_ref().is_ok_and(|decision| decision.is_allowed()), "{outcome:?}");
    }
    assert!(matches!(limiter.acquire(&limit, "ada", 501, TEST_TIMEOUT).await, Err(Error::NeverFits(_))));
}
