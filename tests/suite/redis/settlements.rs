//! Settlements while replies are lost, callers leave, the server has no memory, or a process is
//! killed.

use std::{
    future::{Future, poll_fn},
    io::Write,
    net::TcpStream,
    task::Poll,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use tower_sliding_window::{
    Algorithm, ApiKey, Charge, Check, Error, Key, Limit, Limiter, RedisStore, Secret, Store,
    settlement::Settlement, store::ManualClock,
};

use crate::support::{
    TEST_TIMEOUT,
    example::{SECRET, Server},
    proxy::Proxy,
    redis_server::RedisServer,
    two_threads,
};

const TOKENS: Limit = Limit::per_hour("tokens", 1_000_000);
const LEASE: Duration = Duration::from_secs(60);

fn limiter(url: &str) -> Limiter {
    let store = RedisStore::builder(url)
        .reply_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO)
}

/// The replies to the reservation and to its settlement are lost. Each is sent again and counts
/// once.
#[tokio::test]
async fn reservations_and_settlements_with_lost_replies_count_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(proxy.url());
    let mut expected = 0;
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ] {
        let limit = TOKENS.with_algorithm(algorithm);
        assert!(limiter.peek(&limit, "ada").await.unwrap().is_allowed());
        for cost in 0..50 {
            proxy.lose_replies(1);
            let reservation = limiter
                .reserve(&limit, "ada", 30, LEASE)
                .await
                .unwrap()
                .unwrap();
            assert!(proxy.has_lost_them());
            assert_eq!(
                reservation.decision().binding().used,
                expected + 30,
                "{algorithm:?}"
            );

            proxy.lose_replies(1);
            let settled = reservation.settle(cost).await.unwrap();
            assert!(proxy.has_lost_them());
            expected += cost;
            assert_eq!(
                (settled.was_applied, settled.decision.binding().used),
                (true, expected),
                "{algorithm:?}"
            );
        }
        expected = 0;
    }
}

