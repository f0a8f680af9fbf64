//! Waiting for room.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Limiter,
    line::Place,
    patience::{LEAST_PAUSE, Patience},
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    metrics,
    store::{DenyCache, Store},
};

impl<S: Store> Limiter<S> {
    /// Spends `cost` units of `limit` in the name of `key`, and waits up to `patience` until they are left.
    ///
    /// 1. A refusal is waited out for as long as it says, and then asked again. One that is longer than what is left of
    ///    the patience is returned at once, as the [`Decision`] that it is. Without any patience this is
    ///    [`check`](Self::check), unless others wait.
    /// 2. Through one limiter and its clones there is one line for the same limits and keys, whatever the costs. A caller
    ///    that is refused, or comes while others wait, goes to its end; only the first in line asks, and no caller
    ///    overtakes. One that gives up or is dropped leaves the line.
    /// 3. A caller that cannot be the first in time is refused without having been asked for, since asking could overtake:
    ///    for as long as the first has to wait, with what is used at present. So the retry time is here the least that it
    ///    can be.
    /// 4. A future that is kept and not polled stops no line. 100 ms after the first in line should have asked, or its
    ///    question have ended, the next takes over. Polled again, the first goes on in its old place.
    /// 5. A [`check`](Self::check), a limiter of another process, and a check of other limits or keys stand in no line,
    ///    or in another: of those, the one that asks first after there is room gets it.
    /// 6. A [settlement](Self::settle) or [reset](Self::reset) through the limiter lets the first in each line ask at once that
    ///    waits for one of its limits and keys. Units that others give back are seen when it asks: where only
    ///    [reserved](crate::Charge::reserve) units are in the way, that is after
    ///    [`retry_reserved_after`](Self::retry_reserved_after), or once more when the patience ends before.
    /// 7. The [`deadline`](Self::deadline) is that of each question, not of the wait, and a question is not cut short by
    ///    the patience. An error of the store is returned at once.
    ///
    /// What is never refused, such as a cost of 0, never waits. Waiting needs a tokio runtime with time; it makes no task.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
    /// use std::time::Duration;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore};
    ///
    /// const CALLS: Limit = Limit::per("calls", 2, Duration::from_millis(20));
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// for _ in 0..5 {
    ///     let decision = limiter.acquire(&CALLS, "token-7", 1, Duration::from_secs(5)).await?;
    ///     assert!(decision.is_allowed());
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub async fn acquire(
        &self,
        limit: &Limit,
        key: impl Into<Key>,
        cost: u64,
        patience: Duration,
    ) -> Result<Decision, Error> {
        let check = Check::new(Charge::new(limit.clone(), key, cost)?);
        self.acquire_all(check, patience).await
    }

    /// Decides several charges together, all or nothing, and waits up to `patience` until all of them fit: see
    /// [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// As [`check_all`](Self::check_all).
    pub async fn acquire_all(&self, check: Check, patience: Duration) -> Result<Decision, Error> {
        let mut waited = Duration::ZERO;
        self.acquire_after(check, patience, &mut waited).await
    }

    /// Waits for room for a request that has `waited` for other decisions already. That counts for the first question. Those
    /// after a wait for room have the whole deadline, and it begins anew with them.
    pub(crate) async fn acquire_after(
        &self,
        check: Check,
        patience: Duration,
        waited: &mut Duration,
    ) -> Result<Decision, Error> {
        if !check.can_be_refused() {
            return self.check_after(check, waited).await;
        }
        let (patience, lines) = (Patience::new(patience), &self.parts.lines);
        let charged = lines.charged(check.charges().map(Charge::whose));
        let mut given_back = lines.times_given_back(&charged);
        let mut asking = self.clone();
        let (place, mut asks_at) = match lines.join_others(&charged) {
            Some(place) if patience.allows(place.first_waits()) => (place, Instant::now()),
            Some(place) => return self.refuse(&check, &place, waited).await,
            None => {
                let decision = self.check_after(check.clone(), waited).await?;
                let Some(asks_at) = patience.ask_again_at(&decision) else { return Ok(decision) };
                asking = self.to_ask_after(&decision);
                (lines.join(&charged), asks_at)
            }
        };
        loop {
            if !place.turn(patience).await {
                return self.refuse(&check, &place, waited).await;
            }
            if !place.is_to_ask(asks_at, given_back, self.parts.deadline).await {
                // It was not polled for a while, and another has taken over.
                continue;
            }
            (*waited, given_back) = (Duration::ZERO, lines.times_given_back(&charged));
            let decision = asking.check_after(check.clone(), waited).await?;
            match patience.ask_again_at(&decision) {
                Some(again) => (asks_at, asking) = (again, self.to_ask_after(&decision)),
                None => return Ok(decision),
            }
        }
    }

    /// The limiter that asks again after a refusal: one that does not remember it, where reserved units may have been given
    /// back by others.
    fn to_ask_after(&self, refusal: &Decision) -> Self {
        let limiter = self.clone();
        if refusal.is_refused_by_reservations() { limiter.deny_cache(DenyCache::off()) } else { limiter }
    }

    /// The refusal of a caller that stands behind others.
    async fn refuse(&self, check: &Check, place: &Place, waited: &mut Duration) -> Result<Decision, Error> {
        let standing = self.check_after(check.without_costs(), waited).await?;
        // Room for the first may be there by now, and not for those behind.
        let refusal = standing.refused_for(check, place.first_waits().max(LEAST_PAUSE));
        metrics::decided(&refusal);
        Ok(refusal)
    }
}
