//! Decisions per second of a server under load: 256 tasks, all admitted.

use std::time::Duration;

use super::Outcome;
#[cfg(tower_rate_limiter)]
use crate::contenders::{TOWER_RATE_LIMITER, tower_rate_limiter};
use crate::{
    contenders::{
        Floor, Naive, OURS, TOWER_RATE_LIMIT_REDIS, ours, tower_rate_limit_redis, wide_in,
    },
    load::{HOUR, KEYS, closed_loop, forgetting, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

pub(crate) fn many_keys(effort: Effort) -> Outcome {
    throughput(effort, KEYS, HOUR, "decisions a second, 10,000 keys")
}

/// With a window of a second, each decision finds expired entries.
pub(crate) fn steady(effort: Effort) -> Outcome {
    throughput(
        effort,
        KEYS,
        Duration::from_secs(1),
        "decisions a second, steady logs",
    )
}

pub(crate) fn hot_key(effort: Effort) -> Outcome {
    throughput(effort, 1, HOUR, "decisions a second, one key")
}

fn throughput(effort: Effort, keys: usize, window: Duration, what: &str) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    // So that no log grows from round to round.
    let fresh = || server.run::<()>("FLUSHALL");
    let us = runtime.block_on(ours(&server, wide_in(window)));
    let rival = runtime.block_on(tower_rate_limit_redis(&server));
    let naive = runtime.block_on(Naive::new(&server, window));
    let floor = runtime.block_on(Floor::new(&server));
    let contest = Contest::new(what, Unit::PerSecond)
        .side(OURS, || {
            fresh();
            runtime.block_on(closed_loop(&us, effort.round, keys, true))
        })
        .side(TOWER_RATE_LIMIT_REDIS, || {
            fresh();
            let measured = closed_loop(&rival, effort.round, keys, true);
            runtime.block_on(async {
                if keys == 1 {
                    forgetting(&server, measured).await
                } else {
                    measured.await
                }
            })
        });
    #[cfg(tower_rate_limiter)]
    let other_rival = runtime.block_on(tower_rate_limiter(&server));
    #[cfg(tower_rate_limiter)]
    let contest = contest.side(TOWER_RATE_LIMITER, || {
        fresh();
        runtime.block_on(closed_loop(&other_rival, effort.round, keys, true))
    });
    let contest = contest
        .side(Naive::LABEL, || {
            fresh();
            runtime.block_on(closed_loop(&naive, effort.round, keys, true))
        })
        .side(Floor::LABEL, || {
            fresh();
            runtime.block_on(closed_loop(&floor, effort.round, keys, true))
        });
    Ok(vec![contest.measure(effort.rounds)])
}
