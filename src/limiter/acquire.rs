//! Waiting until a check is admitted, first come, first served.

use std::{panic::resume_unwind, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, timeout_at},
};

use super::{
    Limiter,
    deadline::{current_runtime, later, runtime_has_ended},
    lines::Place,
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    metrics,
};

/// A waiter waits at least this long between two of its checks. Otherwise a store that returns zero
/// retry times would be asked all the time.
const LEAST_BLOCK: Duration = Duration::from_millis(1);

/// The time after which a waiter asks the store again when the store has failed.
const PAUSE: Duration = Duration::from_millis(100);

impl Limiter {
    /// Waits up to `max_wait` until `cost` units of `limit` are left for `key`, and spends them.
    ///
    /// 1. **Order.** Lines are first come, first served. A limiter and its clones have one line for
    ///    each set of limits and keys that can refuse a check. Each tokio runtime has its own
    ///    lines, and so does each [`deadline`](Self::deadline) among the clones. Checks with
    ///    different costs wait in the same line. A waiter joins the end of the line when it is
    ///    refused for the first time, or when it arrives and others are already in line. Waiters
    ///    are admitted in this order. Only the first waiter asks the store. If units are left after
    ///    an admission, the next waiters ask as well: as many as would fit at the admitted check's
    ///    cost. Calls to [`check`](Self::check), waiters in other lines, and other processes do not
    ///    wait in this line: free units go to the first check that asks.
    /// 2. **Retry time.** A refused waiter asks again when its retry time is over. If only
    ///    [reserved](crate::Charge::reserve) units are in the way, it asks again after
    ///    [`retry_reserved_after`](Self::retry_reserved_after), and a last time at the end of
    ///    `max_wait`. If the retry time is longer than the rest of `max_wait`, the refusal is
    ///    returned at once. A waiter that cannot reach the front in time is also refused at once,
    ///    and spends nothing. Its retry time is then a lower bound: the time until the first waiter
    ///    in line asks again.
    /// 3. **Freed units.** A [settlement](Self::settle) or [reset](Self::reset) through this
    ///    limiter or a clone wakes a waiter, and so does a place that is freed. Among the waiters
    ///    at the front of their lines, the one that has waited longest for units under this limit
    ///    and key is woken. If the store's reply to it says that units are left, and this limit
    ///    does not refuse it, the next waiter is woken, and so on. If a settlement's caller leaves
    ///    before the reply, or the call times out, a waiter is woken after the deadline, or after a
    ///    second if the deadline is longer. Other limiters do not wake waiters here, even on the
    ///    same store.
    /// 4. **Failures.** The [`deadline`](Self::deadline) limits each store call, not the wait.
    ///    While the store fails, the first waiter in line asks again every 100 ms. This waiter gets
    ///    the error when less than 100 ms of its `max_wait` is left. If waiting does not help, such
    ///    as after a wrong password, it gets the error at once. Under
    ///    [`fail_local`](Self::fail_local), this process decides under its share meanwhile. The
    ///    store may have counted the units for each call that it did not answer.
    /// 5. **Polling.** While the caller is in line, a task on its runtime waits on its behalf. So a
    ///    future that is kept without being polled does not block others. The check may be admitted
    ///    meanwhile. Its units are then spent, even if the future is dropped before it is polled
    ///    again. Dropping the future ends the task, and the next waiter has its turn. Waiting needs
    ///    a tokio runtime with time. If this runtime ends, the result is an [`Error::Unavailable`].
    ///
    /// A check that can never be refused, such as one at a cost of 0, never waits.
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
    /// for other decisions. This time shortens the deadline of the first store call. Later calls,
    /// after a wait in line, have the whole deadline.
    pub(crate) async fn acquire_after(
        &self,
        check: Check,
        max_wait: Duration,
        waited: &mut Duration,
    ) -> Result<Decision, Error> {
        if !check.can_be_refused() {
            return self.decide(check, waited).await;
        }
        let mut caller = Caller {
            limiter: self.clone(),
            place: self.core.lines.arrive(&check, self.core.deadline),
            check,
            end: later(Instant::now(), max_wait),
            asks_at: None,
        };
        let outcome = match caller.place.line_waits() {
            None => caller.ask(waited).await,
            Some(wait) if is_within(max_wait, wait) => None,
            Some(_) => Some(caller.refuse(waited).await),
        };
        if let Some(outcome) = outcome {
            return outcome;
        }
        *waited = Duration::ZERO;
        // A task waits on the caller's behalf, since the caller may not be polled in time.
        let mut task = JoinSet::new();
        task.spawn_on(caller.wait(), &current_runtime()?);
        match task.join_next().await {
            Some(Ok(outcome)) => outcome,
            Some(Err(error)) if error.is_panic() => resume_unwind(error.into_panic()),
            _ => Err(runtime_has_ended()),
        }
    }
}

