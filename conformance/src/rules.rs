//! The rules that a history of single steps cannot show.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::task::{JoinSet, yield_now};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Key, Limit, Limiter, Store,
    check::AdmissionId,
    limit::prefetch::DEFAULT_LIFE,
    limiter::Breaker,
    settlement::{Settled, Settlement},
};

use crate::{
    contention::stopped_readers,
    history::History,
    replay::replay,
    trial::{ALGORITHMS, Trial},
};

type Kept = Result<(), String>;
type Rule = fn(Trial, Vec<Algorithm>) -> Pin<Box<dyn Future<Output = Kept>>>;

macro_rules! rules {
    ($($name:literal $rule:ident)*) => {
        &[$(($name, |trial, algorithms| Box::pin($rule(trial, algorithms)))),*]
    };
}

pub(crate) const RULES: &[(&str, Rule)] = rules! {
    "a future counts nothing before it is polled" unpolled_futures
    "a future that is dropped counts once at most" dropped_futures
    "checks at the same moment admit exactly the limit" races
    "a thread that waits after it has read the clock moves no units" stopped_readers
    "a check repeated at the same moment counts once" racing_ids
    "settlements at the same moment count once" racing_settlements
    "keys differ in every byte" keys
    "the largest and the smallest limits are exact" extreme_limits
    "huge costs are counted without overflow" huge_costs
    "every pair of charges is decided and settled alike" pairs
    "a check by an algorithm that the store lacks fails alone" other_algorithms
    "a limit with prefetch counts on any store" prefetches
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
        Ok(self.spend(limit, 0).await?.binding().used)
    }

    /// Decides all checks at once, on both handles, and returns the admissions.
    async fn admitted(&self, checks: impl Iterator<Item = Check>) -> Result<Vec<Decision>, String> {
        let decide = |(check, handle): (Check, &Arc<dyn Store>)| handle.decide(check);
        let decided: JoinSet<_> = checks
            .zip(self.handles.iter().cycle())
            .map(decide)
            .collect();
        let decided: Result<Vec<Decision>, _> = decided.join_all().await.into_iter().collect();
        let decided = decided.map_err(|error| format!("expected a decision, got {error:?}"))?;
        Ok(decided.into_iter().filter(Decision::is_allowed).collect())
    }
}

fn charge(limit: &Limit, cost: u64) -> Charge {
    Charge::new(limit.clone(), "ada", cost).unwrap()
}

fn check_of(limit: &Limit, cost: u64) -> Check {
    Check::new(charge(limit, cost))
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "callers pass what they have just computed"
)]
fn expect<T: PartialEq + std::fmt::Debug>(what: &str, expected: T, got: T) -> Kept {
    if expected == got {
        Ok(())
    } else {
        Err(format!("{what}: expected {expected:?}, got {got:?}"))
    }
}

async fn unpolled_futures(trial: Trial, _: Vec<Algorithm>) -> Kept {
    // Two of them are dropped at once.
    let [decision, ..] = [(); 3].map(|()| trial.store().decide(check_of(&WIDE, 1)));
    expect(
        "used units before a future is polled",
        0,
        trial.used(&WIDE).await?,
    )?;
    expect(
        "used units after one was polled",
        1,
        decision
            .await
            .map_err(|error| format!("{error:?}"))?
            .binding()
            .used,
    )
}

async fn dropped_futures(trial: Trial, _: Vec<Algorithm>) -> Kept {
    for _ in 0..5 {
        let task = tokio::spawn(trial.store().decide(check_of(&WIDE, 1)));
        yield_now().await;
        task.abort();
        let _ = task.await;
    }
    let used = trial.used(&WIDE).await?;
    expect(
        "whether five dropped futures have counted five units at most",
        true,
        used <= 5,
    )?;
    let admitted = trial
        .admitted((0..30).map(|_| check_of(&WIDE, 1)))
        .await?
        .len() as u64;
    expect(
        "units that are admitted after dropped futures",
        true,
        (15..=20 - used).contains(&admitted),
    )
}

async fn races(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for algorithm in algorithms {
        let [narrow, wide] = [NARROW, WIDE].map(|limit| limit.with_algorithm(algorithm));
        let admitted = trial
            .admitted((0..50).map(|_| check_of(&narrow, 1)))
            .await?
            .len() as u64;
        let used = (admitted, trial.used(&narrow).await?);
        expect(
            "admissions and used units of 50 checks of a limit of 5",
            (5, 5),
            used,
        )?;
        let _ = trial.store().reset(narrow.clone(), Key::from("ada")).await;

        // The wide limit alone, and together with the narrow one in either order.
        let both = |first, second| check_of(first, 1).and(charge(second, 1)).unwrap();
        let check = |number: usize| match number % 4 {
            0 => both(&narrow, &wide),
            1 => both(&wide, &narrow),
            _ => check_of(&wide, 1),
        };
        let admitted = trial.admitted((0..50).map(check)).await?.len() as u64;
        let used = (admitted, trial.used(&wide).await?);
        expect(
            "admissions and used units of 50 checks of limits of 5 and of 20",
            (20, 20),
            used,
        )?;
        expect(
            "whether the limit of 5 holds",
            true,
            trial.used(&narrow).await? <= 5,
        )?;
        for limit in [narrow, wide] {
            let _ = trial.store().reset(limit, Key::from("ada")).await;
        }
    }
    Ok(())
}

