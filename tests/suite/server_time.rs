//! Random histories on real Redis by the server's own clock: the plain model is told the time at which each decision
//! was made, and has to come to the same.
//!
//! `properties.rs` passes the time in, which reaches the microsecond at which a check passes. Only here are expiries
//! read, though: the script learns from them what the server's clock has in common with the entries.

use std::time::{Duration, UNIX_EPOCH};

use proptest::{
    collection::vec,
    prelude::*,
    sample::{select, subsequence},
    test_runner::{Config, TestCaseError, TestRunner},
};
use tokio::{runtime::Builder, time::sleep};
use tower_sliding_window::{AdmissionId, Charge, Check, DenyCache, Limit, Limiter, RedisStore};

use crate::support::{
    PATIENCE,
    model::{Model, ModelCharge, Standing},
    redis_server::RedisServer,
};

/// Short enough for many windows to pass, and of odd lengths, since expiries are whole milliseconds.
const LIMITS: [Limit; 3] = [
    Limit::per("short", 3, Duration::from_micros(17_001)),
    Limit::per("medium", 12, Duration::from_micros(60_999)),
    Limit::per("long", 40, Duration::from_millis(250)),
];

#[derive(Clone, Debug)]
enum Step {
    Checks(Vec<Asked>),
    Sleep(u64),
    Reset(usize),
}

#[derive(Clone, Debug)]
struct Asked {
    limits: Vec<usize>,
    cost: u64,
    id: Option<u64>,
    copies: usize,
}

fn step() -> impl Strategy<Value = Step> {
    // Mostly of one unit: a log that has ever had a larger entry is read without its expiry.
    let cost = prop_oneof![12 => Just(1), 2 => Just(0), 1 => 2..=4u64];
    let id = prop_oneof![6 => Just(None), 1 => (0..4u64).prop_map(Some)];
    let copies = prop_oneof![8 => Just(1), 1 => 2..=5usize];
    let asked = (subsequence(vec![0, 1, 2], 1..=3), cost, id, copies).prop_map(|(limits, cost, id, copies)| Asked {
        limits,
        cost,
        id,
        copies,
    });
    let pause = prop_oneof![4 => 0..=3_000u64, 2 => 0..=20_000u64, 1 => select(vec![17_001, 61_000])];
    prop_oneof![
        12 => vec(asked, 1..=3).prop_map(Step::Checks),
        4 => pause.prop_map(Step::Sleep),
        1 => (0..LIMITS.len()).prop_map(Step::Reset),
    ]
}

impl Asked {
    fn charges(&self) -> Vec<ModelCharge> {
        let charge = |&limit: &usize| {
            let limit_of = LIMITS[limit].clone();
            ModelCharge::new(limit_of.clone(), (limit, 0), self.cost.min(limit_of.units()))
        };
        self.limits.iter().map(charge).collect()
    }

    fn check(&self) -> Check {
        let mut charges =
            self.charges().into_iter().map(|charge| Charge::new(charge.limit, "ada", charge.cost).unwrap());
        let first = Check::new(charges.next().unwrap());
        let check = charges.try_fold(first, Check::and).unwrap();
        match self.id {
            Some(id) => check.with_id(AdmissionId::from(id)),
            None => check,
        }
    }
}

async fn replay(limiter: &Limiter<RedisStore>, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut model = Model::default();
    for (number, step) in steps.iter().enumerate() {
        match step {
            Step::Sleep(micros) => sleep(Duration::from_micros(*micros)).await,
            Step::Reset(limit) => {
                model.reset((*limit, 0));
                limiter.reset(&LIMITS[*limit], "ada").await.unwrap();
            }
            Step::Checks(asked) => {
                let asked: Vec<&Asked> =
                    asked.iter().flat_map(|asked| std::iter::repeat_n(asked, asked.copies)).collect();
                let decisions: Vec<_> =
                    asked.iter().map(|asked| tokio::spawn(limiter.check_all(asked.check()))).collect();
                for (asked, decision) in asked.into_iter().zip(decisions) {
                    let decision = decision.await.unwrap().unwrap();
                    let now = u64::try_from(decision.at().duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap();
                    let expected = model.decide(now, &asked.charges(), asked.id);
                    for (told, expected) in Standing::all_of(&decision).into_iter().zip(expected) {
                        prop_assert_eq!((told.used, told.retry), (expected.used, expected.retry), "step {}", number);
                        let late = told.reset.checked_sub(expected.reset);
                        prop_assert!(
                            late.is_some_and(|late| late < 1_000),
                            "step {}: {:?} {:?}",
                            number,
                            told,
                            expected
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn redis_decides_by_its_own_clock_as_the_model_does() {
    let (runtime, server) = (Builder::new_current_thread().enable_all().build().unwrap(), RedisServer::start());
    // One batch at a time, so that they are decided in the order in which they were asked.
    let store = RedisStore::builder(&server.url()).connections(1).build().unwrap();
    let limiter = Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off());
    let config = Config { cases: 24, failure_persistence: None, max_shrink_iters: 50, ..Config::default() };
    let outcome = TestRunner::new(config).run(&vec(step(), 1..=500), |steps| {
        server.run::<()>("FLUSHALL");
        runtime.block_on(replay(&limiter, &steps))
    });
    if let Err(failure) = outcome {
        panic!("a difference to the model:\n{failure}");
    }
}
