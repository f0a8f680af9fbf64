//! The clients: how many there are, how often they ask, and on how many threads.

use std::{
    future::Future,
    pin::pin,
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

use crate::{contenders::Contender, server::Server};

/// As many requests as a busy server has in flight.
pub(crate) const TASKS: usize = 256;

/// So many keys that no single one matters.
pub(crate) const KEYS: usize = 10_000;

/// A window in which no unit leaves during the measurement.
pub(crate) const HOUR: Duration = Duration::from_secs(3_600);

/// The clients share the machine with the server, for all sides alike.
pub(crate) fn two_threads() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Decisions per second of 256 tasks. Each asks again as soon as it has its answer, which is always
/// the same.
pub(crate) async fn closed_loop<C: Contender>(
    contender: &C,
    round: Duration,
    keys: usize,
    answer: bool,
) -> f64 {
    let rates = ask_for(contender, round, TASKS, |task| in_turn(task, keys)).await;
    let expected = if answer { rates.decisions } else { 0.0 };
    assert!(
        rates.admitted == expected,
        "a limit is never reached, or spent from the start"
    );
    rates.decisions
}

/// The keys of a task: all of them in turn, in an order of no use to a processor's cache.
pub(crate) fn in_turn(task: usize, keys: usize) -> impl FnMut() -> usize + Send + 'static {
    let mut key = task * 7_919;
    move || {
        key = (key + 104_729) % keys;
        key
    }
}

/// Decisions per second, and those that admit.
#[derive(Clone, Copy)]
pub(crate) struct Rates {
    pub(crate) decisions: f64,
    pub(crate) admitted: f64,
}

/// The rates of so many tasks. Each asks for its next key as soon as it has its answer.
pub(crate) async fn ask_for<C: Contender, K: FnMut() -> usize + Send + 'static>(
    contender: &C,
    round: Duration,
    tasks: usize,
    keys: impl Fn(usize) -> K,
) -> Rates {
    let ended = Arc::new(AtomicBool::new(false));
    let mut running = JoinSet::new();
    let started = Instant::now();
    for task in 0..tasks {
        let (mut contender, mut next_key, ended) =
            (contender.clone(), keys(task), Arc::clone(&ended));
        running.spawn(async move {
            let (mut decisions, mut admitted) = (0_u32, 0_u32);
            while !ended.load(Ordering::Relaxed) {
                admitted += u32::from(contender.decide(next_key()).await);
                decisions += 1;
                // A task that never waits must yield by itself.
                if decisions.is_multiple_of(64) {
                    tokio::task::yield_now().await;
                }
            }
            (decisions, admitted)
        });
    }
    tokio::time::sleep(round).await;
    ended.store(true, Ordering::Relaxed);
    let counts = running.join_all().await;
    let lasted = started.elapsed().as_secs_f64();
    let rate = |count: u32| f64::from(count) / lasted;
    Rates {
        decisions: rate(counts.iter().map(|of| of.0).sum()),
        admitted: rate(counts.iter().map(|of| of.1).sum()),
    }
}

/// The rates of a load, and its work for Redis: processor time for a decision in microseconds, and
/// script calls and commands with those of scripts for each 1,000 decisions.
pub(crate) struct Work {
    pub(crate) rates: Rates,
    pub(crate) micros: f64,
    pub(crate) scripts: f64,
    pub(crate) commands: f64,
}

/// The work of a load that takes so long.
pub(crate) fn work(
    runtime: &Runtime,
    server: &Server,
    round: Duration,
    load: impl Future<Output = Rates>,
) -> Work {
    server.run::<()>("CONFIG RESETSTAT");
    let before = server.processor_micros();
    let rates = runtime.block_on(load);
    let decisions = rates.decisions * round.as_secs_f64();
    Work {
        rates,
        micros: (server.processor_micros() - before) / decisions,
        scripts: server.script_calls() * 1e3 / decisions,
        commands: server.commands() * 1e3 / decisions,
    }
}

/// Empties the server ten times a second. Even the rival's largest bucket is soon spent, and its
/// refusals write nothing, so they would be faster than its admissions.
pub(crate) async fn forgetting<T>(server: &Server, measured: impl Future<Output = T>) -> T {
    let mut measured = pin!(measured);
    let mut often = tokio::time::interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            figures = &mut measured => return figures,
            _ = often.tick() => server.run::<()>("FLUSHALL"),
        }
    }
}

/// The median time of an admission without other requests, in microseconds.
pub(crate) async fn median_micros<C: Contender>(
    contender: &C,
    round: Duration,
    keys: usize,
) -> f64 {
    let mut contender = contender.clone();
    // In a task, as in a server: a thread that blocks on a runtime wakes more slowly than the
    // runtime's workers.
    let measuring = tokio::spawn(async move {
        let (started, mut times) = (Instant::now(), Vec::new());
        while started.elapsed() < round {
            let asked = Instant::now();
            assert!(
                contender.decide(times.len() % keys).await,
                "the limit is never reached"
            );
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
