//! Random histories on a store and on the plain model, with the time passed in. Both must decide
//! alike to the microsecond.
//!
//! The seed is printed; `SEED=... bash tests/run.sh properties` runs the same histories again. A
//! failing history is shrunk to a short one.

mod cached_refusals;
mod prefetch;
mod steps;

use std::{
    cell::Cell,
    env,
    ops::{Range, RangeInclusive},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};
use tokio::task::JoinHandle;
use tower_sliding_window::{
    Algorithm, Charge, Check, Limit, Limiter, MemoryStore, check::AdmissionId, settlement::Settlement,
    store::ManualClock,
};

use self::{
    cached_refusals::Refusals,
    steps::{Asked, Step, step},
};
use crate::support::{
    TEST_TIMEOUT,
    model::{Expected, Model, ModelCharge, ModelStatus, Takes},
    one_thread,
    redis_server::RedisServer,
};

const LIMITS: [Limit; 10] = [
    Limit::per_second("small", 3),
    Limit::per("medium", 10, Duration::from_millis(10_007)),
    Limit::per_minute("large", 200),
    // Its log is longer than the number of entries that the script reads at once.
    Limit::per_hour("huge", 1_500),
    Limit::per("rough", 10, Duration::from_millis(10_007)).with_algorithm(Algorithm::compact_log(3)),
    Limit::per_minute("compact", 200).with_algorithm(Algorithm::compact_log(16)),
    Limit::per_hour("fine", 1_500).with_algorithm(Algorithm::compact_log(128)),
    Limit::per("fixed", 10, Duration::from_millis(10_007)).with_algorithm(Algorithm::fixed_window()),
    Limit::per("counter", 10, Duration::from_millis(10_007)).with_algorithm(Algorithm::sliding_window_counter()),
    Limit::per_minute("counters", 200).with_algorithm(Algorithm::sliding_window_counter()),
];

/// The first limits are exact logs.
const LOGS: Range<usize> = 0..4;

const ALL: Range<usize> = 0..10;
const KEYS: [&str; 2] = ["ada", "bob"];

/// The histories of a test, unless `HISTORIES` says another number. At 500 steps per history on
/// average, at least 100,000 in all are asserted below. The shortest history has one step, so that
/// a failing one can shrink.
const HISTORIES: u32 = 250;

const STEPS: RangeInclusive<usize> = 1..=1_000;

/// A failure that does not happen again would otherwise shrink for a thousand histories.
const MAX_SHRINK_MILLIS: u32 = 60_000;

/// An admitted check.
#[derive(Clone)]
struct Admitted {
    charges: Vec<ModelCharge>,
    id: AdmissionId,
    at: SystemTime,
    /// Whether the check was alone in its batch.
    is_alone: bool,
}

/// Whether the clock may step back. The clock of the in-process store never does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clocks {
    OnlyForward,
    BothWays,
}

