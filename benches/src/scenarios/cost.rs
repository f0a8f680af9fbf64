//! The cost of a decision for Redis: a cost of 10,000 against a cost of 1.

use std::time::Duration;

use tower_sliding_window::{Limiter, RedisStore};

use super::Outcome;
use crate::{
    contenders::wide,
    load::two_threads,
    measure::{Contest, Effort, Unit},
    server::Server,
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let store = runtime
        .block_on(RedisStore::connect(&server.url()))
        .expect("the server is up");
    let limiter = Limiter::new(store).deadline(Duration::from_secs(10));
    let decide = |cost: u64| {
        server.run::<()>("FLUSHALL");
        server.run::<()>("CONFIG RESETSTAT");
        runtime.block_on(async {
            for check in 0..5_000 {
                let decision = limiter
                    .check(&wide(), (check % 100).to_string(), cost)
                    .await;
                assert!(decision.is_ok_and(|decision| decision.is_allowed()));
            }
        });
        server.script_micros()
    };
    let contest = Contest::new("Redis time, at a cost of 10,000", Unit::Micros)
        .side("at a cost of 10,000", || decide(10_000))
        .side("at a cost of 1", || decide(1));
    Ok(vec![contest.measure(effort.rounds)])
}
