//! Reservations, settlements, resets and blocks.

use std::{mem, sync::Arc, time::Duration};

use super::{Core, Limiter, deadline::Deadline, failure::FailureMode, lines::Lines};
use crate::{
    check::{AdmissionId, Charge, Check},
    decision::{Decision, Settled, Settlement},
    error::{ConfigError, Error, StoreError, StoreErrorKind},
    key::Key,
    limit::Limit,
    metrics,
    store::{MOST_TIME, Store, StoreFuture},
};

/// Units that are reserved until they are settled. [`Limiter::reserve`] returns this.
///
/// A reservation can be kept in the value that spends the units, such as a streamed response body:
/// see the example `llm_tokens`. If it is dropped without a settlement, the units count until the
/// lease ends, and are then given back.
#[derive(Debug)]
#[must_use = "a reservation counts at its estimate until it is settled"]
pub struct Reservation {
    limiter: Limiter,
    check: Check,
    decision: Decision,
}

/// Units that are being given back. When this value is dropped, a waiter asks the store.
struct Returning<'a> {
    lines: &'a Arc<Lines>,
    /// One digest per limit and key.
    freed: Vec<u64>,
    /// The time after which the units are expected to have been given back.
    delay: Duration,
}

/// The longest time until units count as freed if the caller that settles them has left, or if the
/// reply is late. If the deadline is shorter, they count as freed after the deadline.
const LONGEST_RETURN: Duration = Duration::from_secs(1);

impl Reservation {
    /// The decision that admitted the reservation.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Sets the actual cost, which may be higher or lower than the estimate. A cost of zero gives
    /// all units back. A settlement after the lease still counts the used units, if the admission
    /// would still be in its window: see [`was_applied`](Settled::was_applied).
    ///
    /// A settlement that is sent again usually counts once, with two exceptions. After `settle(0)`,
    /// another settlement counts if it comes after the lease. Under an algorithm other than the
    /// log, a settlement after the lease counts in addition to any earlier one: see rule 5 in
    /// [`settlement`](crate::settlement). So let a single piece of code settle the reservation.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails,
    /// [`Error::BreakerOpen`] if it has failed repeatedly. The call may be tried again.
    pub async fn settle(&self, cost: u64) -> Result<Settled, Error> {
        let settlement = Settlement::new(self.check.clone(), &self.decision, |_| Some(cost));
        self.limiter.settle(settlement).await
    }
}

impl Limiter {
    /// Reserves `cost` units of `limit` for `key`, for work whose cost is known only afterwards. A
    /// cost of zero reserves one unit. The inner error is the refusal.
    ///
    /// Units that are not settled are given back when the lease ends, and at the latest when the
    /// window ends. A settlement after the lease still counts the used units, but other requests
    /// may have been admitted meanwhile.
    ///
    /// A [full](crate::MemoryStore#when-it-is-full) `MemoryStore` may count the units for the whole
    /// window. Settlements then do not give them back: see [`was_applied`](Settled::was_applied).
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
    ///         let used = 1_234; // as the response says
    ///         reservation.settle(used).await?;
    ///     }
    ///     Err(refused) => println!("come back in {:?}", refused.retry_after()),
    /// }
    /// assert_eq!(limiter.peek(&TOKENS, "ada").await?.binding().used, 1_234);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// The same as [`check`](Self::check). For a [concurrent](Limit::concurrent) limit, the same as
    /// [`block`](Self::block).
    pub async fn reserve(
        &self,
        limit: &Limit,
        key: impl Into<Key>,
        cost: u64,
        lease: Duration,
    ) -> Result<Result<Reservation, Decision>, Error> {
        of_window(limit, "reserving units")?;
        let check = Check::new(Charge::new(limit.clone(), key, cost.max(1))?.reserve(lease));
        let decision = self.check_all(check.clone()).await?;
        if !decision.is_allowed() {
            return Ok(Err(decision));
        }
        Ok(Ok(Reservation {
            limiter: self.clone(),
            check,
            decision,
        }))
    }

    /// Sets an admitted check's actual cost, or gives all its units back: see
    /// [`settlement`](crate::settlement).
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails,
    /// [`Error::BreakerOpen`] if it has failed repeatedly. The call may be tried again.
    pub async fn settle(&self, settlement: Settlement) -> Result<Settled, Error> {
        let returning = self.core.returning(&settlement.check);
        let outcome = if settlement.is_local {
            let settled = self.core.local.settle(settlement).await;
            settled.map_err(Error::from)
        } else {
            let check = settlement.check.without_costs();
            self.core
                .call_store(|store| store.settle(settlement), check)
                .await
        };
        returning.end(outcome.as_ref().err());
        outcome
    }