/// Replays a history on a store and on the model, and compares every decision. Single checks and
/// checks in a batch use two limiters, on the same store or on two that share all data.
async fn replay(
    [alone, together]: [&Limiter; 2],
    clock: &ManualClock,
    mut model: Model,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let mut admitted: Vec<Admitted> = Vec::new();
    let mut last_retry = 0;
    // Each limiter has its own refusal cache.
    let mut refusals = [Refusals::default(), Refusals::default()];
    for (number, step) in steps.iter().enumerate() {
        match step {
            Step::Advance(micros) => clock.advance(Duration::from_micros(*micros)),
            Step::Rewind(micros) => clock.step_back(Duration::from_micros(*micros)),
            Step::AdvanceToRetry { early } => {
                clock.advance(Duration::from_micros(last_retry).saturating_sub(Duration::from_micros((*early).into())));
                last_retry = 0;
            }
            Step::Reset { limit, key } => {
                model.reset((*limit, *key));
                for limiter in [alone, together] {
                    limiter.reset(&LIMITS[*limit], KEYS[*key]).await.unwrap();
                }
            }
            Step::Settle { back, cost, times } => {
                let Some(admitted) = admitted.iter().rev().nth(*back) else { continue };
                // Each limiter's store must also forget its cached refusals.
                for limiter in [alone, together].into_iter().cycle().take(2 * times) {
                    let settled = limiter.settle(admitted.settlement(*cost)).await.unwrap();
                    let reported = (settled.was_applied, ModelStatus::all_of(&settled.decision));
                    let expected = admitted.settle(&mut model, micros(clock.now()), *cost);
                    prop_assert_eq!(reported, expected, "step {}: {:?}", number, step);
                }
            }
            Step::Repeat { back } => {
                let Some(admitted_before) = admitted.iter().rev().filter(|admitted| admitted.is_alone).nth(*back)
                else {
                    continue;
                };
                let mut again = admitted_before.clone();
                let id = u64::from(again.id);
                let decision = alone.check_all(check(&again.charges, Some(id))).await.unwrap();
                let expected = model.decide(micros(clock.now()), &again.charges, Some(id));
                let reported = ModelStatus::all_of(&decision);
                let expected = Expected::all_given(&expected, &reported);
                prop_assert_eq!(reported, expected, "step {}: {:?}", number, step);
                if decision.is_allowed() {
                    again.at = decision.at();
                    admitted.push(again);
                }
            }
            Step::Checks(asked) => {
                let checks: Vec<(Vec<ModelCharge>, Option<u64>)> = asked.iter().flat_map(Asked::checks).collect();
                let now = micros(clock.now());
                let limiter = if checks.len() == 1 { alone } else { together };
                // On a runtime of one thread, the tasks are polled in this order before anything is
                // sent.
                let decisions: Vec<JoinHandle<_>> =
                    checks.iter().map(|(charges, id)| tokio::spawn(limiter.check_all(check(charges, *id)))).collect();
                for ((charges, id), decision) in checks.iter().zip(decisions) {
                    let expected = model.decide(now, charges, *id);
                    let decision = decision.await.unwrap().unwrap();
                    model.identify(u64::from(decision.id()));
                    if decision.is_allowed() {
                        let is_alone = checks.len() == 1;
                        let charges = charges.clone();
                        admitted.push(Admitted { charges, id: decision.id(), at: decision.at(), is_alone });
                    }
                    let reported = ModelStatus::all_of(&decision);
                    let expected = Expected::all_given(&expected, &reported);
                    let refusals = &mut refusals[checks.len().min(2) - 1];
                    if reported == expected {
                        refusals.note(now, charges, *id, &reported);
                    } else if !refusals.has_refused((now, checks.len() == 1), (charges, *id), &reported, &expected) {
                        prop_assert_eq!(reported, expected, "step {}: {:?}", number, step);
                    }
                    let retry = decision.retry_after();
                    last_retry = retry.map_or(last_retry, |retry| u64::try_from(retry.as_micros()).unwrap());
                }
            }
        }
    }
    Ok(())
}

impl Admitted {
    fn settlement(&self, cost: u64) -> Settlement {
        Settlement::by_id(check(&self.charges, None), self.id, self.at, |_| Some(cost))
    }

    /// The result of the settlement in the model.
    fn settle(&self, model: &mut Model, now: u64, cost: u64) -> (bool, Vec<ModelStatus>) {
        let admission = (u64::from(self.id), micros(self.at));
        // Charges are settled one by one.
        let settle = |charge: &ModelCharge| model.settle(now, charge, admission, cost);
        let is_known = self.charges.iter().map(settle).fold(false, |known, this| known | this);
        (is_known, self.charges.iter().map(|charge| model.unrefused(now, charge)).collect())
    }
}

