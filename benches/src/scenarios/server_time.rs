//! The processor time that a decision takes of Redis, which is the bound with many keys. Beside us
//! and the others, scripts run only some of the calls of a log, in batches of 64 checks. No log in
//! a sorted set takes less.

use redis::Script;
use tokio::runtime::Runtime;

use super::Outcome;
use crate::{
    contenders::{
        Contender, Floor, OURS, TOWER_RATE_LIMIT_REDIS, ours, tower_rate_limit_redis, wide,
    },
    load::{KEYS, closed_loop, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

/// The calls for each check. `ZADD` writes the admission, `ZCARD` counts, `PEXPIRETIME` gives the
/// oldest.
const CALLS: [(&str, &str); 4] = [
    ("batches of nothing", ""),
    ("batches of ZADD", "call('ZADD', key, score, id)"),
    (
        "batches of ZCARD, ZADD",
        "call('ZCARD', key) call('ZADD', key, score, id)",
    ),
    (
        "batches of three calls",
        "call('PEXPIRETIME', key) call('ZCARD', key) call('ZADD', key, score, id)",
    ),
];

/// The checks of a batch: as many as 256 tasks fill.
const BATCH: usize = 64;

/// The entries that a log gets.
const ENTRIES: usize = 20;

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let us = runtime.block_on(ours(&server, wide()));
    let rival = runtime.block_on(tower_rate_limit_redis(&server));
    let floor = runtime.block_on(Floor::new(&server));
    let mut contest = Contest::new("Redis time, 10,000 keys", Unit::Micros)
        .side(OURS, || of_contender(&runtime, &server, effort, &us))
        .side(TOWER_RATE_LIMIT_REDIS, || {
            of_contender(&runtime, &server, effort, &rival)
        })
        .side(Floor::LABEL, || {
            of_contender(&runtime, &server, effort, &floor)
        });
    for (label, calls) in CALLS {
        contest = contest.side(label, || of_calls(&server, calls));
    }
    Ok(vec![contest.measure(effort.rounds)])
}

fn of_contender(
    runtime: &Runtime,
    server: &Server,
    effort: Effort,
    contender: &impl Contender,
) -> f64 {
    server.run::<()>("FLUSHALL");
    let before = server.processor_micros();
    let rate = runtime.block_on(closed_loop(contender, effort.round, KEYS, true));
    (server.processor_micros() - before) / (rate * effort.round.as_secs_f64())
}

fn of_calls(server: &Server, calls: &str) -> f64 {
    server.run::<()>("FLUSHALL");
    let script = Script::new(&format!(
        "local call, time, reply = redis.call, redis.call('TIME'), {{}}
         local score = '-' .. time[1] .. string.format('%06d', time[2])
         for i = 1, #KEYS do
           local key, id = KEYS[i], ARGV[i]
           {calls}
           reply[2 * i - 1], reply[2 * i] = i, 0
         end
         return reply"
    ));
    let mut connection = server.connection();
    let before = server.processor_micros();
    for entry in 0..ENTRIES {
        // Not in the order of memory or of the last round, because real clients do not ask in such
        // an order either.
        let stride = 7_919 + 130 * entry;
        let keys: Vec<String> = (0..KEYS)
            .map(|turn| format!("tsw1:{{{:022}}}:wide/h", turn * stride % KEYS))
            .collect();
        for batch in keys.chunks_exact(BATCH) {
            let mut invocation = script.prepare_invoke();
            for key in batch {
                invocation.key(key).arg(format!("{entry:08}"));
            }
            let _: Vec<i64> = invocation.invoke(&mut connection).expect("an answer");
        }
    }
    (server.processor_micros() - before) / (ENTRIES * (KEYS / BATCH) * BATCH) as f64
}