    /// Counts units that an admission has spent. They count in this process if it decided the
    /// check, otherwise in the store. If the store fails, the units do not count under a share: a
    /// ban would take the share for the limit, and so would the figures that clients see.
    pub(crate) async fn count(&self, spent: Check, is_local: bool) -> Result<Decision, Error> {
        if is_local {
            return Ok(self.core.local.decide(spent).await?);
        }
        let store = self.clone().with_failure_mode(FailureMode::Open);
        store.check_all(spent).await
    }

    /// Forgets the units that `limit` counts for `key`, in the store and in this process, which may
    /// have [decided](Self::fail_local) in the store's place.
    ///
    /// For a layer's limit, use the key that its extractor makes.
    /// [`extract`](crate::KeyExtractor::extract) makes it from a request.
    /// [`ApiKey::key`](crate::ApiKey::key) and its counterparts make it from a value. A string
    /// alone is [another key](crate::key#the-key-of-a-layer). If the layer has
    /// [split](crate::split) the limit, reset each of [`Split::keys`](crate::split::Split::keys)
    /// under [`Split::part`](crate::split::Split::part).
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails,
    /// [`Error::BreakerOpen`] if it has failed repeatedly. For a [concurrent](Limit::concurrent)
    /// limit, always [`Error::Unavailable`] with [`StoreErrorKind::Config`]: its places are held
    /// until their decisions are dropped.
    pub async fn reset(&self, limit: &Limit, key: impl Into<Key>) -> Result<(), Error> {
        let key = key.into();
        of_window(limit, "resetting a limit")?;
        let check = Check::new(Charge::fitting(limit.clone(), key.clone(), 0));
        let returning = self.core.returning(&check);
        let outdated = self.core.outdate(limit, &key);
        // This process may have counted in the store's place, so its own counts are reset, too.
        let _ = self.core.local.reset(limit.clone(), key.clone()).await;
        let outcome = self
            .core
            .call_store(|store| store.reset(limit.clone(), key.clone()), check)
            .await;
        drop(outdated);
        returning.end(outcome.as_ref().err());
        outcome
    }

    /// Takes all units of `limit` for `key` during `time`, at most for the limit's window. A block
    /// is for an upstream that answers "too many requests" although the limit has units left.
    ///
    /// 1. Every process on the same store refuses until the block ends, with the right retry time.
    ///    Waiters in [`acquire`](Self::acquire) wait for it.
    /// 2. Units spent before the block still count after it. A limit that is used up can be
    ///    blocked, too. It admits again when the block has ended and enough units have left the
    ///    window. If there are several blocks, the one that ends last holds.
    /// 3. Under a [fixed](crate::Algorithm::FIXED_WINDOW) window, a block ends at the latest with
    ///    the clock's current window. Under a [counter](crate::Algorithm::SLIDING_WINDOW_COUNTER),
    ///    units spent before the block come back little by little, as the counter's estimate falls.
    /// 4. A [reset](Self::reset) ends the block.
    /// 5. If the limit is [prefetched](crate::limit::prefetch), other processes refuse at the
    ///    latest when the life of their prefetches is over.
    ///
    /// A block is one store call. The store never refuses it. If the future is dropped before the
    /// reply, the limit may be blocked or not.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
    /// use std::time::Duration;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore};
    ///
    /// const CALLS: Limit = Limit::per_hour("calls", 5_000);
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// // The upstream has answered 429 with `Retry-After: 30`.
    /// limiter.block(&CALLS, "token-7", Duration::from_secs(30)).await?;
    /// let refused = limiter.check(&CALLS, "token-7", 1).await?;
    /// assert!(refused.retry_after().is_some_and(|wait| wait <= Duration::from_secs(30)));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails,
    /// [`Error::BreakerOpen`] if it has failed repeatedly. The call may be tried again. For a
    /// [concurrent](Limit::concurrent) limit, always [`Error::Unavailable`] with
    /// [`StoreErrorKind::Config`], since it has no window.
    pub async fn block(
        &self,
        limit: &Limit,
        key: impl Into<Key>,
        time: Duration,
    ) -> Result<(), Error> {
        of_window(limit, "blocking a limit")?;
        if time.is_zero() {
            return Ok(());
        }
        // Spent units with a lease count until the lease ends.
        let all = Charge::spent(limit.clone(), key, limit.units()).reserve(time);
        // The retry times in cached refusals are too short now, so these refusals are forgotten.
        let _outdated = self.core.outdate(limit, all.key());
        // With a share, this process would count the units by itself while the store fails, and the
        // limit would not be blocked for other processes.
        self.clone()
            .with_failure_mode(FailureMode::Open)
            .check_all(Check::new(all))
            .await
            .map(drop)
    }

