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
    Limiter,
    breaker::Circuit,
    deadline::Deadline,
    deny_cache::{Question, Refusals},
    failure::Share,
    local::Local,
};
use crate::{
    check::{Check, NeverFits},
    decision::Decision,
    error::Error,
    metrics,
    store::Store,
};

/// What a decision needs of its limiter.
struct Made<S> {
    store: S,
    deadline: Duration,
    refusals: Refusals,
    circuit: Circuit,
    check: Check,
    stand_in: Option<Box<StandIn>>,
}

/// What decides in the store's place. Most checks have none, so it is in a box.
struct StandIn {
    local: Local,
    share: Share,
    check: Check,
}

pin_project! {
    /// The future of a limiter's decision.
    #[must_use = "futures do nothing unless polled"]
    pub struct Decide<S: Store> {
        #[pin]
        state: Deciding<S>,
    }
}

pin_project! {
    #[project = DecidingProjection]
    enum Deciding<S: Store> {
        Never { error: Option<NeverFits> },
        Made { made: Option<Made<S>> },
        Asked {
            #[pin] decision: Deadline<S::Decide>,
            question: Option<Question>,
            circuit: Circuit,
            stand_in: Option<Box<StandIn>>,
        },
    }
}

impl<S: Store> Decide<S> {
    /// Decides, in the store's place under this share, if any.
    pub(super) fn new(limiter: &Limiter<S>, check: Check, share: Option<Share>) -> Self {
        let stand_in = share.map(|share| StandIn { local: limiter.local.clone(), share, check: check.clone() });
        let made = Made {
            store: limiter.store.clone(),
            deadline: limiter.deadline,
            refusals: limiter.refusals.clone(),
            circuit: limiter.circuit.clone(),
            check,
            stand_in: stand_in.map(Box::new),
        };
        Self { state: Deciding::Made { made: Some(made) } }
    }

    pub(super) fn never(error: NeverFits) -> Self {
        Self { state: Deciding::Never { error: Some(error) } }
    }
}

impl<S: Store> Future for Decide<S> {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                DecidingProjection::Never { error } => match error.take() {
                    Some(error) => return Poll::Ready(Err(error.into())),
                    None => None,
                },
                DecidingProjection::Made { made } => match made.take() {
                    Some(Made { store, deadline, refusals, circuit, check, stand_in }) => {
                        let question = match refusals.recall(&check) {
                            Ok(refusal) => {
                                metrics::recalled();
                                metrics::decided(&refusal);
                                return Poll::Ready(Ok(refusal));
                            }
                            Err(question) => question,
                        };
                        if let Some(error) = circuit.refuse(deadline, || store.decide(check.without_costs())) {
                            return Poll::Ready(StandIn::decide(stand_in, error));
                        }
                        let decision = Deadline::new(store.decide(check), deadline);
                        Some(Deciding::Asked { decision, question, circuit, stand_in })
                    }
                    None => None,
                },
                DecidingProjection::Asked { decision, question, circuit, stand_in } => {
                    let outcome = ready!(decision.poll(cx)).and_then(|answer| Ok(answer?));
                    circuit.heard(&outcome);
                    return Poll::Ready(match outcome {
                        Ok(decision) => {
                            metrics::decided(&decision);
                            if let Some(question) = question.take() {
                                question.answered(&decision);
                            }
                            Ok(decision)
                        }
                        Err(error) => StandIn::decide(stand_in.take(), error),
                    });
                }
            };
            // Only a future that is polled again after it was ready has nothing to go on with.
            state.set(next.unwrap_or_else(|| panic!("`Decide` polled after completion")));
        }
    }
}

impl StandIn {
    /// What comes of a check that the store has not decided.
    fn decide(stand_in: Option<Box<Self>>, error: Error) -> Result<Decision, Error> {
        metrics::failed(&error);
        let Some(stand_in) = stand_in else { return Err(error) };
        let decision = stand_in.local.decide(&stand_in.check, stand_in.share, error)?;
        metrics::decided(&decision);
        Ok(decision)
    }
}

impl<S: Store> fmt::Debug for Decide<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decide").finish_non_exhaustive()
    }
}
