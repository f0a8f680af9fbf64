//! The rules that a history of single steps cannot show.

mod prefetch;

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::task::{JoinSet, yield_now};

use self::prefetch::{prefetches, spent_prefetches};
use super::{Trial, history::History, replay::replay};
use crate::{
    algorithm::Algorithm,
    check::{AdmissionId, Charge, Check},
    decision::settlement::Settlement,
    decision::{Decision, LimitStatus},
    key::Key,
    limit::Limit,
    store::Store,
};

type Kept = Result<(), String>;
type Rule = fn(Trial, Vec<Algorithm>) -> Pin<Box<dyn Future<Output = Kept>>>;

macro_rules! rules {
    ($($name:literal $rule:ident)*) => {
        &[$(($name, |trial, algorithms| Box::pin($rule(trial, algorithms)))),*]
    };
}

pub(super) const RULES: &[(&str, Rule)] = rules! {
    "a future counts nothing before it is polled" unpolled_futures
    "a future that is dropped counts once at most" dropped_futures
    "checks at the same moment admit exactly the limit" races
    "a check repeated at the same moment counts once" racing_ids
    "settlements at the same moment count once" racing_settlements
    "all limits of a check are decided, however many" many_limits
    "keys differ in every byte" keys
    "the largest and the smallest limits are exact" extreme_limits
    "huge costs are counted without overflow" huge_costs
    "every pair of charges is decided and settled alike" pairs
    "a check by an algorithm that the store lacks fails alone" other_algorithms
    "a prefetch counts until a window after its life" prefetches
    "the spent units of a prefetch count for a window" spent_prefetches
};

const NARROW: Limit = Limit::per_hour("narrow", 5);
const WIDE: Limit = Limit::per_hour("wide", 20);
const MICROSECOND: Duration = Duration::from_micros(1);

impl Trial {
    fn store(&self) -> &Arc<dyn Store> {
        &self.handles[0]
    }

    async fn decide(&self, check: Check) -> Result<Decision, String> {
        let decided = self.store().decide(check.clone()).await;
        decided.map_err(|error| format!("{check:?}: expected a decision, got {error:?}"))
    }

    async fn spend(&self, limit: &Limit, cost: u64) -> Result<Decision, String> {
        self.decide(check_of(limit, cost)).await
    }

    async fn used(&self, limit: &Limit) -> Result<u64, String> {
        Ok(self.spend(limit, 0).await?.used())
    }

    async fn settle(&self, check: Check, admitted: &Decision, cost: u64) -> Result<(), String> {
        let settled = self.store().settle(Settlement::new(check, admitted, |_| Some(cost))).await;
        let settled = settled.map_err(|error| format!("expected a settlement, got {error:?}"))?;
        expect("whether a settlement counts", true, settled.was_applied)
    }

    /// Decides all checks at once, on both handles, and returns the admissions.
    async fn admitted(&self, checks: impl Iterator<Item = Check>) -> Result<Vec<Decision>, String> {
        let decide = |(check, handle): (Check, &Arc<dyn Store>)| {
            let store = Arc::clone(handle);
            async move { store.decide(check).await }
        };
        let decided: JoinSet<_> = checks.zip(self.handles.iter().cycle()).map(decide).collect();
        let decided: Result<Vec<Decision>, _> = decided.join_all().await.into_iter().collect();
        let decided = decided.map_err(|error| format!("expected a decision, got {error:?}"))?;
        Ok(decided.into_iter().filter(Decision::is_allowed).collect())
    }
}

fn charge(limit: &Limit, cost: u64) -> Charge {
    Charge::fitting(limit.clone(), Key::from("ada"), cost)
}

fn check_of(limit: &Limit, cost: u64) -> Check {
    Check::new(charge(limit, cost))
}

fn all_of(limits: &[&Limit]) -> Check {
    let mut check = check_of(limits[0], 1);
    limits[1..].iter().for_each(|limit| check.add_distinct(charge(limit, 1)));
    check
}

#[expect(clippy::needless_pass_by_value, reason = "callers pass what they have just computed")]
fn expect<T: PartialEq + std::fmt::Debug>(what: &str, expected: T, got: T) -> Kept {
    if expected == got { Ok(()) } else { Err(format!("{what}: expected {expected:?}, got {got:?}")) }
}

