//! A limit with prefetch, far from its end, on one key: decisions per second of 256 tasks, their
//! work for Redis, and the median time of a single request.

use super::Outcome;
#[cfg(tower_rate_limiter)]
use crate::contenders::{TOWER_RATE_LIMITER, tower_rate_limiter};
use crate::{
    contenders::{
        Contender, Floor, OURS, OURS_WITH_PREFETCH, TOWER_RATE_LIMIT_REDIS, ours,
        ours_with_prefetch, tower_rate_limit_redis, wide,
    },
    load::{Rates, TASKS, ask_for, forgetting, in_turn, median_micros, two_threads, work},
    measure::{Comparison, Contest, Effort, Sides, Unit},
    server::Server,
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let prefetches = runtime.block_on(ours_with_prefetch(&server, wide()));
    let exact = runtime.block_on(ours(&server, wide()));
    let rival = runtime.block_on(tower_rate_limit_redis(&server));
    let floor = runtime.block_on(Floor::new(&server));
    let round = effort.round;
    let fresh = || server.run::<()>("FLUSHALL");

    let sides = Sides::new()
        .side(OURS_WITH_PREFETCH, || {
            fresh();
            work(&runtime, &server, round, of_one_key(&prefetches, effort))
        })
        .side(OURS, || {
            fresh();
            work(&runtime, &server, round, of_one_key(&exact, effort))
        })
        .side(TOWER_RATE_LIMIT_REDIS, || {
            fresh();
            work(
                &runtime,
                &server,
                round,
                forgetting(&server, of_one_key(&rival, effort)),
            )
        });
    #[cfg(tower_rate_limiter)]
    let other_rival = runtime.block_on(tower_rate_limiter(&server));
    #[cfg(tower_rate_limiter)]
    let sides = sides.side(TOWER_RATE_LIMITER, || {
        fresh();
        work(&runtime, &server, round, of_one_key(&other_rival, effort))
    });
    let works = sides.measure(effort.rounds);

    let alone = Contest::new("median time, one request at a time", Unit::Micros)
        .side(OURS_WITH_PREFETCH, || {
            fresh();
            runtime.block_on(median_micros(&prefetches, round, 1))
        })
        .side(OURS, || {
            fresh();
            runtime.block_on(median_micros(&exact, round, 1))
        })
        .side(Floor::LABEL, || {
            runtime.block_on(median_micros(&floor, round, 1))
        });
    Ok(vec![
        Comparison::of(
            "decisions a second, one key",
            Unit::PerSecond,
            &works,
            |work| work.rates.decisions,
        ),
        Comparison::of(
            "Redis commands per 1000 decisions",
            Unit::Commands,
            &works,
            |work| work.commands,
        ),
        Comparison::of(
            "script calls per 1000 decisions",
            Unit::Scripts,
            &works,
            |work| work.scripts,
        ),
        alone.measure(effort.rounds),
    ])
}

async fn of_one_key<C: Contender>(contender: &C, effort: Effort) -> Rates {
    let rates = ask_for(contender, effort.round, TASKS, |task| in_turn(task, 1)).await;
    assert!(
        rates.admitted == rates.decisions,
        "the limit is never reached"
    );
    rates
}
