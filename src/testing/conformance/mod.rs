//! The conformance suite: the rules that every store must keep.

mod report;
mod rules;
mod store_under_test;
mod trial;

pub use self::report::{BrokenRule, Report};
use self::{rules::RULES, trial::Trial};
use crate::{
    algorithm::Algorithm,
    store::{ManualClock, Store},
};

/// Runs a store through all rules, each on a new store with a clock of its own.
///
/// `make` makes a store that has nothing stored and decides by the given clock. It may connect, and may own what has to live as
/// long as the store, such as a server. If the store has a [local state](Store::local_state), that goes by the clock as well:
/// [`LocalState::by`](crate::LocalState::by). Some rules ask the store thousands of times, so a slow store is better served by
/// one rule at a time. The store has to count by every [`Algorithm`]; for others there is [`Conformance`].
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use tower_sliding_window::{MemoryStore, testing::assert_conformance};
///
/// assert_conformance(async |clock| MemoryStore::builder().clock(&clock).build()).await;
/// # }
/// ```
///
/// # Panics
///
/// If the store breaks a rule. The message names every broken rule. A rule that takes longer than five minutes is broken, too.
pub async fn assert_conformance<S: Store + Clone>(make: impl AsyncFn(ManualClock) -> S) {
    Conformance::new().run(make).await.assert_kept();
}

/// The conformance suite, for a store that counts by some algorithms only, or for one rule alone. [`assert_conformance`] is the
/// short form.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use tower_sliding_window::{Algorithm, MemoryStore, testing::Conformance};
///
/// let logs_only = Conformance::new().algorithms([Algorithm::log()]);
/// let report = logs_only.run(async |clock| MemoryStore::builder().clock(&clock).build()).await;
/// report.assert_kept();
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a suite tests nothing until it is run"]
pub struct Conformance {
    algorithms: Vec<Algorithm>,
    rule: Option<&'static str>,
}

impl Conformance {
    /// All rules, by all algorithms.
    pub fn new() -> Self {
        let all = [Algorithm::log(), Algorithm::compact(16), Algorithm::counter(), Algorithm::fixed()];
        Self { algorithms: all.into(), rule: None }
    }

    /// The algorithms that the store counts by. Default: a log, a compact log of 16 entries, a counter, a fixed window. Rules
    /// about other algorithms are left out. A log has to be among them, since most rules use it.
    ///
    /// # Panics
    ///
    /// If there is no algorithm.
    pub fn algorithms(self, algorithms: impl IntoIterator<Item = Algorithm>) -> Self {
        let algorithms: Vec<Algorithm> = algorithms.into_iter().collect();
        assert!(!algorithms.is_empty(), "a store counts by one algorithm at least");
        Self { algorithms, ..self }
    }

    /// Runs this rule alone. Default: all.
    pub fn rule(self, name: &'static str) -> Self {
        Self { rule: Some(name), ..self }
    }

    /// The names of all rules. Each name says its rule.
    pub fn rules() -> impl Iterator<Item = &'static str> {
        RULES.iter().map(|rule| rule.name)
    }

    /// Runs the rules one after the other. `make` makes a new store for each of them: see [`assert_conformance`].
    ///
    /// # Panics
    ///
    /// If no rule has the name that [`rule`](Self::rule) sets. A rule that is broken does not panic.
    pub async fn run<S: Store + Clone>(&self, make: impl AsyncFn(ManualClock) -> S) -> Report {
        let is_asked_for = |name| self.rule.is_none_or(|only| only == name);
        assert!(Self::rules().any(is_asked_for), "no rule has the name {:?}", self.rule);
        let mut report = Report::of(&self.algorithms);
        for rule in RULES.iter().filter(|rule| is_asked_for(rule.name)) {
            let trial = async {
                let clock = ManualClock::new();
                let store = make(clock.clone()).await;
                (rule.test)(Trial::new(store, clock, &self.algorithms)).await;
            };
            report.try_out(rule.name, trial).await;
        }
        report
    }
}

impl Default for Conformance {
    fn default() -> Self {
        Self::new()
    }
}

/// Makes a `#[tokio::test]` of each rule that a store must keep, so that a failing rule is a failing test.
///
/// The first argument makes the store, as for [`assert_conformance`](crate::testing::assert_conformance). The second one, a
/// [`Conformance`](crate::testing::Conformance), may be left out. It needs tokio with the features `macros` and `rt`.
///
/// ```
/// # #[cfg(test)]
/// mod my_store {
///     use tower_sliding_window::{MemoryStore, conformance_tests};
///
///     conformance_tests!(async |clock| MemoryStore::builder().clock(&clock).build());
/// }
/// ```
#[macro_export]
macro_rules! conformance_tests {
    ($make:expr) => {
        $crate::conformance_tests!($make, $crate::testing::Conformance::new());
    };
    ($make:expr, $conformance:expr) => {
        $crate::__conformance_rules! { tests ($make, $conformance) }
    };
}
