//! A clock that steps by an hour, in both directions, under load.

use std::time::Duration;

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{Limit, Limiter, store::ManualClock};

use super::{CLIENTS, reached};
use crate::support::{
    TEST_TIMEOUT,
    outage::row,
    redis_server::{RedisServer, store_at},
};

const UNITS: u64 = 50;
const LIMIT: Limit = Limit::per("calls", UNITS, Duration::from_secs(10));
const HOUR: Duration = Duration::from_secs(3_600);
const MICROSECOND: Duration = Duration::from_micros(1);

/// With so many batches in flight at a time.
fn limiter(server: &RedisServer, clock: &ManualClock, connections: u32) -> Limiter {
    let store = store_at(&server.url())
        .clock(clock)
        .connections(connections)
        .connect_timeout(TEST_TIMEOUT);
    Limiter::new(store.build().unwrap())
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO)
}

/// All clients send so many checks. Returns how many were admitted.
async fn admitted(limiter: &Limiter, times: usize) -> u64 {
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
        assert_eq!(admitted(&limiter, 1).await, 0, "a step back admits nothing");
        clock.advance(LIMIT.window() - MICROSECOND);
        assert_eq!(admitted(&limiter, 1).await, 0);
        clock.advance(MICROSECOND);
        assert_eq!(
            admitted(&limiter, 2).await,
            UNITS,
            "the key recovers after one window"
        );

        clock.advance(HOUR);
        assert_eq!(
            admitted(&limiter, 2).await,
            UNITS,
            "a step forward admits the limit once more"
        );
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

/// Each step forward admits the limit once more, and a step back admits nothing. A batch that is in
/// flight during a step carries the earlier time, so the server sees one more step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clock_steps_under_load() {
    const STEPS: u64 = 50;
    /// Two stores with two connections each.
    const ON_THEIR_WAY: u64 = 4;

    let (server, clock) = (RedisServer::start(), ManualClock::new());
    // With one connection, or the server would see more steps than there are, because each batch
    // carries its time.
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
    reached(
        "clock: steps while many ask",
        CLIENTS,
        format!("admitted {total} over {STEPS} steps each way"),
    );
    assert!(
        (UNITS..=UNITS * (1 + STEPS * (1 + ON_THEIR_WAY))).contains(&total),
        "{total}"
    );
}
