//! Random histories on a store behind limiters, with the time passed in. The store must decide as
//! the oracle does, to the microsecond.
//!
//! The seed is printed; `SEED=... bash tests/run.sh properties` runs the same histories again. A
//! failing history is shrunk to a short one.

mod cached_refusals;
mod prefetch;
mod steps;

use std::{
    cell::Cell,
    env, iter,
    ops::{Range, RangeInclusive},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use proptest::{
    collection::vec,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};
use tokio::task::JoinHandle;
use tower_sliding_window::{
    Algorithm, Check, Decision, Key, Limit, Limiter, MemoryStore, check::AdmissionId,
    settlement::Settlement, store::ManualClock,
};
use tower_sliding_window_conformance::Oracle;

use self::{
    cached_refusals::{Decided, Refusals},
    steps::{Asked, Step, step},
};
use crate::support::{TEST_TIMEOUT, one_thread, redis_server::RedisServer};

/// The store on Redis reads so many entries for a retry time.
const ENTRIES_READ: usize = 100;

const LIMITS: [Limit; 10] = [
    Limit::per_second("small", 3),
    Limit::per("medium", 10, Duration::from_millis(10_007)),
    Limit::per_minute("large", 200),
    // Its log is longer than the number of entries that the script reads at once.
    Limit::per_hour("huge", 1_500),
    Limit::per("rough", 10, Duration::from_millis(10_007))
        .with_algorithm(Algorithm::compact_log(3)),
    Limit::per_minute("compact", 200).with_algorithm(Algorithm::compact_log(16)),
    Limit::per_hour("fine", 1_500).with_algorithm(Algorithm::compact_log(128)),
    Limit::per("fixed", 10, Duration::from_millis(10_007)).with_algorithm(Algorithm::FIXED_WINDOW),
    Limit::per("counter", 10, Duration::from_millis(10_007))
        .with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER),
    Limit::per_minute("counters", 200).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER),
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
    check: Check,
    decision: Decision,
    /// True if the check was alone in its batch.
    is_alone: bool,
}

/// True if the clock may step back. The clock of the in-process store never does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clocks {
    OnlyForward,
    BothWays,
}

/// Replays a history on a store, and lets the oracle compare every decision. Single checks and
/// checks in a batch use two limiters, on the same store or on two that share all data.
async fn replay(
    [alone, together]: [&Limiter; 2],
    clock: &ManualClock,
    mut oracle: Oracle,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let mut admitted: Vec<Admitted> = Vec::new();
    let mut last_retry = Duration::ZERO;
    // Each limiter has its own refusal cache.
    let mut refusals = [Refusals::default(), Refusals::default()];
    for (number, step) in steps.iter().enumerate() {
        let differs = |difference: String| {
            TestCaseError::fail(format!("step {number}: {difference}, in {step:?}"))
        };
        match step {
            Step::Advance(micros) => clock.advance(Duration::from_micros(*micros)),
            Step::Rewind(micros) => clock.step_back(Duration::from_micros(*micros)),
            Step::AdvanceToRetry { early } => {
                clock.advance(last_retry.saturating_sub(Duration::from_micros((*early).into())));
                last_retry = Duration::ZERO;
            }
            Step::Reset { limit, key } => {
                oracle.reset(&LIMITS[*limit], &Key::from(KEYS[*key]));
                for limiter in [alone, together] {
                    limiter.reset(&LIMITS[*limit], KEYS[*key]).await.unwrap();
                }
            }
            Step::Settle { back, cost, times } => {
                let Some(Admitted {
                    check, decision, ..
                }) = admitted.iter().rev().nth(*back)
                else {
                    continue;
                };
                let settlement =
                    Settlement::by_id(check.clone(), decision.id(), decision.at(), |_| Some(*cost));
                // Each limiter's store must also forget its cached refusals.
                for limiter in [alone, together].into_iter().cycle().take(2 * times) {
                    let settled = limiter.settle(settlement.clone()).await.unwrap();
                    oracle
                        .settle(clock.now(), &settlement, &settled)
                        .map_err(differs)?;
                }
            }
            Step::Repeat { back } => {
                let mut before = admitted.iter().rev().filter(|admitted| admitted.is_alone);
                let Some(Admitted {
                    check, decision, ..
                }) = before.nth(*back)
                else {
                    continue;
                };
                let check = check.clone().with_id(decision.id());
                let decision = alone.check_all(check.clone()).await.unwrap();
                oracle
                    .decide(clock.now(), &check, &decision)
                    .map_err(differs)?;
                refusals[0].note(Decided {
                    now: clock.now(),
                    check: &check,
                    decision: &decision,
                    is_alone: true,
                });
                if decision.is_allowed() {
                    admitted.push(Admitted {
                        check,
                        decision,
                        is_alone: true,
                    });
                }
            }
            Step::Checks(asked) => {
                let checks: Vec<Check> = asked.iter().flat_map(Asked::checks).collect();
                let now = clock.now();
                let is_alone = checks.len() == 1;
                let limiter = if is_alone { alone } else { together };
                // On a runtime of one thread, the tasks are polled in this order before anything is
                // sent.
                let decisions: Vec<JoinHandle<_>> = checks
                    .iter()
                    .map(|check| tokio::spawn(limiter.check_all(check.clone())))
                    .collect();
                for (check, decision) in iter::zip(checks, decisions) {
                    let decision = decision.await.unwrap().unwrap();
                    let decided = Decided {
                        now,
                        check: &check,
                        decision: &decision,
                        is_alone,
                    };
                    let refusals = &mut refusals[usize::from(!is_alone)];
                    match oracle.decide(now, &check, &decision) {
                        Ok(()) => refusals.note(decided),
                        Err(_) if refusals.have_refused(decided, oracle.expected().unwrap()) => {}
                        Err(difference) => return Err(differs(difference)),
                    }
                    last_retry = decision.retry_after().unwrap_or(last_retry);
                    if decision.is_allowed() {
                        admitted.push(Admitted {
                            check,
                            decision,
                            is_alone,
                        });
                    }
                }
            }
        }
    }
    Ok(())
}

