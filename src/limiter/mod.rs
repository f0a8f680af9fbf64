//! The limiter: a store, a deadline, and a memory for refusals, without HTTP.
//!
//! 1. [`check`](Limiter::check) spends, [`acquire`](Limiter::acquire) waits until it can, [`peek`](Limiter::peek) asks,
//!    [`reserve`](Limiter::reserve) spends what is [settled](Limiter::settle) later, [`close`](Limiter::close) takes all
//!    for a time, [`reset`](Limiter::reset) forgets.
//! 2. Every answer comes within the [`deadline`](Limiter::deadline), 50 ms by default, which covers queueing,
//!    connecting and the reply. It runs from the first poll, and arms a timer only if the store makes it wait.
//! 3. A refusal is a [`Decision`]; what is not a decision is a typed [`Error`].
//! 4. A refusal may be repeated without asking the store, for as long as it is true: see [`DenyCache`].
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
//! use tower_sliding_window::{Limit, Limiter, MemoryStore};
//!
//! // 5000 calls an hour for each access token of an upstream service.
//! const CALLS: Limit = Limit::per_hour("calls", 5_000);
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! match limiter.check(&CALLS, "token-7", 1).await? {
//!     decision if decision.is_allowed() => assert_eq!(decision.remaining(), 4_999),
//!     decision => println!("wait {:?}", decision.retry_after()),
//! }
//! assert_eq!(limiter.peek(&CALLS, "token-7").await?.remaining(), 4_999);
//! # Ok(()) }
//! ```

mod acquire;
mod close;
mod deadline;
mod deny_cache;
mod failure;
mod line;
mod patience;
mod reservation;

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;

use self::{
    deadline::Deadline,
    deny_cache::{Question, Refusals},
    line::Lines,
};
pub use self::{deny_cache::DenyCache, failure::FailureMode, reservation::Reservation};
use crate::{
    check::{Charge, Check, NeverFits},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
    store::Store,
};

/// How long a decision may take unless the limiter says otherwise.
const DEFAULT_DEADLINE: Duration = Duration::from_millis(50);

/// A store, a deadline, and a memory for refusals, which clones share. See the [module docs](self). Cheap to clone if
/// the store is.
#[derive(Clone, Debug)]
pub struct Limiter<S> {
    store: S,
    deadline: Duration,
    refusals: Refusals,
    lines: Lines,
}

impl<S: Store> Limiter<S> {
    /// A limiter on `store` with a deadline of 50 ms.
    #[must_use]
    pub fn new(store: S) -> Self {
        let refusals = Refusals::new(DenyCache::new(), store.epoch());
        Self { store, deadline: DEFAULT_DEADLINE, refusals, lines: Lines::default() }
    }

    /// Sets how long any answer may take. Default: 50 ms.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets for how long, and how many, refusals may be repeated without asking the store. Default:
    /// [`DenyCache::new`].
    #[must_use]
    pub fn deny_cache(mut self, deny_cache: DenyCache) -> Self {
        self.refusals = Refusals::new(deny_cache, self.store.epoch());
        self
    }

    /// Spends `cost` units of `limit` in the name of `key`, if they are left.
    ///
    /// # Errors
    ///
    /// [`Error::NeverFits`] if the cost is above the limit, [`Error::TimedOut`] past the deadline,
    /// [`Error::Unavailable`] if the store fails.
    pub fn check(&self, limit: &Limit, key: impl Into<Key>, cost: u64) -> Decide<S> {
        match Charge::new(limit.clone(), key, cost) {
            Ok(charge) => self.check_all(Check::new(charge)),
            Err(error) => Decide { state: Deciding::Never { error: Some(error) } },
        }
    }

    /// Decides several charges together, all or nothing.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails.
    pub fn check_all(&self, check: Check) -> Decide<S> {
        let made = Made { store: self.store.clone(), deadline: self.deadline, refusals: self.refusals.clone(), check };
        Decide { state: Deciding::Made { made: Some(made) } }
    }

    /// Reserves `cost` units of `limit` in the name of `key`, if they are left: for work whose cost is known only
    /// afterwards. What is not settled is given back when the lease ends, with the window at the latest. The inner error
    /// is the refusal.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
    /// use std::time::Duration;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore};
    ///
    /// const TOKENS: Limit = Limit::per_hour("tokens", 10_000);
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// match limiter.reserve(&TOKENS, "ada", 2_000, Duration::from_secs(120)).await? {
    ///     Ok(reservation) => {
    ///         let used = 1_234; // as the answer says
    ///         reservation.settle(used).await?;
    ///     }
    ///     Err(refused) => println!("come back in {:?}", refused.retry_after()),
    /// }
    /// assert_eq!(limiter.peek(&TOKENS, "ada").await?.used(), 1_234);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub async fn reserve(
        &self,
        limit: &Limit,
        key: impl Into<Key>,
        cost: u64,
        lease: Duration,
    ) -> Result<Result<Reservation<S>, Decision>, Error> {
        let check = Check::new(Charge::new(limit.clone(), key, cost)?.reserve(lease));
        let decision = self.check_all(check.clone()).await?;
        let is_allowed = decision.is_allowed();
        Ok(if is_allowed { Ok(Reservation::new(self.clone(), check, decision)) } else { Err(decision) })
    }

    /// Sets what an admitted check has really cost, or gives it back: see [`settlement`](crate::settlement).
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails. It may be tried again.
    pub async fn settle(&self, settlement: Settlement) -> Result<Settled, Error> {
        let line = self.lines.digest(settlement.accounts().map(|account| account.charge().whose()));
        let settled = Deadline::new(self.store.settle(settlement), self.deadline).await??;
        self.lines.given_back(line);
        Ok(settled)
    }

    /// How `limit` stands for `key`, without spending anything. Look at [`remaining`](Decision::remaining): asking costs
    /// nothing, so the decision itself is never a refusal, even when nothing is left.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails.
    pub fn peek(&self, limit: &Limit, key: impl Into<Key>) -> Decide<S> {
        self.check(limit, key, 0)
    }

    /// Forgets what `limit` counts for `key`.
    ///
    /// What a layer counts is under the keys that its extractor makes:
    /// [`extract`](crate::KeyExtractor::extract) makes the key of a request for a reset, too, and
    /// [`ApiKey::key`](crate::ApiKey::key) and its like that of a value.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails.
    pub async fn reset(&self, limit: &Limit, key: impl Into<Key>) -> Result<(), Error> {
        let key = key.into();
        let line = self.lines.digest([(limit, &key)]);
        Deadline::new(self.store.reset(limit.clone(), key), self.deadline).await??;
        self.lines.given_back(line);
        Ok(())
    }

    /// Something else that has to come within the deadline.
    pub(crate) fn within<F>(&self, future: F) -> Deadline<F> {
        Deadline::new(future, self.deadline)
    }
}

/// What a decision needs of its limiter.
struct Made<S> {
    store: S,
    deadline: Duration,
    refusals: Refusals,
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
        Asked { #[pin] decision: Deadline<S::Decide>, question: Option<Question> },
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
                    Some(Made { store, deadline, refusals, check }) => match refusals.recall(&check) {
                        Ok(refusal) => return Poll::Ready(Ok(refusal)),
                        Err(question) => {
                            let decision = Deadline::new(store.decide(check), deadline);
                            Some(Deciding::Asked { decision, question })
                        }
                    },
                    None => None,
                },
                DecidingProjection::Asked { decision, question } => {
                    let outcome = ready!(decision.poll(cx))??;
                    if let Some(question) = question.take() {
                        question.answered(&outcome);
                    }
                    return Poll::Ready(Ok(outcome));
                }
            };
            // Only a future that is polled again after it was ready has nothing to go on with.
            state.set(next.unwrap_or_else(|| panic!("`Decide` polled after completion")));
        }
    }
}

impl<S: Store> std::fmt::Debug for Decide<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decide").finish_non_exhaustive()
    }
}
