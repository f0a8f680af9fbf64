//! The outcome of the conformance suite: the rules that a store keeps, and those that it breaks.

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::Poll,
    time::Duration,
};

use tokio::time::timeout;

use crate::algorithm::Algorithm;

/// Longer than any rule takes on a store that needs 10 ms for a check.
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// The rules that a store keeps and breaks. Its `Display` lists the broken ones, each with its first failed assertion.
#[derive(Clone, Debug, Default)]
#[must_use = "a report fails no test by itself: see `assert_kept`"]
pub struct Report {
    kept: Vec<&'static str>,
    broken: Vec<BrokenRule>,
    tries_other_algorithms: bool,
}

/// A rule that a store breaks.
#[derive(Clone, Debug)]
pub struct BrokenRule {
    name: &'static str,
    failure: String,
}

impl Report {
    /// The report of a suite that tries a store by these algorithms.
    pub(super) fn of(algorithms: &[Algorithm]) -> Self {
        let tries_other_algorithms = algorithms.iter().any(|algorithm| *algorithm != Algorithm::log());
        Self { tries_other_algorithms, ..Self::default() }
    }

    /// Tries out a rule, and adds its outcome.
    pub(super) async fn try_out(&mut self, name: &'static str, rule: impl Future<Output = ()>) {
        let outcome = timeout(TIME_LIMIT, failure_of(rule)).await;
        match outcome.unwrap_or_else(|_| Some(format!("it took longer than {TIME_LIMIT:?}"))) {
            None => self.kept.push(name),
            Some(failure) => self.broken.push(BrokenRule { name, failure }),
        }
    }

    /// Whether the store may have failed because it does not count by an algorithm.
    fn may_lack_an_algorithm(&self) -> bool {
        self.tries_other_algorithms && self.broken.iter().any(|rule| rule.failure.contains("Unavailable("))
    }

    /// The names of the rules that the store keeps.
    pub fn kept(&self) -> impl Iterator<Item = &'static str> {
        self.kept.iter().copied()
    }

    /// The rules that the store breaks.
    pub fn broken(&self) -> impl Iterator<Item = &BrokenRule> {
        self.broken.iter()
    }

    /// Fails the test if the store breaks a rule.
    ///
    /// # Panics
    ///
    /// If the store breaks a rule, with the names of all broken rules.
    #[track_caller]
    pub fn assert_kept(&self) {
        assert!(self.broken.is_empty(), "{self}");
    }
}

impl BrokenRule {
    /// The name of the rule, which says it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The message of the assertion that failed first.
    #[must_use]
    pub fn failure(&self) -> &str {
        &self.failure
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.kept, &*self.broken) {
            ([], [rule]) => write!(f, "the store breaks the rule {rule}")?,
            (kept, broken) => {
                write!(f, "the store keeps {} rules and breaks {}", kept.len(), broken.len())?;
                broken.iter().try_for_each(|rule| write!(f, "\n- {rule}"))?;
            }
        }
        if self.may_lack_an_algorithm() {
            f.write_str(
                "\nIf the store does not count by every algorithm, name its own by `Conformance::algorithms`.",
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for BrokenRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.failure)
    }
}

/// The message with which a rule panics. The panic ends here, so that the other rules are tried out as well.
async fn failure_of(rule: impl Future<Output = ()>) -> Option<String> {
    let mut rule = pin!(rule);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| rule.as_mut().poll(cx))) {
        Ok(poll) => poll.map(|()| None),
        Err(panic) => Poll::Ready(Some(message(&*panic))),
    })
    .await
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a text").to_owned()
}
