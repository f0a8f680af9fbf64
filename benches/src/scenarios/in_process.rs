//! Without Redis: decisions per second of the in-process store, as a service, on two threads.
//!
//! *A short log* is the usual limit, 100 units a minute. Each round starts without any key. The
//! threads ask all keys in turn, until each key has spent its 100 units. *A long log* is a limit of
//! a million a second. Its log holds all admissions of the last second, under thousands of keys.
//! Neither side refuses anything: a refusal is cheaper than an admission, so it would change the
//! ratio.
//!
//! *A bare log* has no feature but the log. tower_governor keeps no log. So their ratio is about
//! the best that a log of this kind can reach.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::Builder;

use super::Outcome;
use crate::{
    contenders::{
        BARE_LOG, Contender, Inner, Layered, OURS, Quota, Routed, TOWER_GOVERNOR, bare_log,
        ours_in_process, ours_routed, tower_governor, tower_governor_routed,
        tower_governor_without_headers,
    },
    load::KEYS,
    measure::{Comparison, Contest, Effort, Unit},
};

const SHORT: Quota = Quota {
    units: 100,
    window: Duration::from_secs(60),
};
const LONG: Quota = Quota {
    units: 1_000_000,
    window: Duration::from_secs(1),
};

const THREADS: usize = 2;

pub(crate) fn run(effort: Effort) -> Outcome {
    Ok(vec![
        short_log(effort),
        routed(effort),
        bare(effort),
        long_log(effort),
    ])
}

fn short_log(effort: Effort) -> Comparison {
    let units = SHORT.units as usize;
    // Twice the admissions, since one limit gets half of a store.
    Contest::new(
        "decisions a second, without Redis: a short log",
        Unit::PerSecond,
    )
    .side(OURS, || {
        all_units(&ours_in_process(SHORT, 2 * units * KEYS), units)
    })
    .side(TOWER_GOVERNOR, || all_units(&tower_governor(SHORT), units))
    .side(without_headers(), || {
        all_units(&tower_governor_without_headers(SHORT), units)
    })
    .side(NO_LIMITER, || all_units(&Layered(Inner), units))
    .measure(effort.rounds)
}

/// As people use it.
fn routed(effort: Effort) -> Comparison {
    let units = SHORT.units as usize;
    Contest::new("the same, in front of a route of axum", Unit::PerSecond)
        .side(OURS, || {
            all_units(&ours_routed(SHORT, 2 * units * KEYS), units)
        })
        .side(TOWER_GOVERNOR, || {
            all_units(&tower_governor_routed(SHORT), units)
        })
        .side(NO_LIMITER, || all_units(&Routed::new(), units))
        .measure(effort.rounds)
}

fn bare(effort: Effort) -> Comparison {
    let units = SHORT.units as usize;
    Contest::new("the same, the least of an exact log", Unit::PerSecond)
        .side(BARE_LOG, || all_units(&bare_log(SHORT), units))
        .side(TOWER_GOVERNOR, || all_units(&tower_governor(SHORT), units))
        .measure(effort.rounds)
}

fn long_log(effort: Effort) -> Comparison {
    let (us, rival, short, bare) = (
        ours_in_process(LONG, 50_000_000),
        tower_governor(LONG),
        tower_governor_without_headers(LONG),
        Layered(Inner),
    );
    Contest::new(
        "decisions a second, without Redis: a long log",
        Unit::PerSecond,
    )
    .side(OURS, || for_a_round(&us, effort.round))
    .side(TOWER_GOVERNOR, || for_a_round(&rival, effort.round))
    .side(without_headers(), || for_a_round(&short, effort.round))
    .side(NO_LIMITER, || for_a_round(&bare, effort.round))
    .measure(effort.rounds)
}

const NO_LIMITER: &str = "the service without a limiter";

fn without_headers() -> String {
    format!("{TOWER_GOVERNOR} without headers")
}

/// Decisions a second until each key has had so many.
fn all_units<C: Contender + Sync>(contender: &C, units: usize) -> f64 {
    let decisions = KEYS * units;
    let mut left = [decisions / THREADS; THREADS];
    let elapsed = on_threads(contender, &mut left, |left| {
        *left -= 1;
        *left > 0
    });
    decisions as f64 / elapsed.as_secs_f64()
}

/// Decisions a second for so long.
fn for_a_round<C: Contender + Sync>(contender: &C, round: Duration) -> f64 {
    let ended = AtomicBool::new(false);
    let mut decisions = [0_u64; THREADS];
    let elapsed = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(round);
            ended.store(true, Ordering::Relaxed);
        });
        on_threads(contender, &mut decisions, |decisions| {
            *decisions += 1;
            !ended.load(Ordering::Relaxed)
        })
    });
    decisions.iter().sum::<u64>() as f64 / elapsed.as_secs_f64()
}

/// Lets each thread ask until `goes_on` says no, and returns how long that takes. A thread has one
/// task: a task never waits here, so two on one thread would not take turns.
fn on_threads<C, N>(
    contender: &C,
    counts: &mut [N; THREADS],
    goes_on: impl Fn(&mut N) -> bool + Sync,
) -> Duration
where
    C: Contender + Sync,
    N: Send,
{
    let (barrier, goes_on) = (Barrier::new(THREADS + 1), &goes_on);
    thread::scope(|scope| {
        let mut threads = Vec::with_capacity(THREADS);
        for (thread, count) in counts.iter_mut().enumerate() {
            let (barrier, contender) = (&barrier, contender.clone());
            threads.push(scope.spawn(move || {
                let runtime = Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .expect("a runtime");
                barrier.wait();
                runtime.block_on(one_task(contender, thread * KEYS / THREADS, || {
                    goes_on(count)
                }));
            }));
        }
        barrier.wait();
        let started = Instant::now();
        threads
            .into_iter()
            .for_each(|thread| thread.join().expect("the thread ends"));
        started.elapsed()
    })
}

/// Asks all keys in turn.
async fn one_task<C: Contender>(mut contender: C, first: usize, mut goes_on: impl FnMut() -> bool) {
    let mut key = first;
    loop {
        key = (key + 7_919) % KEYS;
        assert!(contender.decide(key).await, "the limit is never reached");
        if !goes_on() {
            return;
        }
    }
}
