//! The policy of a layer: its limiter, limits and settings, and its plan for each request.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderName, request::Parts};

use super::{
    events::Events,
    headers::{Figures, HeaderSets, PartitionKeys},
    rejection::Rejection,
    request::{CheckDetails, Cost, Decider, DecisionFuture, DraftCharge, LimitChoices, Limits, RequestFilter},
};
use crate::{
    check::Check,
    decision::Decision,
    limiter::{FailureMode, Limiter},
};

/// Shared by all services of a layer.
#[derive(Clone)]
pub(super) struct Policy<R, L> {
    pub(super) limiter: Limiter,
    pub(super) limits: L,
    pub(super) responder: R,
    pub(super) settings: Settings,
}

/// The settings of a layer that have defaults.
#[derive(Clone, Default)]
pub(super) struct Settings {
    pub(super) filter: RequestFilter,
    pub(super) cost: Option<Arc<Cost>>,
    pub(super) failure_mode: FailureMode,
    /// Goes before `failure_mode`.
    pub(super) failure_mode_by: Option<Arc<FailureModeBy>>,
    pub(super) headers: HeaderSets,
    pub(super) partition_keys: Option<PartitionKeys>,
    pub(super) shadow_header: Option<HeaderName>,
    /// How long a request waits for capacity. `None` refuses it at once.
    pub(super) max_wait: Option<Duration>,
    pub(super) heeds_upstream: bool,
    pub(super) events: Arc<Events>,
}

/// The failure mode of a request of a cost.
type FailureModeBy = dyn Fn(&Parts, u64) -> FailureMode + Send + Sync;

/// The next step of a layer for a request.
pub(super) enum Plan {
    /// Responds in the service's place: the request is denied, has no key, or costs too much.
    Reject(Rejection),
    /// Calls the service: no limit charges the request.
    Forward(Option<Box<CheckDetails>>),
    /// Refuses a request without asking the store.
    Refuse { refusal: Decision, mode: FailureMode, details: Option<Box<CheckDetails>> },
    /// Decides a check: at once if the store can, otherwise when it replies.
    Decide { check: Check, mode: FailureMode, details: Option<Box<CheckDetails>> },
    /// Awaits a decision that needs a choice of limits, or may wait for capacity.
    Await(DecisionFuture),
}

impl<R> Policy<R, Limits> {
    #[inline]
    pub(super) fn plan(&self, request: &Parts) -> Plan {
        self.plan_or_reject(request).unwrap_or_else(Plan::Reject)
    }

    #[inline]
    fn plan_or_reject(&self, request: &Parts) -> Result<Plan, Rejection> {
        let Settings { filter, max_wait, heeds_upstream, events, .. } = &self.settings;
        if !filter.counts(request, events)? {
            return Ok(Plan::Forward(None));
        }
        let cost = self.settings.cost.as_ref().map_or(1, |cost| cost(request));
        let mode = self.failure_mode(request, cost);
        if self.limits.any_is_chosen {
            return self.plan_choice(request, cost, mode);
        }
        let builder = self.limits.check(request, cost, *heeds_upstream, self.partition_keys())?;
        let (check, details) = (builder.check, builder.details);
        Ok(match check {
            check if max_wait.is_some() => Plan::Await(self.decider(request, mode).decide(check, details)),
            Some(check) => Plan::Decide { check, mode, details },
            None => Plan::Forward(details),
        })
    }

    fn plan_choice(&self, request: &Parts, cost: u64, mode: FailureMode) -> Result<Plan, Rejection> {
        let heeds_upstream = self.settings.heeds_upstream;
        let drafts = self.limits.iter().map(|limit| limit.draft(request, cost, heeds_upstream));
        let drafts = drafts.collect::<Result<Vec<_>, _>>()?;
        if let Some((check, refusal)) = self.refuse_without_choice(&drafts) {
            let left_out: Vec<_> = drafts.into_iter().filter_map(DraftCharge::into_left_out).collect();
            let partition_keys = self.partition_keys().map(|keys| keys.of(&check)).unwrap_or_default();
            let details = CheckDetails { left_out, partition_keys, ..CheckDetails::default() };
            return Ok(Plan::Refuse { refusal, mode, details: Some(Box::new(details)) });
        }
        let choices = LimitChoices::begin(drafts, request, mode);
        Ok(Plan::Await(self.decider(request, mode).choose_and_decide(choices, self.limits.keeps_check(heeds_upstream))))
    }

    /// The check of the limits that need no choice, and its refusal, if that is known at once: then no limit is chosen. A layer
    /// that waits for capacity always chooses.
    fn refuse_without_choice<C>(&self, drafts: &[DraftCharge<C>]) -> Option<(Check, Decision)> {
        let mut charges = drafts.iter().filter_map(DraftCharge::charge).cloned();
        let first = charges.next().filter(|_| self.settings.max_wait.is_none())?;
        let mut check = Check::new(first);
        charges.for_each(|charge| check.add_distinct(charge));
        let refusal = self.limiter.refuse_now(&check)?;
        Some((check, refusal))
    }

    fn decider(&self, request: &Parts, mode: FailureMode) -> Decider {
        let Settings { max_wait, partition_keys, .. } = &self.settings;
        Decider::new(&self.limiter, mode, request).max_wait(*max_wait).partition_keys(partition_keys.clone())
    }
}

impl<R> Policy<R, Limits> {
    /// Limits in the shadow refuse nothing, even without a decision.
    fn failure_mode(&self, request: &Parts, cost: u64) -> FailureMode {
        let Settings { failure_mode, failure_mode_by, .. } = &self.settings;
        match failure_mode_by {
            _ if self.limits.all_are_shadow => FailureMode::Open,
            Some(mode_by) => mode_by(request, cost),
            None => *failure_mode,
        }
    }

    /// `None` if responses show no partition keys.
    fn partition_keys(&self) -> Option<&PartitionKeys> {
        self.settings.partition_keys.as_ref().filter(|_| self.settings.headers.has_rate_limit())
    }

    /// What clients see of the decision.
    #[inline]
    pub(super) fn figures(&self, decision: &Decision, details: Option<&CheckDetails>) -> Figures {
        let partition_keys = || details.map(|details| details.partition_keys.clone()).unwrap_or_default();
        Figures::of(self.settings.headers, decision, partition_keys)
    }
}

impl<R, L: fmt::Debug> fmt::Debug for Policy<R, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { filter, failure_mode, failure_mode_by, headers, .. } = &self.settings;
        let failure_mode: &dyn fmt::Debug = if failure_mode_by.is_some() { &"by request" } else { failure_mode };
        f.debug_struct("Policy")
            .field("limiter", &self.limiter)
            .field("limits", &self.limits)
            .field("filter", filter)
            .field("failure_mode", failure_mode)
            .field("headers", headers)
            .finish_non_exhaustive()
    }
}
