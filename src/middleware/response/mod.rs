//! Completes a request after its decision. A rejected request gets its response here. For any other
//! request, the layer adds headers and extensions to the service's response.

mod body;
mod follow_up;
mod upstream;

#[cfg(any(feature = "axum", feature = "grpc"))]
use std::sync::LazyLock;
use std::{mem, sync::Arc};

use http::{Extensions, Method, Response, request::Parts};
use http_body::Body;

pub(super) use self::follow_up::Settling;
use super::{
    events::Degraded,
    plan::{CheckDetails, Decided, TimeWaited},
    policy::Policy,
    rejection::{Rejection, RejectionResponse, ShadowRefusals},
};
#[cfg(any(feature = "axum", feature = "grpc"))]
use super::{events::Events, headers::HeaderSets};
use crate::{decision::Decision, error::Error, limit::Limit, limiter::FailureMode};

/// The decision and settings that are needed to complete the response to a request that passed.
pub(super) struct Completion {
    policy: Arc<Policy>,
    /// `None` if the request passed without a decision.
    decision: Option<Decision>,
    degraded: Option<Degraded>,
    /// `None` if the request needs no details: it is uncounted, or all the layer's limits are
    /// plain.
    details: Option<Box<CheckDetails>>,
}

impl Policy {
    /// Lets the request pass with the decision in its extensions, or makes the response to a
    /// rejected request. Reports requests that the store has not decided, shadow refusals, and
    /// setup mistakes.
    #[inline]
    pub(super) fn conclude<B: Body + 'static>(
        self: &Arc<Self>,
        decided: Decided,
        request: &mut Parts,
        responder: &impl RejectionResponse<B>,
    ) -> Result<Completion, Response<B>> {
        let Decided {
            outcome,
            mut details,
            can_be_refused,
            waited,
        } = decided;
        let fails_open = outcome.is_err() && !can_be_refused;
        let mode = if fails_open {
            FailureMode::Open
        } else {
            self.limiter.failure_mode
        };
        let degraded = self.report_degraded(&outcome, mode);
        let admission = match outcome {
            Ok(Some(decision)) if !decision.is_allowed() => Err(self.refusal(decision)),
            Ok(admission) => Ok(admission),
            Err(_) if degraded.is_some() && mode == FailureMode::Open => Ok(None),
            Err(error) => Err(error.into()),
        };
        let decision = match admission {
            Ok(decision) => decision,
            Err(rejection) => {
                return Err(self.reject(request, rejection, details, degraded, responder));
            }
        };
        // Without details, the request is uncounted or all limits are plain. Either way, it takes
        // no places.
        let holds_place = details.is_some() && decision.as_ref().is_some_and(Decision::holds_place);
        if holds_place && !self.frees_with_head && !body::is_known::<B>() {
            let problem = body::unknown::<B>();
            let mut statuses = decision.iter().flat_map(Decision::statuses);
            if statuses.any(|status| status.limit.is_concurrent() && !status.is_shadow) {
                return Err(self.reject(request, problem, details, degraded, responder));
            }
            self.events.mistake(&problem);
        }
        if let Some(details) = &mut details {
            details.shadow =
                self.report_shadow(decision.as_ref(), mem::take(&mut details.left_out));
            let settles = details.check.is_some()
                && self
                    .limits
                    .iter()
                    .any(|limit| limit.cost_afterwards().is_some());
            details.request = settles.then(|| Box::new(request.clone()));
        }
        if let Some(decision) = &decision {
            // Layers whose addresses give the same number would be 64 GB apart.
            let number = (Arc::as_ptr(self).addr() / 16) as u32;
            let own = decision.clone().left_by(number, waited);
            if let Some(outer) = request.extensions.insert(own) {
                self.leave_within(outer, &mut request.extensions);
            }
        } else if !waited.is_zero() {
            request.extensions.insert(TimeWaited(waited));
        }
        Ok(Completion {
            policy: Arc::clone(self),
            decision,
            degraded,
            details,
        })
    }

    /// Adds the outer layers' decision to this layer's.
    #[cold]
    fn leave_within(&self, outer: Decision, left: &mut Extensions) {
        let Some(decision) = left.get_mut::<Decision>() else {
            return;
        };
        *decision = decision.clone().within(outer);
        if decision.counts_twice() {
            self.events.counts_twice(|| self.names());
        }
    }

    /// Reports a rejection, and makes its response.
    pub(super) fn reject<B: Body + 'static>(
        &self,
        request: &Parts,
        rejection: Rejection,
        details: Option<Box<CheckDetails>>,
        degraded: Option<Degraded>,
        responder: &impl RejectionResponse<B>,
    ) -> Response<B> {
        self.events.rejected(&rejection);
        let left_out = details.map(|details| details.left_out).unwrap_or_default();
        let shadow = self.report_shadow(rejection.decision(), left_out);
        let head = rejection.head(self.headers);
        let mut response = responder.respond(&rejection, request, head);
        response.extensions_mut().insert(rejection);
        if let Some(degraded) = degraded {
            degraded.add_to(&mut response);
        }
        if let Some(shadow) = shadow {
            shadow.add_to(&mut response);
        }
        if request.method == Method::HEAD {
            body::without_content(response)
        } else {
            response
        }
    }

    /// Reports a request on which the store has not decided. A cost above the limit is not
    /// reported, since the store is not asked.
    #[inline]
    fn report_degraded(
        &self,
        outcome: &Result<Option<Decision>, Error>,
        mode: FailureMode,
    ) -> Option<Degraded> {
        let error = match outcome {
            Ok(decision) => decision.as_ref()?.local_cause()?,
            Err(Error::NeverFits(_)) => return None,
            Err(error) => error,
        };
        self.events.undecided(error, mode, || self.names());
        Some(Degraded {
            error: error.clone(),
            mode,
            inner: None,
        })
    }

    /// Reports the shadow limits that would have refused a request.
    fn report_shadow(
        &self,
        decision: Option<&Decision>,
        left_out: Vec<(Option<Limit>, Rejection)>,
    ) -> Option<ShadowRefusals> {
        let refused = decision.filter(|decision| decision.shadow_refusals().next().is_some());
        if refused.is_none() && left_out.is_empty() {
            return None;
        }
        let refusals = ShadowRefusals {
            decisions: refused
                .cloned()
                .map(Decision::without_places)
                .into_iter()
                .collect(),
            left_out,
        };
        self.events
            .shadow_refused(|| refusals.names().collect::<Vec<_>>().join(", "));
        for (_, rejection) in &refusals.left_out {
            self.events.mistake(rejection);
        }
        Some(refusals)
    }
}

