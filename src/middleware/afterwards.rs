//! What is done between the service's response and the client.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::{Duration, SystemTime},
};

use http::{Response, request, response};

use super::{
    claim::Record, headers::Figures, limits::Limits, outcome::Outcome, policy::Policy, shadow::ShadowRefusals,
    upstream::closed_for,
};
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    limiter::Limiter,
    settlement::{Settled, Settlement},
    store::Store,
};

/// What is done with a response of which more is to be said than figures. Most have none, so it is in a box.
pub(super) struct Afterwards<S, R> {
    policy: Arc<Policy<S, R, Limits>>,
    admitted: Option<Admitted>,
    shadow: Option<ShadowRefusals>,
}

/// An admission of which more is to be known.
struct Admitted {
    check: Check,
    /// Of which limit of the layer each charge of the check is.
    places: Vec<usize>,
    decision: Decision,
    /// Where one of them settles.
    request: Option<request::Parts>,
}

/// In a box: what a limiter does in several steps cannot be named.
pub(super) type Work = Pin<Box<dyn Future<Output = Done> + Send>>;

/// What came of it.
pub(super) struct Done {
    settled: Option<Result<Settled, Error>>,
    closed: Result<(), Error>,
}

impl<S, R> Afterwards<S, R> {
    /// What remains to be done for a request that is let through, if anything does. `request` is its parts, to keep.
    pub(super) fn of(
        policy: &Arc<Policy<S, R, Limits>>,
        record: Option<Box<Record>>,
        decision: Option<&Decision>,
        request: impl FnOnce() -> request::Parts,
    ) -> Option<Box<Self>> {
        if record.is_none() && !policy.limits.traits().has_shadow {
            return None;
        }
        let (kept, left_out) = match record.map(|record| *record) {
            Some(Record { check, places, left_out }) => (check.map(|check| (check, places)), left_out),
            None => (None, Vec::new()),
        };
        let shadow = policy.shadow(decision, left_out);
        let admitted = kept.zip(decision).map(|((check, places), decision)| {
            let settles = |place: &usize| policy.limits.get(*place).is_some_and(|limit| limit.settles().is_some());
            let request = places.iter().any(settles).then(request);
            Admitted { check, places, decision: decision.clone(), request }
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
        let settlement = admitted.settlement(&self.policy.limits, &parts);
        let closing = if self.policy.settings.heeds_upstream { self.closing(admitted, &parts) } else { None };
        let is_any = settlement.is_some() || closing.is_some();
        let work = is_any.then(|| -> Work {
            let limiter = self.policy.limiter.clone();
            Box::pin(async move {
                let settled = match settlement {
                    Some(settlement) => Some(limiter.settle(settlement).await),
                    None => None,
                };
                let closed = match closing {
                    Some((limits, time)) => {
                        limiter.within(close(&limiter, limits, time)).await.and_then(|closed| closed)
                    }
                    None => Ok(()),
                };
                Done { settled, closed }
            })
        });
        (Response::from_parts(parts, body), work)
    }

    /// What an upstream wants to be closed, and for how long.
    fn closing(&self, admitted: &Admitted, response: &response::Parts) -> Option<(Vec<(Limit, Key)>, Duration)> {
        let time = closed_for(response.status, &response.headers, SystemTime::now())?;
        self.policy.settings.events.closes(time);
        let charged = admitted.check.charges().zip(&admitted.places).filter(|(charge, _)| !charge.is_shadow());
        let limits = charged.flat_map(|(charge, place)| {
            let limit = self.policy.limits.get(*place);
            let keys = limit.map(|limit| limit.all_parts_of(charge.key())).unwrap_or_default();
            keys.into_iter().map(|key| (charge.limit().clone(), key))
        });
        Some((limits.collect(), time))
    }

    /// The figures after a settlement.
    pub(super) fn end(&self, done: Done) -> Option<Figures> {
        let settings = &self.policy.settings;
        if let Err(error) = done.closed {
            settings.events.not_closed(&error);
        }
        match done.settled? {
            Ok(settled) => {
                if !settled.is_known() && self.admitted.as_ref().is_some_and(Admitted::is_leased) {
                    settings.events.settled_late();
                }
                (!settings.heeds_upstream).then(|| Figures::of(settled.decision(), settings.reset_format))
            }
            Err(error) => {
                settings.events.not_settled(&error);
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

/// Closes limits for keys, all at once: neither their number nor one that cannot be closed keeps the others open.
async fn close<S: Store>(limiter: &Limiter<S>, limits: Vec<(Limit, Key)>, time: Duration) -> Result<(), Error> {
    let mut open: Vec<_> =
        limits.iter().map(|(limit, key)| Box::pin(limiter.close(limit, key.clone(), time))).collect();
    let mut closed = Ok(());
    poll_fn(|cx| {
        open.retain_mut(|closing| {
            let Poll::Ready(outcome) = closing.as_mut().poll(cx) else { return true };
            closed = mem::replace(&mut closed, Ok(())).and(outcome);
            false
        });
        if open.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    closed
}

impl Admitted {
    /// What is to be settled, if something is: it has cost something else, or would be given back.
    fn settlement(&self, limits: &Limits, response: &response::Parts) -> Option<Settlement> {
        let request = self.request.as_ref()?;
        let mut is_due = false;
        let charged = self.check.charges().zip(&self.places).zip(self.decision.statuses());
        let costs: Vec<Option<u64>> = charged
            .map(|((charge, place), status)| {
                let settle = limits.get(*place).and_then(|limit| limit.settles())?;
                // Where the shadow would have refused, nothing is counted.
                if charge.cost() == 0 || status.retry_after().is_some() {
                    return None;
                }
                let cost = settle(&Outcome::new(request, response, charge.cost()));
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
