//! Prefetches: units that a process takes at once, and spends without asking Redis.
//!
//! `decision/properties/prefetch.rs` has the random histories.

mod attacks;
mod calls;
mod costs;
mod counting;
mod faults;
mod giving_back;
mod killed;
mod lost_takes;
mod near_the_limit;
mod servers;
mod spending;

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tower_sliding_window::{
    Decision, Limit, Limiter, RedisStore,
    limit::prefetch::{DEFAULT_LIFE, MAX_LIFE, MIN_LIFE},
    limiter::Breaker,
    store::ManualClock,
};

use crate::support::{TEST_TIMEOUT, is_refused_by_reservations, redis_server::RedisServer};

const LIFE: Duration = Duration::from_millis(100);

/// Far from its limit in all tests that do not say otherwise.
const API: Limit = Limit::per_minute("api", 1_000_000).prefetch(DEFAULT_LIFE);

/// A limiter whose prefetches live by the clock of the machine.
fn limiter(server: &RedisServer) -> Limiter {
    Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT)
}

/// A limiter whose prefetches and windows end when the test says so.
fn limiter_by(server: &RedisServer, clock: &ManualClock) -> Limiter {
    Limiter::new(server.store().clock(clock).build().unwrap()).deadline(TEST_TIMEOUT)
}

async fn check(limiter: &Limiter, limit: &Limit, key: &str, cost: u64) -> Decision {
    limiter.check(limit, key, cost).await.unwrap()
}

/// The units in Redis, with those that processes hold.
async fn used(server: &RedisServer, clock: &ManualClock, limit: &Limit, key: &str) -> (u64, u64) {
    let decision = check(&limiter_by(server, clock), limit, key, 0).await;
    (decision.binding().used, decision.binding().reserved)
}

/// True if the limiter admits a request without asking Redis.
async fn is_in_process(server: &RedisServer, limiter: &Limiter, limit: &Limit, key: &str) -> bool {
    let before = server.script_calls();
    assert!(check(limiter, limit, key, 1).await.is_allowed());
    server.script_calls() == before
}

/// Makes requests until the limiter holds a prefetch, and returns how many it has made.
async fn hold(server: &RedisServer, limiter: &Limiter, limit: &Limit, key: &str) -> u64 {
    let (begun, mut requests) = (Instant::now(), 0);
    while begun.elapsed() < TEST_TIMEOUT {
        // Together, so that they are within a life on a slow machine, too.
        let burst = join_all((0..16).map(|_| check(limiter, limit, key, 1))).await;
        assert!(burst.iter().all(Decision::is_allowed));
        requests += 16;
        for _ in 0..20 {
            requests += 1;
            if is_in_process(server, limiter, limit, key).await {
                return requests;
            }
            sleep(Duration::from_millis(1)).await;
        }
    }
    panic!("no prefetch after {requests} requests");
}

/// Waits until Redis counts so many units, of which none are held.
async fn wait_until_used(
    server: &RedisServer,
    clock: &ManualClock,
    limit: &Limit,
    key: &str,
    units: u64,
) {
    let begun = Instant::now();
    while used(server, clock, limit, key).await != (units, 0) {
        assert!(
            begun.elapsed() < TEST_TIMEOUT,
            "{:?}, not {units}",
            used(server, clock, limit, key).await
        );
        sleep(Duration::from_millis(5)).await;
    }
}