struct Caller {
    limiter: Limiter,
    place: Place,
    check: Check,
    end: Instant,
    /// The time at which the caller asks again after a refusal.
    asks_at: Option<Instant>,
}

impl Caller {
    /// Asks the store whenever it is the caller's turn, until the caller need not wait any more.
    async fn wait(mut self) -> Result<Decision, Error> {
        // A caller that has waited for others asks as soon as it has its turn.
        if self.place.line_waits().is_some() {
            self.asks_at = None;
        }
        if timeout_at(self.end, self.place.turn()).await.is_err() {
            return self.refuse(&mut Duration::default()).await;
        }
        self.check.wait_in_line();
        loop {
            if let Some(asks_at) = self.asks_at {
                self.place.sleep(asks_at).await;
            }
            if let Some(outcome) = self.ask(&mut Duration::default()).await {
                return outcome;
            }
        }
    }

    /// Asks the store once. Returns `None` if the caller has to wait.
    async fn ask(&mut self, waited: &mut Duration) -> Option<Result<Decision, Error>> {
        let outcome = self.limiter.decide(self.check.clone(), waited).await;
        let told = match &outcome {
            Ok(decision) if decision.is_the_stores() => Some(decision),
            _ => None,
        };
        self.place.hear(told);
        let distance = self.limiter.core.round_trip.distance();
        self.asks_at = ask_again_at(self.end, &outcome, distance);
        if self.asks_at.is_none() {
            return Some(outcome);
        }
        if told.is_some_and(Decision::is_refused_by_reservations) {
            // Other callers may give back units, even while a refusal is cached.
            self.limiter = self.limiter.clone().asking_each_time();
        }
        None
    }

    /// Refuses a caller that does not get its turn in time.
    async fn refuse(&self, waited: &mut Duration) -> Result<Decision, Error> {
        let (core, check) = (&self.limiter.core, &self.check);
        let status = match self.limiter.decide(check.without_costs(), waited).await {
            Err(error) => return core.known(check).ok_or(error),
            Ok(status) => status,
        };
        // Units may be left by now, but they are for the first waiter in line.
        let wait = self.place.line_waits().unwrap_or_default();
        let refusal = status.refused_for(check, wait.max(LEAST_BLOCK));
        metrics::decided(&refusal, &core.layer);
        Ok(refusal)
    }
}

/// Returns when to ask again. Returns `None` after an admission that still has its places, after an
/// error that waiting does not cure, or if the retry time is later than `end`. If only reserved
/// units are in the way, the last check is at `end`, since they may be given back at any time.
fn ask_again_at(
    end: Instant,
    outcome: &Result<Decision, Error>,
    distance: Duration,
) -> Option<Instant> {
    let now = Instant::now();
    let left = end.saturating_duration_since(now);
    let (wait, asks_after) = match outcome {
        // A shutdown has freed the place while the reply was in flight.
        Ok(decision) if decision.has_lost_place() => (PAUSE, PAUSE),
        Ok(decision) => {
            let mut wait = decision.retry_after()?;
            if decision.is_refused_by_reservations() {
                wait = wait.min(left);
            }
            // The retry time counts from the store's decision. The reply has travelled since then,
            // and the next check will travel, too. Together this takes a round trip, which is
            // subtracted. If this process decided in the store's place, the caller asks again after
            // a `PAUSE`: the store may be back long before the retry time, with units left.
            let asks_after = if decision.is_the_stores() {
                wait.saturating_sub(distance)
            } else {
                wait.min(PAUSE)
            };
            (wait, asks_after)
        }
        Err(error) if error.may_pass() => (PAUSE, PAUSE),
        Err(_) => return None,
    };
    is_within(left, wait).then(|| later(now, asks_after.max(LEAST_BLOCK)))
}

fn is_within(left: Duration, wait: Duration) -> bool {
    // With no time left, a wait of zero is too long as well. Otherwise a store that always returns
    // a zero retry time would be asked for ever.
    !left.is_zero() && wait <= left
}
