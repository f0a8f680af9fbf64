//! Settles requests that are dropped before their response: see [`settle_dropped`](crate::KeyedLimit::settle_dropped).

use std::{future::poll_fn, pin::pin, sync::Arc};

use super::{
    super::{
        events::{Event, Events},
        policy::Policy,
        request::{ChargedLimit, CheckDetails, Decided, DecisionFuture, Detachable, DroppedCost, Limits},
    },
    settlements::Settlements,
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    limiter::{AskStore, FailureMode, Limiter},
};

/// It has no part of the policy's type `R`, which need not be `'static`.
pub(crate) struct DroppedRequests {
    limiter: Limiter,
    /// One for each limit of the layer.
    costs: Arc<[DroppedCost]>,
    events: Arc<Events>,
}

impl DroppedRequests {
    /// `costs` are those of the limits of the policy.
    pub(crate) fn new<R>(policy: &Policy<R, Limits>, costs: &Arc<[DroppedCost]>) -> Self {
        let events = Arc::clone(&policy.settings.events);
        Self { limiter: policy.limiter.clone(), costs: Arc::clone(costs), events }
    }

    /// Settles an admitted request when it is dropped. `None` if it has nothing to settle.
    pub(super) fn guard(&self, check: &Check, charged: &[ChargedLimit], decision: &Decision) -> Option<Detachable<()>> {
        let cost = |charge: &Charge, charged: &ChargedLimit| match self.costs.get(charged.limit_index)? {
            DroppedCost::Charge => Some(charged.cost),
            DroppedCost::Lease => None,
            DroppedCost::Units(units) if charge.takes_nothing() => Some(*units),
            DroppedCost::Units(units) => Some(charge.cost().min(*units)),
        };
        let settlements = Settlements::new(check, charged, decision, cost, |_, _| None)?;
        let (limiter, events) = (self.limiter.clone(), Arc::clone(&self.events));
        Some(Detachable::new(async move {
            if let Err(error) = settlements.apply(&limiter).await {
                events.log(Event::NotSettled(&error));
            }
        }))
    }

    /// Completes the store's decision even if the request is dropped, since it may then be counted.
    pub(crate) fn complete_asking(
        self,
        decision: AskStore,
        mode: FailureMode,
        details: Option<Box<CheckDetails>>,
    ) -> DecisionFuture {
        let limiter = self.limiter.clone();
        self.complete(Box::pin(async move {
            let mut decision = pin!(decision);
            let outcome = poll_fn(|cx| decision.as_mut().poll(&limiter, cx)).await.map(Some);
            Decided { outcome, mode, details, waited: decision.waited() }
        }))
    }

    /// Completes a decision even if the request is dropped, since it may then be counted.
    pub(crate) fn complete(self, decision: DecisionFuture) -> DecisionFuture {
        Box::pin(Detachable::new(async move {
            let mut decided = decision.await;
            self.add_guard(&mut decided);
            decided
        }))
    }

    fn add_guard(&self, decided: &mut Decided) {
        if let (Ok(Some(decision)), Some(details)) = (&decided.outcome, &mut decided.details)
            && decision.is_allowed()
            && let Some(check) = &details.check
        {
            details.drop_guard = self.guard(check, &details.charged, decision);
        }
    }
}
