//! The cost of a long log: the time of an admission with very many entries in the window, and with
//! ten.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use tower_sliding_window::{Charge, Check, Limiter, RedisStore, check::AdmissionId};

use super::Outcome;
use crate::{
    contenders::wide,
    load::{TASKS, median, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

/// The entries in the window of a rarely used key.
const FEW: usize = 10;

/// The admissions behind a figure. With few entries, each admission uses another key, or the
/// entries would soon be many.
const SAMPLE: usize = 1_000;

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let store = runtime
        .block_on(RedisStore::connect(&server.url()))
        .expect("the server is up");
    let limiter = Limiter::new(store).deadline(Duration::from_secs(10));
    let long = |_| "long".to_owned();
    runtime.block_on(fill(&limiter, effort.entries, long));

    let measure_long = || runtime.block_on(admissions(&server, &limiter, long));
    // Keys that no earlier figure has used.
    let turn = Cell::new(0);
    let measure_short = || {
        let turn = turn.replace(turn.get() + 1);
        let short = move |check: usize| format!("short-{turn}-{}", check % SAMPLE);
        runtime.block_on(async {
            fill(&limiter, SAMPLE * FEW, short).await;
            admissions(&server, &limiter, short).await
        })
    };
    let (many, few) = (
        format!("{} entries", thousands(effort.entries)),
        format!("{FEW} entries"),
    );
    let server_time = Contest::new(format!("Redis time, {many}"), Unit::Micros)
        .side(&many, || measure_long().script)
        .side(&few, || measure_short().script);
    let client_time = Contest::new(format!("median time, {many}"), Unit::Micros)
        .side(&many, || measure_long().client)
        .side(&few, || measure_short().client);
    Ok([server_time, client_time]
        .map(|contest| contest.measure(effort.rounds))
        .into())
}

/// So many admissions, each with its own id, so that those of one batch do not share an entry.
async fn fill(
    limiter: &Limiter,
    admissions: usize,
    key: impl Fn(usize) -> String + Copy + Send + 'static,
) {
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            for number in (task..admissions).step_by(TASKS) {
                let charge = Charge::new(wide(), key(number), 1).expect("a cost below the limit");
                let check = Check::new(charge).with_id(AdmissionId(number as u64));
                assert!(
                    limiter
                        .check_all(check)
                        .await
                        .expect("an answer")
                        .is_allowed()
                );
            }
        });
    }
    tasks.join_all().await;
}

/// The times of some admissions, in microseconds.
struct Times {
    /// The mean on the server.
    script: f64,
    /// The median at the client.
    client: f64,
}

async fn admissions(server: &Server, limiter: &Limiter, key: impl Fn(usize) -> String) -> Times {
    server.run::<()>("CONFIG RESETSTAT");
    let mut times = Vec::with_capacity(SAMPLE);
    for number in 0..SAMPLE {
        let asked = Instant::now();
        let decision = limiter.check(&wide(), key(number), 1).await;
        times.push(asked.elapsed());
        assert!(decision.expect("an answer").is_allowed());
    }
    Times {
        script: server.script_micros(),
        client: median(times).as_secs_f64() * 1e6,
    }
}

/// A number in a readable form.
fn thousands(number: usize) -> String {
    match (number / 1_000_000, number / 1_000 % 1_000, number % 1_000) {
        (0, 0, ones) => ones.to_string(),
        (0, thousands, ones) => format!("{thousands},{ones:03}"),
        (millions, thousands, ones) => format!("{millions},{thousands:03},{ones:03}"),
    }
}
