//! Decisions: by the prefetches of this process, the refusal cache, the breaker, the store, or this process in the store's place.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use super::{Core, Limiter, deadline::Deadline, deadline::time_left, failure::FailureMode, places};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::{Error, StoreError},
    key::Key,
    limit::Limit,
    local::{Lookup, Prefetches},
    metrics,
    store::{Store, StoreFuture},
};

/// A check that was decided without waiting, or that the store is asked about.
pub(crate) enum DecideNow {
    Decided(Result<Decision, Error>),
    Ask(Asking),
}

/// The store's reply to a check, within the deadline, and what this process makes of it. It has no check inline, so that it
/// stays small.
pub(crate) struct Asking {
    core: Arc<Core>,
    pub(crate) reply: Deadline<StoreFuture<Decision>>,
    /// The place in the refusal cache that learns from the reply, if there is one.
    lookup: Option<Lookup>,
    /// If this process decides in the store's place, or with prefetch, or if it takes a place: the check.
    kept: Option<Box<Check>>,
    mode: FailureMode,
    /// The last prefetch that was taken before.
    asked_after: u64,
}

impl Future for Asking {
    type Output = Result<Decision, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(Pin::new(&mut self.reply).poll(cx));
        let Self { core, reply, lookup, kept, mode, asked_after } = &*self;
        let mut outcome = core.heard(reply, outcome);
        if let Some(kept) = kept {
            outcome = outcome.map(|decision| core.note(kept, decision, *asked_after));
        }
        let decided = core.conclude(outcome, lookup.as_ref(), kept.as_deref(), *mode);
        Poll::Ready(core.hold_places(kept.as_deref(), decided, || Some(reply.took())))
    }
}

impl Limiter {
    /// Spends `cost` units of `limit` for `key`, if they are left. The future borrows nothing, so it can be spawned.
    ///
    /// # Errors
    ///
    /// [`Error::NeverFits`] if the cost is above the limit, [`Error::TimedOut`] past the deadline,
    /// [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has failed repeatedly.
    pub fn check<K: Into<Key>>(
        &self,
        limit: &Limit,
        key: K,
        cost: u64,
    ) -> impl Future<Output = Result<Decision, Error>> + Send + 'static + use<K> {
        let (limiter, charge) = (self.clone(), Charge::new(limit.clone(), key, cost));
        async move {
            // Without the future of `decide`, which would copy the check once more: a tenth of a remembered refusal's time.
            match limiter.decide_now(Check::new(charge?), limiter.failure_mode, Duration::default) {
                DecideNow::Decided(outcome) => outcome,
                DecideNow::Ask(asking) => asking.await,
            }
        }
    }

    /// Decides several charges together, all or nothing.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly.
    pub fn check_all(&self, check: Check) -> impl Future<Output = Result<Decision, Error>> + Send + 'static + use<> {
        let limiter = self.clone();
        async move { limiter.decide(check, &mut Duration::default()).await }
    }

    /// Shows how `limit` stands for `key`, without spending anything. Look at [`remaining`](Decision::remaining): the
    /// decision itself is never a refusal, even if nothing is left.
    ///
    /// Units that processes hold with [prefetch](crate::limit::prefetch) count as used.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly.
    pub fn peek<K: Into<Key>>(
        &self,
        limit: &Limit,
        key: K,
    ) -> impl Future<Output = Result<Decision, Error>> + Send + 'static + use<K> {
        self.check(limit, key, 0)
    }

    /// Decides for a request that has `waited` for other decisions, and adds the time that this one takes.
    pub(crate) async fn decide(&self, check: Check, waited: &mut Duration) -> Result<Decision, Error> {
        match self.decide_now(check, self.failure_mode, || *waited) {
            DecideNow::Decided(outcome) => outcome,
            DecideNow::Ask(mut asking) => {
                let outcome = (&mut asking).await;
                *waited = asking.reply.waited();
                outcome
            }
        }
    }

    /// Decides without waiting if the refusal cache, an open breaker or the store can. What the request has `waited` for other
    /// decisions shortens the deadline.
    #[inline]
    pub(crate) fn decide_now(&self, check: Check, mode: FailureMode, waited: impl FnOnce() -> Duration) -> DecideNow {
        let core = &self.core;
        if let Some(decision) = core.spend(&check) {
            return DecideNow::Decided(Ok(decision));
        }
        let lookup = core.refusals.as_ref().and_then(|refusals| refusals.look_up(&check));
        if let Some(refusal) = core.recall(&check, lookup.as_ref()) {
            return DecideNow::Decided(Ok(refusal));
        }
        if let Some(error) = core.refuse(|| check.without_costs()) {
            let decided = core.decide_locally(Some(&check), mode, error);
            return DecideNow::Decided(core.hold_places(Some(&check), decided, || None));
        }
        let Some(outcome) = core.store.decide_now(&check) else {
            return DecideNow::Ask(self.asking(check, lookup, mode, waited()));
        };
        let outcome = outcome.map_err(Error::from);
        core.breaker.count(&outcome, || Duration::ZERO);
        let decided = core.conclude(outcome, lookup.as_ref(), Some(&check), mode);
        DecideNow::Decided(core.hold_places(Some(&check), decided, || None))
    }

    /// Not on the way of a check that is decided at once.
    #[inline(never)]
    fn asking(&self, check: Check, lookup: Option<Lookup>, mode: FailureMode, waited: Duration) -> Asking {
        let core = Arc::clone(&self.core);
        let is_prefetched = || check.charges().any(|charge| charge.limit().prefetches.is_some());
        let is_kept = matches!(mode, FailureMode::Local(_))
            || core.prefetches.is_some() && is_prefetched()
            || check.takes_place();
        let kept = is_kept.then(|| Box::new(check.clone()));
        let asked_after = core.prefetches.as_ref().filter(|_| is_kept).map_or(0, |prefetches| prefetches.last_taken());
        let deadline = core.deadline();
        let reply = core.store.decide_within(check, time_left(deadline, waited));
        Asking { reply: Deadline::new(reply, deadline, waited), core, lookup, kept, mode, asked_after }
    }

    /// The refusal of a check, if it can be known without waiting, and without spending anything otherwise. The retry time
    /// of a store's own refusal is then a lower bound.
    pub(crate) fn refuse_now(&self, check: &Check) -> Option<Decision> {
        let core = &*self.core;
        if core.prefetches_of(check).is_some_and(|prefetches| prefetches.can_spend(check)) {
            return None;
        }
        let lookup = core.refusals.as_ref().and_then(|refusals| refusals.look_up(check));
        if let Some(refusal) = core.recall(check, lookup.as_ref()) {
            return Some(refusal);
        }
        if core.breaker.is_open_for(core.deadline()) || !check.can_be_refused() {
            return None;
        }
        let refusal = core.store.decide_now(&check.without_costs())?.ok()?.into_refusal(check)?;
        let refusal = refusal.with_retry_reserved_after(core.retry_reserved_after);
        metrics::decided(&refusal, &core.layer);
        Some(refusal)
    }
}

