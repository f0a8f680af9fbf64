//! The service and its response future, which waits for the decision, then for the inner service's
//! response, then for the settlements.

use std::{
    fmt,
    future::Future,
    mem,
    ops::ControlFlow::{Break, Continue},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response, request::Parts};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    plan::{Decided, Pending, TimeWaited},
    policy::Policy,
    rejection::{JsonResponse, RejectionResponse},
    response::{Completion, Settling},
};

/// A service guarded by a [`RateLimitLayer`](super::RateLimitLayer). See the [module
/// docs](crate::middleware).
pub struct RateLimit<I, R = JsonResponse> {
    pub(super) inner: I,
    pub(super) policy: Arc<Policy>,
    pub(super) responder: Arc<R>,
}

impl<I, R, ReqBody, ResBody> Service<Request<ReqBody>> for RateLimit<I, R>
where
    I: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    R: RejectionResponse<ResBody>,
    ResBody: Body + 'static,
{
    type Response = Response<ResBody>;
    type Error = I::Error;
    type Future = ResponseFuture<I, R, ReqBody, ResBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    /// Calls the inner service right away if the check is decided without waiting.
    #[inline]
    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let state = match self.policy.plan(&parts) {
            Ok(Break(decided)) => self.forward(decided, parts, body),
            Ok(Continue(pending)) => State::Deciding {
                pending,
                kept: Some((self.take(), parts, body)),
            },
            Err(rejection) => State::Ready {
                response: Some(
                    self.policy
                        .reject(&parts, rejection, None, None, &*self.responder),
                ),
            },
        };
        // A rejected request does not need the ready inner service. That service may hold a permit,
        // so drop it.
        if matches!(state, State::Ready { .. }) {
            drop(self.take());
        }
        ResponseFuture { state }
    }
}

impl<I, R> RateLimit<I, R> {
    /// Takes this service for a request that has to wait, and leaves a clone. The request needs the
    /// instance that was polled ready; the clone waits for the next `poll_ready`. See "Be careful
    /// when cloning inner services" in the `tower_service` docs.
    fn take(&mut self) -> Self
    where
        I: Clone,
    {
        let clone = self.clone();
        mem::replace(self, clone)
    }

    /// Calls the inner service, or responds in its place.
    #[inline]
    fn forward<ReqBody, ResBody>(
        &mut self,
        decided: Decided,
        mut parts: Parts,
        body: ReqBody,
    ) -> State<I, R, ReqBody, I::Future, ResBody>
    where
        I: Service<Request<ReqBody>, Response = Response<ResBody>>,
        R: RejectionResponse<ResBody>,
        ResBody: Body + 'static,
    {
        match self.policy.conclude(decided, &mut parts, &*self.responder) {
            Ok(completion) => {
                let response = self.inner.call(Request::from_parts(parts, body));
                State::Forwarded {
                    response,
                    completion: Some(completion),
                }
            }
            Err(response) => State::Ready {
                response: Some(response),
            },
        }
    }
}

pin_project! {
    /// The response future of [`RateLimit`](super::RateLimit).
    ///
    /// If it is dropped before the decision, the inner service is not called, but the check may
    /// have been counted. If it is dropped before the response, reserved units stay reserved until
    /// their [lease](super::KeyedLimit::lease) ends. If it is dropped during a settlement, or if
    /// the settlement takes longer than the layer's deadline, a task on the current runtime
    /// completes the settlement.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<I, R, ReqBody, ResBody>
    where
        I: Service<Request<ReqBody>>,
    {
        #[pin]
        state: State<I, R, ReqBody, I::Future, ResBody>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<I, R, ReqBody, F, ResBody> {
        Deciding { #[pin] pending: Pending, kept: Option<(RateLimit<I, R>, Parts, ReqBody)> },
        Forwarded { #[pin] response: F, completion: Option<Completion> },
        Settling { #[pin] settling: Settling, response: Option<(Response<ResBody>, Completion)> },
        Ready { response: Option<Response<ResBody>> },
    }
}

impl<I, R, ReqBody, ResBody> Future for ResponseFuture<I, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: RejectionResponse<ResBody>,
    ResBody: Body + 'static,
{
    type Output = Result<Response<ResBody>, I::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Deciding { pending, kept } => {
                    let decided = ready!(pending.poll(cx));
                    let (mut service, parts, body) = take(kept);
                    service.forward(decided, parts, body)
                }
                StateProjection::Forwarded {
                    response,
                    completion,
                } => {
                    let response = ready!(response.poll(cx))?;
                    let completion = take(completion);
                    match completion.settle(response) {
                        (response, None) => {
                            return Poll::Ready(Ok(completion.write(None, response)));
                        }
                        (response, Some(settling)) => State::Settling {
                            settling,
                            response: Some((response, completion)),
                        },
                    }
                }
                StateProjection::Settling {
                    mut settling,
                    response,
                } => {
                    let settled = ready!(settling.as_mut().poll(cx)).ok().flatten();
                    let (mut response, completion) = take(response);
                    let waited = settling.waited();
                    if !waited.is_zero() {
                        response.extensions_mut().insert(TimeWaited(waited));
                    }
                    State::Ready {
                        response: Some(completion.write(settled.as_ref(), response)),
                    }
                }
                StateProjection::Ready { response } => return Poll::Ready(Ok(take(response))),
            };
            state.set(next);
        }
    }
}

/// Takes the value. Panics if the future is polled after completion, which requests cannot cause.
fn take<T>(value: &mut Option<T>) -> T {
    value
        .take()
        .unwrap_or_else(|| panic!("`ResponseFuture` polled after completion"))
}

impl<I, R, ReqBody, ResBody> fmt::Debug for ResponseFuture<I, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// tonic's server finds a guarded service by the inner service's name.
#[cfg(feature = "grpc")]
impl<I: tonic::server::NamedService, R> tonic::server::NamedService for RateLimit<I, R> {
    const NAME: &'static str = I::NAME;
}

// `Clone` is not derived, since that would require `R: Clone`. Responders are shared.
impl<I: Clone, R> Clone for RateLimit<I, R> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            policy: Arc::clone(&self.policy),
            responder: Arc::clone(&self.responder),
        }
    }
}

impl<I: fmt::Debug, R> fmt::Debug for RateLimit<I, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .field("policy", &self.policy)
            .finish()
    }
}
