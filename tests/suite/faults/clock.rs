//! A clock that steps by an hour, either way, while many ask.

use std::time::Duration;

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{DenyCache, Limit, Limiter, ManualClock, RedisStore};

use super::{CLIENTS, reached};
use crate::support::{TEST_TIMEOUT, outage::row, redis_server::RedisServer};

const UNITS: u64 = 50;
const LIMIT: Limit = Limit::per("calls", UNITS, Duration::from_secs(10));
const HOUR: Duration = Duration::from_secs(3_600);
const MICROSECOND: Duration = Duration::from_micros(1);

/// With so many batches at a time in flight.
fn limiter(server: &RedisServer, clock: &ManualClock, connections: u32) -> Limiter<RedisStore> {
    let store = RedisStore::builder(&server.url()).clock(clock).connections(connections).connect_timeout(TEST_TIMEOUT);
    Limiter::new(store.build().unwrap()).deadline(TEST_TIMEOUT).deny_cache(DenyCache::off())
}

/// All clients ask so many times; how many were admitted.
async fn admitted(limiter: &Limiter<RedisStore>, times: usize) -> u64 {
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let limiter = limiter.clone();
        clients.spawn(async move {
            let mut admitted = 0;
            for _ in 0..times {
                admitted += u64::from(limiter.check(&LIMIT, "ada", 1).await.unwrap().is_allowed());
            }
            admitted
        });
    }
    clients.join_all().await.into_iter().sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_steps_an_hour_back_and_an_hour_forward() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter(&server, &clock, 4);
    for _ in 0..10 {
        assert_eq!(admitted(&limiter, 2).await, UNITS);
        clock.step_back(HOUR);
        assert_eq!(admitted(&limiter, 1).await, 0, "nothing more backwards");
        clock.advance(LIMIT.window() - MICROSECOND);
        assert_eq!(admitted(&limiter, 1).await, 0);
        clock.advance(MICROSECOND);
        assert_eq!(admitted(&limiter, 2).await, UNITS, "right again after one window");

        clock.advance(HOUR);
        assert_eq!(admitted(&limiter, 2).await, UNITS, "one extra limit forwards, and no more");
        clock.advance(LIMIT.window());
    }
    row(
        "the clock steps back an hour, and forward an hour, ten times",
        format!(
            "of {UNITS} units none more backwards, and {UNITS} again after one window; {UNITS} more a step forward"
        ),
        "no over-admission, and a key right again within one window; at most one extra limit a key",
    );
}

/// The clock steps in the middle of what is being asked: each step forward admits one limit more, and no step back any.
/// Each batch that was on its way meanwhile carries the time from before the step, so that the server sees one more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_steps_under_load() {
    const STEPS: u64 = 50;
    /// Two stores of two connections each.
    const ON_THEIR_WAY: u64 = 4;

    let (server, clock) = (RedisServer::start(), ManualClock::new());
    // One after the other, or the server would see more steps than there are: the time is passed in with each batch.
    let limiter = limiter(&server, &clock, 1);
    let stepping = tokio::spawn(async move {
        for _ in 0..STEPS {
            sleep(Duration::from_millis(10)).await;
            clock.step_back(HOUR);
            sleep(Duration::from_millis(10)).await;
            clock.advance(HOUR);
        }
    });
    let mut total = 0;
    while !stepping.is_finished() {
        total += admitted(&limiter, 10).await;
    }
    stepping.await.unwrap();
    reached("clock: steps while many ask", CLIENTS, format!("admitted {total} over {STEPS} steps each way"));
    assert!((UNITS..=UNITS * (1 + STEPS * (1 + ON_THEIR_WAY))).contains(&total), "{total}");
}
