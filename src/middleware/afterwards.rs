//! What is done between the service's response and the client.

use std::{future::Future, pin::Pin, sync::Arc};

use http::{Response, request, response};

use super::{
    claim::Record,
    headers::Figures,
    limits::Limits,
    outcome::Outcome,
    policy::{Admission, Policy},
    shadow::ShadowRefusals,
};
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    settlement::{Settled, Settlement},
    store::Store,
};

/// What is done with a response of which more is to be said than figures. Most have none, so it is in a box.
pub(super) struct Afterwards<S, R> {
    policy: Arc<Policy<S, R, Limits>>,
    admitted: Option<Admitted>,
    shadow: Option<ShadowRefusals>,
}

/// An admission that may be settled.
struct Admitted {
    check: Check,
    /// Of which limit of the layer each charge of the check is.
    places: Vec<usize>,
    decision: Decision,
    request: request::Parts,
}

/// The one thing here that cannot be named: what a limiter does for a settlement.
pub(super) type Work = Pin<Box<dyn Future<Output = Result<Settled, Error>> + Send>>;

impl<S, R> Afterwards<S, R> {
    /// What remains to be done for a request that is let through, if anything does. `request` is its parts, to keep.
    pub(super) fn of(
        policy: &Arc<Policy<S, R, Limits>>,
        record: Option<Box<Record>>,
        admission: &Admission,
        request: impl FnOnce() -> request::Parts,
    ) -> Option<Box<Self>> {
        let decision = if let Admission::Decided(decision) = admission { Some(decision) } else { None };
        let (kept, left_out) = match record.map(|record| *record) {
            Some(Record { check, places, left_out }) => (check.map(|check| (check, places)), left_out),
            None => (None, Vec::new()),
        };
        let shadow = policy.shadow(decision, left_out);
        let admitted = kept.zip(decision).and_then(|((check, places), decision)| {
            let settles =
                places.iter().any(|place| policy.limits.get(*place).is_some_and(|limit| limit.settles().is_some()));
            settles.then(|| Admitted { check, places, decision: decision.clone(), request: request() })
        });
        let is_needed = shadow.is_some() || admitted.is_some();
        is_needed.then(|| Box::new(Self { policy: Arc::clone(policy), admitted, shadow }))
    }

    /// Begins what takes time, if there is such a thing.
    pub(super) fn begin<B>(&self, response: Response<B>) -> (Response<B>, Option<Work>)
    where
        S: Store,
    {
        let Some(admitted) = &self.admitted else { return (response, None) };
        let (parts, body) = response.into_parts();
        let work = admitted.settlement(&self.policy.limits, &parts).map(|settlement| -> Work {
            let limiter = self.policy.limiter.clone();
            Box::pin(async move { limiter.settle(settlement).await })
        });
        (Response::from_parts(parts, body), work)
    }

    /// The figures after a settlement.
    pub(super) fn end(&self, settled: Result<Settled, Error>) -> Option<Figures> {
        let events = &self.policy.settings.events;
        match settled {
            Ok(settled) => {
                if !settled.is_known() && self.admitted.as_ref().is_some_and(Admitted::is_leased) {
                    events.settled_late();
                }
                Some(Figures::of(settled.decision(), self.policy.settings.reset_format))
            }
            Err(error) => {
                events.not_settled(&error);
                None
            }
        }
    }

    /// Writes what is to be said of the shadow.
    pub(super) fn write<B>(self, response: &mut Response<B>) {
        if let Some(shadow) = self.shadow {
            shadow.write(response, self.policy.settings.shadow_header.as_ref());
        }
    }
}

impl Admitted {
    /// What is to be settled, if something is: it has cost something else, or would be given back.
    fn settlement(&self, limits: &Limits, response: &response::Parts) -> Option<Settlement> {
        let mut is_due = false;
        let charged = self.check.charges().zip(&self.places).zip(self.decision.statuses());
        let costs: Vec<Option<u64>> = charged
            .map(|((charge, place), status)| {
                let settle = limits.get(*place).and_then(|limit| limit.settles())?;
                // Where the shadow would have refused, nothing is counted.
                if charge.cost() == 0 || status.retry_after().is_some() {
                    return None;
                }
                let cost = settle(&Outcome::new(&self.request, response, charge.cost()));
                is_due |= cost != charge.cost() || charge.lease() < Some(charge.limit().window());
                Some(cost)
            })
            .collect();
        let mut costs = costs.into_iter();
        is_due.then(|| Settlement::new(self.check.clone(), &self.decision, |_| costs.next().flatten()))
    }

    /// Whether what is not settled is given back before it would leave its window.
    fn is_leased(&self) -> bool {
        self.check.charges().any(|charge| charge.lease().is_some_and(|lease| lease < charge.limit().window()))
    }
}
