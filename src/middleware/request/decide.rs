//! Decisions that a request waits for, and how long it waits for them.
//!
//! Each layer waits for at most its own deadline, less what the request has waited in layers further out. If nothing is
//! left, the layer still waits for 5 ms, so that a store that hangs does not turn off the limits on another store. So a
//! request waits for at most the longest deadline of its layers, plus 5 ms for each layer that found nothing left.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::request::Parts;
use tokio::time::Instant;

use super::{
    super::headers::PartitionKeys,
    check::{CheckBuilder, CheckDetails, Limits},
    keyed_limit::DraftCharge,
};
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    limiter::{Asking, FailureMode, Limiter},
};

/// A decision that a request waits for.
pub(crate) enum DecisionFuture {
    /// Asks the store about a check that could not be decided at once.
    Ask { asking: Asking, mode: FailureMode, details: Option<Box<CheckDetails>> },
    /// In a box, since it may contain the future of a user's closure.
    Other(Pin<Box<dyn Future<Output = Decided> + Send>>),
}

impl Future for DecisionFuture {
    type Output = Decided;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Decided> {
        match self.get_mut() {
            Self::Ask { asking, mode, details } => {
                let outcome = ready!(Pin::new(&mut *asking).poll(cx)).map(Some);
                Poll::Ready(Decided { outcome, mode: *mode, details: details.take(), waited: asking.waited() })
            }
            Self::Other(decision) => decision.as_mut().poll(cx),
        }
    }
}

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

/// Decides the check of a request that has to wait.
pub(crate) struct Decider {
    pub(crate) limiter: Limiter,
    pub(crate) mode: FailureMode,
    /// How long the request has waited in the layers further out.
    pub(crate) waited: Duration,
}

impl Decider {
    /// Lets a request wait in line for capacity.
    pub(crate) fn wait(
        mut self,
        check: Check,
        details: Option<Box<CheckDetails>>,
        max_wait: Duration,
    ) -> DecisionFuture {
        DecisionFuture::Other(Box::pin(async move {
            let outcome = self.limiter.acquire_after(check, max_wait, &mut self.waited).await.map(Some);
            Decided { outcome, mode: self.mode, details, waited: self.waited }
        }))
    }

    /// Chooses limits first. Choice and decision share one deadline.
    pub(crate) fn choose_and_decide(
        mut self,
        limits: Arc<Limits>,
        mut drafts: Vec<DraftCharge>,
        request: &Parts,
        max_wait: Option<Duration>,
        partition_keys: Option<PartitionKeys>,
    ) -> DecisionFuture {
        let choices = limits.begin_choices(&drafts, request);
        DecisionFuture::Other(Box::pin(async move {
            let (begun, mut unchosen) = (Instant::now(), None);
            let deadline = (&self.limiter, self.waited);
            let chosen = limits.choose(&mut drafts, choices, deadline, self.mode, &mut unchosen).await;
            let choice = begun.elapsed();
            let mut builder = CheckBuilder::new(limits.keeps_check());
            if unchosen.is_some() {
                builder.details().unchosen = unchosen;
            }
            if let Err(error) = chosen.and_then(|()| builder.add_all(drafts)) {
                let details = builder.details;
                return Decided { outcome: Err(error), mode: self.mode, details, waited: self.waited };
            }
            if let Some(keys) = &partition_keys {
                builder.add_partition_keys(keys);
            }
            let mut waited = self.waited.saturating_add(choice);
            let outcome = match (builder.check, max_wait) {
                (None, _) => Ok(None),
                (Some(check), Some(max_wait)) => {
                    self.limiter.acquire_after(check, max_wait, &mut waited).await.map(Some)
                }
                (Some(check), None) => self.limiter.decide(check, &mut waited).await.map(Some),
            };
            self.waited = waited.saturating_sub(choice);
            Decided { outcome, mode: self.mode, details: builder.details, waited: self.waited }
        }))
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
