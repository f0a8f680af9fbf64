//! The status of a charge after a decision, as the model expects it.

use std::time::Duration;

use tower_sliding_window::Decision;

use super::RETRY_RESERVED_AFTER;

/// The status of a charge after the decision, in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelStatus {
    pub(crate) used: u64,
    /// The reserved part of the used units.
    pub(crate) reserved: u64,
    pub(crate) reset: u64,
    pub(crate) retry: Option<u64>,
    /// Whether the charge would be admitted if all reserved units returned.
    pub(crate) by_reservations: bool,
}

/// The wait of a refused charge.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    /// If all reserved units returned now.
    pub(super) sure: u64,
    /// If no reserved units return before their lease ends.
    pub(super) longest: u64,
}

impl Refusal {
    /// The retry time: at most the time after which reservations are checked again, but at least
    /// the certain wait.
    pub(super) fn retry_time(self) -> u64 {
        self.longest.min(self.sure.max(RETRY_RESERVED_AFTER))
    }
}

/// The status that a charge must have after the decision.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(super) exact: ModelStatus,
    /// When the last entry leaves that the store reads for a retry time, if that is before the
    /// exact time.
    pub(super) not_before: Option<u64>,
}

impl Expected {
    /// The status that the store must report. Its figures are exact. Only a retry time for which
    /// the store would have to read too many entries may be early, but not before the last of the
    /// entries that it reads has left.
    pub(crate) fn given(&self, reported: &ModelStatus) -> ModelStatus {
        let retry = match (self.not_before, reported.retry, self.exact.retry) {
            (Some(least), Some(reported), Some(exact)) if (least..=exact).contains(&reported) => Some(reported),
            _ => self.exact.retry,
        };
        ModelStatus { retry, ..self.exact.clone() }
    }

    pub(crate) fn all_given(expected: &[Self], reported: &[ModelStatus]) -> Vec<ModelStatus> {
        assert_eq!(expected.len(), reported.len());
        expected.iter().zip(reported).map(|(expected, reported)| expected.given(reported)).collect()
    }
}

impl ModelStatus {
    pub(crate) fn all_of(decision: &Decision) -> Vec<Self> {
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap();
        decision
            .statuses()
            .map(|status| Self {
                used: status.used(),
                reserved: status.reserved(),
                reset: micros(status.reset_after()),
                retry: status.retry_after().map(micros),
                by_reservations: status.is_refused_by_reservations(),
            })
            .collect()
    }
}
