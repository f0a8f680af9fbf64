//! From a request to its decision: whether the request is counted, under which limits, by which keys and costs.
//!
//! 1. A request whose key is on a list of denied keys gets 403. Otherwise, a request whose key is on a list of allowed keys,
//!    a skipped request, and a CORS preflight go to the service uncounted. All other requests are counted.
//! 2. A request without a key is on no list. A key that is present but cannot be read may be a denied key, so a list of denied
//!    keys rejects it with the status of its [`KeyError`](super::extract::KeyError). No list of allowed keys has it.
//! 3. Each layer waits for at most its own deadline, less what the request has waited in layers further out. If nothing is
//!    left, the layer still waits for 5 ms, so that a store that hangs does not turn off the limits on another store. So a
//!    request waits for at most the longest deadline of its layers, plus 5 ms for each layer that found nothing left.

mod check;
mod chosen;
mod cost;
pub(super) mod keyed_limit;
mod preflight;

use std::{pin::Pin, sync::Arc, time::Duration};

use http::{Method, request::Parts};

pub(super) use self::check::CheckDetails;
pub use self::keyed_limit::{Exchange, KeyedLimit};
use super::{headers::PartitionKeys, policy::Policy, rejection::Rejection};
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    limiter::{Asking, DecideNow, FailureMode},
    metrics,
};

/// How a request is decided.
pub(super) enum Plan {
    /// Without waiting, or there is nothing to decide.
    Decided(Decided),
    /// The store is asked about its check.
    Ask { asking: Asking, mode: FailureMode, details: Option<Box<CheckDetails>> },
    /// After a choice of limits, or a wait for capacity. In a box, since it may contain the future of a user's closure.
    Wait(Pin<Box<dyn Future<Output = Decided> + Send>>),
}

/// The outcome of a request's check.
pub(super) struct Decided {
    /// No decision if there was nothing to decide.
    pub(super) outcome: Result<Option<Decision>, Error>,
    pub(super) mode: FailureMode,
    pub(super) details: Option<Box<CheckDetails>>,
    /// How long the request has waited for decisions, in all layers so far, if it has waited for this one. A choice is no
    /// decision: it takes no time from layers further in.
    pub(super) waited: Duration,
}

impl Policy {
    /// An error if the request is denied, has no key, or costs too much.
    #[inline]
    pub(super) fn plan(self: &Arc<Self>, request: &Parts) -> Result<Plan, Rejection> {
        let at_once =
            |outcome, mode, details| Plan::Decided(Decided { outcome, mode, details, waited: Duration::ZERO });
        if !self.counts(request)? {
            return Ok(at_once(Ok(None), FailureMode::default(), None));
        }
        let cost = self.cost.as_ref().map_or(1, |cost| cost(request));
        let mode = self.failure_mode(request, cost);
        let is_plain = self.limits.iter().all(KeyedLimit::is_plain);
        let (check, details) = if is_plain && self.max_wait.is_none() && self.partition_keys().is_none() {
            (self.plain_check(request, cost)?, None)
        } else {
            let drafts = self.limits.iter().map(|limit| limit.draft(request, cost));
            let drafts = drafts.collect::<Result<Vec<_>, _>>()?;
            if self.max_wait.is_some() || self.any(KeyedLimit::is_chosen) {
                return Ok(self.choose_and_decide(drafts, request, mode));
            }
            let mut details = Box::default();
            (self.check(drafts, &mut details)?, Some(details))
        };
        let Some(check) = check else { return Ok(at_once(Ok(None), mode, details)) };
        Ok(match self.limiter.decide_now(check, mode.share()) {
            DecideNow::Decided(outcome) => at_once(outcome.map(Some), mode, details),
            DecideNow::Ask(asking) => Plan::Ask { asking: asking.after(time_waited(request)), mode, details },
        })
    }

    /// Whether the request is counted, unless it is denied.
    #[inline]
    fn counts(&self, request: &Parts) -> Result<bool, Rejection> {
        for list in &self.denied {
            if list(request).map_err(Rejection::NoKey)? {
                return Err(Rejection::Denied);
            }
        }
        let is_preflight = || request.method == Method::OPTIONS && preflight::is_preflight(&request.headers);
        let mistake = |error| {
            self.events.mistake(&Rejection::NoKey(error));
            false
        };
        let uncounted = if !self.counts_preflights && is_preflight() {
            "preflight"
        } else if self.skipped.iter().any(|skips| skips(request)) {
            "skipped"
        } else if self.exempt.iter().any(|list| list(request).unwrap_or_else(mistake)) {
            "allowed"
        } else {
            return Ok(true);
        };
        metrics::uncounted(uncounted, self.events.layer());
        Ok(false)
    }

    /// Limits in the shadow refuse nothing, even without a decision.
    #[inline]
    fn failure_mode(&self, request: &Parts, cost: u64) -> FailureMode {
        match &self.failure_mode_by {
            _ if self.limits.iter().all(|limit| limit.is_shadow) => FailureMode::Open,
            Some(mode_by) => mode_by(request, cost),
            None => self.failure_mode,
        }
    }

    /// The check of limits without options, which most layers have: its response needs no details.
    #[inline]
    fn plain_check(&self, request: &Parts, cost: u64) -> Result<Option<Check>, Rejection> {
        let mut check = None::<Check>;
        for limit in &self.limits {
            let Some(charge) = limit.plain_charge(request, cost)? else { continue };
            match &mut check {
                Some(check) => check.add_distinct(charge),
                none => *none = Some(Check::new(charge)),
            }
        }
        Ok(check)
    }

    /// `None` if responses show no partition keys.
    fn partition_keys(&self) -> Option<&PartitionKeys> {
        self.partition_keys.as_ref().filter(|_| self.headers.has_rate_limit())
    }
}

/// In a request's extensions, for the layers further in.
#[derive(Clone, Copy)]
struct TimeWaited(Duration);

/// How long a request has waited for decisions in the layers further out.
fn time_waited(request: &Parts) -> Duration {
    request.extensions.get().map(|TimeWaited(time)| *time).unwrap_or_default()
}

pub(super) fn record_time_waited(request: &mut Parts, time: Duration) {
    if !time.is_zero() {
        request.extensions.insert(TimeWaited(time));
    }
}
