//! Waiting until a check is admitted.

use std::time::Duration;

use tokio::time::Instant;

use super::{Limiter, deadline::later, lines::Position};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    metrics,
};

/// A caller waits at least this long between two of its checks. Otherwise a store whose retry times
/// are zero would be asked all the time.
const LEAST_BLOCK: Duration = Duration::from_millis(1);

/// The time after which a caller asks the store again when the store has failed.
const PAUSE: Duration = Duration::from_millis(100);

impl Limiter {
    /// Waits up to `max_wait` until `cost` units of `limit` are left for `key`, and spends them.
    ///
    /// 1. After a refusal, the caller waits for the retry time, and asks again. If the retry time
    ///    is longer than the rest of `max_wait`, this method returns the refusal, a [`Decision`],
    ///    at once. With a `max_wait` of zero, this method does the same as [`check`](Self::check),
    ///    unless other callers wait.
    /// 2. A limiter and its clones have one line for each set of limits and keys that can refuse.
    ///    Checks at different costs wait in the same line. Clones with another
    ///    [`deadline`](Self::deadline) have lines of their own, since the store may answer only the
    ///    callers with the longer deadline. A caller that is refused, or arrives while others wait,
    ///    joins the line. Callers stand in the order of their arrival. Only the first in line asks.
    ///    After an admission that leaves units, the next callers ask as well, as many as fit into
    ///    these units together. No caller overtakes another. A caller that gives up or is dropped
    ///    leaves the line.
    /// 3. A caller that cannot reach the front of the line in time is refused without spending. The
    ///    retry time of this refusal is a lower bound: the time that the first in line has to wait.
    /// 4. A future that is kept but not polled delays the line only for a moment. The next caller
    ///    takes over 100 ms after the first in line should have asked, or its call should have
    ///    ended. If the next caller is not polled within a millisecond, any other caller that is
    ///    polled takes over. A caller that is polled again gets its old position in the line back.
    /// 5. [`check`](Self::check), limiters of other processes, and checks of other sets of limits
    ///    or keys do not join the line. Units that are left go to the first check that asks,
    ///    whether it waits in the line or not.
    /// 6. After a [settlement](Self::settle) or [reset](Self::reset) through this limiter, waiting
    ///    callers ask at once, in the order of their arrival. A caller asks if it is the first in
    ///    its line, fits into the units that are left, and is refused by no other limit or key. If
    ///    the number of units that are left is unknown, such as after a reset, one caller asks, and
    ///    the others ask after the reply to that caller. If a caller does not use the freed units,
    ///    the next caller asks. If the caller of the settlement leaves before the reply, or the
    ///    call times out, the waiting callers ask after a delay that is as long as the deadline,
    ///    but at most a second. If the first in line is refused only because units are
    ///    [reserved](crate::Charge::reserve), that caller asks again after
    ///    [`retry_reserved_after`](Self::retry_reserved_after), and for the last time at the end of
    ///    `max_wait`. A caller that does not fit into the units that are left asks only when its
    ///    retry time is over, even if the freed units and the units that leave the window would be
    ///    enough earlier.
    /// 7. A settlement or reset through another limiter wakes no caller of this limiter, even if
    ///    both limiters have the same store. The callers of this limiter then ask again when their
    ///    retry times are over. Only clones of one limiter wake each other's callers.
    /// 8. The [`deadline`](Self::deadline) limits each call to the store, not the wait. The end of
    ///    `max_wait` does not interrupt a call. While the store fails or does not answer in time,
    ///    the first in line asks again every 100 ms. A caller gets the error when less than 100 ms
    ///    of its `max_wait` are left. If waiting does not help, such as after a wrong password, the
    ///    caller gets the error at once. Under [`fail_local`](Self::fail_local), the share decides
    ///    while the store cannot. The store may have counted the units of each call that it did not
    ///    answer. So one caller that waits while the store stands still may use several times its
    ///    cost. These units leave with the window.
    ///
    /// A check that can never be refused, such as a check at a cost of 0, never waits. Waiting
    /// needs a tokio runtime with time. While several callers wait in a line, a task on the runtime
    /// of one of them watches the line. If that runtime is not driven, the next caller takes over
    /// only after another second or so, plus 20 ms for each caller in line.
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
    /// The same as [`check`](Self::check).
    pub async fn acquire(
        &self,
        limit: &Limit,
        key: impl Into<Key>,
        cost: u64,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        let check = Check::new(Charge::new(limit.clone(), key, cost)?);
        self.acquire_all(check, max_wait).await
    }