    /// Begins a ban, unless it has already begun. Caches and returns the ban's refusal.
    pub(crate) async fn ban(&self, begins: Charge, is_local: bool) -> Result<Decision, Error> {
        let asks = Check::new(begins.asks());
        let time = begins.lease().unwrap_or_default();
        let lookup = match &self.core.refusals {
            Some(refusals) if !is_local => refusals.look_up(&asks),
            _ => None,
        };
        // All bans have the same id, so a ban that still holds does not begin again. When it has
        // ended, the id is free again.
        let begun = self
            .count(Check::new(begins).with_id(AdmissionId(0)), is_local)
            .await?;
        if begun.binding().used == 0 {
            let full = StoreError::new(
                "beginning a ban",
                StoreErrorKind::OutOfMemory,
                "the store is full",
            );
            return Err(full.of_one_check().into());
        }
        // After the clock has stepped back, the reset time is longer than the ban. So the ban's
        // time is the upper bound.
        let wait = begun.binding().reset_after().min(time);
        let refusal = begun.refused_for(&asks, wait);
        self.core.learn(lookup, &asks, &refusal);
        Ok(refusal)
    }
}

impl Core {
    /// Frees an admission's places. If `wakes`, waiters ask for them.
    pub(super) async fn release(&self, places: Settlement, wakes: bool) -> Result<Settled, Error> {
        let mut returning = self.returning(&places.check);
        if !wakes {
            returning.freed.clear();
        }
        let store: &dyn Store = if places.is_local {
            &self.local
        } else {
            &self.store
        };
        let outcome = self.upkeep(store.settle(places), MOST_TIME).await;
        returning.end(outcome.as_ref().err());
        outcome
    }

    /// Makes a call that no caller waits for, even while the store's breaker is open.
    pub(super) async fn upkeep<T>(
        &self,
        call: StoreFuture<T>,
        deadline: Duration,
    ) -> Result<T, Error> {
        let outcome = Deadline::new(call, deadline, Duration::ZERO)
            .await
            .and_then(|reply| Ok(reply?));
        outcome.inspect_err(|error| metrics::failed(error.label(), &self.layer))
    }

    /// Units under a check's limits and keys that are about to be given back.
    fn returning(&self, check: &Check) -> Returning<'_> {
        let lines = &self.lines;
        let freed = check
            .charges()
            .map(|charge| charge.digest(&lines.digester))
            .collect();
        Returning {
            lines,
            freed,
            delay: self.deadline().min(LONGEST_RETURN),
        }
    }

    /// Makes a store call that is not a decision, unless the breaker is open. `probe` is a check at
    /// no cost, for the breaker's probes.
    async fn call_store<T>(
        &self,
        call: impl FnOnce(&dyn Store) -> StoreFuture<T>,
        probe: Check,
    ) -> Result<T, Error> {
        let part = self.store.part_of(&probe);
        let outcome = if let Some(error) = self.refuse(|| probe) {
            Err(error)
        } else {
            let mut reply = Deadline::new(call(&*self.store), self.deadline(), Duration::ZERO);
            let outcome = (&mut reply).await;
            self.heard(&reply, part, None, outcome)
        };
        outcome.inspect_err(|error| metrics::failed(error.label(), &self.layer))
    }
}

/// Fails if the limit is concurrent.
fn of_window(limit: &Limit, doing: &'static str) -> Result<(), StoreError> {
    const PROBLEM: &str = "places are held until their decisions are dropped: only a limit of a window is reserved, blocked or reset";
    if !limit.is_concurrent() {
        return Ok(());
    }
    let cause = ConfigError::of_limit(limit.name(), PROBLEM);
    Err(StoreError::new(doing, StoreErrorKind::Config, cause).of_one_check())
}

impl Returning<'_> {
    /// Ends the call. After a timeout, the units may still be given back, so a waiter asks after
    /// the delay. After another failure, nobody asks.
    fn end(mut self, error: Option<&Error>) {
        match error {
            None => self.delay = Duration::ZERO,
            Some(Error::TimedOut { .. }) => {}
            Some(_) => self.freed.clear(),
        }
    }
}

impl Drop for Returning<'_> {
    fn drop(&mut self) {
        let freed = mem::take(&mut self.freed);
        if self.delay.is_zero() || freed.is_empty() {
            self.lines.free(&freed);
        } else {
            self.lines.free_after(self.delay, freed);
        }
    }
}
