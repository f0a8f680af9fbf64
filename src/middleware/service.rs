//! The service.

use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response, request::Parts};
use tower_service::Service;

use super::{
    claim::Claim,
    future::{Held, ResponseFuture},
    limits::Limits,
    note::Note,
    policy::{Next, Policy},
    rejection::{JsonResponse, RejectionResponse},
    waited::waited,
};
use crate::{
    limiter::{DecideNow, FailureMode},
    store::Store,
};

/// A service guarded by a [`RateLimitLayer`](super::RateLimitLayer). See the [module docs](crate::middleware).
pub struct RateLimit<I, S, R = JsonResponse> {
    inner: I,
    policy: Arc<Policy<S, R, Limits>>,
}

impl<I, S, R> RateLimit<I, S, R> {
    pub(super) fn new(inner: I, policy: Arc<Policy<S, R, Limits>>) -> Self {
        Self { inner, policy }
    }

    /// The guarded service.
    pub fn get_ref(&self) -> &I {
        &self.inner
    }

    /// The guarded service, to change.
    pub fn get_mut(&mut self) -> &mut I {
        &mut self.inner
    }

    /// The guarded service, without its guard.
    pub fn into_inner(self) -> I {
        self.inner
    }
}

impl<I, S, R, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimit<I, S, R>
where
    I: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store,
    R: RejectionResponse<ResBody>,
{
    type Response = Response<ResBody>;
    type Error = I::Error;
    type Future = ResponseFuture<I, S, R, ReqBody, ResBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    /// Calls the inner service here and now if the check is decided without waiting.
    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let mut claim = Claim::default();
        let (next, mode) = match self.policy.claim(&parts, &mut claim) {
            Ok(claimed) => claimed,
            Err(rejection) => {
                let response = self.policy.reject(&parts, rejection, None, None);
                return self.rejected(response);
            }
        };
        let outcome = match next {
            Next::Ask(asking) => {
                return ResponseFuture::asking(self.policy.asked_for(asking), self.hold(parts, body, mode));
            }
            Next::Refuse(refusal) => Ok(Some(refusal)),
            Next::Decide => match claim.check {
                Some(check) => match self.policy.limiter.decide_now(check, mode.share(), || waited(&parts)) {
                    DecideNow::Decided(outcome) => outcome.map(Some),
                    DecideNow::AskStore(undecided) => {
                        if let Some(dropping) = self.policy.dropping() {
                            let asking = dropping.follow_up(undecided, claim.record);
                            return ResponseFuture::asking(asking, self.hold(parts, body, mode));
                        }
                        return ResponseFuture::deciding(undecided, claim.record, self.hold(parts, body, mode));
                    }
                },
                None => Ok(None),
            },
        };
        match Note::of(&self.policy, outcome, mode, claim.record, &mut parts) {
            Ok(note) => ResponseFuture::forwarded(self.inner.call(Request::from_parts(parts, body)), note),
            Err(response) => self.rejected(response),
        }
    }
}

impl<I: Clone, S, R> RateLimit<I, S, R> {
    /// Lets the inner service go with a request that has to wait. It is this instance that was polled ready, not a clone
    /// of it; the clone waits for the next `poll_ready`. See "Be careful when cloning inner services" in the docs of
    /// `tower_service`.
    fn hold<ReqBody>(&mut self, parts: Parts, body: ReqBody, mode: FailureMode) -> Held<I, S, R, ReqBody> {
        Held { inner: self.take_inner(), parts, body, policy: Arc::clone(&self.policy), mode }
    }

    /// Answers in the inner service's place, and lets go of what its readiness holds, such as a permit.
    fn rejected<ReqBody, ResBody>(&mut self, response: Response<ResBody>) -> ResponseFuture<I, S, R, ReqBody, ResBody>
    where
        I: Service<Request<ReqBody>>,
        S: Store,
    {
        drop(self.take_inner());
        ResponseFuture::rejected(response)
    }

    fn take_inner(&mut self) -> I {
        let clone = self.inner.clone();
        mem::replace(&mut self.inner, clone)
    }
}

// Not derived: a responder is shared, so it need not be `Clone`.
impl<I: Clone, S, R> Clone for RateLimit<I, S, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), policy: Arc::clone(&self.policy) }
    }
}

impl<I: fmt::Debug, S: fmt::Debug, R> fmt::Debug for RateLimit<I, S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit").field("inner", &self.inner).field("policy", &self.policy).finish()
    }
}
