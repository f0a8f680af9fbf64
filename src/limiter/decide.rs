//! The future of a decision: out of the deny cache, the breaker's, the store's, or of this process in the store's place.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;

use super::{
    Limiter, Parts,
    deadline::{Deadline, Time},
    failure::Share,
};
use crate::{
    check::{Check, NeverFits},
    decision::Decision,
    error::Error,
    metrics,
    store::{Question, Store},
};

pin_project! {
    /// The future of a limiter's decision.
    #[must_use = "futures do nothing unless polled"]
    pub struct Decide<S: Store> {
        limiter: Limiter<S>,
        // For other decisions, before this one.
        waited: Duration,
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
        // The check to decide in this process if the store fails, in a box, since most checks have none.
        stand_in: Option<Box<(Check, Share)>>,
    }
}

/// A check that cannot be decided without waiting: how long it may wait, and what is needed to remember the answer.
#[derive(Debug)]
pub(crate) struct Unanswered {
    time: Time,
    question: Option<Question>,
    share: Option<Share>,
}

impl<S: Store> Decide<S> {
    /// Decides, after so long a wait for other decisions.
    #[inline]
    pub(super) fn new(limiter: &Limiter<S>, check: Check, waited: Duration) -> Self {
        Self { limiter: limiter.clone(), waited, state: Deciding::Made { check: Some(check) } }
    }

    pub(super) fn never(limiter: &Limiter<S>, error: NeverFits) -> Self {
        Self { limiter: limiter.clone(), waited: Duration::ZERO, state: Deciding::Never { error: Some(error) } }
    }
}

impl<S: Store> Future for Decide<S> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (limiter, waited, mut state) = (&*this.limiter, *this.waited, this.state);
        let share = limiter.share();
        loop {
            let next = match state.as_mut().project() {
                DecidingProjection::Never { error } => match error.take() {
                    Some(error) => return Poll::Ready(Err(error.into())),
                    None => None,
                },
                DecidingProjection::Made { check } => match check.take() {
                    Some(check) => match limiter.decide_now(&check, share, || waited) {
                        Ok(outcome) => return Poll::Ready(outcome),
                        Err(unanswered) => Some(Deciding::Asked { undecided: limiter.ask_store(check, unanswered) }),
                    },
                    None => None,
                },
                DecidingProjection::Asked { undecided } => return undecided.poll(limiter, cx),
            };
            // Only a future that is polled again after it was ready has nothing to go on with.
            state.set(next.unwrap_or_else(|| panic!("`Decide` polled after completion")));
        }
    }
}

impl<S: Store> Undecided<S> {
    /// As a future is polled, by the limiter that has asked.
    #[inline]
    pub(crate) fn poll(
        self: Pin<&mut Self>,
        limiter: &Limiter<S>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Decision, Error>> {
        let mut this = self.project();
        let outcome = ready!(this.decision.as_mut().poll(cx)).and_then(|answer| Ok(answer?));
        limiter.parts.told(&outcome, &this.decision);
        let stand_in = this.stand_in.as_deref().map(|(check, share)| (check, *share));
        Poll::Ready(limiter.parts.heard(outcome, this.question.as_ref(), stand_in))
    }

    /// How long the request has waited for decisions by now.
    pub(crate) fn waited(&self) -> Duration {
        self.decision.waited()
    }
}

impl<S: Store> Parts<S> {
    /// Decides what takes no waiting: out of the deny cache, by an open breaker, or by a store that knows at once; and what
    /// has no time left to wait, since the request has `waited` for other decisions.
    #[inline]
    pub(super) fn decide_now(
        &self,
        check: &Check,
        share: Option<Share>,
        waited: impl FnOnce() -> Duration,
    ) -> Result<Result<Decision, Error>, Unanswered> {
        let question = match self.recall(check) {
            Ok(refusal) => return Ok(Ok(refusal)),
            Err(question) => question,
        };
        if let Some(error) = self.circuit.refuse(self.deadline, || self.probes(check.without_costs())) {
            return Ok(self.decide_locally(share.map(|share| (check, share)), error));
        }
        if let Some(outcome) = self.store.decide_now(check) {
            let outcome = outcome.map_err(Error::from);
            self.circuit.heard(&outcome, || Duration::ZERO);
            return Ok(self.heard(outcome, question.as_ref(), share.map(|share| (check, share))));
        }
        Err(Unanswered { time: self.time(waited()), question, share })
    }

