//! The prefetches of one limit and key, and what to do with them next.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, SystemTime},
};

use tokio::sync::Notify;

use super::{
    Prefetches,
    demand::{FEWEST_REQUESTS, rate},
    state::{PrefetchedUnits, State},
};
use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    key::Key,
    limit::{Limit, prefetch::Prefetch},
    settlement::Settlement,
};

/// A prefetch is at most this part of the units that are left.
pub(super) const PART_OF_THE_REST: u64 = 8;

/// The next prefetch is asked for when this part of the units is left.
const LOW: u64 = 4;

/// After so many lives without a step, the runtime of a task is taken for one that is not driven.
const MOST_LIVES: u64 = 10;

/// The prefetches of one limit and key. Times are microseconds of the local clock.
pub(crate) struct Holding {
    limit: Limit,
    key: Key,
    prefetches: Prefetch,
    state: Mutex<State>,
    /// Wakes the task that takes and gives back.
    changed: Notify,
}

/// A holding, as long as a task takes care of it.
pub(crate) struct KeptHolding {
    pub(super) prefetches: Arc<Prefetches>,
    pub(super) digest: u64,
    pub(super) holding: Arc<Holding>,
    pub(super) first_units: u64,
    pub(super) is_over: bool,
}

/// The next action of a holding's task.
pub(crate) enum Step {
    Ask { give_back: Vec<Settlement>, take: Option<Taking> },
    Wait(Duration),
    End,
}

/// A prefetch that is asked for.
pub(crate) struct Taking {
    pub(crate) check: Check,
    asked_at: u64,
    drops: u64,
}

