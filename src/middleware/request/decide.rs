//! Decisions that a request waits for, and how long it waits for them.
//!
//! Each layer waits for at most its own deadline, less what the request has waited in layers further out. If nothing is
//! left, the layer still waits for 5 ms, so that a store that hangs does not turn off the limits on another store. So a
//! request waits for at most the longest deadline of its layers, plus 5 ms for each layer that found nothing left.

use std::{future::Future, pin::Pin, time::Duration};

use http::request::Parts;
use tokio::time::Instant;

use super::{
    super::headers::PartitionKeys,
    charge::LimitChoices,
    limits::{CheckBuilder, CheckDetails},
};
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    limiter::{FailureMode, Limiter},
};

/// In a box, since it may contain the future of a user's closure.
pub(crate) type DecisionFuture = Pin<Box<dyn Future<Output = Decided> + Send>>;

/// The outcome of a request's check.
pub(crate) struct Decided {
    /// No decision if there was nothing to decide.
    pub(crate) outcome: Result<Option<Decision>, Error>,
    pub(crate) mode: FailureMode,
    pub(crate) details: Option<Box<CheckDetails>>,
    /// How long the request has waited for decisions, in all layers so far, if it has waited for this one. A choice is no
    /// decision: it takes no time from layers further in.
    pub(crate) waited: Duration,
}

impl Decided {
    /// An outcome without any wait.
    #[inline]
    pub(crate) fn at_once(
        outcome: Result<Option<Decision>, Error>,
        mode: FailureMode,
        details: Option<Box<CheckDetails>>,
    ) -> Self {
        Self { outcome, mode, details, waited: Duration::ZERO }
    }
}

/// Decides checks that need more than one reply of the store, or a choice of limits first.
pub(crate) struct Decider {
    limiter: Limiter,
    mode: FailureMode,
    max_wait: Option<Duration>,
    partition_keys: Option<PartitionKeys>,
    waited: Duration,
}

impl Decider {
    pub(crate) fn new(limiter: &Limiter, mode: FailureMode, request: &Parts) -> Self {
        let limiter = limiter.clone().with_share(mode.share());
        Self { limiter, mode, max_wait: None, partition_keys: None, waited: time_waited(request) }
    }

    /// Lets a request wait in line for capacity.
    pub(crate) fn max_wait(self, max_wait: Option<Duration>) -> Self {
        Self { max_wait, ..self }
    }

    /// Shows the partition keys of a check in its response.
    pub(crate) fn partition_keys(self, partition_keys: Option<PartitionKeys>) -> Self {
        Self { partition_keys, ..self }
    }

    pub(crate) fn decide(mut self, check: Option<Check>, details: Option<Box<CheckDetails>>) -> DecisionFuture {
        Box::pin(async move {
            let outcome = self.outcome(check).await;
            Decided { outcome, mode: self.mode, details, waited: self.waited }
        })
    }

    pub(crate) fn choose_and_decide(mut self, mut choices: LimitChoices, keeps_check: bool) -> DecisionFuture {
        Box::pin(async move {
            let begun = Instant::now();
            let chosen = choices.choose(&self.limiter, self.waited).await;
            let choice = begun.elapsed();
            let (drafts, unchosen) = choices.take();
            let mut builder = CheckBuilder::with_unchosen(unchosen, keeps_check);
            let outcome = match chosen.and_then(|()| builder.add_all(drafts)) {
                Ok(()) => {
                    if let Some(keys) = &self.partition_keys {
                        builder.add_partition_keys(keys);
                    }
                    // The choice and the decision share one deadline.
                    self.waited = self.waited.saturating_add(choice);
                    let outcome = self.outcome(builder.check).await;
                    self.waited = self.waited.saturating_sub(choice);
                    outcome
                }
                Err(error) => Err(error),
            };
            Decided { outcome, mode: self.mode, details: builder.details, waited: self.waited }
        })
    }

    async fn outcome(&mut self, check: Option<Check>) -> Result<Option<Decision>, Error> {
        let Some(check) = check else { return Ok(None) };
        match self.max_wait {
            Some(max_wait) => self.limiter.acquire_after(check, max_wait, &mut self.waited).await.map(Some),
            None => self.limiter.check_after(check, &mut self.waited).await.map(Some),
        }
    }
}

/// In a request's extensions, for the layers further in.
#[derive(Clone, Copy)]
struct TimeWaited(Duration);

/// How long a request has waited for decisions in the layers further out.
pub(crate) fn time_waited(request: &Parts) -> Duration {
    request.extensions.get().map(|TimeWaited(time)| *time).unwrap_or_default()
}

pub(crate) fn record_time_waited(request: &mut Parts, time: Duration) {
    if !time.is_zero() {
        request.extensions.insert(TimeWaited(time));
    }
}
