//! The clients: who asks, how often, and on how many threads.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
};

use crate::contenders::Contender;

/// As many requests as a busy server has under way.
pub(crate) const TASKS: usize = 256;

/// So many that no key matters.
pub(crate) const KEYS: usize = 10_000;

/// A window in which nothing leaves while it is measured.
pub(crate) const HOUR: Duration = Duration::from_secs(3_600);

/// The clients share the machine with the server, as all sides do.
pub(crate) fn two_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Decisions a second of 256 tasks that each ask again as soon as they have the answer, which is always the same.
pub(crate) async fn closed_loop<C: Contender>(contender: &C, round: Duration, keys: usize, answer: bool) -> f64 {
    let ended = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for task in 0..TASKS {
        let (mut contender, ended) = (contender.clone(), Arc::clone(&ended));
        tasks.spawn(async move {
            let mut decisions = 0_u32;
            let mut key = task * 7_919;
            while !ended.load(Ordering::Relaxed) {
                key = (key + 104_729) % keys;
                assert_eq!(contender.decide(key).await, answer, "a limit is never reached, or spent from the start");
                decisions += 1;
            }
            decisions
        });
    }
    tokio::time::sleep(round).await;
    ended.store(true, Ordering::Relaxed);
    let decisions: u32 = tasks.join_all().await.into_iter().sum();
    f64::from(decisions) / started.elapsed().as_secs_f64()
}

/// The median time of an admission when there is no other request, in microseconds.
pub(crate) async fn median_micros<C: Contender>(contender: &C, round: Duration) -> f64 {
    let mut contender = contender.clone();
    // In a task, as a server would: the thread that waits for a runtime is woken more slowly than its workers.
    let measuring = tokio::spawn(async move {
        let (started, mut times) = (Instant::now(), Vec::new());
        while started.elapsed() < round {
            let asked = Instant::now();
            assert!(contender.decide(times.len() % KEYS).await, "the limit is never reached");
            times.push(asked.elapsed());
        }
        median(times).as_secs_f64() * 1e6
    });
    measuring.await.expect("the task ends")
}

pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