fn micros(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

/// Reduces the cost to the units of the limit.
fn charge(bucket: (usize, usize), cost: u64) -> ModelCharge {
    let limit = LIMITS[bucket.0].clone();
    let cost = cost.min(limit.units());
    ModelCharge::new(limit, bucket, cost)
}

fn check(charges: &[ModelCharge], id: Option<u64>) -> Check {
    let mut charges = charges.iter().map(|charge| {
        let (limit, key) = (charge.limit.clone(), KEYS[charge.bucket.1]);
        let made = match charge.takes {
            Takes::WhatFits => Charge::new(limit, key, charge.cost).unwrap(),
            Takes::Nothing => Charge::any_left(limit, key),
            Takes::WhatWasSpent => Charge::spent(limit, key, charge.cost),
        };
        let made = charge.lease.map(|lease| made.clone().reserve(Duration::from_micros(lease))).unwrap_or(made);
        if charge.is_shadow { made.in_shadow() } else { made }
    });
    let first = Check::new(charges.next().unwrap());
    let check = charges.try_fold(first, Check::and).unwrap();
    match id {
        Some(id) => check.with_id(AdmissionId::from(id)),
        None => check,
    }
}

fn run(clocks: Clocks, limits: Range<usize>, history: impl Fn(Vec<Step>) -> Result<(), TestCaseError>) {
    let seed = env::var("SEED").map_or_else(|_| random_seed(), |seed| seed.parse().expect("SEED is a number"));
    println!("SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&u64::to_le_bytes(seed));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let cases = env::var("HISTORIES").map_or(HISTORIES, |number| number.parse().expect("HISTORIES is a number"));
    let config = Config { cases, failure_persistence: None, max_shrink_time: MAX_SHRINK_MILLIS, ..Config::default() };
    let steps_taken = Cell::new(0);
    let outcome = TestRunner::new_with_rng(config, rng).run(&vec(step(clocks, limits), STEPS), |steps| {
        steps_taken.set(steps_taken.get() + steps.len());
        history(steps)
    });
    if let Err(failure) = outcome {
        panic!("SEED={seed} finds a difference to the model:\n{failure}");
    }
    println!("{} steps without a difference", steps_taken.get());
    // Five standard deviations below the mean: 102,000 steps of 250 histories. The sum of few
    // histories varies more.
    let (cases, deviation) = (f64::from(cases), 289.0);
    assert!(steps_taken.get() as f64 >= 500.0 * cases - 5.0 * deviation * cases.sqrt());
}

fn random_seed() -> u64 {
    u64::from(AdmissionId::fresh())
}

fn memory(limits: Range<usize>) {
    let runtime = one_thread();
    run(Clocks::OnlyForward, limits, |steps| {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::new().clock(&clock));
        runtime.block_on(replay([&limiter; 2], &clock, Model::of_memory(), &steps))
    });
}

#[test]
fn memory_decides_as_the_model_does() {
    memory(LOGS);
}

#[test]
fn memory_counts_by_every_algorithm_as_the_model_does() {
    memory(ALL);
}

#[test]
fn redis_decides_as_the_model_does() {
    redis(Clocks::BothWays, LOGS, Duration::ZERO);
}

#[test]
fn redis_counts_by_every_algorithm_as_the_model_does() {
    redis(Clocks::BothWays, ALL, Duration::ZERO);
}

/// A cached refusal does not move future entries back after the clock steps back, as a check on
/// Redis does. So the clock only runs forward.
#[test]
fn redis_and_the_refusal_cache_decide_as_the_model_does() {
    redis(Clocks::OnlyForward, ALL, Duration::from_secs(1));
}

fn redis(clocks: Clocks, limits: Range<usize>, refusal_cache: Duration) {
    let (runtime, server) = (one_thread(), RedisServer::start());
    let clock = ManualClock::new();
    // Over one connection, checks are decided in order of arrival. Only with two does a single
    // check skip the queue.
    let stores = [2, 1].map(|connections| server.store().clock(&clock).connections(connections).build().unwrap());
    run(clocks, limits, |steps| {
        server.run::<()>("FLUSHALL");
        let [alone, together] =
            stores.clone().map(|store| Limiter::new(store).deadline(TEST_TIMEOUT).refusal_cache(refusal_cache));
        runtime.block_on(replay([&alone, &together], &clock, Model::of_redis(), &steps))
    });
}