impl Core {
    /// Most limits have no prefetch, so their checks cost no look-up.
    #[inline]
    fn prefetches_of(&self, check: &Check) -> Option<&Arc<Prefetches>> {
        self.prefetches.as_ref().filter(|_| check.is_prefetched())
    }

    /// Admits a check out of the prefetches that this process holds.
    #[inline]
    fn spend(&self, check: &Check) -> Option<Decision> {
        let decision = self.prefetches_of(check)?.spend(check)?;
        metrics::prefetch_hit();
        metrics::decided(&decision, &self.layer);
        Some(decision)
    }

    /// Refuses a check as the refusal cache remembers it.
    #[inline]
    fn recall(&self, check: &Check, lookup: Option<&Lookup>) -> Option<Decision> {
        let refusal = self.refusals.as_ref()?.recall(check, lookup?, self.retry_reserved_after)?;
        metrics::refusal_cache_hit();
        metrics::decided(&refusal, &self.layer);
        Some(refusal)
    }

    /// The error to return instead of asking the store, if the breaker is open. Its probes send a check that costs nothing.
    pub(super) fn refuse(&self, probe: impl FnOnce() -> Check) -> Option<Error> {
        if !self.breaker.is_open() {
            return None;
        }
        let deadline = self.deadline();
        let (store, probe) = (Arc::clone(&self.store), probe());
        let probes = move |deadline| {
            let (store, reply) = (Arc::clone(&store), store.decide(probe.clone()));
            async move {
                let reply = Deadline::new(reply, deadline, Duration::ZERO).await;
                reply.map_err(|error| error.at_distance(round_trip(&*store)))
            }
        };
        let longest = self.store.local_state().map_or(deadline, |state| state.round_trip.longest_deadline());
        self.breaker.refuse(deadline, self.deadline.unwrap_or(longest), probes)
    }

    /// Makes a decision of the store's reply.
    #[inline]
    fn conclude(
        &self,
        outcome: Result<Decision, Error>,
        lookup: Option<&Lookup>,
        check: Option<&Check>,
        mode: FailureMode,
    ) -> Result<Decision, Error> {
        match outcome {
            Ok(decision) => {
                metrics::decided(&decision, &self.layer);
                if let (Some(refusals), Some(lookup), false) = (&self.refusals, lookup, decision.is_allowed()) {
                    refusals.learn(lookup, &decision);
                }
                Ok(decision.with_retry_reserved_after(self.retry_reserved_after))
            }
            Err(error) => self.decide_locally(check, mode, error),
        }
    }

    /// Lets a decision hold the places that it has taken. The store has `took` so long for it, if it has not decided at once.
    #[inline]
    fn hold_places(
        self: &Arc<Self>,
        check: Option<&Check>,
        decided: Result<Decision, Error>,
        took: impl FnOnce() -> Option<Duration>,
    ) -> Result<Decision, Error> {
        match (check, decided) {
            (Some(check), Ok(decision)) if check.takes_place() => Ok(places::hold(self, check, decision, took())),
            (_, decided) => decided,
        }
    }

    /// Tells the breaker how a call to the store has ended.
    pub(super) fn heard<T>(
        &self,
        call: &Deadline<StoreFuture<T>>,
        outcome: Result<Result<T, StoreError>, Error>,
    ) -> Result<T, Error> {
        let outcome = outcome.and_then(|reply| Ok(reply?));
        let outcome = outcome.map_err(|error| error.at_distance(round_trip(&*self.store)));
        let has_waited_for_others =
            || self.store.local_state().is_some_and(|state| state.has_answered_within(call.took()));
        if !matches!(outcome, Err(Error::TimedOut { .. })) || call.blames_store() && !has_waited_for_others() {
            // At most the deadline, however late the reply was polled.
            self.breaker.count(&outcome, || call.took().min(call.deadline));
        }
        outcome
    }
}

pub(super) fn round_trip(store: &dyn Store) -> Option<Duration> {
    store.local_state()?.round_trip.known()
}
