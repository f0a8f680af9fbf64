//! Random histories on Redis by the server's own clock. The oracle gets the time at which each
//! decision was made, and must decide the same.
//!
//! `decision/properties` passes the time in, which tests retry times to the microsecond. Only here
//! does the script read expiries, from which it learns when the oldest entry was written.

use std::{iter, time::Duration};

use proptest::{
    collection::vec,
    prelude::*,
    sample::{select, subsequence},
    test_runner::{Config, TestCaseError, TestRunner},
};
use tokio::{runtime::Builder, time::sleep};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Key, Limit, Limiter, check::AdmissionId,
    settlement::Settlement,
};
use tower_sliding_window_conformance::Oracle;

use crate::support::{TEST_TIMEOUT, check_of, redis_server::RedisServer};

const KEYS: [&str; 4] = ["ada", "bob", "eve", "joe"];

/// Short, so that many windows pass. The lengths are odd, because expiries are whole milliseconds.
const LIMITS: [Limit; 6] = [
    Limit::per("short", 3, Duration::from_micros(17_001)),
    Limit::per("medium", 12, Duration::from_micros(60_999)),
    Limit::per("long", 40, Duration::from_millis(250)),
    Limit::per("compact", 12, Duration::from_micros(60_999))
        .with_algorithm(Algorithm::compact_log(6)),
    Limit::per("fixed", 8, Duration::from_micros(40_001)).with_algorithm(Algorithm::FIXED_WINDOW),
    Limit::per("counter", 8, Duration::from_micros(40_001))
        .with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER),
];

#[derive(Clone, Debug)]
enum Step {
    Checks(Vec<Asked>),
    Sleep(u64),
    /// Settles the admission `back` places before the last one.
    Settle {
        back: usize,
        cost: u64,
    },
    Reset(usize, usize),
}

/// The same check for several keys, so that checks that differ only in their key share a batch.
#[derive(Clone, Debug)]
struct Asked {
    keys: Vec<usize>,
    limits: Vec<usize>,
    cost: u64,
    id: Option<u64>,
    copies: usize,
    /// The lease of the first charge, in microseconds.
    lease: Option<u64>,
}

fn step() -> impl Strategy<Value = Step> {
    // Mostly single units, because a log that has ever had a larger entry is read without its
    // expiry.
    let cost = prop_oneof![12 => Just(1), 2 => Just(0), 1 => 2..=4u64];
    let id = prop_oneof![6 => Just(None), 1 => (0..4u64).prop_map(Some)];
    let copies = prop_oneof![8 => Just(1), 1 => 2..=5usize, 1 => 6..=40usize];
    let lease = prop_oneof![6 => Just(None), 1 => (1..60_000u64).prop_map(Some)];
    let limits = subsequence((0..LIMITS.len()).collect::<Vec<_>>(), 1..=3);
    // The first key is in most checks, so that some logs are full while others are new.
    let keys = prop_oneof![2 => Just(vec![0]), 1 => subsequence((0..KEYS.len()).collect::<Vec<_>>(), 1..=4)];
    let asked = (keys, limits, cost, id, copies, lease).prop_map(
        |(keys, limits, cost, id, copies, lease)| Asked {
            keys,
            limits,
            cost,
            id,
            copies,
            lease,
        },
    );
    let pause =
        prop_oneof![4 => 0..=3_000u64, 2 => 0..=20_000u64, 1 => select(vec![17_001, 61_000])];
    prop_oneof![
        12 => vec(asked, 1..=3).prop_map(Step::Checks),
        4 => pause.prop_map(Step::Sleep),
        2 => (0..4usize, 0..4u64).prop_map(|(back, cost)| Step::Settle { back, cost }),
        1 => (0..LIMITS.len(), 0..KEYS.len()).prop_map(|(limit, key)| Step::Reset(limit, key)),
    ]
}

impl Asked {
    fn check(&self, key: usize) -> Check {
        let charges = self.limits.iter().enumerate().map(|(place, limit)| {
            let limit = LIMITS[*limit].clone();
            let cost = self.cost.min(limit.units());
            let lease = self.lease.filter(|_| place == 0).map(Duration::from_micros);
            lease.into_iter().fold(
                Charge::new(limit, KEYS[key], cost).unwrap(),
                Charge::reserve,
            )
        });
        self.id
            .map(AdmissionId)
            .into_iter()
            .fold(check_of(charges), Check::with_id)
    }

    /// One for each key and copy.
    fn checks(&self) -> impl Iterator<Item = Check> {
        self.keys
            .iter()
            .flat_map(|key| iter::repeat_n(self.check(*key), self.copies))
    }
}

async fn replay(limiter: &Limiter, steps: &[Step]) -> Result<(), TestCaseError> {
    // The script reads 100 entries for a retry time, and expiries are whole milliseconds.
    let mut oracle = Oracle::new()
        .reading_entries(100)
        .reset_late_by(Duration::from_millis(1));
    let mut admitted: Vec<(Check, Decision)> = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let differs =
            |difference: String| TestCaseError::fail(format!("step {number}: {difference}"));
        match step {
            Step::Sleep(micros) => sleep(Duration::from_micros(*micros)).await,
            Step::Reset(limit, key) => {
                oracle.reset(&LIMITS[*limit], &Key::from(KEYS[*key]));
                limiter.reset(&LIMITS[*limit], KEYS[*key]).await.unwrap();
            }
            Step::Settle { back, cost } => {
                let Some((check, decision)) = admitted.iter().rev().nth(*back) else {
                    continue;
                };
                let settlement =
                    Settlement::by_id(check.clone(), decision.id(), decision.at(), |_| Some(*cost));
                let settled = limiter.settle(settlement.clone()).await.unwrap();
                oracle
                    .settle(settled.decision.at(), &settlement, &settled)
                    .map_err(differs)?;
            }
            Step::Checks(asked) => {
                // No more than a batch takes.
                let checks: Vec<Check> = asked.iter().flat_map(Asked::checks).take(60).collect();
                let decisions: Vec<_> = checks
                    .iter()
                    .map(|check| tokio::spawn(limiter.check_all(check.clone())))
                    .collect();
                // The time of the same batch. A repeated check reports the time of its first
                // admission.
                let now = tokio::spawn(limiter.peek(&LIMITS[0], "the clock"))
                    .await
                    .unwrap()
                    .unwrap()
                    .at();
                for (check, decision) in iter::zip(checks, decisions) {
                    let decision = decision.await.unwrap().unwrap();
                    oracle.decide(now, &check, &decision).map_err(differs)?;
                    if decision.is_allowed() {
                        admitted.push((check, decision));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn redis_decides_by_its_own_clock_as_the_oracle_does() {
    let (runtime, server) = (
        Builder::new_current_thread().enable_all().build().unwrap(),
        RedisServer::start(),
    );
    // One batch at a time, so that checks are decided in order.
    let store = server.store().connections(1).build().unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    let config = Config {
        cases: 24,
        failure_persistence: None,
        max_shrink_iters: 50,
        ..Config::default()
    };
    let outcome = TestRunner::new(config).run(&vec(step(), 1..=500), |steps| {
        server.run::<()>("FLUSHALL");
        runtime.block_on(replay(&limiter, &steps))
    });
    if let Err(failure) = outcome {
        panic!("a difference to the oracle:\n{failure}");
    }
}
