//! Prefetches on other servers than a single one that keeps its data and tells the time.

use std::time::Duration;

use tokio::task::JoinSet;

use super::*;

/// Asks from eight tasks for each of the limiters until all units are spent, and returns how many
/// were admitted.
async fn spend_all(limiters: &[Limiter], limit: &Limit, key: &str) -> u64 {
    let mut tasks = JoinSet::new();
    for limiter in limiters.iter().flat_map(|limiter| [limiter; 8]) {
        let (limiter, limit, key) = (limiter.clone(), limit.clone(), key.to_owned());
        tasks.spawn(async move {
            let mut admitted = 0;
            loop {
                let decision = check(&limiter, &limit, &key, 1).await;
                match decision.retry_after() {
                    None => admitted += 1,
                    Some(_) if is_refused_by_reservations(&decision) => {
                        sleep(Duration::from_millis(5)).await;
                    }
                    Some(_) => return admitted,
                }
            }
        });
    }
    tasks.join_all().await.into_iter().sum()
}

/// The entries of all keys: one for each unit without prefetches, and one for each prefetch.
fn entries(server: &RedisServer) -> u64 {
    server
        .keys()
        .iter()
        .map(|key| server.run::<u64>(&format!("ZCARD {key}")))
        .sum()
}

#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_admits_the_whole_limit_and_is_hardly_asked() {
    use crate::support::redis_cluster::RedisCluster;

    let cluster = RedisCluster::start(3).await;
    let limiters = [(); 2].map(|()| cluster.limiter(cluster.builder()).deadline(TEST_TIMEOUT));
    let limit = Limit::per_minute("api", 20_000).prefetch(DEFAULT_LIFE);
    for key in ["ada", "bob", "eve", "joe"] {
        assert_eq!(spend_all(&limiters, &limit, key).await, 20_000, "{key}");
    }
    let entries: u64 = cluster.0.iter().map(entries).sum();
    assert!(entries < 20_000, "{entries} of 80,000 units");
    // The parts of a limit are on several nodes, and each has prefetches of its own.
    let split = Limit::per_minute("split", 40_000)
        .prefetch(DEFAULT_LIFE)
        .split(4);
    for key in split.keys("ada") {
        let mut admitted = 0;
        for limiter in &limiters {
            while limiter
                .check(&split.part, key.clone(), 100)
                .await
                .unwrap()
                .is_allowed()
            {
                admitted += 100;
            }
            limiter.shutdown(TEST_TIMEOUT).await.unwrap();
        }
        assert_eq!(admitted, 10_000);
    }
}

/// A server that has lost its data starts every window anew. A prefetch of before is spent until
/// its life ends, and giving it back counts no more than was spent of it.
#[tokio::test]
async fn a_server_that_loses_its_data_counts_no_prefetch_twice() {
    let (mut server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    for loses_by_restart in [false, true] {
        let requests = hold(&server, &limiter, &API, "ada").await;
        if loses_by_restart {
            server.kill();
            server.restart();
        } else {
            server.run::<()>("FLUSHALL");
        }
        let mut spent = 0;
        while spent < 3 {
            spent += u64::from(limiter.check(&API, "ada", 1).await.is_ok());
        }
        clock.advance(LIFE);
        limiter.shutdown(TEST_TIMEOUT).await.unwrap();
        let (all, held) = used(&server, &clock, &API, "ada").await;
        assert!(
            all <= requests + spent && held == 0,
            "{all} of {requests} and {spent}, {held} held"
        );
        limiter.reset(&API, "ada").await.unwrap();
        clock.advance(API.window() + LIFE);
        assert_eq!(used(&server, &clock, &API, "ada").await, (0, 0));
    }
}

/// Each reply comes too late, so every prefetch has failed. Those that Redis has counted all the
/// same end with their lives.
#[tokio::test]
async fn prefetches_whose_replies_come_too_late_end_with_their_lives() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server
        .store()
        .clock(&clock)
        .reply_timeout(Duration::from_secs(1))
        .build()
        .unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF);
    let mut admitted = hold(&server, &limiter, &API, "ada").await;
    for _ in 0..2 {
        server.pause();
        let burst = join_all((0..200).map(|_| limiter.check(&API, "ada", 1))).await;
        admitted += burst
            .iter()
            .flatten()
            .filter(|decision| decision.is_allowed())
            .count() as u64;
        clock.advance(LIFE);
        server.resume();
        while limiter.check(&API, "ada", 1).await.is_err() {}
        admitted += 1;
    }
    clock.advance(LIFE);
    let (all, _) = used(&server, &clock, &API, "ada").await;
    assert!(all >= admitted, "{all} counted, {admitted} admitted");
    clock.advance(API.window());
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    clock.advance(API.window() + LIFE);
    assert_eq!(used(&server, &clock, &API, "ada").await, (0, 0));
}
