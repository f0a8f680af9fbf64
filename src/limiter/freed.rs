//! The callers that a limit and key refuses, and which of them ask when units are freed.
//!
//! 1. The first in a line asks when all limits and keys that refuse it have units for it. The first
//!    is not woken before, since it would be refused.
//! 2. Of the callers that fit, the first to arrive asks, and the next ones that fit as well.
//! 3. A settlement or a reply tells how many units are left. When a caller asks, there may be
//!    fewer, or more. So the reply to the last caller that has asked for the units tells how many
//!    are left for others. If that reply does not come, the next caller asks. A caller that was
//!    woken counts as admitted until its reply.
//! 4. Sometimes too many callers ask, and are refused. Enough callers ask in any case: a settlement
//!    tells of units that are freed after a reply was decided, and callers have timers for units
//!    that leave the window.

use std::{collections::BTreeMap, sync::Arc};

use super::line::{Caller, Wanted};
use crate::decision::LimitStatus;

/// A limit and key that callers want.
#[derive(Default)]
pub(super) struct Pair {
    pub(super) callers: usize,
    /// The callers that the limit and key refuses, by number.
    refused: BTreeMap<u64, (Wanted, Arc<Caller>)>,
    /// No refused caller has more room than this. If more units are used, no search is made, since
    /// it would find no caller.
    most_room: u64,
    /// The callers that were woken, by number, until they are answered.
    woken: BTreeMap<u64, Woken>,
    /// The fewest units that may be used. `None` if a reply will tell, or if nothing was freed.
    used: Option<u64>,
    /// The last of the woken callers that has asked, until its reply.
    asker: Option<u64>,
}

struct Woken {
    caller: Arc<Caller>,
    /// The units that an admission takes.
    takes: u64,
    has_asked: bool,
}

impl Pair {
    pub(super) fn refuse(&mut self, caller: &Arc<Caller>, wanted: Wanted) {
        self.refused.insert(caller.number, (wanted, Arc::clone(caller)));
        self.most_room = self.most_room.max(wanted.room);
    }

    /// Takes note of the fewest units that may be used: zero if that is not known. Figures may
    /// arrive in another order than they were true, so the lowest holds until a caller asks.
    pub(super) fn free(&mut self, used: u64) {
        let known = self.used.filter(|_| !self.will_learn());
        self.used = Some(known.map_or(used, |known| known.min(used)));
    }

    /// Takes the caller that asks next.
    pub(super) fn take_next(&mut self) -> Option<(Wanted, Arc<Caller>)> {
        let used = self.used?;
        let all_used = self.woken.values().fold(used, |all, woken| all.saturating_add(woken.takes));
        // If it is not known how many units are used, one caller finds out.
        if all_used > self.most_room || used == 0 && self.will_learn() {
            return None;
        }
        let next = self.refused.iter().find(|(_, (wanted, _))| wanted.room >= all_used);
        let number = next.map(|(number, _)| *number);
        if number.is_none() {
            self.most_room = all_used.saturating_sub(1);
        }
        self.refused.remove(&number?)
    }

    /// Takes note that the caller was woken, and will ask.
    pub(super) fn note_woken(&mut self, caller: &Arc<Caller>, takes: u64) {
        let woken = Woken { caller: Arc::clone(caller), takes, has_asked: false };
        self.woken.insert(caller.number, woken);
    }

    /// The callers that were woken, and have not asked yet.
    pub(super) fn will_ask(&self) -> impl Iterator<Item = &Arc<Caller>> {
        self.woken.values().filter(|woken| !woken.has_asked).map(|woken| &woken.caller)
    }

    /// Takes note that the caller asks. The reply to a woken caller will bring newer figures, so the
    /// known figure is dropped.
    pub(super) fn ask(&mut self, number: u64) {
        self.refused.remove(&number);
        if let Some(woken) = self.woken.get_mut(&number) {
            woken.has_asked = true;
            (self.asker, self.used) = (Some(number), None);
        }
    }

    /// Whether the reply to a woken caller will tell more than what is known.
    fn will_learn(&self) -> bool {
        self.will_ask().next().is_some()
    }

    /// Takes note of the reply to a caller.
    pub(super) fn answer(&mut self, number: u64, wanted: &Wanted, status: &LimitStatus) {
        self.woken.remove(&number);
        if self.asker.take_if(|asker| *asker == number).is_some() {
            // The caller is not to ask again at once, even if the figures of a store contradict its
            // refusal.
            let least = status.refuses().map_or(0, |_| wanted.room.saturating_add(1));
            self.free(status.used().max(least));
        }
    }

    /// Takes note that the caller does not ask, or that its reply does not come.
    pub(super) fn leave(&mut self, number: u64) {
        self.refused.remove(&number);
        let was_to_ask = self.woken.remove(&number).is_some_and(|woken| !woken.has_asked);
        if was_to_ask || self.asker.take_if(|asker| *asker == number).is_some() {
            self.free(0);
        }
    }
}
