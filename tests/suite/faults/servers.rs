//! A server that hangs, dies, forgets the script, has no memory, or is busy.

use std::time::Duration;

use tokio::time::sleep;

use super::{
    CLIENTS, keep_busy,
    load::{History, Load},
};
use crate::support::{
    TEST_TIMEOUT,
    outage::row,
    redis_server::{RedisServer, is_on_a_pool},
};

const DEADLINE: Duration = Duration::from_millis(100);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still() {
    let server = RedisServer::start();
    let load = Load::start(&server.url(), CLIENTS, DEADLINE).await;
    for _ in 0..5 {
        sleep(Duration::from_millis(100)).await;
        server.pause();
        sleep(Duration::from_millis(250)).await;
        server.resume();
    }
    load.recover().await;
    let outcome = load
        .end()
        .await
        .keeps_the_rules("SIGSTOP for 250 ms", History::Exact);
    assert!(outcome.failed_with("timed out") > 0, "{outcome}");
}

/// A server that restarts without data admits the limit once more per restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_that_is_killed() {
    const LIVES: usize = 4;

    let mut server = RedisServer::start();
    let load = Load::start(&server.url(), CLIENTS, DEADLINE).await;
    for _ in 1..LIVES {
        sleep(Duration::from_millis(200)).await;
        server.kill();
        sleep(Duration::from_millis(200)).await;
        server.restart();
        load.recover().await;
    }
    let outcome = load
        .end()
        .await
        .keeps_the_rules("kill -9 and restart", History::Forgotten(LIVES - 1));
    // A pool of the application tries for longer than these checks wait.
    let reason = if is_on_a_pool() {
        "answer within"
    } else {
        "refused"
    };
    assert!(outcome.failed_with(reason) > 0, "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgets_the_script() {
    let server = RedisServer::start();
    let load = Load::start(&server.url(), CLIENTS, TEST_TIMEOUT).await;
    let mut forgetful = server.connect();
    for _ in 0..150 {
        sleep(Duration::from_millis(10)).await;
        redis::cmd("SCRIPT")
            .arg("FLUSH")
            .exec(&mut forgetful)
            .unwrap();
    }
    let outcome = load
        .end()
        .await
        .keeps_the_rules("SCRIPT FLUSH every 10 ms", History::Exact);
    row(
        "`SCRIPT FLUSH` every 10 ms",
        format!(
            "{} decisions, {} failed",
            outcome.decided(),
            outcome.failed()
        ),
        "no failed check",
    );
    assert_eq!(outcome.failed(), 0, "{outcome}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_memory() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "noeviction"]);
    let load = Load::start(&server.url(), CLIENTS, TEST_TIMEOUT).await;
    for _ in 0..5 {
        sleep(Duration::from_millis(100)).await;
        server.run::<()>("CONFIG SET maxmemory 1");
        sleep(Duration::from_millis(150)).await;
        server.run::<()>("CONFIG SET maxmemory 0");
    }
    load.recover().await;
    let outcome = load
        .end()
        .await
        .keeps_the_rules("no memory for 150 ms", History::Exact);
    assert!(
        outcome.failed() > 0 && outcome.failed() == outcome.failed_with("OOM"),
        "{outcome}"
    );
}

/// Another script runs until it is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_kept_busy() {
    let server = RedisServer::start_with(&["--lua-time-limit", "20"]);
    let load = Load::start(&server.url(), CLIENTS, DEADLINE).await;
    for _ in 0..4 {
        sleep(Duration::from_millis(100)).await;
        keep_busy(&server, Duration::from_millis(200)).await;
    }
    load.recover().await;
    let outcome = load
        .end()
        .await
        .keeps_the_rules("a script of others for 200 ms", History::Exact);
    assert!(outcome.failed_with("BUSY") > 0, "{outcome}");
}
