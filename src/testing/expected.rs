//! The reply that the oracle expects, and how a store's reply differs from it.

use std::time::{Duration, SystemTime};

use crate::{
    clock::micros,
    decision::{Decision, LimitStatus},
};

/// The reply that the oracle expects.
pub(super) struct Expected {
    pub(super) decision: Decision,
    /// The earliest retry time of each status. A store looks at the first hundred entries only: so it may report an earlier time if more
    /// have to leave, but not before the hundredth has left.
    pub(super) earliest: Vec<Refusal>,
    /// A repeated check may have lost its exact time.
    pub(super) is_timed: bool,
}

/// How long a charge does not fit, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Refusal {
    /// If all reserved units are given back now; 0 if it fits then.
    pub(super) least: u64,
    /// If nothing is given back before its lease ends.
    pub(super) most: u64,
}

impl Expected {
    /// What differs in the store's decision, in words; `None` if nothing does.
    pub(super) fn difference(&self, got: &Decision) -> Option<String> {
        let verdict = |decision: &Decision| if decision.is_allowed() { "an admission" } else { "a refusal" };
        if got.is_allowed() != self.decision.is_allowed() {
            let (used, limit) = (got.used(), got.binding().limit());
            let found = format!("{} with {used} used units of {:?}", verdict(got), limit.name());
            return Some(format!("expected {}, got {found}", verdict(&self.decision)));
        }
        if self.is_timed && got.at() != self.decision.at() {
            let [expected, got] = [self.decision.at(), got.at()]
                .map(|at| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
                .map(micros);
            return Some(format!("expected a decision of the time {expected}, got one of {got}"));
        }
        let statuses = self.decision.statuses().zip(&self.earliest).zip(got.statuses());
        statuses.map(|((expected, earliest), got)| difference_of_statuses(expected, got, *earliest)).find_map(|it| it)
    }
}

fn difference_of_statuses(expected: &LimitStatus, got: &LimitStatus, earliest: Refusal) -> Option<String> {
    let name = expected.limit().name();
    if got.limit().name() != name {
        return Some(format!("expected the status of {name:?}, got that of {:?}", got.limit().name()));
    }
    let waits = |status: &LimitStatus| status.waits().map(|(least, most)| [most, least]);
    let [first, last] = [earliest.most, earliest.least].map(Duration::from_micros);
    let is_early_enough = waits(expected).zip(waits(got)).is_some_and(|(expected, got)| {
        (first..=expected[0]).contains(&got[0]) && (last..=expected[1]).contains(&got[1])
    });
    let figures = |status: &LimitStatus| {
        let retry = waits(if is_early_enough { expected } else { status });
        let [most, least] = [0, 1].map(|place| retry.map(|waits| micros(waits[place])));
        [
            ("used units", Some(status.used())),
            ("reserved units", Some(status.reserved())),
            ("microseconds until the retry time", most),
            ("microseconds until the retry time without reserved units", least),
            ("microseconds until the reset time", Some(micros(status.reset_after()))),
        ]
    };
    let mut figures = figures(expected).into_iter().zip(figures(got));
    let ((what, expected), (_, got)) = figures.find(|(expected, got)| expected != got)?;
    let number = |figure: Option<u64>| figure.map_or_else(|| "none".to_owned(), |figure| figure.to_string());
    Some(format!("expected {} {what} of {name:?}, got {}", number(expected), number(got)))
}
