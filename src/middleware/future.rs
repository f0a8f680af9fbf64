//! The response future: first the decision, then the inner service's response, then what is left to do about it.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{Request, Response, request};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    afterwards::Work,
    asking::Asked,
    claim::Record,
    errand::Errand,
    limits::Limits,
    note::{Note, Progress},
    policy::Policy,
    rejection::RejectionResponse,
    waited::note_waited,
};
use crate::{
    decision::Decision,
    error::Error,
    limiter::{AskStore, FailureMode},
    store::Store,
};

pin_project! {
    /// The response future of [`RateLimit`](super::RateLimit).
    ///
    /// What is decided without waiting is decided before there is a future. Dropped before the decision, it leaves the
    /// inner service uncalled; the check may have been counted. Dropped before the response, it leaves what was reserved
    /// to the end of its lease, or has it settled as [`settle_dropped`](super::KeyedLimit::settle_dropped) says. A
    /// settlement that has begun goes on: a task of the current runtime does that, within the layer's deadline.
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
        Deciding {
            #[pin] undecided: AskStore<S>,
            held: Option<Held<I, S, R, ReqBody>>,
            record: Option<Box<Record>>,
        },
        Asking { #[pin] asking: Errand<Asked>, held: Option<Held<I, S, R, ReqBody>> },
        Forwarded { #[pin] response: F, note: Option<Note<S, R>> },
        Concluding { #[pin] work: Work, answer: Option<(Response<ResBody>, Note<S, R>)> },
        Rejected { response: Option<Response<ResBody>> },
    }
}

/// What waits for the decision: the service that was polled ready, the request, and what the layer was told.
pub(super) struct Held<I, S, R, ReqBody> {
    pub(super) inner: I,
    /// The request, in the two parts that it was looked at in.
    pub(super) parts: request::Parts,
    pub(super) body: ReqBody,
    pub(super) policy: Arc<Policy<S, R, Limits>>,
    /// What to do if the store cannot decide.
    pub(super) mode: FailureMode,
}

impl<I, S, R, ReqBody, ResBody> ResponseFuture<I, S, R, ReqBody, ResBody>
where
    I: Service<Request<ReqBody>>,
    S: Store,
{
    /// Waits for the store.
    #[inline]
    pub(super) fn deciding(undecided: AskStore<S>, record: Option<Box<Record>>, held: Held<I, S, R, ReqBody>) -> Self {
        Self { state: State::Deciding { undecided, held: Some(held), record } }
    }

    /// Waits for what takes more than one question.
    pub(super) fn asking(asking: Errand<Asked>, held: Held<I, S, R, ReqBody>) -> Self {
        Self { state: State::Asking { asking, held: Some(held) } }
    }

    /// Waits for the inner service, which is called already.
    #[inline]
    pub(super) fn forwarded(response: I::Future, note: Note<S, R>) -> Self {
        Self { state: State::Forwarded { response, note: Some(note) } }
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
                StateProjection::Deciding { mut undecided, held, record } => match held {
                    Some(waiting) => {
                        let outcome = ready!(undecided.as_mut().poll(&waiting.policy.limiter, cx));
                        let waited = undecided.waited();
                        held.take().map(|held| held.proceed(outcome.map(Some), record.take(), waited))
                    }
                    None => None,
                },
                StateProjection::Asking { asking, held } => {
                    let Asked { outcome, record, waited } = ready!(asking.poll(cx));
                    held.take().map(|held| held.proceed(outcome, record, waited))
                }
                StateProjection::Forwarded { response, note } => {
                    let response = ready!(response.poll(cx))?;
                    match note.take().map(|note| note.conclude(response)) {
                        Some(Progress::Done(response)) => return Poll::Ready(Ok(response)),
                        Some(Progress::Waits { work, answer }) => {
                            Some(State::Concluding { work, answer: Some(answer) })
                        }
                        None => None,
                    }
                }
                StateProjection::Concluding { work, answer } => {
                    let done = ready!(work.poll(cx));
                    match answer.take() {
                        Some((response, note)) => return Poll::Ready(Ok(note.concluded(&done, response))),
                        None => None,
                    }
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
    /// Calls the inner service, now that it is decided that it may be called, or answers in its place. The request has
    /// waited for so long by now.
    #[inline]
    fn proceed<ResBody>(
        self,
        outcome: Result<Option<Decision>, Error>,
        record: Option<Box<Record>>,
        waited: Duration,
    ) -> State<I, S, R, ReqBody, I::Future, ResBody>
    where
        I: Service<Request<ReqBody>, Response = Response<ResBody>>,
        R: RejectionResponse<ResBody>,
    {
        let Self { mut inner, mut parts, body, policy, mode } = self;
        note_waited(&mut parts, waited);
        match Note::of(&policy, outcome, mode, record, &mut parts) {
            Ok(note) => State::Forwarded { response: inner.call(Request::from_parts(parts, body)), note: Some(note) },
            Err(response) => State::Rejected { response: Some(response) },
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