async fn racing_ids(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let checks = (0..30).map(|_| check_of(&WIDE, 2).with_id(AdmissionId(7)));
    expect(
        "admissions of one id",
        30,
        trial.admitted(checks).await?.len(),
    )?;
    expect("used units of one id", 2, trial.used(&WIDE).await?)
}

async fn racing_settlements(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let check = Check::new(charge(&WIDE, 20).reserve(WIDE.window()));
    let admitted = trial.decide(check.clone()).await?;
    let settle = |store: &Arc<dyn Store>| {
        store.settle(Settlement::new(check.clone(), &admitted, |_| Some(3)))
    };
    let settled: JoinSet<_> = trial.handles.iter().cycle().take(20).map(settle).collect();
    let settled: Result<Vec<Settled>, _> = settled.join_all().await.into_iter().collect();
    let counted = settled
        .map_err(|error| format!("{error:?}"))?
        .into_iter()
        .filter(|settled| settled.was_applied)
        .count();
    expect(
        "settlements that count, and used units",
        (1, 3),
        (counted, trial.used(&WIDE).await?),
    )
}

/// Long ones, those that are no text, and those that would be the same if they were joined.
async fn keys(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let mut keys = vec![
        Key::new("user", "ada"),
        Key::new("user", "Ada"),
        Key::new("USER", "ada"),
        Key::from("ada"),
    ];
    keys.extend([Key::new("ip", "a"), Key::new("i", "pa")]);
    keys.extend(
        [("a", "bc"), ("ab", "c")]
            .map(|(first, second)| Key::from((&first.into(), &second.into()))),
    );
    keys.extend(
        [&[0xff_u8][..], &[0xfe], &[0], &[0, 0], &[]].map(|bytes| Key::new("bytes", bytes)),
    );
    keys.extend([0, 70, 299, 300].map(|place| {
        let mut bytes = [b'a'; 301];
        bytes[place] = b'b';
        Key::new("long", &bytes[..300])
    }));
    keys.extend((0..100_u8).map(|number| Key::new("number", [number])));
    for is_first in [true, false] {
        for key in &keys {
            let check =
                Check::new(Charge::new(Limit::per_hour("once", 1), key.clone(), 1).unwrap());
            expect(
                &format!("a check for {key:?}"),
                is_first,
                trial.decide(check).await?.is_allowed(),
            )?;
        }
    }
    Ok(())
}

async fn extreme_limits(trial: Trial, _: Vec<Algorithm>) -> Kept {
    let large = Limit::per("large", Limit::MAX_UNITS, Limit::MAX_WINDOW);
    expect(
        "remaining units",
        1,
        trial.spend(&large, Limit::MAX_UNITS - 1).await?.remaining(),
    )?;
    expect(
        "the last unit",
        true,
        trial.spend(&large, 1).await?.is_allowed(),
    )?;
    let refused = trial.spend(&large, Limit::MAX_UNITS).await?;
    expect(
        "the retry time of a full limit",
        Some(Limit::MAX_WINDOW),
        refused.retry_after(),
    )?;

    let short = Limit::per("short", 1, Limit::MIN_WINDOW);
    expect(
        "the first unit",
        true,
        trial.spend(&short, 1).await?.is_allowed(),
    )?;
    trial.clock.advance(Limit::MIN_WINDOW - MICROSECOND);
    expect(
        "the retry time of a full limit",
        Some(MICROSECOND),
        trial.spend(&short, 1).await?.retry_after(),
    )
}

async fn huge_costs(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for algorithm in algorithms {
        let limit = Limit::per("huge", Limit::MAX_UNITS, Duration::from_secs(86_400))
            .with_algorithm(algorithm);
        for _ in 0..4_100 {
            let spent = Check::new(Charge::spent(limit.clone(), "ada", u64::MAX));
            expect("spent units", true, trial.decide(spent).await?.is_allowed())?;
        }
        expect(
            "a check after endless spending",
            false,
            trial.spend(&limit, 1).await?.is_allowed(),
        )?;
    }
    Ok(())
}

async fn pairs(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    replay(&trial, &History::of_pairs(&algorithms))
        .await
        .map_err(|(_, difference)| difference)
}

async fn other_algorithms(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    // A single failure of the store opens its breaker, and an error of one check does not.
    let breaker = Breaker::new(1, Duration::from_secs(3_600));
    let limiter = Limiter::new(Arc::clone(trial.store()))
        .breaker(breaker)
        .deadline(Duration::MAX);
    for other in ALGORITHMS {
        let limit = NARROW.with_algorithm(other);
        if limiter.check(&limit, "ada", 1).await.is_err() {
            expect(
                &format!("whether the store lacks {other:?}"),
                false,
                algorithms.contains(&other),
            )?;
            let next = limiter
                .check(&WIDE.with_algorithm(algorithms[0]), "bob", 1)
                .await;
            expect("whether it is an error of one check", true, next.is_ok())?;
        }
    }
    for algorithm in algorithms {
        let decision = trial.spend(&WIDE.with_algorithm(algorithm), 1).await?;
        expect(
            "a check after one that has failed",
            true,
            decision.is_allowed(),
        )?;
    }
    Ok(())
}

/// It is the limiter that takes prefetches, and on few stores.
async fn prefetches(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for algorithm in algorithms {
        let limit = Limit::per_second("prefetch", 100)
            .prefetch(DEFAULT_LIFE)
            .with_algorithm(algorithm);
        expect(
            "used units of a limit with prefetch",
            1,
            trial.spend(&limit, 1).await?.binding().used,
        )?;
        let _ = trial.store().reset(limit, Key::from("ada")).await;
    }
    Ok(())
}
