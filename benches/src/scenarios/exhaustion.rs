//! Limits that are at their end all the time, so that a unit is spent as soon as it comes free:
//! prefetches must not cost anything there. Each of 64 tasks asks again as soon as it has its
//! answer, without and with the refusal cache.

use std::time::Duration;

use tower::Layer;
use tower_sliding_window::{
    Limit, Limiter, RedisStore, limit::prefetch::DEFAULT_LIFE, middleware::RateLimit,
};

use super::Outcome;
use crate::{
    contenders::{Inner, Layered, OURS, OURS_WITH_PREFETCH, our_layer_on},
    load::{Work, ask_for, in_turn, two_threads, work},
    measure::{Comparison, Effort, Sides, Unit},
    server::Server,
};

const TASKS: usize = 64;

/// Units that are spent at once come free at once, so a measurement takes whole windows.
const WINDOW: Duration = Duration::from_millis(500);

pub(crate) fn run(effort: Effort) -> Outcome {
    let mut comparisons = Vec::new();
    for (keys, units) in [(1, 500), (1_000, 5)] {
        for (cache, settings) in [
            ("", Duration::ZERO),
            (", refusal cache", Duration::from_secs(1)),
        ] {
            let load = format!("{keys} x {}/s{cache}", units * 2);
            let works = measure(effort, keys, Limit::per("near", units, WINDOW), settings);
            comparisons.extend([
                Comparison::of(
                    format!("decisions a second, {load}"),
                    Unit::PerSecond,
                    &works,
                    |work| work.rates.decisions,
                ),
                Comparison::of(
                    format!("admitted a second, {load}"),
                    Unit::PerSecond,
                    &works,
                    |work| work.rates.admitted,
                ),
                Comparison::of(
                    format!("scripts per 1000, {load}"),
                    Unit::Scripts,
                    &works,
                    |work| work.scripts,
                ),
            ]);
        }
    }
    Ok(comparisons)
}

fn measure(
    effort: Effort,
    keys: usize,
    limit: Limit,
    refusal_cache: Duration,
) -> Vec<(String, Vec<Work>)> {
    let (runtime, server) = (two_threads(), Server::start());
    let contender = |limit| runtime.block_on(near(&server, limit, refusal_cache));
    let (prefetches, exact) = (
        contender(limit.clone().prefetch(DEFAULT_LIFE)),
        contender(limit),
    );
    let round = WINDOW.max(effort.round / 2);
    let measure = |contender: &Layered<RateLimit<Inner>>| {
        server.run::<()>("FLUSHALL");
        let load = |lasting| ask_for(contender, lasting, TASKS, |task| in_turn(task, keys));
        // The limits are at their end, and no unit comes free in this half of a window.
        runtime.block_on(load(WINDOW * 3 / 2));
        work(&runtime, &server, round, load(round))
    };
    Sides::new()
        .side(OURS_WITH_PREFETCH, || measure(&prefetches))
        .side(OURS, || measure(&exact))
        .measure(effort.rounds.min(5))
}

async fn near(server: &Server, limit: Limit, refusal_cache: Duration) -> Layered<RateLimit<Inner>> {
    let store = RedisStore::connect(&server.url())
        .await
        .expect("the server is up");
    let layer = our_layer_on(Limiter::new(store).refusal_cache(refusal_cache), limit);
    Layered(layer.layer(Inner))
}