/// A settlement must complete even if its caller cannot wait for it, such as when a client
/// disconnects.
#[tokio::test]
async fn a_settlement_completes_after_its_caller_leaves() {
    let server = RedisServer::start();
    let observer = limiter(&server.url());
    let check = Check::new(Charge::new(TOKENS, "ada", 30).unwrap().reserve(LEASE));
    let admitted = observer.check_all(check.clone()).await.unwrap();
    // The store is not connected yet, so nothing was sent when the caller leaves.
    let store = server.store().build().unwrap();
    let mut settling = Box::pin(store.settle(Settlement::new(check, &admitted, |_| Some(5))));
    assert!(poll_fn(|cx| Poll::Ready(settling.as_mut().poll(cx).is_pending())).await);
    drop(settling);
    let left = Instant::now();
    while observer.peek(&TOKENS, "ada").await.unwrap().binding().used != 5 {
        assert!(left.elapsed() < TEST_TIMEOUT, "it is not settled");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Others are refused until an abandoned settlement is done, and the refusal cache must not repeat
/// that refusal afterwards. The settlement is late because it waits for the batch before it, or
/// because the server was a replica at first.
#[test]
fn units_returned_by_an_abandoned_settlement_are_seen() {
    const ONE: Limit = Limit::per_hour("one", 1);
    const DELAY: Duration = Duration::from_millis(400);

    let (living, elsewhere) = (two_threads(), two_threads());
    for is_replica in [false, true] {
        let server = RedisServer::start();
        let proxy = living.block_on(Proxy::start(&server));
        let store = RedisStore::builder(proxy.url())
            .connect_timeout(TEST_TIMEOUT)
            .reply_timeout(TEST_TIMEOUT);
        let store = store.connections(1).build().unwrap();
        let limiter = Limiter::new(store)
            .deadline(TEST_TIMEOUT)
            .refusal_cache(Duration::MAX);
        let check = Check::new(Charge::new(ONE, "ada", 1).unwrap());
        let admitted = living.block_on(limiter.check_all(check.clone())).unwrap();
        // On a busy machine the first replies take long. A server that seems far would get a second
        // batch before the first reply.
        for _ in 0..100 {
            assert!(
                elsewhere
                    .block_on(limiter.peek(&ONE, "bob"))
                    .unwrap()
                    .is_allowed(),
                "it is connected"
            );
        }

        proxy.delay_replies(DELAY);
        if is_replica {
            server.run::<()>(&format!("REPLICAOF {}", server.address().replace(':', " ")));
        } else {
            living.spawn(limiter.check(&ONE, "eve", 1));
        }
        let hasty = limiter.clone().deadline(DELAY / 8);
        let settling = async {
            sleep(DELAY / 8).await;
            hasty
                .settle(Settlement::new(check, &admitted, |_| Some(0)))
                .await
        };
        assert!(matches!(
            living.block_on(settling).unwrap_err(),
            Error::TimedOut { .. }
        ));
        if is_replica {
            server.run::<()>("REPLICAOF NO ONE");
        }
        assert!(
            !elsewhere
                .block_on(limiter.check(&ONE, "ada", 1))
                .unwrap()
                .is_allowed(),
            "the settlement is not done yet"
        );

        let refused = Instant::now();
        while !elsewhere
            .block_on(limiter.check(&ONE, "ada", 1))
            .unwrap()
            .is_allowed()
        {
            assert!(
                refused.elapsed() < TEST_TIMEOUT,
                "the refusal is repeated forever"
            );
        }
    }
}

/// A check and a settlement in one batch each report their own failure.
#[tokio::test]
async fn an_error_names_the_operation_that_failed() {
    let mut server = RedisServer::start();
    let limiter = limiter(&server.url());
    let reservation = limiter
        .reserve(&TOKENS, "ada", 30, LEASE)
        .await
        .unwrap()
        .unwrap();
    server.kill();
    let text = |error: &dyn std::error::Error| format!("{error}: {}", error.source().unwrap());
    let (checked, settled) = tokio::join!(limiter.check(&TOKENS, "ada", 1), reservation.settle(20));
    assert!(text(&checked.unwrap_err()).ends_with("deciding a check failed"));
    assert!(text(&settled.unwrap_err()).ends_with("settling an admission failed"));
}

/// A check without its own entry is not sent again. It fails, and has counted at most once. Other
/// checks of its batch are sent again.
#[tokio::test]
async fn a_check_that_could_count_twice_is_not_resent() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(proxy.url());
    let compact = TOKENS.with_algorithm(Algorithm::compact_log(16));
    assert!(limiter.peek(&compact, "ada").await.unwrap().is_allowed());

    for round in 1..=20 {
        proxy.lose_replies(1);
        assert!(limiter.check(&compact, "ada", 1).await.is_err());
        assert!(proxy.has_lost_them());
        assert_eq!(
            limiter.peek(&compact, "ada").await.unwrap().binding().used,
            round
        );
    }

    let url = proxy.url().to_owned();
    let store = RedisStore::builder(&url)
        .connections(1)
        .reply_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    let batching = Limiter::new(store).deadline(TEST_TIMEOUT);
    assert!(batching.peek(&TOKENS, "bob").await.unwrap().is_allowed());
    proxy.lose_replies(1);
    let (log, compact) = tokio::join!(
        batching.check(&TOKENS, "bob", 1),
        batching.check(&compact, "bob", 1)
    );
    assert!(compact.is_err() && log.unwrap().binding().used == 1);
}

/// A hundred callers settle at once, each twice, and send checks in between.
#[tokio::test]
async fn settlements_and_checks_share_batches() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    let tasks = (1..=100).map(|cost| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let reservation = limiter
                .reserve(&TOKENS, "ada", 1_000, LEASE)
                .await
                .unwrap()
                .unwrap();
            let (first, second) = tokio::join!(reservation.settle(cost), reservation.settle(cost));
            assert!(first.unwrap().was_applied != second.unwrap().was_applied);
            assert!(limiter.check(&TOKENS, "ada", 1).await.unwrap().is_allowed());
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!(
        limiter.peek(&TOKENS, "ada").await.unwrap().binding().used,
        100 * 101 / 2 + 100
    );
}

/// Equal checks in one batch share an entry. Each can be refunded by itself, once.
#[tokio::test]
async fn copies_that_share_an_entry_are_refunded_one_by_one() {
    let server = RedisServer::start();
    let store = server.store().connections(1).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let check = Check::new(Charge::new(TOKENS, "ada", 3).unwrap());
    let asked: Vec<_> = (0..40)
        .map(|_| tokio::spawn(limiter.check_all(check.clone())))
        .collect();
    let mut decisions = Vec::new();
    for decision in asked {
        decisions.push(decision.await.unwrap().unwrap());
    }
    let entries = || server.run::<i64>(&format!("ZCARD {}", server.keys()[0]));
    assert!(entries() < 10, "the copies share entries");
    for (place, decision) in decisions.iter().enumerate() {
        for is_known in [true, false] {
            let settled = limiter
                .settle(Settlement::new(check.clone(), decision, |_| Some(0)))
                .await
                .unwrap();
            let left = 3 * (39 - place as u64);
            assert_eq!(
                (settled.was_applied, settled.decision.binding().used),
                (is_known, left)
            );
        }
    }
    assert!(server.keys().is_empty(), "keys are left");
}

/// A server without memory admits nothing, but accepts settlements.
#[tokio::test]
async fn an_out_of_memory_server_still_accepts_refunds() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ] {
        let limit = TOKENS.with_algorithm(algorithm);
        let reservations = [30, 40].map(|cost| limiter.reserve(&limit, "ada", cost, LEASE));
        let [first, second] = reservations;
        let (first, second) = (
            first.await.unwrap().unwrap(),
            second.await.unwrap().unwrap(),
        );
        server.run::<()>("CONFIG SET maxmemory 1");
        assert!(limiter.check(&limit, "ada", 1).await.is_err());
        assert_eq!(
            first.settle(0).await.unwrap().decision.binding().used,
            40,
            "{algorithm:?}"
        );
        assert_eq!(
            second.settle(5).await.unwrap().decision.binding().used,
            5,
            "{algorithm:?}"
        );
        server.run::<()>("CONFIG SET maxmemory 0");
    }
}

