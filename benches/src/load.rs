//! The clients: how many there are, how often they ask, and on how many threads.

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

/// As many requests as a busy server has in flight.
pub(crate) const TASKS: usize = 256;

/// So many keys that no single one matters.
pub(crate) const KEYS: usize = 10_000;

/// A window in which no unit leaves during the measurement.
pub(crate) const HOUR: Duration = Duration::from_secs(3_600);

/// The clients share the machine with the server, for all sides alike.
pub(crate) fn two_threads() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Decisions per second of 256 tasks. Each asks again as soon as it has its answer, which is always the same.
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

/// The median time of an admission without other requests, in microseconds.
pub(crate) async fn median_micros<C: Contender>(contender: &C, round: Duration) -> f64 {
    let mut contender = contender.clone();
    // In a task, as in a server: a thread that blocks on a runtime wakes more slowly than the runtime's workers.
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
