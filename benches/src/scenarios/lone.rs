//! The median time of a single request.

use super::Outcome;
#[cfg(tower_rate_limiter)]
use crate::contenders::{TOWER_RATE_LIMITER, tower_rate_limiter};
use crate::{
    contenders::{Floor, OURS, TOWER_RATE_LIMIT_REDIS, ours, tower_rate_limit_redis, wide},
    load::{KEYS, median_micros, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let fresh = || server.run::<()>("FLUSHALL");
    let us = runtime.block_on(ours(&server, wide()));
    let rival = runtime.block_on(tower_rate_limit_redis(&server));
    let floor = runtime.block_on(Floor::new(&server));
    let contest = Contest::new("median time, one request at a time", Unit::Micros)
        .side(OURS, || {
            fresh();
            runtime.block_on(median_micros(&us, effort.round, KEYS))
        })
        .side(TOWER_RATE_LIMIT_REDIS, || {
            fresh();
            runtime.block_on(median_micros(&rival, effort.round, KEYS))
        });
    #[cfg(tower_rate_limiter)]
    let other_rival = runtime.block_on(tower_rate_limiter(&server));
    #[cfg(tower_rate_limiter)]
    let contest = contest.side(TOWER_RATE_LIMITER, || {
        fresh();
        runtime.block_on(median_micros(&other_rival, effort.round, KEYS))
    });
    let contest = contest.side(Floor::LABEL, || {
        fresh();
        runtime.block_on(median_micros(&floor, effort.round, KEYS))
    });
    Ok(vec![contest.measure(effort.rounds)])
}
