//! Redis's time of a script, by its own statistics: a fixed window and a counter of two buckets,
//! beside the scripts that are mostly used for them. The scripts of others decide one check a call.

use std::time::Duration;

use redis::Script;
use tokio::{runtime::Runtime, task::JoinSet};
use tower_sliding_window::{Algorithm, Limit, Limiter, RedisStore};

use super::Outcome;
use crate::{
    contenders::OURS,
    load::{HOUR, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

/// `INCR`, with an expiry from the first unit on.
const INCR: &str = "local used = redis.call('INCR', KEYS[1])
     if used == 1 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
     return used <= tonumber(ARGV[1]) and 1 or 0";

/// The units of this window and, in proportion, those of the one before it.
const TWO_BUCKETS: &str = "local time = redis.call('TIME')
     local now, window = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[2])
     local number, part = math.floor(now / window), now % window / window
     local current = KEYS[1] .. ':' .. number
     local used = tonumber(redis.call('GET', current) or 0)
     local before = tonumber(redis.call('GET', KEYS[1] .. ':' .. number - 1) or 0)
     if used + before * (1 - part) >= tonumber(ARGV[1]) then return 0 end
     redis.call('INCR', current)
     redis.call('PEXPIRE', current, 2 * window)
     return 1";

/// Other keys, so that no key is in the processor's cache because it alone was asked for.
const KEYS: usize = 1_000;

/// The checks that are asked for at once. Most travel in batches of 64.
const AT_ONCE: usize = 256;

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let store = RedisStore::builder(server.url()).connections(1);
    let store = runtime.block_on(store.connect()).expect("the server is up");
    let limiter = Limiter::new(store)
        .deadline(Duration::from_secs(10))
        .refusal_cache(Duration::ZERO);
    let kinds = [
        ("a fixed window", Algorithm::FIXED_WINDOW, "INCR", INCR),
        (
            "a counter",
            Algorithm::SLIDING_WINDOW_COUNTER,
            "two buckets",
            TWO_BUCKETS,
        ),
    ];
    let mut comparisons = Vec::new();
    for (kind, algorithm, name, text) in kinds {
        for (outcome, units) in [("admitted", 1_000_000), ("refused", 1)] {
            for (how, at_once) in [("alone", 1), ("in batches", AT_ONCE)] {
                let limit = Limit::per("limit", units, HOUR).with_algorithm(algorithm);
                let what = format!("Redis time of {kind}, {outcome}, {how}");
                let contest = Contest::new(what, Unit::Micros)
                    .side(OURS, || {
                        server.run::<()>("FLUSHALL");
                        of_ours(&runtime, &server, &limiter, &limit, at_once)
                    })
                    .side(name, || {
                        server.run::<()>("FLUSHALL");
                        of_script(&server, text, units)
                    });
                comparisons.push(contest.measure(effort.rounds));
            }
        }
    }
    Ok(comparisons)
}

fn of_ours(
    runtime: &Runtime,
    server: &Server,
    limiter: &Limiter,
    limit: &Limit,
    at_once: usize,
) -> f64 {
    let round = async || {
        for first in (0..KEYS).step_by(at_once) {
            let mut checks = JoinSet::new();
            for key in first..KEYS.min(first + at_once) {
                let (limiter, limit) = (limiter.clone(), limit.clone());
                checks.spawn(async move {
                    let decision = limiter.check(&limit, key.to_string(), 1).await;
                    _ = decision.expect("a decision");
                });
            }
            checks.join_all().await;
        }
    };
    per_decision(server, || runtime.block_on(round()))
}

fn of_script(server: &Server, text: &str, units: u64) -> f64 {
    let (script, mut connection) = (Script::new(text), server.connection());
    per_decision(server, || {
        for key in 0..KEYS {
            let mut call = script.key(format!("limit:{key}"));
            let call = call.arg(units).arg(HOUR.as_millis() as u64);
            let _: u64 = call.invoke(&mut connection).expect("an answer");
        }
    })
}

/// The first rounds load the script, make the keys and spend the units of a limit of one.
fn per_decision(server: &Server, mut round: impl FnMut()) -> f64 {
    round();
    round();
    server.run::<()>("CONFIG RESETSTAT");
    const ROUNDS: usize = 5;
    for _ in 0..ROUNDS {
        round();
    }
    let statistics: String = server.run("INFO commandstats");
    let micros = statistics
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:"))
        .and_then(|line| line.split("usec=").nth(1)?.split(',').next())
        .and_then(|micros| micros.parse::<f64>().ok())
        .expect("scripts were called");
    micros / (ROUNDS * KEYS) as f64
}
