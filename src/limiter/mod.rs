//! The limiter: a store, a deadline, a memory for refusals, and what to do when the store fails, without HTTP.
//!
//! 1. [`check`](Limiter::check) spends, [`acquire`](Limiter::acquire) waits until it can, [`peek`](Limiter::peek) asks,
//!    [`reserve`](Limiter::reserve) spends what is [settled](Limiter::settle) later, [`pause`](Limiter::pause) takes all
//!    for a time, [`reset`](Limiter::reset) forgets.
//! 2. Every question to the store is answered within the [`deadline`](Limiter::deadline), 50 ms by default, which covers
//!    queueing, connecting and the reply. It runs from the first poll, and arms a timer only if the store makes it wait.
//!    All but [`acquire`](Limiter::acquire) ask one question.
//! 3. A refusal is a [`Decision`]; what is not a decision is a typed [`Error`].
//! 4. A check that is known to be refused is refused without asking the store, as long as that is true: see [`DenyCache`].
//! 5. A store that has failed repeatedly is not asked, but tried in the background: see [`Breaker`]. Limiters on clones of
//!    one `RedisStore` know the same of it.
//! 6. While the store cannot decide, this process may, under a share of each limit: see [`Share`].
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
mod deadline;
mod decide;
mod failure;
mod line;
mod local;
mod patience;
mod pause;
mod reservation;
mod turn;

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use tokio::time::Instant;

pub(crate) use self::decide::{Unanswered, Undecided};
use self::{deadline::Deadline, line::Lines, local::Local};
pub use self::{
    decide::Decide,
    failure::{FailureMode, Share},
    reservation::Reservation,
};
use crate::{
    check::{Charge, Check},
    decision::{Decision, RETRY_RESERVED_AFTER},
    error::{Error, StoreError},
    key::Key,
    limit::Limit,
    metrics,
    settlement::{Settled, Settlement},
    store::{Breaker, Circuit, DenyCache, Refusals, Store},
};

/// How long a decision may take unless the limiter says otherwise.
const DEFAULT_DEADLINE: Duration = Duration::from_millis(50);

/// A store, a deadline, a memory for refusals, and a breaker, which clones share. See the [module docs](self). Cheap to
/// clone.
#[derive(Clone, Debug)]
pub struct Limiter<S> {
    parts: Arc<Parts<S>>,
    /// Under which to decide in the store's place, if at all.
    share: Option<Share>,
}

/// What a limiter is made of. A clone of it is what a limiter becomes when it gets a setting of its own.
#[derive(Clone, Debug)]
struct Parts<S> {
    store: S,
    deadline: Duration,
    retry_reserved_after: Duration,
    refusals: Refusals,
    circuit: Circuit,
    lines: Lines,
    local: Local,
}

impl<S: Store> Limiter<S> {
    /// A limiter on `store` with a deadline of 50 ms. It has the deny cache and the breaker of the store, if the store has an
    /// [local state](Store::local_state).
    #[must_use]
    pub fn new(store: S) -> Self {
        let (refusals, circuit) = (Refusals::of_store(store.local_state()), Circuit::of_store(store.local_state()));
        let (lines, local) = (Lines::default(), Local::default());
        let (deadline, retry_reserved_after) = (DEFAULT_DEADLINE, RETRY_RESERVED_AFTER);
        let parts = Parts { store, deadline, retry_reserved_after, refusals, circuit, lines, local };
        Self { parts: Arc::new(parts), share: None }
    }

