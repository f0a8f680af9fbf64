//! Refusals that come early because other processes hold units unspent: their share of all
//! requests, by the life of prefetches, the number of processes, and the load.
//! Beside it the lease of a usual quota server, simulated in memory, and the units that it admits
//! above the limit.
//!
//! A process is a `RedisStore` of its own. Requests arrive at random times, the same for prefetches
//! and leases.

mod judge;
mod leases;

use std::{
    array,
    time::{Duration, UNIX_EPOCH},
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tower_sliding_window::{Limit, Limiter, RedisStore};

use self::{
    judge::{Answer, Verdict, judge},
    leases::lease,
};
use crate::{
    dice::Dice,
    load::two_threads,
    measure::{Effort, Outcome},
    server::Server,
};

/// The units of the limit.
const UNITS: usize = 2_000;
const WINDOW: Duration = Duration::from_secs(1);

const PROCESSES: [usize; 3] = [2, 8, 32];
const LIVES: [Duration; 3] = [
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_millis(1_000),
];
/// In percent of the limit. All run at the same time, each on a key of its own.
const LOADS: [usize; 3] = [80, 100, 150];

/// A request of one of the loads.
#[derive(Clone, Copy)]
struct Arrival {
    /// Since the start.
    at: Duration,
    load: usize,
    process: usize,
}

pub(crate) fn run(effort: Effort) -> Outcome {
    println!(
        "\n{UNITS} units a second; in each cell a load of 80 / 100 / 150 % of it; admitted: in percent of an exact log"
    );
    println!(
        "| processes | life | refused early | admitted | lease: refused early | admitted | above the limit |"
    );
    println!("|---|---|---|---|---|---|---|");
    let limit = Limit::per("near", UNITS as u64, WINDOW);
    let mut above = 0;
    for processes in PROCESSES {
        let arrivals = arrivals(processes, WINDOW + effort.round * 2);
        let leases = |life, most| array::from_fn(|load| judge(lease(&arrivals, load, life, most)));
        let exact: Verdicts = leases(WINDOW, Some(1));
        let mut measure = |limit: &Limit| {
            let verdicts = two_threads()
                .block_on(answers(limit, processes, &arrivals))
                .map(judge);
            above = verdicts
                .iter()
                .map(|verdict| verdict.above)
                .fold(above, usize::max);
            shares(&verdicts, &exact)
        };
        println!("| {processes} | no prefetch | {} | | | |", measure(&limit));
        for life in LIVES {
            let shares_of_prefetches = measure(&limit.clone().prefetch(life));
            let leases = leases(life, None);
            print!(
                "| {processes} | {} ms | {shares_of_prefetches} | ",
                life.as_millis()
            );
            println!(
                "{} | {} |",
                shares(&leases, &exact),
                cell(&leases, |verdict| verdict.above.to_string())
            );
        }
    }
    println!("\nPrefetch admitted at most {above} units above the limit.");
    Ok(Vec::new())
}

type Verdicts = [Verdict; LOADS.len()];

/// The early refusals, in percent of all requests, and the admissions, in percent of those of an
/// exact log.
fn shares(verdicts: &Verdicts, exact: &Verdicts) -> String {
    let early = cell(verdicts, |verdict| format!("{:.1}", verdict.early * 100.0));
    let mut exact = exact.iter();
    let admitted = cell(verdicts, |verdict| {
        let of = exact.next().map_or(0, |exact| exact.admitted);
        format!("{:.0}", verdict.admitted as f64 * 100.0 / of as f64)
    });
    format!("{early} | {admitted}")
}

fn cell(verdicts: &Verdicts, figure: impl FnMut(&Verdict) -> String) -> String {
    verdicts.each_ref().map(figure).join(" / ")
}

/// Random arrivals, in their order.
fn arrivals(processes: usize, until: Duration) -> Vec<Arrival> {
    let mut dice = Dice::new(19);
    let mut arrivals = Vec::new();
    for (load, percent) in LOADS.into_iter().enumerate() {
        let gap = WINDOW * 100 / (UNITS * percent) as u32;
        let mut at = Duration::ZERO;
        while at < until {
            arrivals.push(Arrival {
                at,
                load,
                process: dice.below(processes),
            });
            // Exponential, as between independent clients.
            at += gap.mul_f64(-(1.0 - dice.fraction()).ln());
        }
    }
    arrivals.sort_by_key(|arrival| arrival.at);
    arrivals
}

/// The answers to each load, from processes that share a Redis.
async fn answers(
    limit: &Limit,
    processes: usize,
    arrivals: &[Arrival],
) -> [Vec<Answer>; LOADS.len()] {
    let server = Server::start();
    let mut limiters = Vec::new();
    for _ in 0..processes {
        let store = RedisStore::connect(&server.url())
            .await
            .expect("the server is up");
        limiters.push(Limiter::new(store).deadline(Duration::from_secs(10)));
    }
    let (started, mut requests) = (Instant::now(), JoinSet::new());
    for arrival in arrivals {
        sleep_until(started + arrival.at).await;
        let (limiter, limit, load) = (
            limiters[arrival.process].clone(),
            limit.clone(),
            arrival.load,
        );
        requests.spawn(async move {
            let decision = limiter.check(&limit, load.to_string(), 1).await.ok()?;
            let at = decision
                .at()
                .duration_since(UNIX_EPOCH)
                .expect("a time after 1970");
            Some((
                load,
                Answer {
                    at,
                    admitted: decision.is_allowed(),
                },
            ))
        });
    }
    let mut answers: [Vec<Answer>; LOADS.len()] = Default::default();
    for (load, answer) in requests.join_all().await.into_iter().flatten() {
        answers[load].push(answer);
    }
    let undecided = arrivals.len() - answers.iter().map(Vec::len).sum::<usize>();
    if undecided > 0 {
        println!(
            "(the next row lacks {undecided} requests without a decision: the machine is too slow)"
        );
    }
    answers
}
