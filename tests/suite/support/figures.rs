//! The figures of a status, to compare them.

use std::time::Duration;

use tower_sliding_window::{Decision, decision::LimitStatus};

/// How one limit stands after a decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) used: u64,
    /// The reserved part of the used units.
    pub(crate) reserved: u64,
    pub(crate) reset: Duration,
    pub(crate) retry: Option<Duration>,
    /// True if the charge would be admitted if all reserved units returned.
    pub(crate) is_by_reservations: bool,
}

impl Figures {
    pub(crate) fn of(status: &LimitStatus) -> Self {
        Self {
            used: status.used,
            reserved: status.reserved,
            reset: status.reset_after(),
            retry: status.retry_after(),
            is_by_reservations: status.is_refused_by_reservations(),
        }
    }

    pub(crate) fn all_of(decision: &Decision) -> Vec<Self> {
        decision.statuses().map(Self::of).collect()
    }
}
