//! The steps that a holding's task takes. `limiter/prefetch.rs` runs the task.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{
    Prefetches,
    demand::SAVED,
    holding::{Holding, PrefetchedUnits},
};
use crate::{
    check::{AdmissionId, Charge, Check},
    clock::micros,
    decision::{Decision, Settlement},
    error::StoreError,
    limit::prefetch::MAX_LIFE,
    local::lock,
};

/// A holding that a task takes care of.
pub(crate) struct KeptHolding {
    prefetches: Arc<Prefetches>,
    holding: Arc<Holding>,
}

/// The next action for a holding's task.
pub(crate) enum Step {
    /// The task gives prefetches back, asks for a new one, or both. It passes the store's reply
    /// about the new prefetch to [`KeptHolding::answer`].
    Ask {
        give_back: Vec<Settlement>,
        take: Option<Check>,
    },
    Wait(Duration),
    End,
}

impl KeptHolding {
    /// Returns the holding if no task takes care of it, and `None` otherwise. The caller has locked
    /// the table, and has to start a task for the returned holding.
    pub(super) fn begin(prefetches: &Arc<Prefetches>, holding: &Arc<Holding>) -> Option<Self> {
        let mut state = lock(&holding.state);
        if state.stepped_at.is_some() {
            return None;
        }
        (state.stepped_at, state.ends) = (Some(prefetches.now()), false);
        // If an earlier task has asked for a prefetch, but has ended before the reply, the new task
        // gives that prefetch back.
        let asked = state.asked.take();
        state.prefetches.extend(asked);
        Some(Self {
            prefetches: Arc::clone(prefetches),
            holding: Arc::clone(holding),
        })
    }

    /// A check at no cost for the holding's limit and key.
    pub(crate) fn check(&self) -> Check {
        Check::new(Charge::fitting(
            self.holding.limit.clone(),
            self.holding.key.clone(),
            0,
        ))
    }

    /// Chooses the next action. The task does not take prefetches while the breaker is open.
    pub(crate) fn next(&self, is_open: bool) -> Step {
        let holding = &*self.holding;
        let mut state = lock(&holding.state);
        let now = self.prefetches.now();
        (state.stepped_at, state.pace) = (Some(now), self.prefetches.pace(&holding.limit));
        let life = state.pace.life;
        if state.asks_from > now.saturating_add(micros(MAX_LIFE)) {
            // The clock has stepped back. The comparison is with the longest life, since the life
            // may have been longer when `asks_from` was set.
            state.asks_from = 0;
        }
        let budget = &self.prefetches.budget;
        budget.earn(SAVED.saturating_mul(mem::take(&mut state.saved.0)));
        let mut wanted = holding.wanted(&mut state, now);
        if wanted.is_some() && (is_open || !budget.pay()) {
            wanted = None;
        }
        let mut prefetches = state.prefetches.iter();
        if wanted.is_none() && prefetches.all(|prefetch| prefetch.is_alive(now)) {
            // Without a prefetch, the task waits. If it has asked for a prefetch, it waits for the
            // reply, otherwise until it may ask again. After this wait, it ends if the key is not
            // asked for often.
            let otherwise = match state.asked {
                Some(_) => now.saturating_add(life),
                None if state.ends => now,
                None => state.asks_from,
            };
            let renewal = state
                .renewal()
                .filter(|renewal| *renewal > now && state.asked.is_none());
            let ends = state.prefetches.iter().map(|prefetch| prefetch.until);
            let until = ends.chain(renewal).min().unwrap_or(otherwise);
            return match until.saturating_sub(now) {
                0 => Step::End,
                wait => Step::Wait(Duration::from_micros(wait)),
            };
        }
        // The settlements and the new prefetch are sent together, so that they travel in one script
        // call. A prefetch that is used up is settled, too. Otherwise its units would stay
        // reserved, and retry times would assume that they may be given back.
        let give_back = state.settle_all(now);
        let take = wanted.map(|units| {
            let charge = Charge::prefetch(holding.limit.clone(), holding.key.clone(), units, life);
            let check = Check::new(charge).with_id(AdmissionId::fresh());
            state.asked = Some(PrefetchedUnits {
                check: check.clone(),
                admitted: None,
                number: 0,
                units: 0,
                left: 0,
                low: 0,
                asked_at: now,
                until: now.saturating_add(life),
            });
            check
        });
        Step::Ask { give_back, take }
    }

    /// Records the store's answer to the prefetch that was asked for. If the store has failed, it
    /// may have counted the prefetch, so the next step gives it back.
    pub(crate) fn answer(&self, answer: Result<Decision, StoreError>) {
        let prefetches = &*self.prefetches;
        let number = prefetches.taken.fetch_add(1, Ordering::SeqCst) + 1;
        let mut state = lock(&self.holding.state);
        let now = prefetches.now();
        let Some(mut asked) = state.asked.take() else {
            return;
        };
        let pace = state.pace;
        let asked_at = asked.asked_at;
        // After a refusal or a failure, the task waits and asks again, since the key is asked for
        // often.
        match answer {
            Ok(decision) => {
                if decision.is_allowed() {
                    let units = asked.check.charges().map(Charge::cost).sum();
                    (asked.number, asked.units, asked.left, asked.low) =
                        (number, units, units, pace.low(units));
                    asked.admitted = Some(decision.clone());
                    state.spending.measure_anew(now, pace);
                    state.prefetches.push(asked);
                } else {
                    state.asks_from = now.saturating_add(pace.life);
                }
                state.learn(decision.binding(), decision.at(), asked_at);
            }
            Err(_) => {
                state.prefetches.push(asked);
                state.asks_from = now.saturating_add(pace.life / 8);
            }
        }
        drop(state);
        self.holding.changed.notify_one();
    }

    pub(crate) async fn changed(&self) {
        self.holding.changed.notified().await;
    }
}

impl Drop for KeptHolding {
    fn drop(&mut self) {
        let mut holdings = self.prefetches.write();
        let mut state = lock(&self.holding.state);
        state.stepped_at = None;
        // If the task has not given everything back, its runtime has ended. The holding then stays
        // in the table, so that callers can spend its units until their life is over.
        let is_over = state.prefetches.is_empty() && state.asked.is_none();
        let digest = self.holding.digest;
        let held = holdings.get(&digest);
        if is_over && held.is_some_and(|held| Arc::ptr_eq(held, &self.holding)) {
            holdings.remove(&digest);
        }
        drop((state, holdings));
        self.prefetches.ended.notify_waiters();
    }
}
