//! The store on Redis: connections, batches, the data in Redis, and each kind of server.

mod batching;
mod bounded_work;
#[cfg(feature = "cluster")]
mod cluster;
mod connection_settings;
mod distance;
mod ended_runtimes;
mod errors;
mod fairness;
mod false_sentinels;
mod foreign_content;
mod hashed_keys;
mod lone_checks;
#[cfg(feature = "cluster")]
mod lost_nodes;
mod opening;
mod passwords;
mod reconnecting;
mod resent_checks;
mod runtimes;
mod sentinel;
mod server_time;
mod set_up;
mod settlements;
#[cfg(feature = "cluster")]
mod several_slots;
mod slots_at_once;
#[cfg(feature = "credentials")]
mod sources;
mod state;
mod timers;
#[cfg(feature = "tls")]
mod tls;

use tower_sliding_window::{Error, Limit, Limiter};

use crate::support::{TEST_TIMEOUT, redis_server::store_at};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

fn limiter(url: &str) -> Limiter {
    Limiter::new(store_at(url).connections(2).build().unwrap()).deadline(TEST_TIMEOUT)
}

/// Spends one unit of `CALLS`, and returns how many are used.
async fn used(limiter: &Limiter) -> Result<u64, Error> {
    limiter
        .check(&CALLS, "ada", 1)
        .await
        .map(|decision| decision.binding().used)
}
