//! The policy of a layer: its limiter, limits and settings, and its plan for each request.

use std::{fmt, sync::Arc, time::Duration};

use http::request::Parts;

use super::{
    events::Events,
    headers::{HeaderSets, PartitionKeys},
    rejection::Rejection,
    request::{
        CheckBuilder, CheckDetails, Cost, Decided, Decider, DecisionFuture, DraftCharge, Limits, RequestFilter,
        time_waited,
    },
};
use crate::{
    check::Check,
    decision::Decision,
    limiter::{DecideNow, FailureMode, Limiter},
};

/// Shared by all services of a layer.
#[derive(Clone)]
pub(super) struct Policy<R> {
    pub(super) limiter: Limiter,
    pub(super) limits: Arc<Limits>,
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
    /// How long a request waits for capacity. `None` refuses it at once.
    pub(super) max_wait: Option<Duration>,
    pub(super) events: Arc<Events>,
}

/// The failure mode of a request of a cost.
type FailureModeBy = dyn Fn(&Parts, u64) -> FailureMode + Send + Sync;

/// The next step of a layer for a request.
pub(super) enum Plan {
    /// Decided without waiting, or there is nothing to decide.
    Decided(Decided),
    /// Awaits the store, a choice of limits, or capacity.
    Await(DecisionFuture),
}

impl<R> Policy<R> {
    /// An error if the request is denied, has no key, or costs too much.
    #[inline]
    pub(super) fn plan(&self, request: &Parts) -> Result<Plan, Rejection> {
        let Settings { filter, max_wait, events, .. } = &self.settings;
        if !filter.counts(request, events)? {
            return Ok(Plan::Decided(Decided::at_once(Ok(None), FailureMode::default(), None)));
        }
        let cost = self.settings.cost.as_ref().map_or(1, |cost| cost(request));
        let mode = self.failure_mode(request, cost);
        if self.limits.any_is_chosen {
            return self.plan_choice(request, cost, mode);
        }
        let CheckBuilder { check, details, .. } = self.limits.check(request, cost, self.partition_keys())?;
        let Some(check) = check else { return Ok(Plan::Decided(Decided::at_once(Ok(None), mode, details))) };
        if let Some(max_wait) = *max_wait {
            return Ok(Plan::Await(self.decider(request, mode).wait(check, details, max_wait)));
        }
        Ok(match self.limiter.decide_now(check, mode.share()) {
            DecideNow::Decided(outcome) => Plan::Decided(Decided::at_once(outcome.map(Some), mode, details)),
            DecideNow::Ask(asking) => {
                let asking = asking.after(time_waited(request));
                Plan::Await(DecisionFuture::Ask { asking, mode, details })
            }
        })
    }

    fn plan_choice(&self, request: &Parts, cost: u64, mode: FailureMode) -> Result<Plan, Rejection> {
        let drafts = self.limits.all.iter().map(|limit| limit.draft(request, cost));
        let drafts = drafts.collect::<Result<Vec<_>, _>>()?;
        if let Some((check, refusal)) = self.refuse_without_choice(&drafts) {
            let left_out = drafts.into_iter().filter_map(|draft| match draft {
                DraftCharge::LeftOut(limit, rejection) => Some((limit, rejection)),
                _ => None,
            });
            let partition_keys = self.partition_keys().map(|keys| keys.of(&check)).unwrap_or_default();
            let details = CheckDetails { left_out: left_out.collect(), partition_keys, ..CheckDetails::default() };
            return Ok(Plan::Decided(Decided::at_once(Ok(Some(refusal)), mode, Some(Box::new(details)))));
        }
        let (decider, limits) = (self.decider(request, mode), Arc::clone(&self.limits));
        let partition_keys = self.settings.partition_keys.clone();
        Ok(Plan::Await(decider.choose_and_decide(limits, drafts, request, self.settings.max_wait, partition_keys)))
    }

    /// The check of the limits that need no choice, and its refusal, if that is known at once: then no limit is chosen. A layer
    /// that waits for capacity always chooses.
    fn refuse_without_choice(&self, drafts: &[DraftCharge]) -> Option<(Check, Decision)> {
        let mut charges = drafts.iter().filter_map(DraftCharge::charge).cloned();
        let first = charges.next().filter(|_| self.settings.max_wait.is_none())?;
        let mut check = Check::new(first);
        charges.for_each(|charge| check.add_distinct(charge));
        let refusal = self.limiter.refuse_now(&check)?;
        Some((check, refusal))
    }

    fn decider(&self, request: &Parts, mode: FailureMode) -> Decider {
        Decider { limiter: self.limiter.clone().with_share(mode.share()), mode, waited: time_waited(request) }
    }

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
}

impl<R> fmt::Debug for Policy<R> {
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
