//! The conformance suite: whether a store decides as the oracle does.

use std::{
    future::Future,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use tokio::time::timeout;
use tower_sliding_window::{Algorithm, Store, store::ManualClock};

use crate::{
    history::History,
    replay::{replay, shrink},
    rules::RULES,
    trial::{ALGORITHMS, Trial},
};

/// Longer than any part of the suite takes on a store that needs 10 ms for a check.
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// The conformance suite, which fails the test of a store that breaks a rule.
///
/// 1. Random histories of checks, repeated checks, settlements, resets and clock steps are decided
///    by the store and by an oracle, which has the rules in their plainest form, and compared step
///    by step. If a decision differs, the history is shrunk to the steps that lead there.
/// 2. Rules show what histories cannot: futures that are not polled or dropped, checks at the same
///    moment, threads that stop between reading the clock and deciding, huge costs, errors.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use tower_sliding_window::MemoryStore;
/// use tower_sliding_window_conformance::Conformance;
///
/// Conformance::new().run(async |clock| MemoryStore::new().clock(&clock)).await;
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a suite tests nothing until it is run"]
pub struct Conformance {
    algorithms: Vec<Algorithm>,
    seeds: Vec<u64>,
}

impl Conformance {
    /// All algorithms, and 30 histories of new seeds.
    pub fn new() -> Self {
        let first = RandomState::new().hash_one(0);
        Self {
            algorithms: ALGORITHMS.into(),
            seeds: (0..30).map(|number| first.wrapping_add(number)).collect(),
        }
    }

    /// The algorithms that the store counts by. Default: a log, a compact log of 16 entries, a
    /// counter, a fixed window. A check by another one has to be decided, or to fail with an [error
    /// of one check](tower_sliding_window::error::StoreError::of_one_check).
    ///
    /// # Panics
    ///
    /// If there is no algorithm.
    pub fn algorithms(self, algorithms: impl IntoIterator<Item = Algorithm>) -> Self {
        let algorithms: Vec<Algorithm> = algorithms.into_iter().collect();
        assert!(
            !algorithms.is_empty(),
            "a store counts by one algorithm at least"
        );
        Self { algorithms, ..self }
    }

    /// The seeds of the random histories, one for each history of 200 steps. The message of a
    /// failure has the seed of the history that has failed: `seeds([27])` runs the history 27
    /// alone. Default: 30 seeds, others each time.
    pub fn seeds(self, seeds: impl IntoIterator<Item = u64>) -> Self {
        Self {
            seeds: seeds.into_iter().collect(),
            ..self
        }
    }

    /// Runs the suite, and stops at the first history that differs.
    ///
    /// `make` makes a store that has nothing stored and decides by the given clock. It may connect,
    /// and may own what has to live as long as the store, such as a server. It is called for each
    /// history and rule, and again to shrink a history. If the store has a [local
    /// state](Store::local_state), that goes by the clock as well:
    /// [`LocalState::by`](tower_sliding_window::store::LocalState::by). Clones of the store have to
    /// share what they remember; a store that is not `Clone` is given in an [`Arc`].
    ///
    /// # Panics
    ///
    /// If the store breaks a rule. The message lists the rules: what was expected, what the store
    /// did, and the steps that lead there.
    pub async fn run<S: Store + Clone>(&self, make: impl AsyncFn(ManualClock) -> S) {
        let make = async || {
            let clock = ManualClock::new();
            let store = make(clock.clone()).await;
            Trial {
                handles: [Arc::new(store.clone()), Arc::new(store)],
                clock,
            }
        };
        let mut broken = String::new();
        for (name, rule) in RULES {
            let kept =
                within_time(async { rule(make().await, self.algorithms.clone()).await }).await;
            broken.extend(kept.err().map(|failure| format!("\n- {name}: {failure}")));
        }
        for seed in self.seeds.iter().copied() {
            let history = History::random(seed, &self.algorithms);
            let replayed = async {
                replay(&make().await, &history)
                    .await
                    .map_err(|(_, difference)| difference)
            };
            if let Err(failure) = within_time(replayed).await {
                let failure = shrink(&make, history).await.unwrap_or(failure);
                broken += &format!("\n- a history of the seed {seed} differs: {failure}");
                break;
            }
        }
        assert!(broken.is_empty(), "the store breaks rules:{broken}");
    }
}

impl Default for Conformance {
    fn default() -> Self {
        Self::new()
    }
}

async fn within_time(part: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    timeout(TIME_LIMIT, part)
        .await
        .unwrap_or_else(|_| Err(format!("it took longer than {TIME_LIMIT:?}")))
}