impl Holding {
    /// A holding without prefetches. A task has to take care of it.
    pub(super) fn new(charge: &Charge, prefetches: Prefetch, status: &LimitStatus, at: SystemTime, now: u64) -> Self {
        let (limit, key) = (charge.limit().clone(), charge.key().clone());
        Self { limit, key, prefetches, state: Mutex::new(State::new(status, at, now)), changed: Notify::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it holds units of this very limit and key.
    pub(super) fn is_of(&self, charge: &Charge) -> bool {
        self.key == *charge.key() && self.limit == *charge.limit()
    }

    /// Spends units, if enough are held.
    pub(super) fn spend(&self, state: &mut State, charge: &Charge, now: u64) -> Option<(LimitStatus, SystemTime)> {
        if !self.can_spend(state, charge, now) {
            return None;
        }
        let (before, is_low) = (state.left(now), |left: u64, state: &State| left <= state.newest_units(now) / LOW);
        let mut cost = charge.cost();
        for prefetch in state.prefetches.iter_mut().filter(|prefetch| prefetch.is_alive(now)) {
            let part = cost.min(prefetch.left);
            prefetch.left -= part;
            cost -= part;
        }
        state.count(charge.cost());
        let left = before - charge.cost();
        if left == 0 || is_low(left, state) && !is_low(before, state) {
            self.changed.notify_one();
        }
        Some((state.status(charge, now), state.known.at_local(now)))
    }

    pub(super) fn can_spend(&self, state: &State, charge: &Charge, now: u64) -> bool {
        let is_enough = state.left(now) >= charge.cost();
        if !is_enough && state.prefetches.front().is_some_and(|prefetch| !prefetch.is_alive(now)) {
            // The task is late.
            self.changed.notify_one();
        }
        is_enough
    }

    /// Takes note of a decision of the store on this limit and key, which was asked after the prefetch of this number was taken. Returns the
    /// units of it that this process holds unspent, and all that are reserved for it.
    pub(super) fn learn(
        &self,
        spent: u64,
        status: &LimitStatus,
        at: SystemTime,
        asked_after: u64,
        now: u64,
    ) -> (u64, u64) {
        let mut state = self.lock();
        if spent > 0 {
            state.count(spent);
        }
        // Prefetches that were taken meanwhile may be counted in the status or not, and the spent units in theirs or not.
        if state.prefetches.iter().any(|prefetch| prefetch.number > asked_after) {
            state.known.used = state.known.used.saturating_add(spent);
            return (0, 0);
        }
        if at >= state.known.at {
            state.learn(status, at, now);
        }
        (state.left(now), state.units())
    }

    /// Makes sure that a task takes care of it. Returns whether the caller has to start that.
    pub(super) fn keep(&self, now: u64) -> Option<bool> {
        let mut state = self.lock();
        if state.is_over {
            return None;
        }
        if !state.is_kept {
            state.stepped_at = now;
        }
        Some(!mem::replace(&mut state.is_kept, true))
    }

    /// Whether its task is on a runtime that is not driven.
    pub(super) fn is_abandoned(&self, now: u64) -> bool {
        let (state, most) = (self.lock(), self.prefetches.life_micros().saturating_mul(MOST_LIVES));
        state.is_kept && now.saturating_sub(state.stepped_at) >= most
    }

    /// Gives back all prefetches at once, and takes none for a life.
    pub(super) fn drop_prefetches(&self, now: u64) {
        let mut state = self.lock();
        state.drops += 1;
        (state.asks_from, state.waits_until) = (now.saturating_add(self.prefetches.life_micros()), 0);
        state.prefetches.iter_mut().for_each(|prefetch| prefetch.until = 0);
        drop(state);
        self.changed.notify_one();
    }

    /// The units of the next prefetch, if it is time for it and worth it.
    fn wanted(&self, state: &State, now: u64, first_units: u64) -> Option<u64> {
        let is_due = state.left(now) <= state.newest_units(now) / LOW;
        if !is_due || now < state.asks_from {
            return None;
        }
        let elapsed = now.saturating_sub(state.since);
        let demand = rate(state.spent, elapsed, self.prefetches.life_micros()).max(first_units);
        let rest = self.limit.units().saturating_sub(state.known.used);
        let units = demand.min(self.prefetches.most()).min(rest / PART_OF_THE_REST);
        let cost = if state.requests > 0 { state.spent.div_ceil(state.requests) } else { 1 };
        (units >= cost.saturating_mul(FEWEST_REQUESTS)).then_some(units)
    }
}

impl KeptHolding {
    /// Chooses the next action.
    pub(crate) fn next(&mut self) -> Step {
        let (holding, now) = (&*self.holding, self.prefetches.clock.now());
        let mut state = holding.lock();
        state.stepped_at = now;
        let wanted = holding.wanted(&state, now, mem::take(&mut self.first_units));
        if wanted.is_none() && state.prefetches.iter().all(|prefetch| prefetch.is_alive(now)) {
            // Without a prefetch it waits until it may ask again, and then ends unless the key is asked for often.
            let until = state.prefetches.iter().map(|prefetch| prefetch.until).min().unwrap_or(state.waits_until);
            let wait = until.saturating_sub(now);
            self.is_over = wait == 0;
            return if self.is_over { Step::End } else { Step::Wait(Duration::from_micros(wait)) };
        }
        // Together, so that they travel in one script. A prefetch that is used up is settled, too: its units are not reserved any more, and
        // no retry time counts on them.
        let give_back = state.settle_all(now);
        let take = wanted.map(|units| {
            let charge =
                Charge::prefetch(holding.limit.clone(), holding.key.clone(), units, holding.prefetches.life_micros());
            Taking { check: Check::new(charge).with_id(AdmissionId::fresh()), asked_at: now, drops: state.drops }
        });
        Step::Ask { give_back, take }
    }

    /// Adds a prefetch that the store has admitted, or remembers that it has refused it.
    pub(crate) fn take(&self, taking: Taking, decision: Decision) {
        let Taking { check, asked_at, drops } = taking;
        let (Some(charge), Some(status)) = (check.only_charge(), decision.statuses().next()) else { return };
        let (units, life) = (charge.cost(), self.holding.prefetches.life_micros());
        let number = self.prefetches.taken.fetch_add(1, Ordering::SeqCst) + 1;
        let now = self.prefetches.clock.now();
        let mut state = self.holding.lock();
        let (status, at) = (status.clone(), decision.at());
        if decision.is_allowed() {
            // If all prefetches were dropped meanwhile, it is given back, too.
            let until = if state.drops == drops { asked_at.saturating_add(life) } else { 0 };
            state.prefetches.push_back(PrefetchedUnits {
                number,
                check,
                decision,
                units,
                left: units,
                asked_at,
                until,
            });
            (state.since, state.spent, state.requests) = (now, 0, 0);
        } else {
            state.ask_again_from(now.saturating_add(life), drops);
        }
        state.learn(&status, at, asked_at);
    }

    /// The store has failed to take a prefetch.
    pub(crate) fn fail(&self, taking: &Taking) {
        let wait = self.holding.prefetches.life_micros() / 8;
        self.holding.lock().ask_again_from(self.prefetches.clock.now().saturating_add(wait), taking.drops);
    }

    pub(crate) async fn changed(&self) {
        self.holding.changed.notified().await;
    }
}

impl Drop for KeptHolding {
    fn drop(&mut self) {
        // Perhaps because its runtime has ended. Others may spend what is held, as long as it lives.
        let mut state = self.holding.lock();
        state.is_kept = false;
        state.is_over |= self.is_over;
        drop(state);
        if self.is_over
            && let Some(tables) = self.prefetches.tables.get()
        {
            tables.holdings.remove_if(&self.digest, |held| Arc::ptr_eq(held, &self.holding));
        } else {
            self.prefetches.has_abandoned.store(true, Ordering::SeqCst);
        }
        self.prefetches.kept.fetch_sub(1, Ordering::SeqCst);
        self.prefetches.ended.notify_waiters();
    }
}
