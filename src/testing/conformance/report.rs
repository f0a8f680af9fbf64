//! The outcome of the conformance suite: the rules that a store keeps, and those that it breaks.

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::Poll,
};

/// The rules that a store keeps and breaks. Its `Display` lists the broken ones, each with its first failed assertion.
#[derive(Clone, Debug, Default)]
#[must_use = "a report fails no test by itself: see `assert_kept`"]
pub struct Report {
    kept: Vec<&'static str>,
    broken: Vec<BrokenRule>,
}

/// A rule that a store breaks.
#[derive(Clone, Debug)]
pub struct BrokenRule {
    name: &'static str,
    failure: String,
}

impl Report {
    /// Tries out a rule, and adds its outcome.
    pub(super) async fn try_out(&mut self, name: &'static str, rule: impl Future<Output = ()>) {
        match failure_of(rule).await {
            None => self.kept.push(name),
            Some(failure) => self.broken.push(BrokenRule { name, failure }),
        }
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
        let (kept, broken) = (self.kept.len(), self.broken.len());
        write!(f, "the store keeps {kept} rules and breaks {broken}")?;
        self.broken.iter().try_for_each(|rule| write!(f, "\n- {rule}"))
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
