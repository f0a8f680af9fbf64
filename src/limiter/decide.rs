//! Decides checks. Four things can decide a check: this process's prefetches, the refusal cache, an
//! open breaker, and the store. They are asked in this order, and the first one that can decide
//! does so. If the store fails, this process may decide in its place.

use std::{
    future::{Future, pending},
    ops::ControlFlow::{self, Break, Continue},
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use super::{
    Core, Limiter,
    deadline::{Deadline, time_left},
    failure::FailureMode,
    places,
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::{Error, StoreError},
    key::Key,
    limit::Limit,
    local::{LONGEST_DEADLINE, Lookup, Underway},
    metrics,
    store::{MOST_TIME, Store, StoreFuture},
};

/// Waits within the deadline for the store's reply to a check, and turns it into a decision.
pub(crate) struct Asking {
    core: Arc<Core>,
    pub(crate) reply: Deadline<StoreFuture<Decision>>,
    /// The result of looking up the check in the refusal cache. The cache needs it to learn from
    /// the store's reply. `None` without a cache, or if the check cannot be refused.
    lookup: Option<Lookup>,
    mode: FailureMode,
    /// The store part that decides.
    part: Option<Arc<str>>,
    /// The check, until its outcome is known. If the store fails, this process may decide in its
    /// place.
    check: Option<Arc<Check>>,
    /// The number of the last prefetch that was taken before the store was asked. `None` if no
    /// limit has prefetch.
    asked_after: Option<u64>,
    /// Set by the first poll if the check takes places. While it is set, `shutdown` waits for this
    /// check.
    underway: Option<Underway>,
    /// Set when the check is sent, if the check takes places and has a caller's id. `None` for any
    /// other check.
    user: Option<Arc<OnceLock<places::User>>>,
}

impl Future for Asking {
    type Output = Result<Decision, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if this.underway.is_none() && this.check.as_ref().is_some_and(|it| it.takes_place()) {
            this.underway = Some(this.core.owed.begin());
        }
        let outcome = ready!(Pin::new(&mut this.reply).poll(cx));
        if outcome.is_err() {
            this.let_go();
        }
        // The check is taken out, so that dropping this future has nothing left to do.
        let (part, check) = (this.part.take(), this.check.take());
        let underway = this.underway.take();
        let (core, reply, lookup) = (&this.core, &this.reply, this.lookup);
        let mut outcome = match outcome {
            // The store has not answered in time, so the breaker does not count this as an answer.
            Ok(Ok(refusal)) if refusal.is_estimate() => Ok(refusal),
            outcome => core.heard(reply, part, check.as_deref(), outcome),
        };
        if let (Some(asked_after), Some(check)) = (this.asked_after, &check) {
            outcome = outcome.map(|decision| core.note(check, decision, asked_after));
        }
        let call = underway.as_ref().map(|it| (reply.took(), it));
        Poll::Ready(core.conclude(outcome, lookup, check.as_deref(), this.mode, call))
    }
}

impl Asking {
    /// Starts a task that waits for the reply, since the caller no longer waits for it. After the
    /// reply, the task frees the places at once, and updates the refusal cache. The task starts
    /// only if the check may have been sent, and only if the reply matters: if the check takes
    /// places, or if the refusal cache refuses other checks until this reply.
    fn let_go(&mut self) {
        let is_queued = self.user.as_ref().is_some_and(|user| user.get().is_none());
        let has_turn = self.lookup.is_some_and(|lookup| lookup.has_turn);
        if !self.reply.has_begun() || is_queued || self.underway.is_none() && !has_turn {
            return;
        }
        let Some(check) = self.check.clone() else {
            return;
        };
        let core = Arc::clone(&self.core);
        let underway = self.underway.clone();
        let lookup = self.lookup;
        let reply = self.reply.replace(Box::pin(pending()));
        // Places are freed even after a very late reply. A refusal is remembered for a short time.
        let most = if underway.is_some() {
            MOST_TIME
        } else {
            LONGEST_DEADLINE
        };
        let reply = Deadline::new(reply, most, Duration::ZERO);
        // Dropping a detachable future does not stop it: it goes on without a caller.
        drop(self.core.owed.detachable(async move {
            if let Ok(Ok(decision)) = reply.await {
                core.learn(lookup, &check, &decision);
                let call = underway.as_ref().map(|it| (Duration::ZERO, it));
                drop(places::hold(&core, &check, decision, call));
            }
        }));
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.check.is_some() {
            self.let_go();
        }
    }
}

