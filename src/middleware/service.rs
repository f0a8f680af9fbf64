//! The service.

use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response, request::Parts};
use tower_service::Service;

use super::{
    future::{PendingRequest, ResponseFuture},
    policy::{Plan, Policy},
    rejection::{JsonResponse, RejectionResponse},
};

/// A service guarded by a [`RateLimitLayer`](super::RateLimitLayer). See the [module docs](crate::middleware).
pub struct RateLimit<I, R = JsonResponse> {
    inner: I,
    policy: Arc<Policy<R>>,
}

impl<I, R> RateLimit<I, R> {
    pub(super) fn new(inner: I, policy: Arc<Policy<R>>) -> Self {
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

impl<I, R, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimit<I, R>
where
    I: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    R: RejectionResponse<ResBody>,
{
    type Response = Response<ResBody>;
    type Error = I::Error;
    type Future = ResponseFuture<I, R, ReqBody, ResBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    /// Calls the inner service right away if the check is decided without waiting.
    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let decided = match self.policy.plan(&parts) {
            Err(rejection) => return self.reject(self.policy.reject(&parts, rejection, None, None)),
            Ok(Plan::Decided(decided)) => decided,
            Ok(Plan::Await(decision)) => return ResponseFuture::deciding(decision, self.hold(parts, body)),
        };
        match self.policy.conclude(decided, &mut parts) {
            Ok(completion) => ResponseFuture::forwarded(self.inner.call(Request::from_parts(parts, body)), completion),
            Err(response) => self.reject(response),
        }
    }
}

impl<I: Clone, R> RateLimit<I, R> {
    /// Takes out the inner service with a request that has to wait. It is this instance that was polled ready, not a clone
    /// of it; the clone waits for the next `poll_ready`. See "Be careful when cloning inner services" in the docs of
    /// `tower_service`.
    fn hold<ReqBody>(&mut self, parts: Parts, body: ReqBody) -> PendingRequest<I, R, ReqBody> {
        PendingRequest { inner: self.take_inner(), parts, body, policy: Arc::clone(&self.policy) }
    }

    /// Responds in the inner service's place, and drops the ready instance, so that it frees a permit that it may hold.
    fn reject<ReqBody, ResBody>(&mut self, response: Response<ResBody>) -> ResponseFuture<I, R, ReqBody, ResBody>
    where
        I: Service<Request<ReqBody>>,
    {
        drop(self.take_inner());
        ResponseFuture::rejected(response)
    }

    fn take_inner(&mut self) -> I {
        let clone = self.inner.clone();
        mem::replace(&mut self.inner, clone)
    }
}

/// tonic's server takes a guarded service in the place of the service.
#[cfg(feature = "grpc")]
impl<I: tonic::server::NamedService, R> tonic::server::NamedService for RateLimit<I, R> {
    const NAME: &'static str = I::NAME;
}

// Not derived, since that would require `R: Clone`. A responder is shared.
impl<I: Clone, R> Clone for RateLimit<I, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), policy: Arc::clone(&self.policy) }
    }
}

impl<I: fmt::Debug, R> fmt::Debug for RateLimit<I, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit").field("inner", &self.inner).field("policy", &self.policy).finish()
    }
}
