//! The cost of a request that is dropped before its response: see
//! [`settle_dropped`](super::KeyedLimit::settle_dropped).

use std::{future::poll_fn, pin::pin, sync::Arc};

use super::{
    asking::{Asked, Asking},
    claim::{Origin, Record},
    errand::Errand,
    events::Events,
    settling::Due,
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    limiter::{AskStore, Limiter},
    store::Store,
};

/// What a limit says of a dropped request.
#[derive(Clone, Copy, Debug)]
pub(super) enum WhenDropped {
    /// It stays charged, since the limit does not settle.
    StaysCharged,
    /// It stays charged until its lease ends, if anything was charged.
    KeepsLease,
    /// It has cost so many units, at most what was charged, if anything was.
    Costs(u64),
}

/// Settles dropped requests.
pub(super) struct Dropping<S> {
    limiter: Limiter<S>,
    /// What the limits of the layer say, by their places.
    limits: Arc<[WhenDropped]>,
    events: Arc<Events>,
}

impl<S: Store> Dropping<S> {
    pub(super) fn new(limiter: Limiter<S>, limits: Arc<[WhenDropped]>, events: Arc<Events>) -> Self {
        Self { limiter, limits, events }
    }

    /// Settles an admitted request when it is dropped, if there is something to settle.
    pub(super) fn guard(&self, check: &Check, origins: &[Origin], decision: &Decision) -> Option<Errand<()>> {
        let cost = |charge: &Charge, origin: &Origin| match self.limits.get(origin.place)? {
            WhenDropped::StaysCharged => Some(origin.cost),
            WhenDropped::KeepsLease => None,
            WhenDropped::Costs(units) if charge.takes_nothing() => Some(*units),
            WhenDropped::Costs(units) => Some(charge.cost().min(*units)),
        };
        let due = Due::of(check, origins, decision, cost, |_, _| None)?;
        let (limiter, events) = (self.limiter.clone(), Arc::clone(&self.events));
        Some(Errand::new(async move {
            if let Err(error) = due.settle(&limiter).await {
                events.not_settled(&error);
            }
        }))
    }

    /// Follows up a question to the store, also if the request is dropped meanwhile: it may be counted by then.
    pub(super) fn follow_up(self, undecided: AskStore<S>, record: Option<Box<Record>>) -> Errand<Asked> {
        let limiter = self.limiter.clone();
        self.follow_up_asking(Box::pin(async move {
            let mut undecided = pin!(undecided);
            let decision = poll_fn(|cx| undecided.as_mut().poll(&limiter, cx)).await;
            Asked { outcome: decision.map(Some), record, waited: undecided.waited() }
        }))
    }

    pub(super) fn follow_up_asking(self, asking: Asking) -> Errand<Asked> {
        Errand::new(async move {
            let mut asked = asking.await;
            if let (Ok(Some(decision)), Some(record)) = (&asked.outcome, &mut asked.record)
                && decision.is_allowed()
                && let Some(check) = &record.check
            {
                record.dropped = self.guard(check, &record.origins, decision);
            }
            asked
        })
    }
}
