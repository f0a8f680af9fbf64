//! What is done between the service's response and the client.

use std::{
    future::{Future, poll_fn},
    mem,
    sync::Arc,
    task::Poll,
    time::SystemTime,
};

use http::{Response, request, response};

use super::{
    claim::{Origin, Record},
    errand::Errand,
    events::Events,
    exchange::Exchange,
    headers::Figures,
    limits::Limits,
    policy::Policy,
    settling::Due,
    shadow::ShadowRefusals,
    upstream::{Away, away},
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    limiter::Limiter,
    store::Store,
};

/// What is done with a response of which more is to be said than figures. Most have none, so it is in a box.
pub(super) struct Afterwards<S, R> {
    policy: Arc<Policy<S, R, Limits>>,
    admitted: Option<Admitted>,
    shadow: Option<ShadowRefusals>,
    /// Settles the request if this is dropped before its response.
    dropped: Option<Errand<()>>,
}

/// An admission of which more is to be known.
struct Admitted {
    check: Check,
    origins: Vec<Origin>,
    decision: Decision,
    /// Where one of them settles.
    request: Option<request::Parts>,
}

/// A call counts as of its answer, since the upstream may have counted it that late; later than its admission by such a part
/// of the window at most, which is the throughput that this can cost.
const HEEDED_LATE: u32 = 10;

/// Work that goes on if the client leaves: otherwise the client would leave with units that it has used.
pub(super) type Work = Errand<Done>;

/// What came of it.
pub(super) struct Done {
    /// How the limits stand after what was due.
    settled: Option<Decision>,
}

impl<S: Store, R> Afterwards<S, R> {
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
        let Record { check, origins, left_out, dropped, .. } = record.map(|record| *record).unwrap_or_default();
        let shadow = policy.shadow(decision, left_out);
        let admitted = check.zip(decision).map(|(check, decision)| {
            let settles =
                |origin: &Origin| policy.limits.get(origin.place).is_some_and(|limit| limit.settles().is_some());
            let request = origins.iter().any(settles).then(request);
            Admitted { check, origins, decision: decision.clone(), request }
        });
        let guard =
            |admitted: &Admitted| policy.dropping()?.guard(&admitted.check, &admitted.origins, &admitted.decision);
        let dropped = dropped.or_else(|| admitted.as_ref().and_then(guard));
        let is_needed = shadow.is_some() || admitted.is_some();
        is_needed.then(|| Box::new(Self { policy: Arc::clone(policy), admitted, shadow, dropped }))
    }

    /// Begins what takes time, if there is such a thing.
    pub(super) fn begin<B>(&mut self, response: Response<B>) -> (Response<B>, Option<Work>) {
        let Some(admitted) = &self.admitted else { return (response, None) };
        let (parts, body) = response.into_parts();
        let due = admitted.due(&self.policy, &parts);
        // Not before, since what says the cost may panic.
        if let Some(mut dropped) = self.dropped.take() {
            dropped.call_off();
        }
        let closing = if self.policy.settings.heeds_upstream {
            Closing::of(admitted, due.as_ref(), &self.policy.limits, &parts)
        } else {
            None
        };
        let is_any = due.is_some() || closing.is_some();
        let work = is_any.then(|| {
            let (limiter, events) = (self.policy.limiter.clone(), Arc::clone(&self.policy.settings.events));
            Errand::new(async move {
                let settled = match due {
                    Some(due) => due.settle(&limiter).await.inspect_err(|error| events.not_settled(error)).ok(),
                    None => None,
                };
                if let Some(closing) = closing {
                    let closed = limiter.within(closing.close(&limiter, &events)).await.and_then(|closed| closed);
                    if let Err(error) = closed {
                        events.not_closed(&error);
                    }
                }
                Done { settled }
            })
        });
        (Response::from_parts(parts, body), work)
    }
}

