//! Random histories on a store and on the plain model, with the time passed in, decided alike to the microsecond.
//!
//! The seed is printed; `SEED=... bash tests/run.sh properties` runs the same histories again. A failing history is
//! shrunk to a short one.

use std::{
    cell::Cell,
    collections::HashMap,
    env,
    ops::RangeInclusive,
    time::{Duration, UNIX_EPOCH},
};

use proptest::{
    collection::vec,
    prelude::*,
    sample::{select, subsequence},
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};
use tower_sliding_window::{
    AdmissionId, Charge, Check, DenyCache, Limit, Limiter, ManualClock, MemoryStore, RedisStore, Store,
};

use crate::support::{
    PATIENCE,
    model::{Model, ModelCharge, Standing},
    redis_server::RedisServer,
};

const LIMITS: [Limit; 4] = [
    Limit::per_second("small", 3),
    Limit::per("medium", 10, Duration::from_millis(10_007)),
    Limit::per_minute("large", 200),
    // Its log is longer than what the script reads at a time.
    Limit::per_hour("huge", 1_500),
];

const KEYS: [&str; 2] = ["ada", "bob"];

/// Histories of 500 steps on average make the 100,000 that are asserted below, with a wide margin. The shortest is one
/// step, so that a failing history can shrink.
const HISTORIES: u32 = 250;
const STEPS: RangeInclusive<usize> = 1..=1_000;

#[derive(Clone, Debug)]
enum Step {
    /// Checks that arrive together, so that a store may decide them in one batch.
    Checks(Vec<Asked>),
    Reset {
        limit: usize,
        key: usize,
    },
    Advance(u64),
    Rewind(u64),
    /// To the moment at which the check refused last will pass, or one microsecond before.
    AdvanceToRetry {
        early: bool,
    },
}

#[derive(Clone, Debug)]
struct Asked {
    buckets: Vec<(usize, usize)>,
    cost: u64,
    id: Option<u64>,
    /// How many callers ask the same.
    copies: usize,
}

/// Whether a history may contain steps back of the clock: the in-process store's own clock never does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clocks {
    OnlyForward,
    BothWays,
}

fn step(clocks: Clocks) -> impl Strategy<Value = Step> {
    let buckets: Vec<(usize, usize)> = (0..LIMITS.len()).flat_map(|limit| [(limit, 0), (limit, 1)]).collect();
    let cost = prop_oneof![6 => Just(1), 3 => 0..=10u64, 2 => 0..=200u64, 1 => 100..=1_500u64];
    let id = prop_oneof![4 => Just(None), 1 => (0..6u64).prop_map(Some)];
    let copies = prop_oneof![6 => Just(1), 1 => 1..=20usize];
    let asked = (subsequence(buckets, 1..=3), cost, id, copies).prop_map(|(buckets, cost, id, copies)| Asked {
        buckets,
        cost,
        id,
        copies,
    });
    let time = prop_oneof![
        0..=3u64,
        0..=1_500_000u64,
        0..=70_000_000u64,
        select(vec![1_000_000, 10_007_000, 60_000_000, 3_600_000_000])
    ];
    let back = match clocks {
        Clocks::OnlyForward => 0,
        Clocks::BothWays => 1,
    };
    prop_oneof![
        18 => asked.clone().prop_map(|asked| Step::Checks(vec![asked])),
        6 => vec(asked, 1..=8).prop_map(Step::Checks),
        1 => (0..LIMITS.len(), 0..KEYS.len()).prop_map(|(limit, key)| Step::Reset { limit, key }),
        6 => time.clone().prop_map(Step::Advance),
        back => time.prop_map(Step::Rewind),
        4 => any::<bool>().prop_map(|early| Step::AdvanceToRetry { early }),
    ]
}

/// Takes a history on a store and on the model, and compares every answer. Checks that come alone and those that come
/// together go through limiters of their own, on the same store or on two that share everything.
async fn replay<S: Store>(
    [alone, together]: [&Limiter<S>; 2],
    clock: &ManualClock,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let mut model = Model::default();
    let mut last_retry = 0;
    // Each limiter has a deny cache of its own.
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
            Step::Checks(asked) => {
                let checks: Vec<(Vec<ModelCharge>, Option<u64>)> = asked.iter().flat_map(Asked::checks).collect();
                let now = clock.now().duration_since(UNIX_EPOCH).unwrap();
                let now = u64::try_from(now.as_micros()).unwrap();
                let limiter = if checks.len() == 1 { alone } else { together };
                // On a runtime of one thread the tasks are polled in this order, before anything is sent.
                let decisions: Vec<JoinHandle<_>> =
                    checks.iter().map(|(charges, id)| tokio::spawn(limiter.check_all(check(charges, *id)))).collect();
                for ((charges, id), decision) in checks.iter().zip(decisions) {
                    let expected = model.decide(now, charges, *id);
                    let decision = decision.await.unwrap().unwrap();
                    let told = Standing::all_of(&decision);
                    if !refusals[checks.len().min(2) - 1].has_repeated(now, (charges, *id), &told, &expected) {
                        prop_assert_eq!(told, expected, "step {}: {:?}", number, step);
                    }
                    let retry = decision.retry_after();
                    last_retry = retry.map_or(last_retry, |retry| u64::try_from(retry.as_micros()).unwrap());
                }
            }
        }
    }
    Ok(())
}

