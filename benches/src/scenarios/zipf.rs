//! Decisions per second of 256 tasks that ask for 100,000 keys by Zipf's law with exponent 1, all
//! admitted: the first key gets a twelfth of the requests, and the rarer half of the keys a
//! twentieth.

use std::sync::Arc;

use tokio::runtime::Runtime;
use tower_sliding_window::{Limit, limit::prefetch::MAX_LIFE};

use super::Outcome;
#[cfg(tower_rate_limiter)]
use crate::contenders::{TOWER_RATE_LIMITER, tower_rate_limiter};
use crate::{
    contenders::{
        Contender, OURS, OURS_WITH_LONG_PREFETCH, OURS_WITH_PREFETCH, TOWER_RATE_LIMIT_REDIS,
        long_prefetches, ours, ours_with_prefetch, tower_rate_limit_redis,
    },
    dice::Dice,
    load::{Rates, TASKS, Work, ask_for, two_threads, work},
    measure::{Comparison, Effort, Sides, Unit},
    server::Server,
};

const KEYS: usize = 100_000;

/// The keys that are drawn in advance, so that drawing takes no time of the measurement.
const DRAWN: usize = 1 << 20;

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let far = Limit::per_minute("far", 1_000_000);
    let long_prefetches = runtime.block_on(ours(&server, far.clone().prefetch(long_prefetches())));
    let prefetches = runtime.block_on(ours_with_prefetch(&server, far.clone()));
    let exact = runtime.block_on(ours(&server, far));
    let rival = runtime.block_on(tower_rate_limit_redis(&server));
    let keys = draw();
    let sides = Sides::new()
        .side(OURS_WITH_LONG_PREFETCH, || {
            measure(&runtime, &server, &long_prefetches, effort, &keys)
        })
        .side(OURS_WITH_PREFETCH, || {
            measure(&runtime, &server, &prefetches, effort, &keys)
        })
        .side(OURS, || measure(&runtime, &server, &exact, effort, &keys))
        .side(TOWER_RATE_LIMIT_REDIS, || {
            measure(&runtime, &server, &rival, effort, &keys)
        });
    #[cfg(tower_rate_limiter)]
    let other_rival = runtime.block_on(tower_rate_limiter(&server));
    #[cfg(tower_rate_limiter)]
    let sides = sides.side(TOWER_RATE_LIMITER, || {
        measure(&runtime, &server, &other_rival, effort, &keys)
    });
    let works = sides.measure(effort.rounds);
    Ok(vec![
        Comparison::of(
            "decisions a second, by Zipf's law",
            Unit::PerSecond,
            &works,
            |work| work.rates.decisions,
        ),
        Comparison::of("Redis time, by Zipf's law", Unit::Micros, &works, |work| {
            work.micros
        }),
        Comparison::of(
            "Redis commands per 1000 decisions",
            Unit::Commands,
            &works,
            |work| work.commands,
        ),
    ])
}

fn measure<C: Contender>(
    runtime: &Runtime,
    server: &Server,
    contender: &C,
    effort: Effort,
    keys: &Arc<[usize]>,
) -> Work {
    server.run::<()>("FLUSHALL");
    // A process knows which keys are busy after the longest life of a prefetch. The other sides get
    // as long to warm up.
    let warm_up = Effort {
        round: 2 * MAX_LIFE,
        ..effort
    };
    runtime.block_on(admissions(contender, warm_up, keys));
    work(
        runtime,
        server,
        effort.round,
        admissions(contender, effort, keys),
    )
}

async fn admissions<C: Contender>(contender: &C, effort: Effort, keys: &Arc<[usize]>) -> Rates {
    let next_key = |task: usize| {
        let (keys, mut drawn) = (Arc::clone(keys), task * (DRAWN / TASKS));
        move || {
            drawn = (drawn + 1) % DRAWN;
            keys[drawn]
        }
    };
    let rates = ask_for(contender, effort.round, TASKS, next_key).await;
    assert!(
        rates.admitted == rates.decisions,
        "the limit is never reached"
    );
    rates
}

/// Keys by a table of cumulated weights.
fn draw() -> Arc<[usize]> {
    let mut total = 0.0;
    let mut cumulated = Vec::with_capacity(KEYS);
    for rank in 1..=KEYS {
        total += 1.0 / rank as f64;
        cumulated.push(total);
    }
    let mut dice = Dice::new(19);
    let mut key = || {
        let weight = dice.fraction() * total;
        cumulated.partition_point(|end| *end <= weight)
    };
    (0..DRAWN).map(|_| key()).collect()
}