async fn unpolled_futures(trial: Trial, _: Vec<Algorithm>) -> Kept {
    for _ in 0..3 {
        drop(trial.store().decide(check_of(&WIDE, 1)));
    }
    expect("used units after three futures were dropped unpolled", 0, trial.used(&WIDE).await?)?;
    let decision = trial.store().decide(check_of(&WIDE, 1));
    expect("used units before a future is polled", 0, trial.used(&WIDE).await?)?;
    expect("used units after it was polled", 1, decision.await.map_err(|error| format!("{error:?}"))?.used())
}

async fn dropped_futures(trial: Trial, _: Vec<Algorithm>) -> Kept {
    for _ in 0..5 {
        let store = Arc::clone(trial.store());
        let task = tokio::spawn(async move { store.decide(check_of(&WIDE, 1)).await });
        yield_now().await;
        task.abort();
        let _ = task.await;
    }
    let used = trial.used(&WIDE).await?;
    expect("whether five dropped futures have counted five units at most", true, used <= 5)?;
    let admitted = trial.admitted((0..30).map(|_| check_of(&WIDE, 1))).await?.len() as u64;
    expect("units that are admitted after dropped futures", true, (15..=20 - used).contains(&admitted))
}

async fn races(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for algorithm in algorithms {
        let [narrow, wide] = [NARROW, WIDE].map(|limit| limit.with_algorithm(algorithm));
        let admitted = trial.admitted((0..50).map(|_| check_of(&narrow, 1))).await?.len() as u64;
        expect(
            "admissions and used units of 50 checks of a limit of 5",
            (5, 5),
            (admitted, trial.used(&narrow).await?),
        )?;
        let _ = trial.store().reset(narrow.clone(), Key::from("ada")).await;

        // The wide limit alone, and together with the narrow one in either order.
        let check = |number: usize| match number % 4 {
            0 => all_of(&[&narrow, &wide]),
            1 => all_of(&[&wide, &narrow]),
            _ => check_of(&wide, 1),
        };
        let admitted = trial.admitted((0..50).map(check)).await?.len() as u64;
        let used = (admitted, trial.used(&wide).await?);
        expect("admissions and used units of 50 checks of limits of 5 and of 20", (20, 20), used)?;
        expect("whether the limit of 5 holds", true, trial.used(&narrow).await? <= 5)?;
        for limit in [narrow, wide] {
            let _ = trial.store().reset(limit, Key::from("ada")).await;
        }
    }
    Ok(())
}

async fn racing_ids(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let checks = (0..30).map(|_| check_of(&WIDE, 2).with_id(AdmissionId::from(7)));
    expect("admissions of one id", 30, trial.admitted(checks).await?.len())?;
    expect("used units of one id", 2, trial.used(&WIDE).await?)
}

async fn racing_settlements(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let check = Check::new(charge(&WIDE, 20).reserve(WIDE.window()));
    let admitted = trial.decide(check.clone()).await?;
    let settle = |store: &Arc<dyn Store>| {
        let settled = store.settle(Settlement::new(check.clone(), &admitted, |_| Some(3)));
        async move { settled.await.map(|settled| settled.was_applied) }
    };
    let settled: JoinSet<_> = trial.handles.iter().cycle().take(20).map(settle).collect();
    let settled: Result<Vec<bool>, _> = settled.join_all().await.into_iter().collect();
    let counted = settled.map_err(|error| format!("{error:?}"))?.into_iter().filter(|was_applied| *was_applied).count();
    expect("settlements that count, and used units", (1, 3), (counted, trial.used(&WIDE).await?))
}

async fn many_limits(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let limit = |number: u64| Limit::new(format!("limit-{number}"), 2, Duration::from_secs(60)).unwrap();
    let limits: Vec<Limit> = (0..12).map(limit).collect();
    let limits: Vec<&Limit> = limits.iter().collect();
    let first = trial.decide(all_of(&limits)).await?;
    expect("used units of twelve limits", vec![1; 12], first.statuses().map(LimitStatus::used).collect())?;
    for full in limits.iter().copied() {
        let _ = trial.spend(full, 1).await?;
        expect("a check of twelve limits, one of them full", false, trial.decide(all_of(&limits)).await?.is_allowed())?;
        let _ = trial.store().reset(full.clone(), Key::from("ada")).await;
        let _ = trial.spend(full, 1).await?;
    }
    Ok(())
}