    /// Decides several charges together, all or nothing, and waits up to `max_wait` until all of
    /// them fit: see [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// The same as [`check_all`](Self::check_all).
    pub async fn acquire_all(&self, check: Check, max_wait: Duration) -> Result<Decision, Error> {
        self.acquire_after(check, max_wait, &mut Duration::default())
            .await
    }

    /// Does the same as [`acquire_all`](Self::acquire_all), for a request that has already `waited`
    /// for other decisions. The time in `waited` shortens the deadline of the first call to the
    /// store. Later calls, after a wait in line, have the whole deadline.
    pub(crate) async fn acquire_after(
        &self,
        check: Check,
        max_wait: Duration,
        waited: &mut Duration,
    ) -> Result<Decision, Error> {
        if !check.can_be_refused() {
            return self.decide(check, waited).await;
        }
        let end = later(Instant::now(), max_wait);
        let (position, mut is_in_line) = self.core.lines.arrive(&check, self.core.deadline);
        if is_in_line
            && !is_within(
                end.saturating_duration_since(Instant::now()),
                position.first_waits(),
            )
        {
            return self.refuse(&check, &position, waited).await;
        }
        let mut limiter = self.clone();
        loop {
            if is_in_line {
                if !position
                    .has_turn_before(end, || self.core.deadline())
                    .await?
                {
                    return self.refuse(&check, &position, waited).await;
                }
                *waited = Duration::ZERO;
            }
            let outcome = limiter.decide(check.clone(), waited).await;
            let asks_at = ask_again_at(end, &outcome, self.core.round_trip.distance());
            position.answer(&outcome, asks_at);
            if asks_at.is_none() {
                return outcome;
            }
            (is_in_line, limiter) = (true, self.clone());
            if outcome.is_ok_and(|decision| decision.is_refused_by_reservations()) {
                // Other callers may give back units before the next check. The next check therefore
                // asks the store, even if the refusal cache remembers a refusal.
                limiter = limiter.asking_each_time();
            }
        }
    }

    /// Refuses a caller that does not reach the front of the line in time.
    async fn refuse(
        &self,
        check: &Check,
        position: &Position,
        waited: &mut Duration,
    ) -> Result<Decision, Error> {
        let status = match self.decide(check.without_costs(), waited).await {
            Err(error) => return self.core.known(check).ok_or(error),
            Ok(status) => status,
        };
        // Units may be left by now. These units are for the first in line, so the callers behind it
        // are refused all the same.
        let refusal = status.refused_for(check, position.first_waits().max(LEAST_BLOCK));
        metrics::decided(&refusal, &self.core.layer);
        Ok(refusal)
    }
}

/// Returns when to ask again; `None` after an admission, after an error that will not pass, or if
/// the retry time goes beyond `end`. If only reserved units refuse, the last check is at `end`,
/// since these units may be given back at any time.
fn ask_again_at(
    end: Instant,
    outcome: &Result<Decision, Error>,
    distance: Duration,
) -> Option<Instant> {
    let now = Instant::now();
    let left = end.saturating_duration_since(now);
    let (wait, asks_after) = match outcome {
        Ok(decision) => {
            let wait = decision.retry_after()?;
            let wait = if decision.is_refused_by_reservations() {
                wait.min(left)
            } else {
                wait
            };
            // The retry time counts from the store's decision. Since then the reply has travelled,
            // and the next check will travel. Both together take a round trip, which is subtracted.
            // After a decision in the store's place, the caller asks after a `PAUSE`: the store may
            // be back long before the retry time, with units left.
            (
                wait,
                if decision.is_the_stores() {
                    wait.saturating_sub(distance)
                } else {
                    wait.min(PAUSE)
                },
            )
        }
        Err(error) => error.may_pass().then_some((PAUSE, PAUSE))?,
    };
    is_within(left, wait).then(|| later(now, asks_after.max(LEAST_BLOCK)))
}

fn is_within(left: Duration, wait: Duration) -> bool {
    // With no time left, a wait of zero is too long as well. Otherwise a store that always returns
    // a retry time of zero would be asked for ever.
    !left.is_zero() && wait <= left
}
