//! A server that is slow, restarts or loses connections: the store reconnects and sends checks
//! again.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    task::JoinSet,
    time::{Instant, sleep},
};
use tower_sliding_window::{
    Algorithm, Error, Limit, Limiter, RedisStore, error::StoreErrorKind, limiter::Breaker,
};

use super::{CALLS, limiter, used};
use crate::support::{
    ALGORITHMS, TEST_TIMEOUT, ms,
    proxy::Proxy,
    redis_server::{RedisServer, store_at},
    until, with_causes,
};

#[tokio::test]
async fn a_flushed_script_is_loaded_again() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    for expected in 1..=5 {
        assert_eq!(used(&limiter).await.unwrap(), expected);
        server.run::<()>("SCRIPT FLUSH");
    }
}

/// With two connections, so that the second one is also closed when the store uses it.
#[tokio::test]
async fn a_server_restart_fails_no_check() {
    let mut server = RedisServer::start();
    let limiter = limiter(&server.url());
    for _ in 0..4 {
        tokio::try_join!(used(&limiter), used(&limiter)).unwrap();
        server.kill();
        server.restart();
    }
    assert_eq!(
        used(&limiter).await.unwrap(),
        1,
        "the server came back empty"
    );
}

#[tokio::test]
async fn closed_connections_fail_no_check_and_lose_no_unit() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    for expected in 1..=20 {
        assert_eq!(used(&limiter).await.unwrap(), expected);
        server.run::<()>("CLIENT KILL TYPE normal SKIPME yes");
    }
}

/// The server closes connections that nobody uses, as it does with `timeout`. A check that would
/// count twice if it ran twice must be decided, too.
#[tokio::test]
async fn connections_that_are_closed_while_idle_fail_nothing() {
    let server = RedisServer::start();
    let limiters = ALGORITHMS.map(|_| limiter(&server.url()));
    for round in 1..=3 {
        sleep(ms(700)).await;
        server.run::<()>("CLIENT KILL TYPE normal SKIPME yes");
        for (limiter, algorithm) in limiters.iter().zip(ALGORITHMS) {
            let limit = CALLS.with_algorithm(algorithm);
            assert_eq!(
                limiter
                    .check(&limit, "ada", 1)
                    .await
                    .unwrap()
                    .binding()
                    .used,
                round,
                "{algorithm:?}"
            );
        }
    }
}

/// What is done after a check, too: a settlement, a reset, and a place that is freed.
#[tokio::test]
async fn nothing_is_lost_after_idleness() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    let counter = CALLS.with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
    let places = Limit::concurrent("jobs", 3);
    let reservation = limiter
        .reserve(&counter, "ada", 5, TEST_TIMEOUT)
        .await
        .unwrap()
        .unwrap();
    let place = limiter.check(&places, "ada", 1).await.unwrap();
    let close = async || {
        sleep(ms(700)).await;
        server.run::<()>("CLIENT KILL TYPE normal SKIPME yes");
    };
    close().await;
    assert!(reservation.settle(2).await.unwrap().was_applied);
    close().await;
    drop(place);
    let key = server
        .keys()
        .into_iter()
        .find(|key| key.contains("jobs"))
        .unwrap();
    until("the place is not freed", || {
        server.run::<u64>(&format!("ZCARD {key}")) == 0
    })
    .await;
    close().await;
    assert_eq!(
        limiter.peek(&counter, "ada").await.unwrap().binding().used,
        2
    );
    close().await;
    limiter.reset(&counter, "ada").await.unwrap();
    assert_eq!(
        limiter.peek(&counter, "ada").await.unwrap().binding().used,
        0
    );
}

/// All callers that wait for a connection fail if making one fails, so it is made once more.
#[tokio::test]
async fn a_connection_that_is_cut_while_it_signs_in_fails_no_check() {
    let server = RedisServer::start();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let address = server.address();
    let proxy = tokio::spawn(async move {
        let (mut cut, _) = listener.accept().await.unwrap();
        cut.read_exact(&mut [0]).await.unwrap();
        drop(cut);
        let mut open = JoinSet::new();
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut server = TcpStream::connect(&address).await.unwrap();
            open.spawn(async move { copy_bidirectional(&mut client, &mut server).await });
        }
    });
    let store = store_at(&url)
        .connections(1)
        .connect_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    assert_eq!(used(&limiter).await.unwrap(), 1);
    proxy.abort();
}

#[tokio::test]
async fn a_hanging_server_times_out_and_is_used_again_later() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    let hasty = limiter
        .clone()
        .deadline(Duration::from_millis(50))
        .breaker(Breaker::OFF);

    server.pause();
    for _ in 0..10 {
        let asked = Instant::now();
        assert!(
            matches!(used(&hasty).await, Err(Error::TimedOut { deadline, .. }) if deadline.as_millis() == 50)
        );
        assert!(asked.elapsed() >= Duration::from_millis(50));
    }
    server.resume();
    used(&limiter).await.unwrap();
}