    /// Sets how long the answer to any question may take. Default: 50 ms.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.set(|parts| parts.deadline = deadline)
    }

    /// Sets when a check is to come back that only [reserved](Charge::reserve) units refuse, which may be given back at any
    /// time. Default: one second. A lease that ends before makes it shorter, and units that are not reserved may make it
    /// longer: see the rules of a [`decision`](crate::decision).
    ///
    /// For so long, [`acquire`](Self::acquire) waits at most until it asks again, and a [`DenyCache`] remembers such a
    /// refusal.
    #[must_use]
    pub fn retry_reserved_after(self, wait: Duration) -> Self {
        self.set(|parts| parts.retry_reserved_after = wait)
    }

    /// Gives this limiter and its clones a deny cache of their own: for how long, and of how many, refusals are remembered.
    /// Default: the store's, which is [`DenyCache::new`].
    #[must_use]
    pub fn deny_cache(self, deny_cache: DenyCache) -> Self {
        self.set(|parts| parts.refusals = Refusals::own(deny_cache, parts.store.local_state()))
    }

    /// Gives this limiter and its clones a breaker of their own: after how many failures the store is not asked for a
    /// while. Default: the store's, which is [`Breaker::new`].
    #[must_use]
    pub fn breaker(self, breaker: Breaker) -> Self {
        self.set(|parts| parts.circuit = Circuit::own(breaker))
    }

    /// Decides in this process, under such a share of each limit, while the store cannot. Default: the store's failure is
    /// an [`Error`], and what happens without a decision is the caller's choice.
    ///
    /// ```
    /// # #[cfg(feature = "redis")]
    /// # async fn call() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_sliding_window::{Limit, Limiter, RedisStore, Share};
    ///
    /// let store = RedisStore::builder("redis://127.0.0.1:6379").build()?;
    /// let limiter = Limiter::new(store).fail_local(Share::one_of(8));
    /// let decision = limiter.check(&Limit::per_day("upstream", 9_500), "account-7", 1).await?;
    /// if let Some(error) = decision.local_cause() {
    ///     println!("{} of this process's share left: {error}", decision.remaining());
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn fail_local(self, share: Share) -> Self {
        self.with_share(Some(share))
    }

    /// The share to decide under in the store's place, if any.
    pub(crate) fn with_share(self, share: Option<Share>) -> Self {
        Self { share, ..self }
    }

    pub(crate) fn share(&self) -> Option<Share> {
        self.share
    }

    fn set(mut self, change: impl FnOnce(&mut Parts<S>)) -> Self {
        change(Arc::make_mut(&mut self.parts));
        self
    }

    /// Spends `cost` units of `limit` in the name of `key`, if they are left.
    ///
    /// # Errors
    ///
    /// [`Error::NeverFits`] if the cost is above the limit, [`Error::TimedOut`] past the deadline,
    /// [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has failed repeatedly.
    pub fn check(&self, limit: &Limit, key: impl Into<Key>, cost: u64) -> Decide<S> {
        match Charge::new(limit.clone(), key, cost) {
            Ok(charge) => self.check_all(Check::new(charge)),
            Err(error) => Decide::never(self, error),
        }
    }

    /// Decides several charges together, all or nothing.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly.
    pub fn check_all(&self, check: Check) -> Decide<S> {
        Decide::new(self, check, Duration::ZERO)
    }

    /// Decides for a request that has `waited` for other decisions already, and adds to that how long it waits for this.
    pub(crate) async fn check_after(&self, check: Check, waited: &mut Duration) -> Result<Decision, Error> {
        let asked = Instant::now();
        let outcome = Decide::new(self, check, *waited).await;
        *waited = waited.saturating_add(asked.elapsed());
        outcome
    }

    /// Decides at once what takes no waiting, in the store's place under this share, if any; and what has no time left to
    /// wait, since its request has `waited` for other decisions.
    #[inline]
    pub(crate) fn decide_now(
        &self,
        check: &Check,
        share: Option<Share>,
        waited: impl FnOnce() -> Duration,
    ) -> Result<Result<Decision, Error>, Unanswered> {
        self.parts.decide_now(check, share, waited)
    }

    /// The refusal of a check, if it is known at once that there is one. Nothing is spent if there is none.
    pub(crate) fn refuse_now(&self, check: &Check) -> Option<Decision> {
        self.parts.refuse_now(check)
    }

    /// Asks the store what could not be decided at once.
    #[inline]
    pub(crate) fn ask_store(&self, check: Check, unanswered: Unanswered) -> Undecided<S> {
        self.parts.ask(check, unanswered)
    }

    /// Reserves `cost` units of `limit`, at least one, in the name of `key`, if they are left: for work whose cost is known only
    /// afterwards. Units that are not settled are given back when the lease ends, with the window at the latest. A
    /// settlement after the lease still counts what was used; in between others may have been admitted in its place. The inner
    /// error is the refusal, a [`Decision`].
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
        let check = Check::new(Charge::new(limit.clone(), key, cost.max(1))?.reserve(lease));
        let decision = self.check_all(check.clone()).await?;
        let is_allowed = decision.is_allowed();
        Ok(if is_allowed { Ok(Reservation::new(self.clone(), check, decision)) } else { Err(decision) })
    }

    /// Sets what an admitted check has really cost, or gives it back: see [`settlement`](crate::settlement).
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly. It may be tried again.
    pub async fn settle(&self, settlement: Settlement) -> Result<Settled, Error> {
        let lines = &self.parts.lines;
        let giving_back = lines.give_back(lines.charged(settlement.accounts().map(|account| account.charge().whose())));
        giving_back.outcome(if settlement.is_local() {
            self.parts.local.settle(settlement).await.map_err(Error::from)
        } else {
            let check = settlement.check().without_costs();
            self.ask(|store| store.settle(settlement), check).await
        })
    }

    /// Counts what was spent by an admission: in this process, if that has decided in the store's place.
    pub(crate) async fn count(&self, spent: Check, is_local: bool) -> Result<Decision, Error> {
        if is_local { Ok(self.parts.local.count(spent).await?) } else { self.check_all(spent).await }
    }

    /// How `limit` stands for `key`, without spending anything. Look at [`remaining`](Decision::remaining): asking costs
    /// nothing, so the decision itself is never a refusal, even when nothing is left.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly.
    pub fn peek(&self, limit: &Limit, key: impl Into<Key>) -> Decide<S> {
        self.check(limit, key, 0)
    }

    /// Forgets what `limit` counts for `key`.
    ///
    /// What a layer counts is under the keys that its extractor makes:
    /// [`extract`](crate::KeyExtractor::extract) makes the key of a request for a reset, too, and
    /// [`ApiKey::key`](crate::ApiKey::key) and its like that of a value. Of a limit that the layer has
    /// [split](crate::KeyedLimit::split), the key itself counts nothing: reset each of [`Split::keys`](crate::Split::keys),
    /// under [`Split::limit`](crate::Split::limit), of the same limit in as many parts.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly.
    pub async fn reset(&self, limit: &Limit, key: impl Into<Key>) -> Result<(), Error> {
        let key = key.into();
        let giving_back = self.parts.lines.give_back(self.parts.lines.charged([(limit, &key)]));
        let check = Check::new(Charge::of_nothing(limit.clone(), key.clone()));
        giving_back.outcome(self.ask(|store| store.reset(limit.clone(), key), check).await)
    }

    /// Asks the store something else than a decision, unless the breaker is open. `probe` is a check that costs nothing.
    async fn ask<T, F>(&self, question: impl FnOnce(&S) -> F, probe: Check) -> Result<T, Error>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let parts = &*self.parts;
        match parts.circuit.refuse(parts.deadline, || parts.probes(probe)) {
            Some(error) => {
                metrics::failed(&error);
                Err(error)
            }
            None => {
                let mut asked = pin!(self.within(question(&parts.store)));
                let outcome = asked.as_mut().await.and_then(|answer| Ok(answer?));
                parts.told(&outcome, &asked);
                outcome.inspect_err(metrics::failed)
            }
        }
    }

    /// Something else that has to come within the deadline.
    pub(crate) fn within<F>(&self, future: F) -> Deadline<F> {
        self.within_after(future, Duration::ZERO)
    }

    /// Something else that has to come within what a request that has `waited` already has left of the deadline.
    pub(crate) fn within_after<F>(&self, future: F, waited: Duration) -> Deadline<F> {
        Deadline::new(future, self.parts.time(waited))
    }
}
