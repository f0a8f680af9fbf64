//! The end of a request: from its decision to a response in the service's place, or to the changes of the service's response.

use std::sync::Arc;

use http::{Response, request::Parts};

use super::{
    super::{
        events::Event,
        headers::Figures,
        policy::Policy,
        rejection::{
            Rejection, RejectionResponse,
            shadow::{LeftOut, ShadowRefusals},
        },
        request::{CheckDetails, Decided, UnchosenLimit, record_time_waited},
    },
    degraded::Degraded,
    follow_up::{FollowUp, Settling},
};
use crate::{decision::Decision, error::Error, limiter::FailureMode, metrics};

/// Completes the response to a request that was let through.
pub(crate) struct Completion<R> {
    /// `None` if there are none to send.
    figures: Option<Figures>,
    degraded: Option<Degraded>,
    follow_up: Option<Box<FollowUp<R>>>,
}

impl<R> Completion<R> {
    /// Lets the request through, with the decision in its extensions, or makes the response to a rejected request.
    #[inline]
    pub(crate) fn new<B>(policy: &Arc<Policy<R>>, decided: Decided, request: &mut Parts) -> Result<Self, Response<B>>
    where
        R: RejectionResponse<B>,
    {
        let Decided { outcome, mode, details, waited } = decided;
        record_time_waited(request, waited);
        let unchosen = details.as_deref().map_or(&[][..], |details| &details.unchosen);
        let degraded = policy.degraded(&outcome, mode, unchosen);
        let decision = match admission(outcome, mode) {
            Ok(decision) => decision,
            Err(rejection) => {
                return Err(policy.reject(request, rejection, details, degraded));
            }
        };
        // A response with figures of an upstream keeps them.
        let sends_figures = !policy.limits.any_heeds_upstream;
        let shown = decision.as_ref().filter(|_| sends_figures);
        let figures = shown.map(|decision| policy.figures(decision, details.as_deref()));
        let follow_up = if details.is_some() || policy.limits.any_is_shadow {
            FollowUp::new(policy, details, decision.as_ref(), || request.clone())
        } else {
            None
        };
        if let Some(decision) = decision {
            request.extensions.insert(decision);
        }
        Ok(Self { figures, degraded, follow_up })
    }

    /// Begins the settlements of the request, if there are any. The response waits for them.
    pub(crate) fn settle<B>(&self, response: Response<B>) -> (Response<B>, Option<Settling>) {
        match &self.follow_up {
            Some(follow_up) => follow_up.settle(response),
            None => (response, None),
        }
    }

    /// Writes headers and extensions of the response. `settled` is the decision after the settlements.
    pub(crate) fn write<B>(mut self, settled: Option<&Decision>, mut response: Response<B>) -> Response<B> {
        if let Some(figures) = &mut self.figures {
            if let Some(settled) = settled {
                figures.settle(settled);
            }
            // An inner layer's rejection keeps its figures, since its `Retry-After` belongs to them.
            if response.extensions().get::<Rejection>().is_none() {
                figures.write_x_rate_limit(response.headers_mut());
            }
            figures.write_rate_limit(response.headers_mut());
        }
        if let Some(degraded) = self.degraded {
            response.extensions_mut().insert(degraded);
        }
        if let Some(follow_up) = self.follow_up {
            follow_up.write_shadow(&mut response);
        }
        response
    }
}

/// The decision of a request that is let through; `None` if there was nothing to decide, or no decision and the layer fails
/// open.
#[inline]
fn admission(outcome: Result<Option<Decision>, Error>, mode: FailureMode) -> Result<Option<Decision>, Rejection> {
    match outcome {
        Ok(Some(decision)) if !decision.is_allowed() => Err(Rejection::Limited(decision)),
        Ok(admission) => Ok(admission),
        Err(error) => match (Rejection::from(error), mode) {
            (Rejection::Unavailable(_), FailureMode::Open) => Ok(None),
            (rejection, _) => Err(rejection),
        },
    }
}

impl<R> Policy<R> {
    /// Set if the store has not decided the request, or not under all of its limits.
    #[inline]
    fn degraded(
        &self,
        outcome: &Result<Option<Decision>, Error>,
        mode: FailureMode,
        unchosen: &[UnchosenLimit],
    ) -> Option<Degraded> {
        let undecided = match outcome {
            Ok(decision) => decision.as_ref().and_then(Decision::local_cause),
            Err(Error::NeverFits(_) | Error::LimitNotChosen(_)) => None,
            Err(error) => Some(error),
        };
        let (events, limits) = (&self.settings.events, || self.limits.names());
        if unchosen.is_empty() {
            return undecided.map(|error| Degraded::undecided(error, mode, events, &limits));
        }
        Degraded::unchosen(unchosen, undecided, mode, events, &limits)
    }

    /// The response to a request that is not let through.
    pub(crate) fn reject<B>(
        &self,
        request: &Parts,
        rejection: Rejection,
        details: Option<Box<CheckDetails>>,
        degraded: Option<Degraded>,
    ) -> Response<B>
    where
        R: RejectionResponse<B>,
    {
        rejection.log(&self.settings.events);
        metrics::rejected(rejection.label(), self.settings.events.layer());
        let decision = rejection.decision();
        let figures = decision.map(|decision| self.figures(decision, details.as_deref()));
        let shadow = self.shadow_refusals(decision, details.map(|details| details.left_out).unwrap_or_default());
        let head = rejection.head(figures.as_ref());
        let mut response = self.responder.respond(&rejection, request, head);
        response.extensions_mut().insert(rejection);
        if let Some(degraded) = degraded {
            response.extensions_mut().insert(degraded);
        }
        if let Some(shadow) = shadow {
            shadow.write(&mut response, self.settings.shadow_header.as_ref());
        }
        response
    }

    /// Logs them, too.
    pub(super) fn shadow_refusals(
        &self,
        decision: Option<&Decision>,
        left_out: Vec<LeftOut>,
    ) -> Option<ShadowRefusals> {
        let (events, limits) = (&self.settings.events, || self.limits.names());
        let refusals = ShadowRefusals::of(decision, left_out)?;
        events.log(Event::ShadowRefusals { limits: &|| refusals.name_list(true) });
        for left_out in refusals.left_out() {
            match left_out.rejection() {
                Rejection::Unavailable(error) => {
                    let mode = Some(FailureMode::Open);
                    events.log(Event::LimitNotChosen { limits: &limits, error, mode, fallbacks: &[] });
                }
                rejection => rejection.log(events),
            }
        }
        Some(refusals)
    }
}
