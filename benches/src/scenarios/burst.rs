//! 10,000 tasks that ask at once: the time until all have their answer, on one key and on a key for
//! each. A table shows how many are without a decision.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::StatusCode;
use tokio::{runtime::Runtime, sync::Barrier, task::JoinSet};

use super::Outcome;
use crate::{
    contenders::{
        Contender, OURS, OURS_WITH_PREFETCH, TOWER_RATE_LIMIT_REDIS, ours, ours_with_prefetch,
        tower_rate_limit_redis, wide,
    },
    load::two_threads,
    measure::{Comparison, Effort, Sides, Unit},
    server::Server,
};

const TASKS: usize = 10_000;

pub(crate) fn run(effort: Effort) -> Outcome {
    println!("\n| {TASKS} tasks at once | side | most responses without a decision |");
    println!("|---|---|---|");
    Ok(vec![
        bursts(effort, 1, "one key"),
        bursts(effort, TASKS, "a key each"),
    ])
}

/// The measurement of a burst.
struct Burst {
    lasted: Duration,
    undecided: usize,
}

fn bursts(effort: Effort, keys: usize, name: &str) -> Comparison {
    let (runtime, server) = (two_threads(), Server::start());
    let prefetches = runtime.block_on(ours_with_prefetch(&server, wide()));
    let exact = runtime.block_on(ours(&server, wide()));
    let rival = runtime.block_on(tower_rate_limit_redis(&server));
    let bursts = Sides::new()
        .side(OURS_WITH_PREFETCH, || {
            burst(&runtime, &server, &prefetches, keys)
        })
        .side(OURS, || burst(&runtime, &server, &exact, keys))
        .side(TOWER_RATE_LIMIT_REDIS, || {
            burst(&runtime, &server, &rival, keys)
        })
        .measure(effort.rounds * 5);
    for (label, bursts) in &bursts {
        let most = bursts.iter().map(|burst| burst.undecided).max();
        println!("| {name} | {label} | {} |", most.unwrap_or(0));
    }
    let what = format!("until all are decided, {name}");
    Comparison::of(what, Unit::Micros, &bursts, |burst| {
        burst.lasted.as_secs_f64() * 1e6
    })
}

fn burst<C: Contender>(runtime: &Runtime, server: &Server, contender: &C, keys: usize) -> Burst {
    server.run::<()>("FLUSHALL");
    runtime.block_on(async {
        // Connections are there before the burst, as on a server that runs.
        let _ = contender.clone().try_decide(TASKS).await;
        let (barrier, mut tasks) = (Arc::new(Barrier::new(TASKS)), JoinSet::new());
        for task in 0..TASKS {
            let (mut contender, barrier) = (contender.clone(), Arc::clone(&barrier));
            tasks.spawn(async move {
                barrier.wait().await;
                let asked = Instant::now();
                let answer = contender.try_decide(task % keys).await;
                (asked, Instant::now(), answer)
            });
        }
        let answers = tasks.join_all().await;
        let first = answers.iter().map(|of| of.0).min().expect("tasks");
        let last = answers.iter().map(|of| of.1).max().expect("tasks");
        let undecided = answers
            .iter()
            .filter(|of| of.2 == Err(StatusCode::SERVICE_UNAVAILABLE))
            .count();
        let admitted = answers.iter().filter(|of| of.2 == Ok(true)).count();
        assert_eq!(admitted + undecided, TASKS, "the limit is never reached");
        Burst {
            lasted: last - first,
            undecided,
        }
    })
}