impl Limiter {
    /// Spends `cost` units of `limit` for `key`, if that many are left. The future does not borrow
    /// anything, so it can be spawned.
    ///
    /// # Errors
    ///
    /// [`Error::NeverFits`] if the cost is above the limit, [`Error::TimedOut`] past the deadline,
    /// [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has failed
    /// repeatedly.
    pub fn check<K: Into<Key>>(
        &self,
        limit: &Limit,
        key: K,
        cost: u64,
    ) -> impl Future<Output = Result<Decision, Error>> + Send + 'static + use<K> {
        let limiter = self.clone();
        let charge = Charge::new(limit.clone(), key, cost);
        async move {
            // This does the same as `decide`. Calling `decide` would copy the check once more,
            // which takes a tenth of the time that a cached refusal takes.
            match limiter.decide_now(Check::new(charge?), Duration::default) {
                Break(outcome) => outcome,
                Continue(asking) => asking.await,
            }
        }
    }

    /// Decides several charges together, all or nothing.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails,
    /// [`Error::BreakerOpen`] if it has failed repeatedly.
    pub fn check_all(
        &self,
        check: Check,
    ) -> impl Future<Output = Result<Decision, Error>> + Send + 'static + use<> {
        let limiter = self.clone();
        async move { limiter.decide(check, &mut Duration::default()).await }
    }

    /// Shows where `limit` stands for `key`, without spending anything. Look at
    /// [`remaining`](Decision::remaining): the decision itself never refuses, even if nothing is
    /// left.
    ///
    /// Units that processes hold with [prefetch](crate::limit::prefetch) count as used. To show
    /// several limits in one call, decide charges at a cost of 0 by [`check_all`](Self::check_all).
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails,
    /// [`Error::BreakerOpen`] if it has failed repeatedly.
    pub fn peek<K: Into<Key>>(
        &self,
        limit: &Limit,
        key: K,
    ) -> impl Future<Output = Result<Decision, Error>> + Send + 'static + use<K> {
        self.check(limit, key, 0)
    }

    /// Decides a check for a request that has already `waited` for other decisions. Adds the time
    /// that this decision takes to `waited`.
    pub(crate) async fn decide(
        &self,
        check: Check,
        waited: &mut Duration,
    ) -> Result<Decision, Error> {
        match self.decide_now(check, || *waited) {
            Break(outcome) => outcome,
            Continue(mut asking) => {
                let outcome = (&mut asking).await;
                *waited = asking.reply.waited();
                outcome
            }
        }
    }

    /// Returns a `Break` with the outcome if prefetches, the refusal cache, an open breaker or the
    /// store can decide without waiting. Otherwise returns a `Continue` with a future that asks the
    /// store. The time that the request has `waited` for other decisions shortens the deadline.
    #[inline]
    pub(crate) fn decide_now(
        &self,
        check: Check,
        waited: impl FnOnce() -> Duration,
    ) -> ControlFlow<Result<Decision, Error>, Asking> {
        let (core, mode) = (&self.core, self.failure_mode);
        if let Some(decision) = core.spend(&check) {
            return Break(Ok(decision));
        }
        let refusals = core.refusals.as_ref();
        let mut lookup = refusals.and_then(|refusals| refusals.look_up(&check));
        let known = core.recall(&check, lookup.as_mut(), true);
        let asks = lookup.is_none_or(|lookup| lookup.asks);
        if !asks && let Some(refusal) = known {
            return Break(Ok(core.repeat(refusal)));
        }
        if let Some(error) = core.refuse(|| check.without_costs()) {
            return Break(core.conclude(Err(error), None, Some(&check), mode, None));
        }
        let Some(outcome) = core.store.decide_now(&check) else {
            return Continue(self.asking(check, lookup, waited()));
        };
        let outcome = outcome.map_err(Error::from);
        core.breaker
            .count(|| core.store.part_of(&check), &outcome, || Duration::ZERO);
        Break(core.conclude(outcome, lookup, Some(&check), mode, None))
    }

    /// Makes the future that asks the store. Not inlined, since a check that is decided at once
    /// does not need it.
    #[inline(never)]
    fn asking(&self, check: Check, lookup: Option<Lookup>, waited: Duration) -> Asking {
        let mode = self.failure_mode;
        let core = Arc::clone(&self.core);
        let asked_after = match &core.prefetches {
            Some(prefetches) if check.has_prefetch() => Some(prefetches.last_taken()),
            _ => None,
        };
        let deadline = core.deadline();
        let part = core.store.part_of(&check);
        let check = Arc::new(check);
        let left = time_left(deadline, waited);
        let mut reply = core.store.decide_within(Arc::clone(&check), left);
        let mut user = None;
        if check.takes_place() {
            (user, reply) = places::in_turn(&core, &check, reply);
        }
        Asking {
            reply: Deadline::new(reply, deadline, waited),
            core,
            lookup,
            mode,
            part,
            check: Some(check),
            asked_after,
            underway: None,
            user,
        }
    }
}

impl Core {
    /// Admits a check from the prefetches that this process holds. Most limits have no prefetch, so
    /// their checks do not need a look-up.
    #[inline]
    fn spend(&self, check: &Check) -> Option<Decision> {
        let prefetches = self.prefetches.as_ref()?;
        if !check.is_prefetched() {
            return None;
        }
        let decision = prefetches.spend(check)?;
        metrics::prefetch_hit();
        metrics::decided(&decision, &self.layer);
        Some(decision)
    }