/// A check that the server refuses for lack of memory does not block a settlement in the same
/// batch.
#[tokio::test]
async fn a_refused_check_prefetches_no_settlement_in_its_batch() {
    let server = RedisServer::start();
    let store = server.store().connections(1).build().unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    let reservation = limiter
        .reserve(&TOKENS, "ada", 30, LEASE)
        .await
        .unwrap()
        .unwrap();
    server.run::<()>("CONFIG SET maxmemory 1");
    let (checked, settled) = tokio::join!(limiter.check(&TOKENS, "bob", 1), reservation.settle(5));
    assert!(checked.is_err(), "the server has no memory for it");
    assert_eq!(settled.unwrap().decision.binding().used, 5);
    assert_eq!(
        limiter.peek(&TOKENS, "bob").await.unwrap().binding().used,
        0
    );
}

/// The process is killed while it reads a request whose tokens it has reserved. They count once,
/// until the lease ends.
#[tokio::test]
async fn units_reserved_by_a_killed_process_return_when_the_lease_ends() {
    let redis = RedisServer::start();
    let mut server = Server::start("llm_tokens", &[("REDIS_URL", &redis.url())]);
    // The whole request but its body, for which the handler waits.
    let mut request = TcpStream::connect(server.url.trim_start_matches("http://")).unwrap();
    let head = "POST /complete HTTP/1.1\r\nhost: localhost\r\nx-api-key: ada\r\ncontent-length: 40\r\n\r\n";
    request.write_all(head.as_bytes()).unwrap();

    let tokens = Limit::per_minute("tokens", 400);
    let key = || -> Key { ApiKey::header("x-api-key", &Secret::new(SECRET).unwrap()).key("ada") };
    let used = async |limiter: &Limiter| limiter.peek(&tokens, key()).await.unwrap().binding().used;
    let present = limiter(&redis.url());
    let started = Instant::now();
    while used(&present).await == 0 {
        assert!(
            started.elapsed() < TEST_TIMEOUT,
            "the example reserves nothing"
        );
        sleep(Duration::from_millis(5)).await;
    }
    server.process.kill().unwrap();
    server.process.wait().unwrap();
    assert_eq!(
        used(&present).await,
        110,
        "a quarter of the bytes, and the longest response"
    );

    // The same entries, seen by a later clock.
    for (later, expected) in [(Duration::from_secs(15), 110), (Duration::from_secs(21), 0)] {
        let clock = ManualClock::new();
        clock.advance(later);
        let store = redis.store().clock(&clock).build().unwrap();
        assert_eq!(
            used(&Limiter::new(store).deadline(TEST_TIMEOUT)).await,
            expected,
            "after {later:?}"
        );
    }
}
