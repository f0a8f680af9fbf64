//! The callers that a limit and key refuses, and which of them ask when units are freed.
//!
//! 1. The first in a line waits for each limit and key that refuses it. When the last of them has
//!    units for it, it asks. Until then it is not woken to ask, since it would be refused.
//! 2. Of the callers that fit, the first to arrive asks.
//! 3. What a settlement or a reply says is left may be gone when a caller asks, and more may be
//!    left. So the reply to the last caller that asked for the units says how many are left for
//!    others. If that reply does not come, the next caller asks.
//! 4. Too many callers may ask, and are refused. Too few never do: whatever was freed after a reply
//!    was decided is told by another. For units that leave the window, callers have their timers.

use std::collections::BTreeMap;

use crate::decision::LimitStatus;

/// So many callers are woken at once. The reply to the last of them lets others ask.
pub(super) const MOST_WOKEN: usize = 1_024;

/// A limit and key of a caller.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) digest: u64,
    /// The most units that may be used for the caller to fit. Limits that share units may differ in
    /// it.
    pub(super) room: u64,
    /// The units that an admission takes.
    pub(super) takes: u64,
}

/// A limit and key that callers want.
#[derive(Default)]
pub(super) struct Pair {
    pub(super) callers: usize,
    /// The callers that it refuses, by number, with their lines.
    refused: BTreeMap<u64, (Wanted, u64)>,
    /// The most room that any of them has had.
    most_room: u64,
    /// The callers that were woken and have not asked yet, by number, with what they take.
    woken: BTreeMap<u64, u64>,
    /// The least that may be used. `None` if a reply will tell, or if nothing was freed.
    used: Option<u64>,
    /// The last of the woken callers that has asked, until its reply.
    asker: Option<u64>,
}

impl Pair {
    pub(super) fn refuse(&mut self, number: u64, wanted: Wanted, line: u64) {
        self.refused.insert(number, (wanted, line));
        self.most_room = self.most_room.max(wanted.room);
    }

    /// Takes note of how many units are used, at least. Returns how many callers may be woken: only
    /// one if different figures are known, since it will tell which one holds.
    pub(super) fn note_used(&mut self, used: u64) -> usize {
        let known = self.used.replace(self.used.unwrap_or(used).min(used));
        if known.is_some() { 1 } else { MOST_WOKEN }
    }

    /// Takes the caller that asks next, with its line.
    pub(super) fn take_next(&mut self) -> Option<(u64, Wanted, u64)> {
        let used = self.woken.values().fold(self.used?, |used, takes| used.saturating_add(*takes));
        if used > self.most_room {
            return None;
        }
        let number = *self.refused.iter().find(|(_, (wanted, _))| wanted.room >= used)?.0;
        let (wanted, line) = self.refused.remove(&number)?;
        Some((number, wanted, line))
    }

    pub(super) fn wake(&mut self, number: u64, wanted: Wanted) {
        self.woken.insert(number, wanted.takes);
    }

    /// The caller asks. If it was woken, its reply is newer than what is known.
    pub(super) fn ask(&mut self, number: u64) {
        self.refused.remove(&number);
        if self.woken.remove(&number).is_some() || self.asker == Some(number) {
            (self.asker, self.used) = (Some(number), None);
        }
    }

    /// Takes note of the reply to a caller. Returns how many others may be woken.
    pub(super) fn answer(&mut self, number: u64, wanted: &Wanted, status: &LimitStatus) -> usize {
        if self.asker != Some(number) {
            return 1;
        }
        self.asker = None;
        // The caller is not to ask again at once, even if the figures of a store contradict its
        // refusal.
        let least = status.refuses().map_or(0, |_| wanted.room.saturating_add(1));
        self.note_used(status.used().max(least))
    }

    /// The caller does not ask. If it has asked, its reply does not come.
    pub(super) fn leave(&mut self, number: u64) {
        self.refused.remove(&number);
        self.woken.remove(&number);
        if self.asker == Some(number) {
            self.asker = None;
            self.note_used(0);
        }
    }
}
