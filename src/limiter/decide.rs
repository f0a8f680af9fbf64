//! Decisions: by the deny cache, the breaker, the store, or this process in the store's place.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;

use super::{
    deadline::Deadline,
    failure::Share,
    settings::{Core, Limiter},
};
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    local::{Lookup, Recall},
    metrics,
    store::StoreFuture,
};

/// A check that was decided without waiting, or that the store has to be asked about.
pub(crate) enum DecideNow {
    Decided(Result<Decision, Error>),
    AskStore(AskStore),
}

pin_project! {
    /// Waits for the store to decide. It is polled with the limiter, and holds no clone of it: all threads would count
    /// those clones at one place.
    pub(crate) struct AskStore {
        #[pin]
        reply: Deadline<StoreFuture<Decision>>,
        lookup: Option<Lookup>,
        kept: Option<Box<KeptCheck>>,
    }
}

/// A check that is needed after the store's reply: for this process to decide in the store's place, or because it is in blocks.
struct KeptCheck {
    check: Check,
    share: Option<Share>,
    /// The last block that was taken before.
    asked_after: u64,
}

impl Limiter {
    /// Decides without waiting if the deny cache, an open breaker or the store can; otherwise asks the store. A failure is
    /// decided under `share`, if there is one. The request has `waited` for other decisions.
    #[inline]
    pub(crate) fn decide_now(
        &self,
        check: Check,
        share: Option<Share>,
        waited: impl FnOnce() -> Duration,
    ) -> DecideNow {
        let core = &*self.core;
        if let Some(decision) = core.spend(&check) {
            return DecideNow::Decided(Ok(decision));
        }
        let lookup = match core.recall(&check) {
            Recall::Refused(refusal) => return DecideNow::Decided(Ok(refusal)),
            Recall::Missed(lookup) => Some(lookup),
            Recall::NotCacheable => None,
        };
        let local = share.map(|share| (&check, share));
        if let Some(error) = core.breaker.refuse(core.deadline, || core.probes(check.without_costs())) {
            return DecideNow::Decided(core.decide_locally(local, error));
        }
        if let Some(outcome) = core.store.decide_now(&check) {
            let outcome = outcome.map_err(Error::from);
            core.breaker.count(&outcome, || Duration::ZERO);
            return DecideNow::Decided(core.conclude(outcome, lookup.as_ref(), local));
        }
        let is_kept =
            share.is_some() || core.blocks.is_some() && check.charges().any(|charge| charge.limit().blocks().is_some());
        let kept = is_kept.then(|| {
            let asked_after = core.blocks.as_ref().map_or(0, |blocks| blocks.last_taken());
            Box::new(KeptCheck { check: check.clone(), share, asked_after })
        });
        let reply = Deadline::new(core.store.decide(check), core.deadline, waited());
        DecideNow::AskStore(AskStore { reply, lookup, kept })
    }

    /// The refusal of a check, if it can be known without waiting, and without spending anything otherwise. The retry time
    /// of a store's own refusal is then a lower bound.
    pub(crate) fn refuse_now(&self, check: &Check) -> Option<Decision> {
        let core = &*self.core;
        if core.blocks.as_ref().is_some_and(|blocks| blocks.can_spend(check)) {
            return None;
        }
        if let Recall::Refused(refusal) = core.recall(check) {
            return Some(refusal);
        }
        if core.breaker.is_open_for(core.deadline) || !check.can_be_refused() {
            return None;
        }
        let refusal = core.store.decide_now(&check.without_costs())?.ok()?.into_refusal(check)?;
        let refusal = refusal.with_retry_reserved_after(core.retry_reserved_after);
        metrics::decided(&refusal, core.layer);
        Some(refusal)
    }
}

impl Core {
    /// Admits a check out of the blocks that this process holds.
    #[inline]
    fn spend(&self, check: &Check) -> Option<Decision> {
        let decision = self.blocks.as_ref()?.spend(check)?;
        metrics::block_hit();
        metrics::decided(&decision, self.layer);
        Some(decision)
    }

    #[inline]
    fn recall(&self, check: &Check) -> Recall {
        let Some(refusals) = &self.refusals else { return Recall::NotCacheable };
        let recall = refusals.recall(check, self.retry_reserved_after);
        let Recall::Refused(refusal) = recall else { return recall };
        let refusal = refusal.with_retry_reserved_after(self.retry_reserved_after);
        metrics::deny_cache_hit();
        metrics::decided(&refusal, self.layer);
        Recall::Refused(refusal)
    }

    /// Sends a check that costs nothing as a probe, as often as it is called.
    pub(super) fn probes(&self, check: Check) -> impl Fn(Duration) -> Deadline<StoreFuture<Decision>> + Send + use<> {
        let store = Arc::clone(&self.store);
        move |deadline| Deadline::new(store.decide(check.clone()), deadline, Duration::ZERO)
    }

    /// Makes a decision of the store's reply.
    #[inline]
    fn conclude(
        &self,
        outcome: Result<Decision, Error>,
        lookup: Option<&Lookup>,
        local: Option<(&Check, Share)>,
    ) -> Result<Decision, Error> {
        match outcome {
            Ok(decision) => {
                metrics::decided(&decision, self.layer);
                if let (Some(refusals), Some(lookup)) = (&self.refusals, lookup) {
                    refusals.learn(lookup, &decision);
                }
                Ok(decision.with_retry_reserved_after(self.retry_reserved_after))
            }
            Err(error) => self.decide_locally(local, error),
        }
    }

    /// Counts the outcome of a call to the store for the breaker.
    pub(super) fn count<T, F>(&self, outcome: &Result<T, Error>, call: &Deadline<F>) {
        if !matches!(outcome, Err(Error::TimedOut { .. })) || call.blames_store() {
            self.breaker.count(outcome, || call.took_in_time());
        }
    }

    /// Decides under a share what the store has failed to decide.
    fn decide_locally(&self, local: Option<(&Check, Share)>, error: Error) -> Result<Decision, Error> {
        metrics::failed(&error, self.layer);
        let Some((check, share)) = local else { return Err(error) };
        let decision = self.local.decide(check, share, error)?;
        metrics::decided(&decision, self.layer);
        Ok(decision.with_retry_reserved_after(self.retry_reserved_after))
    }
}

impl AskStore {
    /// As a future is polled, by the limiter that made it.
    #[inline]
    pub(crate) fn poll(self: Pin<&mut Self>, limiter: &Limiter, cx: &mut Context<'_>) -> Poll<Result<Decision, Error>> {
        let mut this = self.project();
        let outcome = ready!(this.reply.as_mut().poll(cx)).and_then(|reply| Ok(reply?));
        limiter.core.count(&outcome, &this.reply);
        let (core, kept) = (&*limiter.core, this.kept.as_deref());
        let local = kept.and_then(|kept| Some((&kept.check, kept.share?)));
        let outcome = match (outcome, kept) {
            (Ok(decision), Some(kept)) if decision.is_allowed() => {
                Ok(core.note_admission(&kept.check, decision, kept.asked_after))
            }
            (outcome, _) => outcome,
        };
        Poll::Ready(core.conclude(outcome, this.lookup.as_ref(), local))
    }

    /// How long the request has waited for decisions by now.
    pub(crate) fn waited(&self) -> Duration {
        self.reply.waited()
    }
}
