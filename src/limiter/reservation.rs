//! Units that are spent before it is known how many they will be.

use std::fmt;

use super::Limiter;
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    settlement::{Settled, Settlement},
    store::Store,
};

/// Units that are reserved until they are settled: made by [`Limiter::reserve`].
///
/// It can go along with what spends the units, such as the body of a response that is streamed: the example `llm_tokens` does
/// that. Dropped without being settled, as when a process ends, they count until the lease ends, and are then given back.
#[must_use = "a reservation counts at its estimate until it is settled"]
pub struct Reservation<S> {
    limiter: Limiter<S>,
    check: Check,
    decision: Decision,
}

impl<S: Store> Reservation<S> {
    pub(super) fn new(limiter: Limiter<S>, check: Check, decision: Decision) -> Self {
        Self { limiter, check, decision }
    }

    /// The decision by which the units were reserved.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Sets what it has really cost, which may be more or less, or nothing. Sent again, it counts once. One that comes
    /// after the lease still counts what was used, as long as the admission would be in its window:
    /// [`was_applied`](Settled::was_applied) tells.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly. It may be tried again.
    pub async fn settle(&self, cost: u64) -> Result<Settled, Error> {
        self.limiter.settle(Settlement::new(self.check.clone(), &self.decision, |_| Some(cost))).await
    }

    /// Gives all of it back.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    pub async fn release(&self) -> Result<Settled, Error> {
        self.settle(0).await
    }
}

impl<S> fmt::Debug for Reservation<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("decision", &self.decision).finish_non_exhaustive()
    }
}