impl<S, R> Afterwards<S, R> {
    /// The figures after a settlement.
    pub(super) fn end(&self, done: &Done) -> Option<Figures> {
        Figures::of(done.settled.as_ref()?)
    }

    /// Writes what is to be said of the shadow.
    pub(super) fn write<B>(self, response: &mut Response<B>) {
        if let Some(shadow) = self.shadow {
            shadow.write(response, self.policy.settings.shadow_header.as_ref());
        }
    }
}

/// The limits that an upstream wants to be closed, and for how long.
struct Closing {
    limits: Vec<(Limit, Key)>,
    away: Away,
}

impl Closing {
    fn of(admitted: &Admitted, due: Option<&Due>, limits: &Limits, response: &response::Parts) -> Option<Self> {
        let away = away(response.status, &response.headers, SystemTime::now())?;
        let is_news = |index: usize| away.is_refusal || admitted.has_left(index, due);
        let limits: Vec<_> = admitted.heeding(limits, is_news).collect();
        (!limits.is_empty()).then_some(Self { limits, away })
    }

    /// Closes all at once: neither their number nor one that cannot be closed keeps the others open.
    async fn close<S: Store>(self, limiter: &Limiter<S>, events: &Events) -> Result<(), Error> {
        let Self { limits, away } = self;
        let mut open: Vec<_> =
            limits.into_iter().map(|(limit, key)| Box::pin(close(limiter, limit, key, away, events))).collect();
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
}

/// Closes a limit, unless the upstream says no more than that nothing is left, and that is so here as well.
async fn close<S: Store>(
    limiter: &Limiter<S>,
    limit: Limit,
    key: Key,
    away: Away,
    events: &Events,
) -> Result<(), Error> {
    if !away.is_refusal && limiter.clone().with_share(None).peek(&limit, key.clone()).await?.remaining() == 0 {
        return Ok(());
    }
    events.closes(away.time);
    limiter.pause(&limit, key, away.time).await
}

impl Admitted {
    /// The settlements and counts that the response makes due, if there are any.
    fn due<S, R>(&self, policy: &Policy<S, R, Limits>, response: &response::Parts) -> Option<Due> {
        let limits = &policy.limits;
        let cost = |charge: &Charge, origin: &Origin| {
            let Some(settle) = limits.get(origin.place)?.settles() else { return Some(origin.cost) };
            Some(settle(&Exchange::new(self.request.as_ref()?, response, charge.cost())))
        };
        Due::of(&self.check, &self.origins, &self.decision, cost, |charge, origin| {
            let heeds = policy.settings.heeds_upstream && limits.get(origin.place)?.heeds_upstream();
            heeds.then(|| charge.limit().window() / HEEDED_LATE)
        })
    }

    /// Whether the limit of a charge had something left when this was admitted, or has by what it gives back.
    fn has_left(&self, index: usize, due: Option<&Due>) -> bool {
        let left = self.decision.statuses().nth(index).is_none_or(|status| status.remaining() > 0);
        left || due.is_some_and(|due| due.gives_back(index))
    }

    /// What is to be closed of what was charged by limits that heed the upstream: the key of a charge, if it `is_to_close`,
    /// and all other parts of it.
    fn heeding(&self, limits: &Limits, is_to_close: impl Fn(usize) -> bool) -> impl Iterator<Item = (Limit, Key)> {
        let charged = self.check.charges().enumerate().filter(|(_, charge)| !charge.is_shadow());
        charged.flat_map(move |(index, charge)| {
            let heeding = self.origins.iter().filter(move |origin| origin.charge == index);
            let heeding = heeding.filter_map(|origin| limits.get(origin.place)).find(|limit| limit.heeds_upstream());
            let mut keys = heeding.map(|limit| limit.all_parts_of(charge.key())).unwrap_or_default();
            if !is_to_close(index) {
                keys.retain(|key| key != charge.key());
            }
            keys.into_iter().map(|key| (charge.limit().clone(), key))
        })
    }
}
