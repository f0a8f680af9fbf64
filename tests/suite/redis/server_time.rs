//! Random histories on Redis by the server's own clock. The plain model gets the time at which each
//! decision was made, and must decide the same.
//!
//! `decision/properties` passes the time in, which tests retry times to the microsecond. Only here
//! does the script read expiries, from which it learns when the oldest entry was written.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proptest::{
    collection::vec,
    prelude::*,
    sample::{select, subsequence},
    test_runner::{Config, TestCaseError, TestRunner},
};
use tokio::{runtime::Builder, time::sleep};
use tower_sliding_window::{Algorithm, Charge, Check, Limit, Limiter, check::AdmissionId, settlement::Settlement};

use crate::support::{
    TEST_TIMEOUT,
    model::{Expected, Model, ModelCharge, ModelStatus},
    redis_server::RedisServer,
};

const KEYS: [&str; 4] = ["ada", "bob", "eve", "joe"];

/// Short, so that many windows pass. The lengths are odd, because expiries are whole milliseconds.
const LIMITS: [Limit; 6] = [
    Limit::per("short", 3, Duration::from_micros(17_001)),
    Limit::per("medium", 12, Duration::from_micros(60_999)),
    Limit::per("long", 40, Duration::from_millis(250)),
    Limit::per("compact", 12, Duration::from_micros(60_999)).with_algorithm(Algorithm::compact_log(6)),
    Limit::per("fixed", 8, Duration::from_micros(40_001)).with_algorithm(Algorithm::fixed_window()),
    Limit::per("counter", 8, Duration::from_micros(40_001)).with_algorithm(Algorithm::sliding_window_counter()),
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

/// An admitted check, its id and its time.
type Admitted = (Vec<ModelCharge>, u64, SystemTime);

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
    let asked = (keys, limits, cost, id, copies, lease).prop_map(|(keys, limits, cost, id, copies, lease)| Asked {
        keys,
        limits,
        cost,
        id,
        copies,
        lease,
    });
    let pause = prop_oneof![4 => 0..=3_000u64, 2 => 0..=20_000u64, 1 => select(vec![17_001, 61_000])];
    prop_oneof![
        12 => vec(asked, 1..=3).prop_map(Step::Checks),
        4 => pause.prop_map(Step::Sleep),
        2 => (0..4usize, 0..4u64).prop_map(|(back, cost)| Step::Settle { back, cost }),
        1 => (0..LIMITS.len(), 0..KEYS.len()).prop_map(|(limit, key)| Step::Reset(limit, key)),
    ]
}

impl Asked {
    fn charges(&self, key: usize) -> Vec<ModelCharge> {
        let charge = |&limit: &usize| {
            let limit_of = LIMITS[limit].clone();
            ModelCharge::new(limit_of.clone(), (limit, key), self.cost.min(limit_of.units()))
        };
        let mut charges: Vec<ModelCharge> = self.limits.iter().map(charge).collect();
        charges[0].lease = self.lease.map(|lease| lease.min(charges[0].window()));
        charges
    }

    fn check(&self, key: usize) -> Check {
        let check = check(&self.charges(key));
        match self.id {
            Some(id) => check.with_id(AdmissionId::from(id)),
            None => check,
        }
    }
}

fn check(charges: &[ModelCharge]) -> Check {
    let mut charges = charges.iter().map(|charge| {
        let made = Charge::new(charge.limit.clone(), KEYS[charge.bucket.1], charge.cost).unwrap();
        charge.lease.into_iter().map(Duration::from_micros).fold(made, Charge::reserve)
    });
    let first = Check::new(charges.next().unwrap());
    charges.try_fold(first, Check::and).unwrap()
}

fn micros(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

/// Equal to the model, except that a reset read from an expiry is up to a millisecond late.
fn compare(number: usize, reported: Vec<ModelStatus>, expected: Vec<ModelStatus>) -> Result<(), TestCaseError> {
    for (reported, expected) in reported.into_iter().zip(expected) {
        let figures = |status: &ModelStatus| ModelStatus { reset: 0, ..status.clone() };
        prop_assert_eq!(figures(&reported), figures(&expected), "step {}", number);
        let late = reported.reset.checked_sub(expected.reset);
        prop_assert!(late.is_some_and(|late| late < 1_000), "step {}: {:?} {:?}", number, reported, expected);
    }
    Ok(())
}

async fn replay<'a>(limiter: &Limiter, steps: &'a [Step]) -> Result<(), TestCaseError> {
    let mut model = Model::of_redis();
    let mut admitted: Vec<Admitted> = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        match step {
            Step::Sleep(micros) => sleep(Duration::from_micros(*micros)).await,
            Step::Reset(limit, key) => {
                model.reset((*limit, *key));
                limiter.reset(&LIMITS[*limit], KEYS[*key]).await.unwrap();
            }
            Step::Settle { back, cost } => {
                let Some((charges, id, at)) = admitted.iter().rev().nth(*back) else { continue };
                let settlement = Settlement::by_id(check(charges), AdmissionId::from(*id), *at, |_| Some(*cost));
                let settled = limiter.settle(settlement).await.unwrap();
                let now = micros(settled.decision.at());
                let settle = |charge: &ModelCharge| model.settle(now, charge, (*id, micros(*at)), *cost);
                let is_known = charges.iter().map(settle).fold(false, |known, this| known | this);
                prop_assert_eq!(settled.was_applied, is_known, "step {}", number);
                let expected = charges.iter().map(|charge| model.unrefused(now, charge)).collect();
                compare(number, ModelStatus::all_of(&settled.decision), expected)?;
            }
            Step::Checks(asked) => {
                let of_one = |asked: &'a Asked| {
                    asked.keys.iter().flat_map(move |&key| std::iter::repeat_n((asked, key), asked.copies))
                };
                // No more than a batch takes.
                let asked: Vec<(&Asked, usize)> = asked.iter().flat_map(of_one).take(60).collect();
                let decisions: Vec<_> =
                    asked.iter().map(|(asked, key)| tokio::spawn(limiter.check_all(asked.check(*key)))).collect();
                // The time of the same batch. A repeated check reports the time of its first
                // admission.
                let now = micros(tokio::spawn(limiter.peek(&LIMITS[0], "the clock")).await.unwrap().unwrap().at());
                for ((asked, key), decision) in asked.into_iter().zip(decisions) {
                    let decision = decision.await.unwrap().unwrap();
                    prop_assert!(micros(decision.at()) == now || asked.id.is_some(), "step {}", number);
                    let expected = model.decide(now, &asked.charges(key), asked.id);
                    let id = u64::from(decision.id());
                    model.identify(id);
                    if decision.is_allowed() {
                        admitted.push((asked.charges(key), id, decision.at()));
                    }
                    let reported = ModelStatus::all_of(&decision);
                    let expected = Expected::all_given(&expected, &reported);
                    compare(number, reported, expected)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn redis_decides_by_its_own_clock_as_the_model_does() {
    let (runtime, server) = (Builder::new_current_thread().enable_all().build().unwrap(), RedisServer::start());
    // One batch at a time, so that checks are decided in order.
    let store = server.store().connections(1).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT).refusal_cache(Duration::ZERO);
    let config = Config { cases: 24, failure_persistence: None, max_shrink_iters: 50, ..Config::default() };
    let outcome = TestRunner::new(config).run(&vec(step(), 1..=500), |steps| {
        server.run::<()>("FLUSHALL");
        runtime.block_on(replay(&limiter, &steps))
    });
    if let Err(failure) = outcome {
        panic!("a difference to the model:\n{failure}");
    }
}
