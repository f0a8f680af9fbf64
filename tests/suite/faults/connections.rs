//! Connections that are cut, reset, killed by the server, or taken apart byte by byte.

use std::time::Duration;

use tokio::time::sleep;

use super::{
    CLIENTS,
    load::{History, Load},
};
use crate::support::{
    TEST_TIMEOUT,
    proxy::{Cut, Proxy},
    redis_server::RedisServer,
};

/// Checks on a closed connection are sent again. The next fault comes only after that could finish,
/// however slow the machine is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_the_server_kills() {
    let server = RedisServer::start();
    let load = Load::start(&server.url(), CLIENTS, TEST_TIMEOUT).await;
    let mut killer = server.connect();
    for _ in 0..75 {
        sleep(Duration::from_millis(20)).await;
        redis::cmd("CLIENT")
            .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
            .exec(&mut killer)
            .unwrap();
        load.goes_on().await;
    }
    load.recover().await;
    let outcome = load
        .end()
        .await
        .keeps_the_rules("CLIENT KILL, 75 times", History::Resent);
    assert!(
        outcome.failed() * 10 < outcome.admitted(),
        "nearly all are sent again: {outcome}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_cut_and_reset() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let load = Load::start(proxy.url(), CLIENTS, TEST_TIMEOUT).await;
    for round in 0..75 {
        sleep(Duration::from_millis(20)).await;
        proxy.cut(if round % 2 == 0 {
            Cut::Close
        } else {
            Cut::Reset
        });
        load.goes_on().await;
    }
    load.recover().await;
    let outcome = load
        .end()
        .await
        .keeps_the_rules("closed and reset, 75 times", History::Resent);
    assert!(
        outcome.failed() * 10 < outcome.admitted(),
        "nearly all are sent again: {outcome}"
    );
}

/// Requests and replies may arrive in pieces of one byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_of_one_byte() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.split_packets(true);
    // Few clients, so that a batch arrives before the store gives up on its reply.
    let load = Load::start(proxy.url(), 20, TEST_TIMEOUT).await;
    sleep(Duration::from_millis(1_500)).await;
    let outcome = load
        .end()
        .await
        .keeps_the_rules("packets of one byte", History::Exact);
    assert_eq!(
        outcome.failed(),
        outcome.failed_with("timed out"),
        "nothing is misread: {outcome}"
    );
}

/// Open connections fall silent, and no error ends them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_fall_silent() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let load = Load::start(proxy.url(), CLIENTS, Duration::from_millis(100)).await;
    for _ in 0..2 {
        sleep(Duration::from_millis(300)).await;
        proxy.silence_open_connections();
        load.recover().await;
    }
    let outcome = load
        .end()
        .await
        .keeps_the_rules("connections fall silent", History::Resent);
    assert!(outcome.failed_with("timed out") > 0, "{outcome}");
}
