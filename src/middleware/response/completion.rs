//! The end of a request: from its decision to a response in the service's place, or to the changes of the service's response.

use std::sync::Arc;

use http::{Response, request::Parts};

use super::{
    super::{
        events::Event,
        headers::{Figures, Quotas, XRateLimit},
        policy::Policy,
        rejection::{
            Rejection, RejectionResponse,
            shadow::{LeftOut, ShadowRefusals},
        },
        request::{CheckDetails, Decided, Limits, UnchosenLimit, record_time_waited},
    },
    degraded::Degraded,
    follow_up::{FollowUp, Settling},
};
use crate::{decision::Decision, error::Error, limiter::FailureMode, metrics};

/// Completes the response to a request that was let through.
pub(crate) struct Completion<R> {
    /// `None` if the layer sends no `X-RateLimit-*`.
    x_rate_limit: Option<XRateLimit>,
    figures: Option<Figures>,
    /// `None` if the layer sends no `RateLimit`.
    quotas: Option<Box<Quotas>>,
    degraded: Option<Degraded>,
    follow_up: Option<Box<FollowUp<R>>>,
}

impl<R> Completion<R> {
    /// Lets the request through, with the decision in its extensions, or makes the response to a rejected request.
    #[inline]
    pub(crate) fn new<B>(
        policy: &Arc<Policy<R, Limits>>,
        decided: Decided,
        request: &mut Parts,
    ) -> Result<Self, Response<B>>
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
        let sends_figures = !policy.settings.heeds_upstream;
        let quotas = if sends_figures { policy.quotas(decision.as_ref(), details.as_deref()) } else { None };
        let follow_up = if details.is_some() || policy.limits.any_is_shadow {
            FollowUp::new(policy, details, decision.as_ref(), || request.clone())
        } else {
            None
        };
        let x_rate_limit = policy.x_rate_limit(request).filter(|_| sends_figures);
        let figures = decision.as_ref().filter(|_| x_rate_limit.is_some()).and_then(Figures::of);
        if let Some(x_rate_limit) = &x_rate_limit {
            x_rate_limit.reset.tell_inner_layers(&mut request.extensions);
        }
        if let Some(decision) = decision {
            request.extensions.insert(decision);
        }
        Ok(Self { x_rate_limit, figures, quotas, degraded, follow_up })
    }

    /// Begins the settlements of the request, if there are any. The response waits for them.
    pub(crate) fn settle<B>(&mut self, response: Response<B>) -> (Response<B>, Option<Settling>) {
        match &mut self.follow_up {
            Some(follow_up) => follow_up.settle(response),
            None => (response, None),
        }
    }

    /// Writes headers and extensions of the response. `settled` is the decision after the settlements.
    pub(crate) fn write<B>(mut self, settled: Option<&Decision>, mut response: Response<B>) -> Response<B> {
        if let Some(settled) = settled {
            self.figures = Figures::of(settled).or(self.figures);
            if let Some(quotas) = &mut self.quotas {
                quotas.settle(settled);
            }
        }
        if let Some(x_rate_limit) = &self.x_rate_limit {
            self.write_figures(x_rate_limit, &mut response);
        }
        if let Some(quotas) = &self.quotas {
            quotas.write(response.headers_mut());
        }
        if let Some(degraded) = self.degraded {
            response.extensions_mut().insert(degraded);
        }
        if let Some(follow_up) = self.follow_up {
            follow_up.write_shadow(&mut response);
        }
        response
    }

    /// Writes the layer's figures, or the reset of those that are there in its format.
    fn write_figures<B>(&self, format: &XRateLimit, response: &mut Response<B>) {
        let shown = match response.extensions().get::<Rejection>() {
            // An inner layer's. It keeps its figures, since its `Retry-After` belongs to them.
            Some(rejection) => rejection.figures(),
            None => {
                if let Some(figures) = self.figures
                    && figures.write(format, response.headers_mut())
                {
                    return figures.tell_outer_layers(format.reset, response.extensions_mut());
                }
                response.extensions().get().copied()
            }
        };
        if let Some(figures) = shown {
            figures.rewrite_reset(format, response.headers_mut());
        }
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

impl<R> Policy<R, Limits> {
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
        let decision = if let Rejection::Limited(decision) = &rejection { Some(decision) } else { None };
        let quotas = self.quotas(decision, details.as_deref());
        let shadow = self.shadow_refusals(decision, details.map(|details| details.left_out).unwrap_or_default());
        let mut head = rejection.head(self.x_rate_limit(request).as_ref());
        if let Some(quotas) = quotas {
            quotas.write(head.headers_mut());
        }
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