    /// The check's cached refusal, if there is one.
    #[inline]
    fn recall(
        &self,
        check: &Check,
        lookup: Option<&mut Lookup>,
        may_ask: bool,
    ) -> Option<Decision> {
        let refusals = self.refusals.as_ref()?;
        refusals.recall(check, lookup?, self.retry_reserved_after, may_ask)
    }

    /// Returns a cached refusal, and counts it in the metrics.
    #[inline]
    fn repeat(&self, refusal: Decision) -> Decision {
        metrics::refusal_cache_hit();
        metrics::decided(&refusal, &self.layer);
        refusal
    }

    /// Refuses a check that the store cannot decide, if a refusal is cached for it.
    pub(super) fn known(&self, check: &Check) -> Option<Decision> {
        let mut lookup = self.refusals.as_ref()?.look_up(check);
        Some(self.repeat(self.recall(check, lookup.as_mut(), false)?))
    }

    /// The error to return instead of asking the store, if the breaker is open. `probe` makes the
    /// check at no cost that the breaker's probe sends.
    pub(super) fn refuse(&self, probe: impl FnOnce() -> Check) -> Option<Error> {
        if !self.breaker.may_be_open() {
            return None;
        }
        let deadline = self.deadline();
        let probe = probe();
        let part = self.store.part_of(&probe);
        let store = Arc::clone(&self.store);
        let trip = Arc::clone(&self.round_trip);
        let longest = self.deadline.unwrap_or_else(|| trip.longest_deadline());
        self.breaker
            .refuse(part, deadline, longest, move |deadline| {
                let trip = Arc::clone(&trip);
                let reply = Deadline::new(store.decide(probe.clone()), deadline, Duration::ZERO);
                async move {
                    let outcome = reply.await;
                    outcome.map_err(|error| error.at_distance(trip.known()))
                }
            })
    }

    /// Turns the store's reply into a decision, which holds the places that the check has taken.
    /// After a failure, may decide in the store's place. `call` has the time until the store's
    /// reply, and the value that counts a check with places as in flight; it is `None` if the store
    /// decided at once.
    #[inline]
    fn conclude(
        self: &Arc<Self>,
        outcome: Result<Decision, Error>,
        lookup: Option<Lookup>,
        check: Option<&Check>,
        mode: FailureMode,
        call: Option<(Duration, &Underway)>,
    ) -> Result<Decision, Error> {
        let decision = match outcome {
            Ok(decision) => {
                metrics::decided(&decision, &self.layer);
                if let Some(check) = check {
                    self.learn(lookup, check, &decision);
                }
                decision.with_retry_reserved_after(self.retry_reserved_after)
            }
            // While this check waited for its reply, the store may have refused other checks, and a
            // refusal may now be cached for this check, too. So `decide_instead` looks into the
            // cache again.
            Err(error) => self.decide_instead(check, mode, error)?,
        };
        Ok(match check.filter(|check| check.takes_place()) {
            Some(check) => places::hold(self, check, decision, call),
            None => decision,
        })
    }

    /// Updates the refusal cache from the store's reply.
    #[inline]
    pub(super) fn learn(&self, lookup: Option<Lookup>, check: &Check, decision: &Decision) {
        let (Some(refusals), Some(lookup)) = (&self.refusals, lookup) else {
            return;
        };
        if !decision.is_allowed() {
            refusals.learn(&lookup, check, decision);
        } else if lookup.asks {
            refusals.forget(&lookup, check, decision);
        }
    }

    /// Tells the breaker how a call to this store part has ended, and returns the call's outcome.
    pub(super) fn heard<T>(
        &self,
        call: &Deadline<StoreFuture<T>>,
        part: Option<Arc<str>>,
        check: Option<&Check>,
        outcome: Result<Result<T, StoreError>, Error>,
    ) -> Result<T, Error> {
        let outcome = outcome.and_then(|reply| Ok(reply?));
        let outcome = outcome.map_err(|error| error.at_distance(self.round_trip.known()));
        if !outcome
            .as_ref()
            .is_err_and(|error| self.is_excused(error, call, part.as_deref(), check))
        {
            // The caller may have polled the reply late. So the call counts as no longer than its
            // deadline, even if more time has passed.
            self.breaker
                .count(|| part, &outcome, || call.took().min(call.deadline));
        }
        outcome
    }

    /// True if a failed call says nothing about the store: the caller or the runtime was late, the
    /// check has waited for others, or its client has caused the failure by a flood.
    fn is_excused<T>(
        &self,
        error: &Error,
        call: &Deadline<StoreFuture<T>>,
        part: Option<&str>,
        check: Option<&Check>,
    ) -> bool {
        if let Error::TimedOut { .. } = error
            && (!call.blames_store() || self.round_trip.has_answered_within(part, call.took()))
        {
            return true;
        }
        let (Some(crowded), Some(check)) = (&self.crowded, check) else {
            return false;
        };
        error.is_the_stores() && crowded.has(check)
    }
}
