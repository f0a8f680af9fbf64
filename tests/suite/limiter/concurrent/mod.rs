//! Limits of so many admissions at once.

mod each_place;
mod freed;
mod given_back;
#[cfg(feature = "cluster")]
mod hanging_nodes;
mod killed;
mod left_behind;
mod places;
mod renewals;
mod repeated_ids;
mod shutdowns;

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_sliding_window::{Charge, Check, Decision, Limit, Limiter, MemoryStore, RedisStore};

use crate::support::{redis_server::RedisServer, *};

const STREAMS: Limit = Limit::concurrent("streams", 4);

/// Waits until so many places of the key `ada` are held.
async fn until_held(limiter: &Limiter, limit: &Limit, places: u64) {
    let begun = Instant::now();
    while limiter.peek(limit, "ada").await.unwrap().binding().used != places {
        assert!(
            begun.elapsed() < TEST_TIMEOUT,
            "{places} places are never held"
        );
        sleep(ms(5)).await;
    }
}

async fn enter(limiter: &Limiter, limit: &Limit) -> Decision {
    limiter.check(limit, "ada", 1).await.unwrap()
}
