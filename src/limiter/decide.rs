//! The future of a decision: out of the deny cache, the breaker's, the store's, or of this process in the store's place.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;

use super::{Limiter, Parts, deadline::Deadline, deny_cache::Question, failure::Share};
use crate::{
    check::{Check, NeverFits},
    decision::Decision,
    error::Error,
    metrics,
    store::Store,
};

pin_project! {
    /// The future of a limiter's decision.
    #[must_use = "futures do nothing unless polled"]
    pub struct Decide<S: Store> {
        limiter: Limiter<S>,
        share: Option<Share>,
        #[pin]
        state: Deciding<S>,
    }
}

pin_project! {
    #[project = DecidingProjection]
    enum Deciding<S: Store> {
        Never { error: Option<NeverFits> },
        Made { check: Option<Check> },
        Asked { #[pin] undecided: Undecided<S> },
    }
}

pin_project! {
    /// A check that the store has been asked to decide. It is polled with the limiter, which is not counted once more for
    /// it: all threads would do that at one place.
    pub(crate) struct Undecided<S: Store> {
        #[pin]
        decision: Deadline<S::Decide>,
        question: Option<Question>,
        // What to decide in the store's place, in a box, since most checks have nobody else to decide them.
        stand_in: Option<Box<Check>>,
    }
}

/// What is needed to remember the answer, of a check that cannot be decided without waiting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unanswered(Option<Question>);

impl<S: Store> Decide<S> {
    /// Decides, in the store's place under this share, if any.
    #[inline]
    pub(super) fn new(limiter: &Limiter<S>, check: Check, share: Option<Share>) -> Self {
        Self { limiter: limiter.clone(), share, state: Deciding::Made { check: Some(check) } }
    }

    pub(super) fn never(limiter: &Limiter<S>, error: NeverFits) -> Self {
        Self { limiter: limiter.clone(), share: None, state: Deciding::Never { error: Some(error) } }
    }
}

impl<S: Store> Future for Decide<S> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (limiter, share, mut state) = (&*this.limiter, *this.share, this.state);
        loop {
            let next = match state.as_mut().project() {
                DecidingProjection::Never { error } => match error.take() {
                    Some(error) => return Poll::Ready(Err(error.into())),
                    None => None,
                },
                DecidingProjection::Made { check } => match check.take() {
                    Some(check) => match limiter.decide_now(&check, share) {
                        Ok(outcome) => return Poll::Ready(outcome),
                        Err(unanswered) => {
                            Some(Deciding::Asked { undecided: limiter.ask_store(check, share, unanswered) })
                        }
                    },
                    None => None,
                },
                DecidingProjection::Asked { undecided } => return undecided.poll(limiter, share, cx),
            };
            // Only a future that is polled again after it was ready has nothing to go on with.
            state.set(next.unwrap_or_else(|| panic!("`Decide` polled after completion")));
        }
    }
}

impl<S: Store> Undecided<S> {
    /// As a future is polled, by the limiter that has asked, under the same share.
    #[inline]
    pub(crate) fn poll(
        self: Pin<&mut Self>,
        limiter: &Limiter<S>,
        share: Option<Share>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Decision, Error>> {
        let this = self.project();
        let outcome = ready!(this.decision.poll(cx)).and_then(|answer| Ok(answer?));
        Poll::Ready(limiter.parts.heard(outcome, Unanswered(*this.question), this.stand_in.as_deref(), share))
    }
}

impl<S: Store> Parts<S> {
    /// Decides what takes no waiting: out of the deny cache, by an open breaker, or by a store that knows at once.
    #[inline]
    pub(super) fn decide_now(
        &self,
        check: &Check,
        share: Option<Share>,
    ) -> Result<Result<Decision, Error>, Unanswered> {
        let question = match self.refusals.recall(check) {
            Ok(refusal) => {
                metrics::recalled();
                metrics::decided(&refusal);
                return Ok(Ok(refusal));
            }
            Err(question) => question,
        };
        if let Some(error) = self.circuit.refuse(self.deadline, || self.probes(check.without_costs())) {
            return Ok(self.decide_locally(Some(check), share, error));
        }
        match self.store.decide_now(check) {
            Some(outcome) => Ok(self.heard(outcome.map_err(Error::from), Unanswered(question), Some(check), share)),
            None => Err(Unanswered(question)),
        }
    }

    /// Questions to find out whether the store answers: this check, which costs nothing, again and again.
    pub(super) fn probes(&self, check: Check) -> impl Fn() -> S::Decide + Send + use<S> {
        let store = self.store.clone();
        move || store.decide(check.clone())
    }

    /// Asks the store.
    #[inline]
    pub(super) fn ask(&self, check: Check, share: Option<Share>, Unanswered(question): Unanswered) -> Undecided<S> {
        let stand_in = share.map(|_| Box::new(check.clone()));
        let decision = Deadline::new(self.store.decide(check), self.deadline);
        Undecided { decision, question, stand_in }
    }

    /// What comes of the store's answer.
    #[inline]
    fn heard(
        &self,
        outcome: Result<Decision, Error>,
        Unanswered(question): Unanswered,
        check: Option<&Check>,
        share: Option<Share>,
    ) -> Result<Decision, Error> {
        self.circuit.heard(&outcome);
        match outcome {
            Ok(decision) => {
                metrics::decided(&decision);
                if let Some(question) = question {
                    self.refusals.learn(question, &decision);
                }
                Ok(decision)
            }
            Err(error) => self.decide_locally(check, share, error),
        }
    }

    /// What comes of a check that the store has not decided.
    fn decide_locally(&self, check: Option<&Check>, share: Option<Share>, error: Error) -> Result<Decision, Error> {
        metrics::failed(&error);
        let Some((check, share)) = check.zip(share) else { return Err(error) };
        let decision = self.local.decide(check, share, error)?;
        metrics::decided(&decision);
        Ok(decision)
    }
}

impl<S: Store> fmt::Debug for Decide<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decide").finish_non_exhaustive()
    }
}
