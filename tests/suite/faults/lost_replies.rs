//! Replies that are lost after the script has run.

use std::time::Duration;

use tokio::task::JoinHandle;
use tower_sliding_window::{Breaker, Charge, Check, Decision, Error, Limit, Limiter, RedisStore, Settlement};

use super::reached;
use crate::support::{PATIENCE, outage::row, proxy::Proxy, redis_server::RedisServer};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
const KEYS: [&str; 5] = ["ada", "bob", "cy", "dee", "eve"];
/// Of each trial, few enough for one batch.
const CHECKS: usize = 50;
const BATCHES: usize = 200;

type Answer = JoinHandle<Result<Decision, Error>>;

/// With one batch at a time in flight.
fn limiter(proxy: &Proxy) -> Limiter<RedisStore> {
    let store = RedisStore::builder(proxy.url()).connections(1).connect_timeout(PATIENCE).build().unwrap();
    Limiter::new(store).deadline(PATIENCE).breaker(Breaker::off())
}

/// On a runtime of one thread, all of these are asked before the first is sent. Some are alone with their key, others are
/// copies; some cost more than others; some hold their units for a time.
fn ask(limiter: &Limiter<RedisStore>) -> Vec<(usize, u64, Answer)> {
    let ask_one = |number: usize| {
        let (key, cost, limiter) = (number * number % KEYS.len(), [1, 1, 1, 7][number / 10 % 4], limiter.clone());
        let answer = tokio::spawn(async move {
            if number.is_multiple_of(13) {
                let reserved = limiter.reserve(&CALLS, KEYS[key], cost, Duration::from_secs(600)).await?;
                return Ok(reserved.unwrap().decision().clone());
            }
            limiter.check(&CALLS, KEYS[key], cost).await
        });
        (key, cost, answer)
    };
    (0..CHECKS).map(ask_one).collect()
}

/// 10,000 admissions whose reply is lost, and that are sent again: each counts once.
#[tokio::test]
async fn what_is_sent_again_counts_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    let (mut used, mut admitted) = ([0; KEYS.len()], 0);
    for _ in 0..BATCHES {
        proxy.lose_replies(1);
        for (key, cost, answer) in ask(&limiter) {
            let decision = answer.await.unwrap().unwrap();
            used[key] += cost;
            admitted += 1;
            assert!(decision.is_allowed());
        }
        assert!(proxy.has_lost_them());
        for (key, expected) in KEYS.iter().zip(used) {
            assert_eq!(limiter.peek(&CALLS, *key).await.unwrap().used(), expected);
        }
    }
    assert_eq!(admitted, 10_000);
    row(
        "a reply is lost after the script has run, and the checks are sent again",
        format!("{admitted} admissions, each counted once"),
        "each admission counted once, in 10,000 trials",
    );
}

/// Where the second reply is lost, too, the checks fail: they have been counted, and once only.
#[tokio::test]
async fn what_is_lost_twice_fails_and_counts_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    let (mut used, mut failed) = ([0; KEYS.len()], 0);
    for _ in 0..40 {
        proxy.lose_replies(2);
        for (key, cost, answer) in ask(&limiter) {
            assert!(matches!(answer.await.unwrap(), Err(Error::Unavailable(_))));
            used[key] += cost;
            failed += 1;
        }
        assert!(proxy.has_lost_them());
        for (key, expected) in KEYS.iter().zip(used) {
            assert_eq!(limiter.peek(&CALLS, *key).await.unwrap().used(), expected);
        }
    }
    reached("both replies lost", CHECKS, format!("failed {failed}, each counted once"));
}

/// What was sent again can be given back as anything else: alone, as copies that share an entry, and at a cost.
#[tokio::test]
async fn what_is_sent_again_can_be_given_back() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    for (copies, cost) in [(1, 1), (1, 7), (3, 1), (40, 1), (40, 7)] {
        let check = Check::new(Charge::new(CALLS, "ada", cost).unwrap());
        proxy.lose_replies(1);
        let answers: Vec<_> = (0..copies).map(|_| tokio::spawn(limiter.check_all(check.clone()))).collect();
        for answer in answers {
            let decision = answer.await.unwrap().unwrap();
            let settled = limiter.settle(Settlement::refund(check.clone(), &decision)).await.unwrap();
            assert!(settled.is_known(), "{copies} copies of {cost}");
        }
        assert!(proxy.has_lost_them());
        assert_eq!(limiter.peek(&CALLS, "ada").await.unwrap().used(), 0, "{copies} copies of {cost}");
    }
}