    /// The refusal of a check, if that is known without asking a store that makes its callers wait, and without spending
    /// anything if it is none. Where a store at hand has told it, the retry time is a "not before".
    pub(super) fn refuse_now(&self, check: &Check) -> Option<Decision> {
        if let Ok(refusal) = self.recall(check) {
            return Some(refusal);
        }
        if self.circuit.is_open_for(self.deadline) || !check.can_be_refused() {
            return None;
        }
        let refusal = self.store.decide_now(&check.without_costs())?.ok()?.refusing(check)?;
        let refusal = refusal.with_retry_reserved_after(self.retry_reserved_after);
        metrics::decided(&refusal);
        Some(refusal)
    }

    /// The refusal of a check out of the deny cache, or what is needed to remember the one that may come.
    fn recall(&self, check: &Check) -> Result<Decision, Option<Question>> {
        let refusal = self.refusals.recall(check, self.retry_reserved_after)?;
        let refusal = refusal.with_retry_reserved_after(self.retry_reserved_after);
        metrics::recalled();
        metrics::decided(&refusal);
        Ok(refusal)
    }

    /// Questions to find out whether the store answers: this check, which costs nothing, again and again.
    pub(super) fn probes(&self, check: Check) -> impl Fn(Duration) -> Deadline<S::Decide> + Send + use<S> {
        let store = self.store.clone();
        move |deadline| Deadline::new(store.decide(check.clone()), Time::new(deadline, Duration::ZERO))
    }

    /// Asks the store.
    #[inline]
    pub(super) fn ask(&self, check: Check, unanswered: Unanswered) -> Undecided<S> {
        let Unanswered { time, question, share } = unanswered;
        let stand_in = share.map(|share| Box::new((check.clone(), share)));
        Undecided { decision: Deadline::new(self.store.decide(check), time), question, stand_in }
    }

    /// What comes of the store's answer.
    #[inline]
    fn heard(
        &self,
        outcome: Result<Decision, Error>,
        question: Option<&Question>,
        stand_in: Option<(&Check, Share)>,
    ) -> Result<Decision, Error> {
        match outcome {
            Ok(decision) => {
                metrics::decided(&decision);
                if let Some(question) = question {
                    self.refusals.learn(question, &decision);
                }
                Ok(decision.with_retry_reserved_after(self.retry_reserved_after))
            }
            Err(error) => self.decide_locally(stand_in, error),
        }
    }

    /// Tells the breaker what came of a question.
    pub(super) fn told<T, F>(&self, outcome: &Result<T, Error>, asked: &Deadline<F>) {
        // A timeout says nothing of the store where the request had waited elsewhere, or the runtime stood still.
        let is_telling = asked.time().is_mostly_left() && !asked.is_noticed_late();
        if is_telling || !matches!(outcome, Err(Error::TimedOut { .. })) {
            self.circuit.heard(outcome, || asked.took_in_time());
        }
    }

    /// The deadline of a question, after so long a wait for other decisions.
    pub(super) fn time(&self, waited: Duration) -> Time {
        Time::new(self.deadline, waited)
    }

    /// What comes of a check that the store has not decided.
    fn decide_locally(&self, stand_in: Option<(&Check, Share)>, error: Error) -> Result<Decision, Error> {
        metrics::failed(&error);
        let Some((check, share)) = stand_in else { return Err(error) };
        let decision = self.local.decide(check, share, error)?;
        metrics::decided(&decision);
        Ok(decision.with_retry_reserved_after(self.retry_reserved_after))
    }
}

impl<S: Store> fmt::Debug for Decide<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decide").finish_non_exhaustive()
    }
}
