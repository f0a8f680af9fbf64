//! The service.

use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use tower_service::Service;

use super::{
    future::{Held, ResponseFuture},
    limits::Limits,
    policy::Policy,
    rejection::{JsonResponse, RejectionResponse},
};
use crate::store::Store;

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

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        // It is this instance that was polled ready, not a clone of it: it goes with the request, and the clone waits
        // for the next `poll_ready`. See "Be careful when cloning inner services" in the docs of `tower_service`.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);

        let (parts, body) = request.into_parts();
        match self.policy.claim(&parts) {
            Ok((claimed, mode)) => {
                ResponseFuture::claimed(claimed, Held { inner, parts, body, policy: Arc::clone(&self.policy), mode })
            }
            Err(rejection) => ResponseFuture::rejected(self.policy.reject(rejection, None, None)),
        }
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
