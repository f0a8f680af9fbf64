//! Without Redis: decisions per second of the in-process store, as a service, on two threads.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use tokio::runtime::Builder;

use super::Outcome;
use crate::{
    contenders::{
        Contender, Inner, Layered, OURS, TOWER_GOVERNOR, ours_in_process, tower_governor,
        tower_governor_without_headers,
    },
    load::KEYS,
    measure::{Contest, Effort, Unit},
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let (us, rival, short, bare) =
        (ours_in_process(), tower_governor(), tower_governor_without_headers(), Layered(Inner));
    let contest = Contest::new("decisions a second, without Redis", Unit::PerSecond)
        .side(OURS, || on_two_threads(&us, effort.round))
        .side(TOWER_GOVERNOR, || on_two_threads(&rival, effort.round))
        .side(format!("{TOWER_GOVERNOR} without headers"), || on_two_threads(&short, effort.round))
        .side("the service without a limiter", || on_two_threads(&bare, effort.round));
    Ok(vec![contest.measure(effort.rounds)])
}

/// One task on each of two threads. A task never waits here, so two on one thread would not take turns.
fn on_two_threads<C: Contender + Sync>(contender: &C, round: Duration) -> f64 {
    let ended = AtomicBool::new(false);
    let started = Instant::now();
    thread::scope(|scope| {
        let threads = [0, KEYS / 2].map(|first| {
            scope.spawn({
                let ended = &ended;
                move || one_task(contender.clone(), first, ended)
            })
        });
        thread::sleep(round);
        ended.store(true, Ordering::Relaxed);
        let decisions: u64 = threads.into_iter().map(|thread| thread.join().expect("the thread ends")).sum();
        decisions as f64 / started.elapsed().as_secs_f64()
    })
}

fn one_task<C: Contender>(mut contender: C, first: usize, ended: &AtomicBool) -> u64 {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (mut decisions, mut key) = (0, first);
        while !ended.load(Ordering::Relaxed) {
            key = (key + 7_919) % KEYS;
            assert!(contender.decide(key).await, "the limit is never reached");
            decisions += 1;
        }
        decisions
    })
}
