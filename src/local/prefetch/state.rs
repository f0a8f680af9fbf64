//! The prefetches that are held of one limit and key, and the figures of its status. Times are microseconds of the local clock.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use crate::{
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    settlement::Settlement,
};

/// The prefetches of a holding under their lock.
pub(super) struct State {
    /// The oldest first. The second is taken before the first is used up.
    pub(super) prefetches: VecDeque<PrefetchedUnits>,
    pub(super) known: Known,
    /// Whether a task takes and gives back. It has ended for good if the holding is `over`.
    pub(super) is_kept: bool,
    pub(super) is_over: bool,
    /// When the task has last begun something.
    pub(super) stepped_at: u64,
    /// How often all prefetches were dropped: one that was asked for before must not be spent.
    pub(super) drops: u64,
    /// Units spent and requests since the last prefetch was taken.
    pub(super) since: u64,
    pub(super) spent: u64,
    pub(super) requests: u64,
    /// No prefetch is asked for before, since the last one was refused, has failed or was dropped.
    pub(super) asks_from: u64,
    /// Until when the task waits without a prefetch.
    pub(super) waits_until: u64,
}

pub(super) struct PrefetchedUnits {
    /// Prefetches are numbered in the order in which this process has taken them.
    pub(super) number: u64,
    pub(super) check: Check,
    pub(super) decision: Decision,
    pub(super) units: u64,
    pub(super) left: u64,
    pub(super) asked_at: u64,
    pub(super) until: u64,
}

/// The status of the limit as the store has last replied it.
pub(super) struct Known {
    pub(super) at: SystemTime,
    pub(super) asked_at: u64,
    /// Including the prefetches of this process.
    pub(super) used: u64,
    pub(super) reserved_by_others: u64,
    pub(super) reset: Duration,
}

impl State {
    /// Without prefetches, by the status of the limit as the store has just replied it.
    pub(super) fn new(status: &LimitStatus, at: SystemTime, now: u64) -> Self {
        let known = Known { at, asked_at: now, used: 0, reserved_by_others: 0, reset: Duration::ZERO };
        let mut state = Self {
            prefetches: VecDeque::with_capacity(2),
            known,
            is_kept: true,
            is_over: false,
            stepped_at: now,
            drops: 0,
            since: now,
            spent: 0,
            requests: 0,
            asks_from: 0,
            waits_until: 0,
        };
        state.learn(status, at, now);
        state
    }

    pub(super) fn left(&self, now: u64) -> u64 {
        self.prefetches.iter().filter(|prefetch| prefetch.is_alive(now)).map(|prefetch| prefetch.left).sum()
    }

    /// The task waits meanwhile, since the key is asked for often. It does not if all prefetches were dropped after it had asked.
    pub(super) fn ask_again_from(&mut self, time: u64, drops: u64) {
        if self.drops == drops {
            (self.asks_from, self.waits_until) = (time, time);
        }
    }

    /// All units of the prefetches, spent or not.
    pub(super) fn units(&self) -> u64 {
        self.prefetches.iter().map(|prefetch| prefetch.units).sum()
    }

    pub(super) fn newest_units(&self, now: u64) -> u64 {
        self.prefetches.back().filter(|newest| newest.is_alive(now)).map_or(0, |newest| newest.units)
    }

    /// Takes the prefetches that have ended or are used up out of the list, so that they are not spent any more.
    pub(super) fn settle_all(&mut self, now: u64) -> Vec<Settlement> {
        let is_over = |prefetch: &PrefetchedUnits| prefetch.left == 0 || !prefetch.is_alive(now);
        let (over, kept) = self.prefetches.drain(..).partition(is_over);
        self.prefetches = kept;
        let settlements = VecDeque::into_iter(over).map(|PrefetchedUnits { check, decision, units, left, .. }| {
            self.known.used = self.known.used.saturating_sub(left);
            Settlement::new(check, &decision, |_| Some(units - left))
        });
        settlements.collect()
    }

    pub(super) fn count(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
        self.requests += 1;
    }

    pub(super) fn learn(&mut self, status: &LimitStatus, at: SystemTime, asked_at: u64) {
        let own = self.units();
        self.known = Known {
            at,
            asked_at,
            used: status.used(),
            reserved_by_others: status.reserved().saturating_sub(own),
            reset: status.reset_after(),
        };
    }

    /// The status of the limit, with the units that this process holds as those that are left.
    pub(super) fn status(&self, charge: &Charge, now: u64) -> LimitStatus {
        let left = self.prefetches.iter().map(|prefetch| prefetch.left).sum();
        let used = self.known.used.saturating_sub(left);
        let age = Duration::from_micros(now.saturating_sub(self.known.asked_at));
        // Some units are used, so there is a reset time.
        let reset = self.known.reset.saturating_sub(age).max(Duration::from_micros(1));
        LimitStatus::new(charge, used, reset, None).with_reserved(self.known.reserved_by_others, Duration::ZERO)
    }
}

impl PrefetchedUnits {
    /// A time before `asked_at` means that the local clock has stepped back.
    pub(super) fn is_alive(&self, now: u64) -> bool {
        (self.asked_at..self.until).contains(&now)
    }
}

impl Known {
    /// The store's time at a local time: at the latest, since the store has decided after it was asked.
    pub(super) fn at_local(&self, now: u64) -> SystemTime {
        self.at + Duration::from_micros(now.saturating_sub(self.asked_at))
    }
}