/// The last refusal of each check: what a deny cache may repeat.
#[derive(Default)]
struct Refusals(HashMap<Charges, (u64, Vec<Standing>)>);

/// Limit, key and cost of each charge of a check.
type Charges = Vec<(usize, usize, u64)>;

impl Refusals {
    /// Whether a check was told what it was told last, less than a second ago, and this was true: the limits that refuse
    /// stand as they do in the model, which refuses for at least as long.
    fn has_repeated(
        &mut self,
        now: u64,
        (charges, id): (&[ModelCharge], Option<u64>),
        told: &[Standing],
        expected: &[Standing],
    ) -> bool {
        let retry = |standings: &[Standing]| standings.iter().filter_map(|standing| standing.retry).max();
        let check = charges.iter().map(|charge| (charge.bucket.0, charge.bucket.1, charge.cost)).collect();
        let repeated = self.0.get(&check).is_some_and(|(at, refusal)| {
            let elapsed = now.wrapping_sub(*at);
            let later = refusal.iter().map(|standing| Standing {
                used: standing.used,
                reset: standing.reset.saturating_sub(elapsed),
                retry: standing.retry.map(|retry| retry.saturating_sub(elapsed)),
            });
            elapsed < 1_000_000 && later.eq(told.iter().cloned())
        });
        if !repeated && id.is_none() && retry(told).is_some() {
            self.0.insert(check, (now, told.to_vec()));
        }
        let is_true = told.iter().zip(expected).all(|(told, expected)| told.retry.is_none() || told == expected);
        id.is_none() && repeated && retry(told).is_some() && is_true && retry(told) <= retry(expected)
    }
}

impl Asked {
    fn checks(&self) -> impl Iterator<Item = (Vec<ModelCharge>, Option<u64>)> {
        let charges: Vec<ModelCharge> = self.buckets.iter().map(|&bucket| charge(bucket, self.cost)).collect();
        std::iter::repeat_n((charges, self.id), self.copies)
    }
}

/// A cost that the limit allows.
fn charge(bucket: (usize, usize), cost: u64) -> ModelCharge {
    let limit = LIMITS[bucket.0].clone();
    ModelCharge { bucket, cost: cost.min(limit.units()), limit }
}

fn check(charges: &[ModelCharge], id: Option<u64>) -> Check {
    let mut charges =
        charges.iter().map(|charge| Charge::new(charge.limit.clone(), KEYS[charge.bucket.1], charge.cost).unwrap());
    let first = Check::new(charges.next().unwrap());
    let check = charges.try_fold(first, Check::and).unwrap();
    match id {
        Some(id) => check.with_id(AdmissionId::from(id)),
        None => check,
    }
}

fn run(clocks: Clocks, history: impl Fn(Vec<Step>) -> Result<(), TestCaseError>) {
    let seed = env::var("SEED").map_or_else(|_| random_seed(), |seed| seed.parse().expect("SEED is a number"));
    println!("SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&u64::to_le_bytes(seed));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases: HISTORIES, failure_persistence: None, ..Config::default() };
    let steps_taken = Cell::new(0);
    let outcome = TestRunner::new_with_rng(config, rng).run(&vec(step(clocks), STEPS), |steps| {
        steps_taken.set(steps_taken.get() + steps.len());
        history(steps)
    });
    if let Err(failure) = outcome {
        panic!("SEED={seed} finds a difference to the model:\n{failure}");
    }
    println!("{} steps without a difference", steps_taken.get());
    assert!(steps_taken.get() >= 100_000);
}

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn random_seed() -> u64 {
    u64::from_be_bytes(AdmissionId::fresh().to_bytes())
}

#[test]
fn memory_decides_as_the_model_does() {
    let runtime = one_thread();
    run(Clocks::OnlyForward, |steps| {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::builder().clock(&clock).build());
        runtime.block_on(replay([&limiter; 2], &clock, &steps))
    });
}

#[test]
fn redis_decides_as_the_model_does() {
    redis(Clocks::BothWays, DenyCache::off());
}

/// What is repeated does not pull entries back after a step back of the clock, as asking would: a later refusal does.
#[test]
fn redis_and_the_deny_cache_decide_as_the_model_does() {
    redis(Clocks::OnlyForward, DenyCache::new());
}

fn redis(clocks: Clocks, deny_cache: DenyCache) {
    let (runtime, server) = (one_thread(), RedisServer::start());
    let clock = ManualClock::new();
    // Over one connection what comes together is decided in the order of its arrival. Only over more does a check that
    // comes alone need no queue.
    let stores = [2, 1]
        .map(|connections| RedisStore::builder(&server.url()).clock(&clock).connections(connections).build().unwrap());
    run(clocks, |steps| {
        server.run::<()>("FLUSHALL");
        let [alone, together] =
            stores.clone().map(|store| Limiter::new(store).deadline(PATIENCE).deny_cache(deny_cache));
        runtime.block_on(replay([&alone, &together], &clock, &steps))
    });
}
