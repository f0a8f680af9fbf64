//! Random faults, one after the other, for `FAULT_SECONDS`.

use std::{
    env, fs,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

use super::{
    CLIENTS, keep_busy,
    load::{History, Load},
};
use crate::support::{
    TEST_TIMEOUT,
    outage::{millis, row},
    proxy::{Cut, Proxy},
    redis_server::{RedisServer, is_on_a_pool},
};

const SECONDS: u64 = 15;

/// The most connections that one of the two processes opens.
const POOL: usize = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn random_faults() {
    let reported = env::var("FAULT_SECONDS")
        .ok()
        .map(|seconds| seconds.parse().expect("FAULT_SECONDS is a number"));
    let mut server = RedisServer::start_with(&["--lua-time-limit", "20"]);
    let proxy = Proxy::start(&server).await;
    let tasks_before = tasks();
    let load = Load::start(proxy.url(), CLIENTS, Duration::from_millis(100)).await;
    load.recover().await;
    let memory_before = resident_bytes();

    let (random, started) = (RandomState::new(), Instant::now());
    let (mut faults, mut lives) = (0_u64, 1);
    while started.elapsed() < Duration::from_secs(reported.unwrap_or(SECONDS)) {
        let number = random.hash_one(faults);
        let lasting = Duration::from_millis(20 + number / 12 % 200);
        lives += usize::from(strike(&mut server, &proxy, number % 12, lasting).await);
        faults += 1;
        if faults.is_multiple_of(8) {
            load.recover().await;
        }
    }
    load.recover().await;
    let healed = Instant::now();
    // A pool of the application may have opened others meanwhile, which it keeps.
    while server.connections() > 2 * POOL * if is_on_a_pool() { 2 } else { 1 } {
        assert!(healed.elapsed() < TEST_TIMEOUT, "connections have leaked");
        sleep(Duration::from_millis(10)).await;
    }
    let (lasted, memory) = (started.elapsed(), resident_bytes().zip(memory_before));
    // Other tests may use memory at the same time, so this is checked only in a run of its own.
    if let (Some((now, before)), Some(_)) = (memory, reported) {
        assert!(
            now < before + 64 * 1024 * 1024,
            "memory has grown from {before} to {now} bytes"
        );
    }

    let outcome = load.end().await.keeps_the_rules(
        &format!("{faults} random faults"),
        History::Forgotten(lives - 1),
    );
    assert!(outcome.failed() > 0, "{outcome}");
    let ended = Instant::now();
    while tasks() > tasks_before || server.connections() > 0 {
        // A task of a pool looks each 30 s whether the pool is gone.
        let most = TEST_TIMEOUT * if is_on_a_pool() { 2 } else { 1 };
        let (left, connections) = (tasks().saturating_sub(tasks_before), server.connections());
        assert!(
            ended.elapsed() < most,
            "leaked: {left} tasks, {connections} connections"
        );
        sleep(Duration::from_millis(10)).await;
    }
    let grown = memory.map_or(0, |(now, before)| now.saturating_sub(before) / 1024);
    row(
        "random faults",
        format!(
            "{faults} faults in {} s: {} decisions, {} failed, the slowest answer after {}; no panic, nobody stuck, no task \
             or connection left; {grown} KiB more in memory, {} of them what the clients keep in mind",
            lasted.as_secs(),
            outcome.decided(),
            outcome.failed(),
            millis(outcome.slowest()),
            outcome.remembered_bytes() / 1024,
        ),
        "10 minutes: zero panics, zero stuck requests, memory flat, no task or connection leaked",
    );
}

/// Injects one fault and ends it. Returns whether the server has lost its data.
async fn strike(server: &mut RedisServer, proxy: &Proxy, fault: u64, lasting: Duration) -> bool {
    match fault {
        0 => server.pause(),
        1 => server.kill(),
        2 => server.run("SCRIPT FLUSH"),
        3 => server.run("CLIENT KILL TYPE normal SKIPME yes"),
        4 => server.run("CONFIG SET maxmemory 1"),
        5 => proxy.lose_replies(3),
        6 => proxy.split_packets(true),
        7 => proxy.delay_replies(lasting),
        8 => proxy.cut(Cut::Close),
        9 => proxy.cut(Cut::Reset),
        10 => proxy.silence_open_connections(),
        _ => keep_busy(server, lasting).await,
    }
    sleep(lasting).await;
    match fault {
        0 => server.resume(),
        1 => server.restart(),
        4 => server.run("CONFIG SET maxmemory 0"),
        5 => proxy.lose_replies(0),
        6 => proxy.split_packets(false),
        7 => proxy.delay_replies(Duration::ZERO),
        _ => {}
    }
    fault == 1
}

/// The number of tasks on this test's runtime.
fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

fn resident_bytes() -> Option<u64> {
    let pages: u64 = fs::read_to_string("/proc/self/statm")
        .ok()?
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()?;
    Some(pages * 4096)
}
