//! The callers that wait for units of a limit and key, and which of them ask when some are freed.
//!
//! 1. The first in a line waits in the list of one limit and key: of those that refuse it, the one
//!    that does so for longest. Until units of that one are freed, no others help it. Then it asks,
//!    or goes over to the list of another that refuses it.
//! 2. A pair knows the least units that may be used: what a reply says, less the units that were
//!    freed since its call began. Replies may arrive in any order, so this is never too much,
//!    unless units have left the window since. For those, callers have their timers.
//! 3. A caller that asks counts its units as used until the reply, so that no more callers ask than
//!    there are units.
//! 4. Of the callers that fit, the first to arrive asks.

use std::{cmp::Reverse, collections::BTreeMap, iter};

use tokio::time::Instant;

use crate::decision::LimitStatus;

/// The callers that fit are compared by arrival among so many different amounts of room, the
/// largest.
const COMPARED_ROOMS: usize = 16;

/// A limit and key of a caller.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) digest: u64,
    /// The most units that may be used for the caller to fit. Limits that share units may differ in
    /// it.
    pub(super) room: u64,
    /// The units that an admission takes.
    pub(super) takes: u64,
    /// [`Pair::freed`] when the caller asked.
    pub(super) freed_before: u128,
    /// [`Pair::all_asked`] when the caller asked, with its own units.
    pub(super) asked_before: u128,
    /// How long it refuses the caller, as far as is known.
    pub(super) until: Instant,
}

/// Units of a limit and key that were freed.
#[derive(Clone, Copy)]
pub(super) struct Freed {
    pub(super) digest: u64,
    pub(super) units: u64,
    /// How many were used afterwards; `u64::MAX` if that is not known.
    pub(super) used: u64,
}

/// A limit and key that callers want.
#[derive(Default)]
pub(super) struct Pair {
    pub(super) callers: usize,
    /// All units that were freed.
    pub(super) freed: u128,
    /// The least that may be used.
    used: u64,
    /// The units of callers that ask.
    asked: u64,
    /// All units that callers have asked for.
    all_asked: u128,
    /// The list: the line of each caller, by its room and number.
    list: BTreeMap<(Reverse<u64>, u64), u64>,
}

impl Pair {
    pub(super) fn free(&mut self, freed: &Freed) {
        self.freed += u128::from(freed.units);
        self.used = self.used.saturating_sub(freed.units).min(freed.used);
    }

    /// Takes note of the reply to a caller.
    pub(super) fn learn(&mut self, wanted: &Wanted, status: &LimitStatus) {
        // The caller is not to ask again at once, even if the figures of a store contradict its
        // refusal.
        let least = status.refuses().map_or(0, |_| wanted.room.saturating_add(1));
        let freed_since = u64::try_from(self.freed - wanted.freed_before).unwrap_or(u64::MAX);
        self.used = self.used.max(status.used().max(least).saturating_sub(freed_since));
    }

    /// How many units are used when those that have asked after this caller are admitted as well,
    /// by the reply to the caller.
    pub(super) fn used_next(&self, wanted: &Wanted, status: &LimitStatus) -> u64 {
        let asked_since = u64::try_from(self.all_asked - wanted.asked_before).unwrap_or(u64::MAX);
        status.used().saturating_add(asked_since)
    }

    /// Takes note that a check of the caller is sent.
    pub(super) fn note_asked(&mut self, wanted: &mut Wanted) {
        self.all_asked += u128::from(wanted.takes);
        (wanted.freed_before, wanted.asked_before) = (self.freed, self.all_asked);
    }

    /// A caller asks.
    pub(super) fn claim(&mut self, wanted: &Wanted) {
        self.asked = self.asked.saturating_add(wanted.takes);
    }

    /// It does not ask any more.
    pub(super) fn unclaim(&mut self, wanted: &Wanted) {
        self.asked = self.asked.saturating_sub(wanted.takes);
    }

    fn least_used(&self) -> u64 {
        self.used.saturating_add(self.asked)
    }

    pub(super) fn may_admit(&self, wanted: &Wanted) -> bool {
        wanted.room >= self.least_used()
    }

    pub(super) fn enlist(&mut self, wanted: &Wanted, number: u64, line: u64) {
        self.list.insert((Reverse(wanted.room), number), line);
    }

    pub(super) fn delist(&mut self, wanted: &Wanted, number: u64) {
        self.list.remove(&(Reverse(wanted.room), number));
    }

    /// The line of the caller that asks next; `None` if no caller in the list fits.
    pub(super) fn next(&self) -> Option<u64> {
        let least_used = self.least_used();
        let next = |most: u64| {
            let fitting = (most >= least_used).then_some((Reverse(most), 0)..=(Reverse(least_used), u64::MAX))?;
            self.list.range(fitting).next()
        };
        let rooms = iter::successors(next(u64::MAX), |((Reverse(room), _), _)| next(room.checked_sub(1)?));
        rooms.take(COMPARED_ROOMS).min_by_key(|((_, number), _)| *number).map(|(_, line)| *line)
    }
}
