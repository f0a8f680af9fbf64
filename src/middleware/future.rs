//! The response future: first the decision, then the inner service's response.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    headers::Figures,
    policy::{Admission, Limits, Policy},
    rejection::{Degraded, RejectionResponse},
};
use crate::{decision::Decision, error::Error, limiter::Decide, store::Store};

pin_project! {
    /// The response future of [`RateLimit`](super::RateLimit).
    ///
    /// Dropped before the decision, it leaves the inner service uncalled; the check may have been counted.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<I, S, R, ReqBody, ResBody>
    where
        I: Service<Request<ReqBody>>,
        S: Store,
    {
        #[pin]
        state: State<I, S, R, ReqBody, I::Future, ResBody>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<I, S: Store, R, ReqBody, F, ResBody> {
        Deciding { #[pin] decide: Decide<S>, held: Option<Held<I, S, R, ReqBody>> },
        Forwarded { #[pin] response: F, note: Note },
        Rejected { response: Option<Response<ResBody>> },
    }
}

/// What the response is to say of how the request was let through.
enum Note {
    Figures(Figures),
    Degraded(Degraded),
}

/// What waits for the decision: the service that was polled ready, the request, and what the layer was told.
struct Held<I, S, R, ReqBody> {
    inner: I,
    request: Request<ReqBody>,
    policy: Arc<Policy<S, R, Limits>>,
}

impl<I, S, R, ReqBody, ResBody> ResponseFuture<I, S, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>>,
    S: Store,
{
    pub(super) fn deciding(
        decide: Decide<S>,
        inner: I,
        request: Request<ReqBody>,
        policy: Arc<Policy<S, R, Limits>>,
    ) -> Self {
        Self { state: State::Deciding { decide, held: Some(Held { inner, request, policy }) } }
    }

    pub(super) fn rejected(response: Response<ResBody>) -> Self {
        Self { state: State::Rejected { response: Some(response) } }
    }
}

impl<I, S, R, ReqBody, ResBody> Future for ResponseFuture<I, S, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>, Response = Response<ResBody>>,
    S: Store,
    R: RejectionResponse<ResBody>,
{
    type Output = Result<Response<ResBody>, I::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Deciding { decide, held } => {
                    let outcome = ready!(decide.poll(cx));
                    held.take().map(|held| held.proceed(outcome))
                }
                StateProjection::Forwarded { response, note } => {
                    let mut response = ready!(response.poll(cx))?;
                    match note {
                        Note::Figures(figures) => figures.write(response.headers_mut()),
                        Note::Degraded(degraded) => {
                            response.extensions_mut().insert(degraded.clone());
                        }
                    }
                    return Poll::Ready(Ok(response));
                }
                StateProjection::Rejected { response } => match response.take() {
                    Some(response) => return Poll::Ready(Ok(response)),
                    None => None,
                },
            };
            // Only a future that is polled again after it was ready has nothing to go on with.
            state.set(next.unwrap_or_else(|| panic!("`ResponseFuture` polled after completion")));
        }
    }
}

impl<I, S: Store, R, ReqBody> Held<I, S, R, ReqBody> {
    /// Calls the inner service, now that it is decided that it may be called, or answers in its place.
    fn proceed<ResBody>(mut self, outcome: Result<Decision, Error>) -> State<I, S, R, ReqBody, I::Future, ResBody>
    where
        I: Service<Request<ReqBody>, Response = Response<ResBody>>,
        R: RejectionResponse<ResBody>,
    {
        match self.policy.verdict(outcome) {
            Ok(admission) => {
                let note = match admission {
                    Admission::Decided(decision) => {
                        let figures = Figures::of(&decision, self.policy.reset_format);
                        self.request.extensions_mut().insert(decision);
                        Note::Figures(figures)
                    }
                    Admission::Undecided(degraded) => Note::Degraded(degraded),
                };
                State::Forwarded { response: self.inner.call(self.request), note }
            }
            Err(rejection) => State::Rejected { response: Some(self.policy.reject(rejection)) },
        }
    }
}

impl<I, S, R, ReqBody, ResBody> fmt::Debug for ResponseFuture<I, S, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>>,
    S: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
