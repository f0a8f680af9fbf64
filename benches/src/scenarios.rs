//! The scenarios, each a list of rows: us against one other.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{runtime::Builder, task::JoinSet};
use tower_sliding_window::{Limit, Limiter, RedisStore};

use crate::{
    contenders::{Contender, Floor, Naive, ours, tower_rate_limit_redis},
    measure::{Effort, Row, Unit},
    server::Server,
};

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Effort) -> Vec<Row>,
}

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario { name: "many-keys", run: |effort| throughput(effort, 10_000) },
    Scenario { name: "hot-key", run: |effort| throughput(effort, 1) },
    Scenario { name: "lone", run: lone },
    Scenario { name: "cost", run: cost },
];

const TASKS: usize = 256;

/// Never reached.
fn wide() -> Limit {
    Limit::per_hour("wide", 1_000_000_000)
}

/// Runs a scenario on two threads, with the clients and the server on the same machine.
fn on_two_threads<T>(scenario: impl Future<Output = T>) -> T {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(scenario)
}

/// Decisions a second of 256 tasks that each ask again as soon as they are answered.
fn throughput(effort: Effort, keys: usize) -> Vec<Row> {
    on_two_threads(async {
        let server = Server::start();
        let us = ours(&server, wide()).await;
        let (rival, naive, floor) =
            (tower_rate_limit_redis(&server).await, Naive::new(&server).await, Floor::new(&server).await);
        let mut rows = [
            Row::new("tower-rate-limit-redis", Unit::PerSecond),
            Row::new("naive log on bb8", Unit::PerSecond),
            Row::new("floor: EVALSHA of nothing", Unit::PerSecond),
        ];
        for _ in 0..effort.rounds {
            // So that no log grows from round to round.
            server.run::<()>("FLUSHALL");
            let ours = closed_loop(&us, effort.round, keys).await;
            rows[0].add(ours, closed_loop(&rival, effort.round, keys).await);
            rows[1].add(ours, closed_loop(&naive, effort.round, keys).await);
            rows[2].add(ours, closed_loop(&floor, effort.round, keys).await);
        }
        rows.into()
    })
}

async fn closed_loop<C: Contender>(contender: &C, round: Duration, keys: usize) -> f64 {
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
                contender.decide(key).await;
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

/// The median time of one request when there is no other.
fn lone(effort: Effort) -> Vec<Row> {
    on_two_threads(async {
        let server = Server::start();
        let (us, rival, floor) =
            (ours(&server, wide()).await, tower_rate_limit_redis(&server).await, Floor::new(&server).await);
        let mut rows =
            [Row::new("tower-rate-limit-redis", Unit::Micros), Row::new("floor: EVALSHA of nothing", Unit::Micros)];
        for _ in 0..effort.rounds {
            server.run::<()>("FLUSHALL");
            let ours = median_micros(&us, effort.round).await;
            rows[0].add(ours, median_micros(&rival, effort.round).await);
            rows[1].add(ours, median_micros(&floor, effort.round).await);
        }
        rows.into()
    })
}

async fn median_micros<C: Contender>(contender: &C, round: Duration) -> f64 {
    let mut contender = contender.clone();
    let measuring = tokio::spawn(async move {
        let (started, mut times) = (Instant::now(), Vec::new());
        while started.elapsed() < round {
            let asked = Instant::now();
            contender.decide(times.len() % 10_000).await;
            times.push(asked.elapsed());
        }
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e6
    });
    measuring.await.expect("the task ends")
}

/// What a decision costs Redis: a cost of 10,000 against a cost of 1.
fn cost(effort: Effort) -> Vec<Row> {
    on_two_threads(async {
        let server = Server::start();
        let store = RedisStore::connect(&server.url()).await.expect("the server is up");
        let limiter = Limiter::new(store).deadline(Duration::from_secs(10));
        let mut row = Row::new("the same at a cost of 1", Unit::Micros);
        for _ in 0..effort.rounds {
            let mut micros = [0.0; 2];
            for (cost, micros) in [1, 10_000].into_iter().zip(&mut micros) {
                server.run::<()>("FLUSHALL");
                server.run::<()>("CONFIG RESETSTAT");
                for check in 0..5_000 {
                    let decision = limiter.check(&wide(), (check % 100).to_string(), cost).await;
                    assert!(decision.is_ok_and(|decision| decision.is_allowed()));
                }
                *micros = server.script_micros();
            }
            row.add(micros[1], micros[0]);
        }
        vec![row]
    })
}