/// Long ones, those that are no text, and those that would be the same if they were joined.
async fn keys(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let mut keys = vec![Key::new("user", "ada"), Key::new("user", "Ada"), Key::new("USER", "ada"), Key::from("ada")];
    keys.extend([Key::new("ip", "a"), Key::new("i", "pa")]);
    keys.extend([("a", "bc"), ("ab", "c")].map(|(first, second)| Key::from((&first.into(), &second.into()))));
    keys.extend([&[0xff_u8][..], &[0xfe], &[0], &[0, 0], &[]].map(|bytes| Key::new("bytes", bytes)));
    keys.extend([0, 70, 299, 300].map(|place| {
        let mut bytes = [b'a'; 301];
        bytes[place] = b'b';
        Key::new("long", &bytes[..300])
    }));
    keys.extend((0..100_u8).map(|number| Key::new("number", [number])));
    for is_first in [true, false] {
        for key in &keys {
            let check = Check::new(Charge::fitting(Limit::per_hour("once", 1), key.clone(), 1));
            expect(&format!("a check for {key:?}"), is_first, trial.decide(check).await?.is_allowed())?;
        }
    }
    Ok(())
}

async fn extreme_limits(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let large = Limit::per("large", Limit::MAX_UNITS, Limit::MAX_WINDOW);
    expect("remaining units", 1, trial.spend(&large, Limit::MAX_UNITS - 1).await?.remaining())?;
    expect("the last unit", true, trial.spend(&large, 1).await?.is_allowed())?;
    let refused = trial.spend(&large, Limit::MAX_UNITS).await?;
    expect("the retry time of a full limit", Some(Limit::MAX_WINDOW), refused.retry_after())?;

    let short = Limit::per("short", 1, Limit::MIN_WINDOW);
    expect("the first unit", true, trial.spend(&short, 1).await?.is_allowed())?;
    trial.clock.advance(Limit::MIN_WINDOW - MICROSECOND);
    expect("the retry time of a full limit", Some(MICROSECOND), trial.spend(&short, 1).await?.retry_after())
}

async fn huge_costs(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for algorithm in algorithms {
        let limit = Limit::per("huge", Limit::MAX_UNITS, Duration::from_secs(86_400)).with_algorithm(algorithm);
        for _ in 0..4_100 {
            let spent = Check::new(Charge::spent(limit.clone(), "ada", u64::MAX));
            expect("spent units", true, trial.decide(spent).await?.is_allowed())?;
        }
        expect("a check after endless spending", false, trial.spend(&limit, 1).await?.is_allowed())?;

        // An impossible cost refuses its key until it leaves.
        let limit = Limit::per_minute("tokens", 100).with_algorithm(algorithm);
        for _ in 0..20 {
            let check = Check::new(charge(&limit, 1).reserve(Duration::from_secs(5)));
            let admitted = trial.decide(check.clone()).await?;
            trial.settle(check, &admitted, u64::MAX).await?;
            let Some(wait) = trial.spend(&limit, 1).await?.retry_after() else {
                return Err("expected a refusal after a settlement at an impossible cost, got an admission".to_owned());
            };
            expect("whether it refuses for two windows at most", true, wait <= 2 * limit.window())?;
            trial.clock.advance(wait);
        }
    }
    Ok(())
}

async fn pairs(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    replay(&trial, &History::of_pairs(&algorithms)).await.map_err(|(_, difference)| difference)
}

async fn other_algorithms(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for other in [
        Algorithm::sliding_log(),
        Algorithm::compact_log(16),
        Algorithm::sliding_window_counter(),
        Algorithm::fixed_window(),
    ] {
        let limit = NARROW.with_algorithm(other);
        if let Err(error) = trial.store().decide(check_of(&limit, 1)).await {
            expect(&format!("whether the store lacks {other:?}"), false, algorithms.contains(&other))?;
            expect("whether it is an error of one check", true, error.is_of_one_check)?;
        }
    }
    for algorithm in algorithms {
        let decision = trial.spend(&WIDE.with_algorithm(algorithm), 1).await?;
        expect("a check after one that has failed", true, decision.is_allowed())?;
    }
    Ok(())
}