#[tokio::test]
async fn a_reply_may_take_as_long_as_the_reply_timeout() {
    let server = RedisServer::start();
    let hasty = Limiter::new(
        server
            .store()
            .reply_timeout(Duration::from_millis(50))
            .build()
            .unwrap(),
    );
    let hasty = hasty.deadline(TEST_TIMEOUT);
    let patient = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    used(&hasty).await.unwrap();
    used(&patient).await.unwrap();

    server.pause();
    assert!(matches!(used(&hasty).await, Err(Error::Unavailable(_))));
    let waiting = tokio::spawn(async move { used(&patient).await });
    // Longer than the default.
    sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished());
    server.resume();
    waiting.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_server_may_start_after_the_store() {
    let mut server = RedisServer::start();
    server.kill();
    let refused = RedisStore::connect(&server.url()).await.unwrap_err();
    assert_eq!(
        refused.kind,
        StoreErrorKind::Unreachable,
        "connecting at once is refused"
    );

    let limiter = limiter(&server.url());
    // At once, without waiting for the connect timeout.
    let patient = Limiter::new(
        store_at(&server.url())
            .connect_timeout(TEST_TIMEOUT)
            .build()
            .unwrap(),
    );
    let error = used(&patient.deadline(TEST_TIMEOUT)).await.unwrap_err();
    assert!(
        with_causes(&error).contains("refused"),
        "the cause is named: {}",
        with_causes(&error)
    );
    server.restart();
    let up = Instant::now();
    while used(&limiter).await.is_err() {
        assert!(up.elapsed() < TEST_TIMEOUT);
        sleep(Duration::from_millis(10)).await;
    }
}

/// After a failover the old connections lead to a replica. The store closes them and sends the
/// check to the new primary.
#[tokio::test]
async fn connections_to_a_demoted_primary_are_replaced() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::start(&old).await;
    let limiter = limiter(proxy.url());
    used(&limiter).await.unwrap();
    old.run::<()>("REPLICAOF 127.0.0.1 1");
    let error = used(&limiter).await.unwrap_err();
    assert!(
        with_causes(&error).to_lowercase().contains("readonly"),
        "as long as there is no other: {}",
        with_causes(&error)
    );

    proxy.lead_to(&new);
    assert_eq!(used(&limiter).await.unwrap(), 1);
}

/// A connection over which no reply comes, and which no error ends.
#[tokio::test]
async fn a_silent_connection_is_given_up_after_three_requests() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter =
        Limiter::new(store_at(proxy.url()).connections(1).build().unwrap()).deadline(TEST_TIMEOUT);
    used(&limiter).await.unwrap();
    proxy.silence_open_connections();
    let hasty = limiter.clone().deadline(ms(50));
    for _ in 0..3 {
        assert!(matches!(used(&hasty).await, Err(Error::TimedOut { .. })));
    }
    used(&limiter).await.unwrap();
}

/// A runtime that ends takes its unfinished connections along. The next runtime makes new ones.
#[test]
fn a_runtime_that_ends_while_connecting_blocks_no_other() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    server.pause();
    for _ in 0..2 {
        let hasty = limiter.clone().deadline(Duration::from_millis(50));
        let runtime = Runtime::new().unwrap();
        let asked = [(); 2].map(|()| runtime.spawn(hasty.check(&CALLS, "ada", 1)));
        for answer in asked {
            assert!(matches!(
                runtime.block_on(answer).unwrap(),
                Err(Error::TimedOut { .. })
            ));
        }
    }
    server.resume();
    assert!(Runtime::new().unwrap().block_on(used(&limiter)).is_ok());
}

#[tokio::test]
async fn a_reset_survives_a_closed_connection() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    server.run::<()>("CLIENT KILL TYPE normal SKIPME yes");
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert_eq!(used(&limiter).await.unwrap(), 1);
}

/// A server that accepts only one connection still decides over that one.
#[tokio::test]
async fn a_failed_connection_fails_no_check_that_can_use_another() {
    let server = RedisServer::start_with(&["--maxclients", "1"]);
    let limiter = limiter(&server.url());
    while used(&limiter).await.is_err() {
        // The connection that tested the server's start is still being closed.
        sleep(Duration::from_millis(10)).await;
    }
    for _ in 0..20 {
        // The second check is sent while the first is in flight.
        let first = tokio::spawn(limiter.check(&CALLS, "ada", 1));
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        let second = tokio::spawn(limiter.check(&CALLS, "bob", 1));
        assert!(first.await.unwrap().is_ok() && second.await.unwrap().is_ok());
    }
}

/// Dropping a check three times in a row once closed a connection.
#[tokio::test]
async fn dropped_checks_open_no_new_connections() {
    use std::future::Future;
    let server = RedisServer::start();
    let store = store_at(&server.url())
        .connect_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    let calls = Limit::per_hour("calls", 3_000_000);
    let limiter = Limiter::new(store);
    drop(limiter.check(&calls, "ada", 1).await.unwrap());
    let received = || -> u64 {
        let info: String = server.run("INFO stats");
        info.lines()
            .find_map(|line| line.strip_prefix("total_connections_received:"))
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    };
    let before = received();
    for _ in 0..300 {
        let mut check = Box::pin(limiter.check(&calls, "eve", 1));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = check.as_mut().poll(&mut cx);
        drop(check);
        tokio::time::sleep(ms(1)).await;
    }
    let opened = received() - before;
    assert!(
        opened < 10,
        "{opened} connections opened for 300 requests that hung up"
    );
}
