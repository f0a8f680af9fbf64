//! A client that keeps sending after its limit is spent: refusals on one core, and their cost for
//! Redis.

use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

use super::Outcome;
use crate::{
    contenders::{
        Asked, Contender, OURS, TOWER_RATE_LIMIT_REDIS, ours, spent, tower_rate_limit_redis_spent,
    },
    load::{TASKS, closed_loop},
    measure::{Contest, Effort, Unit},
    server::Server,
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let server = Server::start();
    let (asked, service) = (
        runtime.block_on(Asked::new(&server, spent())),
        runtime.block_on(ours(&server, spent())),
    );
    let rival = runtime.block_on(tower_rate_limit_redis_spent(&server));
    // Spends the whole limit. Our keys differ from the others', because a header's value has its
    // own namespace.
    runtime.block_on(asked.clone().decide(0));
    runtime.block_on(service.clone().decide(0));
    runtime.block_on(rival.clone().decide(0));

    let (alone, many) = (
        format!("{TOWER_RATE_LIMIT_REDIS}, one task"),
        format!("{TOWER_RATE_LIMIT_REDIS}, {TASKS} tasks"),
    );
    let round = effort.round;
    let limiter = Contest::new("refusals a second, Limiter", Unit::PerSecond)
        .side(format!("{OURS}, one task"), || {
            runtime.block_on(one_task(&asked, round))
        })
        .side(&alone, || runtime.block_on(one_task(&rival, round)))
        .side(&many, || {
            runtime.block_on(closed_loop(&rival, round, 1, false))
        });
    let layer = Contest::new("refusals a second, service", Unit::PerSecond)
        .side(format!("{OURS}, one task"), || {
            runtime.block_on(one_task(&service, round))
        })
        .side(&alone, || runtime.block_on(one_task(&rival, round)))
        .side(&many, || {
            runtime.block_on(closed_loop(&rival, round, 1, false))
        });
    let scripts = Contest::new("scripts per 1000 refusals", Unit::Scripts)
        .side(OURS, || {
            scripts_per_thousand(&runtime, &server, &service, round)
        })
        .side(TOWER_RATE_LIMIT_REDIS, || {
            scripts_per_thousand(&runtime, &server, &rival, round)
        });
    Ok([limiter, layer, scripts]
        .map(|contest| contest.measure(effort.rounds))
        .into())
}

/// Refusals per second of a task that asks again as soon as it is refused.
async fn one_task<C: Contender>(contender: &C, round: Duration) -> f64 {
    let mut contender = contender.clone();
    let (started, mut refusals) = (Instant::now(), 0_u32);
    while started.elapsed() < round {
        // Reading the clock costs time, and a task that never waits must yield by itself.
        for _ in 0..64 {
            assert!(!contender.decide(0).await, "the limit is spent");
        }
        refusals += 64;
        tokio::task::yield_now().await;
    }
    f64::from(refusals) / started.elapsed().as_secs_f64()
}

/// The scripts that Redis runs for the refusals of a round.
fn scripts_per_thousand<C: Contender>(
    runtime: &Runtime,
    server: &Server,
    contender: &C,
    round: Duration,
) -> f64 {
    server.run::<()>("CONFIG RESETSTAT");
    let refusals = runtime.block_on(one_task(contender, round)) * round.as_secs_f64();
    server.script_calls() * 1e3 / refusals
}
