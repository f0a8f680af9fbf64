//! Replies that arrive around the deadline, before or after it.

use std::time::Duration;

use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_sliding_window::{Error, Limit, Limiter, limiter::Breaker};

use super::{
    CLIENTS,
    load::{History, Load},
    reached,
};
use crate::support::{
    TEST_TIMEOUT,
    proxy::Proxy,
    redis_server::{RedisServer, store_at},
};

const DEADLINE: Duration = Duration::from_millis(50);

/// Checks that timed out may have counted. Otherwise only admitted checks count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_around_the_deadline() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let load = Load::start(proxy.url(), CLIENTS, DEADLINE).await;
    for _ in 0..3 {
        for delay in [0, 20, 45, 50, 55, 90] {
            proxy.delay_replies(Duration::from_millis(delay));
            sleep(Duration::from_millis(100)).await;
        }
    }
    proxy.delay_replies(Duration::ZERO);
    load.recover().await;
    let outcome = load
        .end()
        .await
        .keeps_the_rules("replies around the deadline", History::Exact);
    assert!(outcome.failed_with("timed out") > 0, "{outcome}");
}

/// More checks arrive than the queue holds, while all replies are late. Checks beyond the queue
/// fail at once, all others time out at the deadline, and abandoned checks are not sent later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_behind_late_replies() {
    const FLOOD: usize = 80_000;
    const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
    /// Most callers have asked by then, and none has a reply.
    const DEADLINE: Duration = Duration::from_secs(4);

    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let store = store_at(proxy.url())
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    let limiter = Limiter::new(store)
        .deadline(DEADLINE)
        .refusal_cache(Duration::ZERO)
        .breaker(Breaker::OFF);
    assert!(
        limiter
            .clone()
            .deadline(TEST_TIMEOUT)
            .peek(&CALLS, "ada")
            .await
            .unwrap()
            .is_allowed()
    );

    proxy.delay_replies(Duration::from_secs(8));
    let mut clients = JoinSet::new();
    for _ in 0..FLOOD {
        clients.spawn(timeout(TEST_TIMEOUT, limiter.check(&CALLS, "ada", 1)));
    }
    let (mut full, mut late, mut allowed) = (0, 0, 0);
    for answer in clients.join_all().await {
        match answer.expect("a request is stuck") {
            Ok(_) => allowed += 1,
            Err(Error::TimedOut { .. }) => late += 1,
            Err(error) => {
                assert!(
                    format!("{error:?}").contains("are waiting for Redis"),
                    "{error:?}"
                );
                full += 1;
            }
        }
    }
    // The batches in flight have not returned yet.
    let patient = limiter.clone().deadline(TEST_TIMEOUT);
    let heal = async { proxy.delay_replies(Duration::ZERO) };
    let (used, asked, ()) = tokio::join!(
        patient.peek(&CALLS, "ada"),
        patient.check(&CALLS, "bob", 1),
        heal
    );
    let (used, asked) = (
        used.expect("the queue is full").binding().used,
        asked.expect("the queue is full"),
    );
    assert_eq!(asked.binding().used, 1);
    reached(
        "a flood behind late replies",
        FLOOD,
        format!("admitted {allowed}, counted {used}, late {late}, queue full {full}"),
    );
    assert!(full > 0, "the queue has an end");
    assert_eq!(allowed, 0, "every reply is late");
    assert!(used <= 1_000, "only checks in flight were counted: {used}");
}
