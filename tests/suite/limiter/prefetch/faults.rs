//! Prefetches while Redis fails.

use tower_sliding_window::limiter::Share;

use super::*;
use crate::support::proxy::{Cut, Proxy};

#[tokio::test]
async fn units_that_are_held_are_spent_before_the_share_of_the_process() {
    let (mut server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock).fail_local(Share::one_of(1_000));
    hold(&server, &limiter, &API, "ada").await;
    server.kill();
    assert!(
        check(&limiter, &API, "ada", 1)
            .await
            .local_cause()
            .is_none()
    );
    clock.advance(LIFE);
    let decision = check(&limiter, &API, "ada", 1).await;
    assert!(
        decision.is_allowed() && decision.local_cause().is_some(),
        "{decision:?}"
    );
}

#[tokio::test]
async fn units_are_given_back_when_redis_answers_again() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let proxy = Proxy::start(&server).await;
    let store = RedisStore::builder(proxy.url())
        .clock(&clock)
        .build()
        .unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let requests = hold(&server, &limiter, &API, "ada").await;
    server.pause();
    proxy.cut(Cut::Reset);
    let back = async {
        sleep(Duration::from_millis(300)).await;
        server.resume();
    };
    assert!(tokio::join!(limiter.shutdown(TEST_TIMEOUT), back).0.is_ok());
    wait_until_used(&server, &clock, &API, "ada", requests).await;
}

#[tokio::test]
async fn a_prefetch_whose_reply_is_lost_is_given_back() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let proxy = Proxy::start(&server).await;
    let store = RedisStore::builder(proxy.url())
        .clock(&clock)
        .build()
        .unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    // The reply after these is that of the first prefetch.
    for _ in 0..16 {
        assert!(check(&limiter, &API, "ada", 1).await.is_allowed());
    }
    proxy.lose_replies(1);
    sleep(LIFE).await;
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    assert!(proxy.has_lost_them());
    assert_eq!(used(&server, &clock, &API, "ada").await, (16, 0));
}
