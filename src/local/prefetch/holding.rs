//! The prefetches for one limit and key. Times are microseconds on the local clock.

use std::{
    sync::Mutex,
    time::{Duration, SystemTime},
};

use tokio::sync::Notify;

use super::pace::{Pace, Spending};
use crate::{
    check::{Charge, Check},
    clock::Clock,
    decision::{Decision, LimitStatus, Settlement},
    key::Key,
    limit::Limit,
    local::lock,
};

/// After this many lives without a step, a task's runtime counts as not driven.
const MOST_LIVES: u64 = 10;

/// The prefetches for one limit and key. A task takes them and gives them back. When nothing is
/// held and the key is not asked for often, the task and the holding end.
pub(super) struct Holding {
    pub(super) digest: u64,
    pub(super) limit: Limit,
    pub(super) key: Key,
    pub(super) state: Mutex<State>,
    /// Wakes the task that takes prefetches and gives them back.
    pub(super) changed: Notify,
}

/// The fields that a holding's lock guards.
pub(super) struct State {
    /// The prefetches, the oldest first. There may be two, since the task asks for the next one
    /// before the present one is used up.
    pub(super) prefetches: Vec<PrefetchedUnits>,
    /// The prefetch that the task has asked for, until the reply.
    pub(super) asked: Option<PrefetchedUnits>,
    /// The limit's status in the store's last reply. It does not include the units that were
    /// reserved for this process at that time.
    status: LimitStatus,
    /// The used units in the store's last reply, including this process's prefetches.
    used: u64,
    /// The store's time in its last reply, and the local time at which the store was asked.
    at: SystemTime,
    asked_at: u64,
    pub(super) pace: Pace,
    /// The time at which the task that takes prefetches and gives them back began its last step;
    /// `None` if there is no task.
    pub(super) stepped_at: Option<u64>,
    pub(super) spending: Spending,
    /// The number of checks that did not need a call since the task's last step, and the time of
    /// the last one. Checks that would have travelled in one batch count once.
    pub(super) saved: (u64, u64),
    /// The task does not ask for prefetches before this time, since the last one was refused or
    /// failed.
    pub(super) asks_from: u64,
    /// True if the task ends as soon as it has given everything back.
    pub(super) ends: bool,
}

/// A prefetch in one of three stages: asked for, alive, or ready to be given back.
pub(super) struct PrefetchedUnits {
    pub(super) check: Check,
    /// The store's admission; `None` until the reply. If the store fails, or the task ends before
    /// the reply, the prefetch may have been counted all the same.
    pub(super) admitted: Option<Decision>,
    /// Prefetches are numbered in the order in which this process has taken them.
    pub(super) number: u64,
    pub(super) units: u64,
    pub(super) left: u64,
    /// When this many units are left, the task asks for the next prefetch. These units last about
    /// as long as the next prefetch takes to arrive.
    pub(super) low: u64,
    pub(super) asked_at: u64,
    /// When the prefetch ends; zero if it was dropped.
    pub(super) until: u64,
}

impl Holding {
    /// A holding without prefetches, and without a task.
    pub(super) fn new(
        charge: &Charge,
        digest: u64,
        first_units: u64,
        (status, at): (&LimitStatus, SystemTime),
        now: u64,
        pace: Pace,
    ) -> Self {
        let state = State {
            prefetches: Vec::new(),
            asked: None,
            status: status.clone(),
            used: status.used,
            at,
            asked_at: now,
            pace,
            stepped_at: None,
            spending: Spending::new(first_units, now, pace),
            saved: (0, 0),
            asks_from: 0,
            ends: false,
        };
        Self {
            digest,
            limit: charge.limit().clone(),
            key: charge.key().clone(),
            state: Mutex::new(state),
            changed: Notify::new(),
        }
    }

    /// True if the holding is for exactly the charge's limit and key.
    pub(super) fn is_of(&self, charge: &Charge) -> bool {
        self.key == *charge.key() && self.limit == *charge.limit()
    }

    /// Spends units, if enough are held.
    pub(super) fn spend(
        &self,
        state: &mut State,
        charge: &Charge,
        now: u64,
    ) -> Option<(LimitStatus, SystemTime)> {
        let (before, low) = (state.left(now), state.low(now));
        let left = before.checked_sub(charge.cost())?;
        let mut cost = charge.cost();
        for prefetch in &mut state.prefetches {
            if prefetch.is_alive(now) {
                let part = cost.min(prefetch.left);
                prefetch.left -= part;
                cost -= part;
            }
        }
        state.spending.count(charge.cost());
        if left == 0 || left <= low && before > low {
            self.changed.notify_one();
        }
        // The time since the store was asked. The status is at most this old, since the store has
        // decided after it was asked.
        let age = now.saturating_sub(state.asked_at);
        let at = state.at + Duration::from_micros(age);
        Some((state.status_of(charge, age), at))
    }

