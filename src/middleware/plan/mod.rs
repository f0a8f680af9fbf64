//! Plans a request: decides whether the request is counted, and finds its limits, keys and costs.
//!
//! 1. A denied request gets a 403. Exempt requests that are not denied go to the service uncounted.
//!    All others are counted.
//! 2. A request without a key is not on any list. A key that is present but unreadable may be a
//!    denied key, so a deny list rejects the request with the status of the
//!    [`KeyError`](super::extract::KeyError). Such a key never counts as exempt.
//! 3. Each layer waits at most its own deadline, less the time that the request has already waited
//!    in outer layers, but at least 5 ms. Otherwise an outer layer whose store hangs would use up
//!    all the time, and inner layers could not ask their own stores. So a request waits at most the
//!    longest deadline among its layers, plus 5 ms for each layer whose deadline was already used
//!    up. The same bounds apply to the settlements and blocks that a response waits for, but these
//!    waits are added up separately. Settlements and blocks that are not done by then continue
//!    after the response.

mod ban;
mod check;

use std::{
    ops::ControlFlow::{self, Break, Continue},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{Extensions, request::Parts};

pub(super) use self::check::CheckDetails;
use super::{
    policy::{KeyedLimit, Policy},
    rejection::Rejection,
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::{Error, NeverFits},
    limiter::Asking,
    metrics,
};

/// A decision that a request waits for.
pub(super) enum Pending {
    /// The store is asked about the request's check.
    Ask {
        asking: Asking,
        details: Option<Box<CheckDetails>>,
        can_be_refused: bool,
    },
    /// The request waits for capacity, or its decision may begin a ban. Boxed, since few requests
    /// need this.
    Wait(Pin<Box<dyn Future<Output = Decided> + Send>>),
}

/// The outcome of a request's check.
pub(super) struct Decided {
    /// `None` if there was nothing to decide.
    pub(super) outcome: Result<Option<Decision>, Error>,
    pub(super) details: Option<Box<CheckDetails>>,
    /// True if a limit can refuse the request. If it costs nothing, or if only shadow limits charge
    /// it, no limit can refuse it, and the request fails open.
    pub(super) can_be_refused: bool,
    /// How long the request has waited for decisions in all layers so far. Zero if this layer
    /// decided without waiting.
    pub(super) waited: Duration,
}

impl Future for Pending {
    type Output = Decided;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Decided> {
        match &mut *self {
            Self::Ask {
                asking,
                details,
                can_be_refused,
            } => {
                let outcome = ready!(Pin::new(&mut *asking).poll(cx)).map(Some);
                let waited = asking.reply.waited();
                Poll::Ready(Decided {
                    outcome,
                    details: details.take(),
                    can_be_refused: *can_be_refused,
                    waited,
                })
            }
            Self::Wait(decided) => decided.as_mut().poll(cx),
        }
    }
}

impl Policy {
    /// Plans a request. Returns `Break` if the request was decided without waiting, or if there is
    /// nothing to decide. Returns a rejection if the request is denied, has no key, or costs too
    /// much, or if an option has no effect on a chosen limit.
    #[inline]
    pub(super) fn plan(
        self: &Arc<Self>,
        request: &Parts,
    ) -> Result<ControlFlow<Decided, Pending>, Rejection> {
        if !self.counts(request)? {
            return Ok(at_once(Ok(None), None, false));
        }
        let cost = self.cost.as_ref().map_or(1, |cost| cost(request));
        let (check, details) = if self.is_plain && self.max_wait.is_none() {
            (self.plain_check(request, cost)?, None)
        } else {
            let mut details = Box::new(CheckDetails::of(&self.limits, request, cost)?);
            let keeps_check = self
                .limits
                .iter()
                .any(|limit| limit.cost_afterwards().is_some() || limit.heeds_upstream);
            let check = if keeps_check {
                details.check.clone()
            } else {
                details.check.take()
            };
            let may_wait = self.max_wait.is_some()
                || details.charged.iter().any(|charged| charged.ban.is_some());
            match check {
                Some(check) if may_wait => return Ok(Continue(self.wait(check, details, request))),
                check => (check, Some(details)),
            }
        };
        let Some(check) = check else {
            return Ok(at_once(Ok(None), details, false));
        };
        let can_be_refused = check.can_be_refused();
        Ok(
            match self
                .limiter
                .decide_now(check, || time_waited(&request.extensions))
            {
                Break(outcome) => at_once(outcome.map(Some), details, can_be_refused),
                Continue(asking) => Continue(Pending::Ask {
                    asking,
                    details,
                    can_be_refused,
                }),
            },
        )
    }

    /// Makes the future that decides a check and begins bans. With a `max_wait`, the request waits
    /// in line for capacity.
    fn wait(
        self: &Arc<Self>,
        check: Check,
        details: Box<CheckDetails>,
        request: &Parts,
    ) -> Pending {
        let policy = Arc::clone(self);
        let can_be_refused = check.can_be_refused();
        let mut waited = time_waited(&request.extensions);
        Pending::Wait(Box::pin(async move {
            let limiter = &policy.limiter;
            let decide = async {
                let decision = match policy.max_wait {
                    Some(max_wait) => limiter.acquire_after(check, max_wait, &mut waited).await?,
                    None => limiter.decide(check, &mut waited).await?,
                };
                let is_local = decision.local_cause().is_some();
                Ok(Some(
                    policy
                        .ban(limiter, decision, &details.charged, is_local)
                        .await,
                ))
            };
            let outcome = decide.await;
            Decided {
                outcome,
                details: Some(details),
                can_be_refused,
                waited,
            }
        }))
    }

    /// True if the request is counted. Returns a rejection if it is denied, or if its key is
    /// unreadable and may be a denied key.
    #[inline]
    fn counts(&self, request: &Parts) -> Result<bool, Rejection> {
        for list in &self.denied {
            if list(request)? {
                return Err(Rejection::Denied);
            }
        }
        for list in &self.exempt {
            match list(request) {
                Ok(true) => {
                    metrics::uncounted(&self.events.layer);
                    return Ok(false);
                }
                Ok(false) => {}
                Err(error) => self.events.mistake(&Rejection::NoKey(error)),
            }
        }
        Ok(true)
    }

    /// Makes the check for a layer with only [plain](super::policy::KeyedLimit::is_plain) limits,
    /// as most layers have. The response does not need details.
    #[inline]
    fn plain_check(&self, request: &Parts, cost: u64) -> Result<Option<Check>, Rejection> {
        let mut check = None;
        for KeyedLimit {
            limit, extractor, ..
        } in &self.limits
        {
            let Ok(limit) = limit else { continue };
            let key = extractor.extract(request)?;
            if cost > limit.units() {
                return Err(NeverFits {
                    limit: limit.clone(),
                    cost,
                    is_hidden: false,
                }
                .into());
            }
            Check::push(&mut check, Charge::fitting(limit.clone(), key, cost));
        }
        Ok(check)
    }
}

/// The plan for a request that was decided without waiting.
#[inline]
fn at_once(
    outcome: Result<Option<Decision>, Error>,
    details: Option<Box<CheckDetails>>,
    can_be_refused: bool,
) -> ControlFlow<Decided, Pending> {
    Break(Decided {
        outcome,
        details,
        can_be_refused,
        waited: Duration::ZERO,
    })
}

/// In the extensions of a request without a decision, this is the time that the request has waited
/// for decisions in all layers so far. A [`Decision`] carries this time itself. In a response's
/// extensions, it is the time that the response has waited for settlements and blocks.
#[derive(Clone, Copy)]
pub(super) struct TimeWaited(pub(super) Duration);

pub(super) fn time_waited(extensions: &Extensions) -> Duration {
    let by_decision = extensions.get().map(Decision::waited);
    let by_itself = extensions.get().map(|TimeWaited(time)| *time);
    by_decision.max(by_itself).unwrap_or_default()
}
