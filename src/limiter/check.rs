//! Checks of a limiter, and the future of its decision.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::Instant;

use super::{
    decide::{AskStore, DecideNow},
    settings::Limiter,
};
use crate::{
    check::{Charge, Check, NeverFits},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
};

pin_project! {
    /// The future of a limiter's decision.
    #[must_use = "futures do nothing unless polled"]
    pub struct Decide {
        limiter: Limiter,
        waited: Duration,
        #[pin]
        state: DecideState,
    }
}

pin_project! {
    #[project = DecideStateProjection]
    enum DecideState {
        NeverFits { error: Option<NeverFits> },
        Unpolled { check: Option<Check> },
        AskingStore { #[pin] decision: AskStore },
    }
}

impl Limiter {
    /// Spends `cost` units of `limit` for `key`, if they are left.
    ///
    /// # Errors
    ///
    /// [`Error::NeverFits`] if the cost is above the limit, [`Error::TimedOut`] past the deadline,
    /// [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has failed repeatedly.
    pub fn check(&self, limit: &Limit, key: impl Into<Key>, cost: u64) -> Decide {
        match Charge::new(limit.clone(), key, cost) {
            Ok(charge) => self.check_all(Check::new(charge)),
            Err(error) => self.decide(DecideState::NeverFits { error: Some(error) }, Duration::ZERO),
        }
    }

    /// Decides several charges together, all or nothing.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly.
    pub fn check_all(&self, check: Check) -> Decide {
        self.decide(DecideState::Unpolled { check: Some(check) }, Duration::ZERO)
    }

    /// Shows how `limit` stands for `key`, without spending anything. Look at [`remaining`](Decision::remaining): the
    /// decision itself is never a refusal, even if nothing is left.
    ///
    /// Units that processes hold in [blocks](crate::limit::blocks) count as used.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly.
    pub fn peek(&self, limit: &Limit, key: impl Into<Key>) -> Decide {
        self.check(limit, key, 0)
    }

    /// Decides for a request that has `waited` for other decisions, and adds the time that this one takes.
    pub(crate) async fn check_after(&self, check: Check, waited: &mut Duration) -> Result<Decision, Error> {
        let begun = Instant::now();
        let outcome = self.decide(DecideState::Unpolled { check: Some(check) }, *waited).await;
        *waited = waited.saturating_add(begun.elapsed());
        outcome
    }

    fn decide(&self, state: DecideState, waited: Duration) -> Decide {
        Decide { limiter: self.clone(), waited, state }
    }
}

impl Future for Decide {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (limiter, waited, mut state) = (&*this.limiter, *this.waited, this.state);
        loop {
            let asking = match state.as_mut().project() {
                DecideStateProjection::NeverFits { error } => match error.take() {
                    Some(error) => return Poll::Ready(Err(error.into())),
                    None => None,
                },
                DecideStateProjection::Unpolled { check } => match check.take() {
                    Some(check) => match limiter.decide_now(check, limiter.share, || waited) {
                        DecideNow::Decided(outcome) => return Poll::Ready(outcome),
                        DecideNow::AskStore(decision) => Some(DecideState::AskingStore { decision }),
                    },
                    None => None,
                },
                DecideStateProjection::AskingStore { decision } => return decision.poll(limiter, cx),
            };
            state.set(asking.unwrap_or_else(|| panic!("`Decide` polled after completion")));
        }
    }
}

impl fmt::Debug for Decide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decide").finish_non_exhaustive()
    }
}