fn micros(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

fn run(
    clocks: Clocks,
    limits: Range<usize>,
    history: impl Fn(Vec<Step>) -> Result<(), TestCaseError>,
) {
    let seed = env::var("SEED").map_or_else(
        |_| random_seed(),
        |seed| seed.parse().expect("SEED is a number"),
    );
    println!("SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&u64::to_le_bytes(seed));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let cases = env::var("HISTORIES").map_or(HISTORIES, |number| {
        number.parse().expect("HISTORIES is a number")
    });
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_time: MAX_SHRINK_MILLIS,
        ..Config::default()
    };
    let steps_taken = Cell::new(0);
    let outcome =
        TestRunner::new_with_rng(config, rng).run(&vec(step(clocks, limits), STEPS), |steps| {
            steps_taken.set(steps_taken.get() + steps.len());
            history(steps)
        });
    if let Err(failure) = outcome {
        panic!("SEED={seed} finds a difference to the oracle:\n{failure}");
    }
    println!("{} steps without a difference", steps_taken.get());
    // Five standard deviations below the mean: 102,000 steps of 250 histories. The sum of few
    // histories varies more.
    let cases = f64::from(cases);
    let deviation = 289.0;
    assert!(steps_taken.get() as f64 >= 500.0 * cases - 5.0 * deviation * cases.sqrt());
}

fn random_seed() -> u64 {
    AdmissionId::fresh().0
}

fn memory(limits: Range<usize>) {
    let runtime = one_thread();
    run(Clocks::OnlyForward, limits, |steps| {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::new().clock(&clock));
        runtime.block_on(replay([&limiter; 2], &clock, Oracle::new(), &steps))
    });
}

#[test]
fn memory_decides_as_the_oracle_does() {
    memory(LOGS);
}

#[test]
fn memory_counts_by_every_algorithm_as_the_oracle_does() {
    memory(ALL);
}

#[test]
fn redis_decides_as_the_oracle_does() {
    redis(Clocks::BothWays, LOGS, Duration::ZERO);
}

#[test]
fn redis_counts_by_every_algorithm_as_the_oracle_does() {
    redis(Clocks::BothWays, ALL, Duration::ZERO);
}

/// A cached refusal does not move future entries back after the clock steps back, as a check on
/// Redis does. So the clock only runs forward.
#[test]
fn redis_and_the_refusal_cache_decide_as_the_oracle_does() {
    redis(Clocks::OnlyForward, ALL, Duration::from_secs(1));
}

fn redis(clocks: Clocks, limits: Range<usize>, refusal_cache: Duration) {
    let (runtime, server) = (one_thread(), RedisServer::start());
    let clock = ManualClock::new();
    run(clocks, limits, |steps| {
        server.run::<()>("FLUSHALL");
        // Over one connection, checks are decided in order of arrival. Only with two does a single
        // check skip the queue.
        let stores = [2, 1].map(|connections| {
            server
                .store()
                .clock(&clock)
                .connections(connections)
                .build()
                .unwrap()
        });
        let [alone, together] = stores.map(|store| {
            Limiter::new(store)
                .deadline(TEST_TIMEOUT)
                .refusal_cache(refusal_cache)
        });
        runtime.block_on(replay(
            [&alone, &together],
            &clock,
            Oracle::new().reading_entries(ENTRIES_READ),
            &steps,
        ))
    });
}
