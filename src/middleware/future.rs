//! The response future: the decision, then the inner service's response, then the settlements.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response, request};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    policy::Policy,
    rejection::RejectionResponse,
    request::{Decided, DecisionFuture},
    response::{Completion, Settling},
};

pin_project! {
    /// The response future of [`RateLimit`](super::RateLimit).
    ///
    /// If it is dropped before the decision, the inner service is not called, but the check may have been counted. If it is
    /// dropped before the response, the reserved units stay until the end of their [lease](super::KeyedLimit::lease). A
    /// settlement that has begun is completed by a task of the current runtime, within the layer's deadline.
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
        Deciding { decision: DecisionFuture, request: Option<PendingRequest<I, R, ReqBody>> },
        Forwarded { #[pin] response: F, completion: Option<Completion<R>> },
        Settling { #[pin] settling: Settling, response: Option<(Response<ResBody>, Completion<R>)> },
        Rejected { response: Option<Response<ResBody>> },
    }
}

/// A request that waits for its decision, with the inner service that was polled ready for it.
pub(super) struct PendingRequest<I, R, ReqBody> {
    pub(super) inner: I,
    pub(super) parts: request::Parts,
    pub(super) body: ReqBody,
    pub(super) policy: Arc<Policy<R>>,
}

impl<I, R, ReqBody, ResBody> ResponseFuture<I, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>>,
{
    pub(super) fn deciding(decision: DecisionFuture, request: PendingRequest<I, R, ReqBody>) -> Self {
        Self { state: State::Deciding { decision, request: Some(request) } }
    }

    #[inline]
    pub(super) fn forwarded(response: I::Future, completion: Completion<R>) -> Self {
        Self { state: State::Forwarded { response, completion: Some(completion) } }
    }

    pub(super) fn rejected(response: Response<ResBody>) -> Self {
        Self { state: State::Rejected { response: Some(response) } }
    }
}

impl<I, R, ReqBody, ResBody> Future for ResponseFuture<I, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>, Response = Response<ResBody>>,
    R: RejectionResponse<ResBody>,
{
    type Output = Result<Response<ResBody>, I::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Deciding { decision, request } => {
                    let decided = ready!(Pin::new(decision).poll(cx));
                    take(request).proceed(decided)
                }
                StateProjection::Forwarded { response, completion } => {
                    let response = ready!(response.poll(cx))?;
                    let completion = take(completion);
                    match completion.settle(response) {
                        (response, None) => return Poll::Ready(Ok(completion.write(None, response))),
                        (response, Some(settling)) => {
                            State::Settling { settling, response: Some((response, completion)) }
                        }
                    }
                }
                StateProjection::Settling { settling, response } => {
                    let settled = ready!(settling.poll(cx));
                    let (response, completion) = take(response);
                    return Poll::Ready(Ok(completion.write(settled.as_ref(), response)));
                }
                StateProjection::Rejected { response } => return Poll::Ready(Ok(take(response))),
            };
            state.set(next);
        }
    }
}

fn take<T>(value: &mut Option<T>) -> T {
    value.take().unwrap_or_else(|| panic!("`ResponseFuture` polled after completion"))
}

impl<I, R, ReqBody> PendingRequest<I, R, ReqBody> {
    /// Calls the inner service, or responds in its place.
    #[inline]
    fn proceed<ResBody>(self, decided: Decided) -> State<I, R, ReqBody, I::Future, ResBody>
    where
        I: Service<Request<ReqBody>, Response = Response<ResBody>>,
        R: RejectionResponse<ResBody>,
    {
        let Self { mut inner, mut parts, body, policy } = self;
        match policy.conclude(decided, &mut parts) {
            Ok(completion) => {
                let response = inner.call(Request::from_parts(parts, body));
                State::Forwarded { response, completion: Some(completion) }
            }
            Err(response) => State::Rejected { response: Some(response) },
        }
    }
}

impl<I, R, ReqBody, ResBody> fmt::Debug for ResponseFuture<I, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