    /// Learns from a store decision on this limit and key. `asked_after` is the number of the last
    /// prefetch taken before the store was asked. Returns the number of unspent units that this
    /// process holds, and the number of all units that are reserved for it. If a prefetch was taken
    /// later, the figures are not used, and both numbers are zero.
    pub(super) fn learn(
        &self,
        spent: u64,
        status: &LimitStatus,
        at: SystemTime,
        asked_after: u64,
        clock: &Clock,
    ) -> (u64, u64) {
        let mut state = lock(&self.state);
        let now = clock.now();
        if spent > 0 {
            state.spending.count(spent);
        }
        // If a prefetch was taken after the store was asked, the check's figures are not used.
        // These figures may include the prefetch or not, and the prefetch's figures may include the
        // spent units or not.
        let mut prefetches = state.prefetches.iter();
        if prefetches.any(|prefetch| prefetch.number > asked_after) {
            state.used = state.used.saturating_add(spent);
            return (0, 0);
        }
        if at >= state.at {
            state.learn(status, at, now);
        }
        (state.left(now), state.units())
    }

    pub(super) fn has_task(&self) -> bool {
        lock(&self.state).stepped_at.is_some()
    }

    /// True if the holding's task is on a runtime that is not driven.
    pub(super) fn is_abandoned(&self, now: u64) -> bool {
        let state = lock(&self.state);
        let longest = state.pace.life.saturating_mul(MOST_LIVES);
        state
            .stepped_at
            .is_some_and(|stepped_at| now.saturating_sub(stepped_at) >= longest)
    }

    /// Ends all prefetches at once, including a prefetch that has been asked for, so that the task
    /// gives them back. The task ends after that.
    pub(super) fn drop_prefetches(&self) {
        let mut locked = lock(&self.state);
        let state = &mut *locked;
        state.ends = true;
        for prefetch in state.prefetches.iter_mut().chain(&mut state.asked) {
            prefetch.until = 0;
        }
        drop(locked);
        self.changed.notify_one();
    }

    /// The units for the next prefetch; `None` if it is too early for a prefetch, or if it is not
    /// worth it.
    pub(super) fn wanted(&self, state: &mut State, now: u64) -> Option<u64> {
        let is_due = state.left(now) <= state.low(now)
            || state.renewal().is_some_and(|renewal| renewal <= now);
        let rest = self.limit.units().saturating_sub(state.used);
        let units = state.spending.next_units(now, state.pace, rest)?;
        let may_ask = state.asked.is_none() && !state.ends && now >= state.asks_from;
        (is_due && may_ask).then_some(units)
    }
}

impl State {
    pub(super) fn left(&self, now: u64) -> u64 {
        self.prefetches
            .iter()
            .filter(|prefetch| prefetch.is_alive(now))
            .map(|prefetch| prefetch.left)
            .sum()
    }

    /// All prefetched units, spent or not.
    fn units(&self) -> u64 {
        self.prefetches.iter().map(|prefetch| prefetch.units).sum()
    }

    /// Counts a check that did not ask the store.
    pub(super) fn count_saved(&mut self, now: u64) {
        if now.abs_diff(self.saved.1) >= self.pace.batch {
            self.saved = (self.saved.0 + 1, now);
        }
    }

    /// When this many units are left, it is time for the next prefetch.
    fn low(&self, now: u64) -> u64 {
        match self.prefetches.last() {
            Some(newest) if newest.is_alive(now) => newest.low,
            _ => 0,
        }
    }

    /// The latest time to ask for the next prefetch, so that it arrives before the newest one ends.
    pub(super) fn renewal(&self) -> Option<u64> {
        let newest = self.prefetches.last()?;
        Some(newest.until.saturating_sub(self.pace.lead))
    }

    pub(super) fn learn(&mut self, status: &LimitStatus, at: SystemTime, asked_at: u64) {
        (self.status, self.used, self.at, self.asked_at) =
            (status.clone(), status.used, at, asked_at);
        self.status.leave_out(0, self.units());
    }

    /// The limit's status when the store's last reply has this `age`. Units that this process holds
    /// count as left.
    fn status_of(&self, charge: &Charge, age: u64) -> LimitStatus {
        let left = self.prefetches.iter().map(|prefetch| prefetch.left).sum();
        let mut status = self.status.for_charge(charge);
        status.used = self.used.saturating_sub(left);
        // Some units are used, so there is a reset time.
        status.leaves_after = status.leaves_after.saturating_sub(age).max(1);
        status
    }

    /// Removes the prefetches that have ended or are used up, and returns the settlements that give
    /// them back.
    pub(super) fn settle_all(&mut self, now: u64) -> Vec<Settlement> {
        let mut settlements = Vec::new();
        let over = self
            .prefetches
            .extract_if(.., |prefetch| prefetch.left == 0 || !prefetch.is_alive(now));
        for over in over {
            self.used = self.used.saturating_sub(over.left);
            settlements.extend(over.settlement());
        }
        settlements
    }
}

impl PrefetchedUnits {
    /// True if the prefetch can be spent. A time before `asked_at` means that the local clock has
    /// stepped back. In that case, the prefetch cannot be spent.
    pub(super) fn is_alive(&self, now: u64) -> bool {
        self.admitted.is_some() && (self.asked_at..self.until).contains(&now)
    }

    fn settlement(self) -> Option<Settlement> {
        let Some(decision) = self.admitted else {
            let id = self.check.id()?;
            return Some(Settlement::refund_by_id(self.check, id));
        };
        let spent = self.units - self.left;
        Some(Settlement::new(self.check, &decision, |_| Some(spent)))
    }
}