impl Completion {
    /// Begins the settlements and blocks that the response waits for. `None` if there are none.
    pub(super) fn settle<B>(&self, response: Response<B>) -> (Response<B>, Option<Settling>) {
        let (Some(details), Some(decision)) = (&self.details, &self.decision) else {
            return (response, None);
        };
        let (parts, body) = response.into_parts();
        let settling = self.policy.follow_up(details, decision, &parts);
        (Response::from_parts(parts, body), settling)
    }

    /// Writes the response's headers and extensions, and ties the request's places to its body.
    /// `settled` is the decision after the settlements, if there were any and they finished in
    /// time.
    pub(super) fn write<B: Body + 'static>(
        self,
        settled: Option<&Decision>,
        mut response: Response<B>,
    ) -> Response<B> {
        let Self {
            policy,
            decision,
            degraded,
            details,
        } = self;
        // For a limit that heeds an upstream, the upstream's headers stay in the response.
        let heeds = details.is_some() && policy.limits.iter().any(|limit| limit.heeds_upstream);
        if !heeds && let Some(decision) = settled.or(decision.as_ref()) {
            // An inner layer's rejection keeps its figures, since they match its `Retry-After`.
            if response.extensions().get::<Rejection>().is_none() {
                policy
                    .headers
                    .write_x_rate_limit(decision, response.headers_mut());
            }
            policy
                .headers
                .write_rate_limit(decision, response.headers_mut());
        }
        if let Some(degraded) = degraded {
            degraded.add_to(&mut response);
        }
        let Some(details) = details else {
            return response;
        };
        if let Some(shadow) = details.shadow {
            shadow.add_to(&mut response);
        }
        let held = decision.filter(|decision| decision.holds_place() && !policy.frees_with_head);
        if held.is_some() {
            response.map(|body| body::changed(body, held.as_ref()))
        } else {
            response
        }
    }
}

/// Responds as a layer that fails closed does, with the default responder and [header
/// sets](crate::HeaderSets), when a handler returns a rejection. [`Degraded`], log lines and
/// metrics are the same too.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for Rejection {
    fn into_response(self) -> axum::response::Response {
        let degraded = report(&self);
        let head = self.head(HeaderSets::X_RATE_LIMIT);
        let mut response = self.problem(head).map(axum::body::Body::from);
        response.extensions_mut().insert(self);
        if let Some(degraded) = degraded {
            degraded.add_to(&mut response);
        }
        response
    }
}

/// Makes the status for a gRPC method that returns a rejection. A layer that fails closed responds
/// with the same status through [`GrpcResponse`](crate::middleware::GrpcResponse), but also sends
/// `x-ratelimit-*`. Log lines and metrics are the same too.
#[cfg(feature = "grpc")]
impl From<Rejection> for tonic::Status {
    fn from(rejection: Rejection) -> Self {
        report(&rejection);
        rejection.to_grpc(rejection.head(HeaderSets::NONE).into_parts().0.headers)
    }
}

/// Logs and counts a handler's rejection, as a layer does.
#[cfg(any(feature = "axum", feature = "grpc"))]
fn report(rejection: &Rejection) -> Option<Degraded> {
    /// Shared by all handlers in the process.
    static EVENTS: LazyLock<Events> = LazyLock::new(Events::default);

    EVENTS.rejected(rejection);
    let Rejection::Unavailable(error) = rejection else {
        return None;
    };
    EVENTS.undecided(error, FailureMode::Closed, || {
        "those of a handler".to_owned()
    });
    Some(Degraded {
        error: error.clone(),
        mode: FailureMode::Closed,
        inner: None,
    })
}
