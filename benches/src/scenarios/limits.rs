//! Decisions per second under load with three limits per request: of a second, a minute and an
//! hour.

use super::Outcome;
use crate::{
    contenders::{OURS, TOWER_RATE_LIMIT_REDIS, ours_thrice, tower_rate_limit_redis_thrice},
    load::{KEYS, closed_loop, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let fresh = || server.run::<()>("FLUSHALL");
    let us = runtime.block_on(ours_thrice(&server));
    let rival = runtime.block_on(tower_rate_limit_redis_thrice(&server));
    let contest = Contest::new("decisions a second, three limits", Unit::PerSecond)
        .side(OURS, || {
            fresh();
            runtime.block_on(closed_loop(&us, effort.round, KEYS, true))
        })
        .side(format!("three of {TOWER_RATE_LIMIT_REDIS}"), || {
            fresh();
            runtime.block_on(closed_loop(&rival, effort.round, KEYS, true))
        });
    Ok(vec![contest.measure(effort.rounds)])
}
