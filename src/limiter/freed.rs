//! The callers that a limit and key refuses, and the choice of those that ask when units are freed.
//!
//! 1. The first caller in a line asks when all limits and keys that refuse it have units for it.
//!    The caller is not woken earlier, since it would be refused again.
//! 2. Of the callers that fit into the freed units, the first to arrive asks. Later callers ask as
//!    well if they fit into the rest of these units.
//! 3. A settlement or a reply tells how many units are left. By the time that a woken caller asks,
//!    the number may have changed. So the reply to the last woken caller that has asked tells how
//!    many units are left for other callers. If that reply does not come, the next caller asks.
//!    Until its reply, a woken caller counts as admitted.
//! 4. Sometimes too many callers ask, and some of them are refused. It never happens that too few
//!    callers ask. A reply tells of all units that were free when the store decided. If a
//!    settlement frees units after that, the settlement tells of them. If units leave the window
//!    after that, the callers have timers.

use std::{collections::BTreeMap, sync::Arc};

use super::line::{Caller, Wanted};
use crate::decision::LimitStatus;

/// A limit and key that callers want.
#[derive(Default)]
pub(super) struct Pair {
    pub(super) callers: usize,
    /// The callers that the limit and key refuses, by number.
    refused: BTreeMap<u64, (Wanted, Arc<Caller>)>,
    /// An upper bound of [`Wanted::room`], the used units up to which a caller fits, over all
    /// refused callers. While more units than this are used, no caller is searched for, since none
    /// would fit.
    most_room: u64,
    /// The callers that were woken, by number, until they are answered.
    woken: BTreeMap<u64, Woken>,
    /// A lower bound of the used units. `None` if a reply will bring this figure, or if no units
    /// were freed.
    used: Option<u64>,
    /// The woken caller that has asked last, until its reply.
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

    /// Takes note that at least `used` units are used; zero if the number is unknown. Figures may
    /// arrive in another order than the store has counted them, so the lowest figure holds. While a
    /// woken caller is about to ask, the latest figure holds, since the reply to that caller will
    /// correct it.
    pub(super) fn free(&mut self, used: u64) {
        let known = self.used.filter(|_| !self.will_learn());
        self.used = Some(known.map_or(used, |known| known.min(used)));
    }

    /// Takes the caller that is to ask next out of `refused`. `None` if no caller fits, or if a
    /// woken caller will first tell how many units are used.
    pub(super) fn take_next(&mut self) -> Option<(Wanted, Arc<Caller>)> {
        let used = self.used?;
        let all_used = self.woken.values().fold(used, |all, woken| all.saturating_add(woken.takes));
        // While the number of used units is unknown, only one caller is woken to find out.
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

    /// Takes note that the caller asks. If the caller was woken, its reply will bring a newer
    /// figure, so the known figure is dropped.
    pub(super) fn ask(&mut self, number: u64) {
        self.refused.remove(&number);
        if let Some(woken) = self.woken.get_mut(&number) {
            woken.has_asked = true;
            (self.asker, self.used) = (Some(number), None);
        }
    }

    /// Whether a woken caller has not asked yet, so that the reply to it will bring a newer figure.
    fn will_learn(&self) -> bool {
        self.will_ask().next().is_some()
    }

    /// Takes note of the reply to a caller.
    pub(super) fn answer(&mut self, number: u64, wanted: &Wanted, status: &LimitStatus) {
        self.woken.remove(&number);
        if self.asker.take_if(|asker| *asker == number).is_some() {
            // After a refusal, so many units count as used that the caller does not fit. The
            // store's figures may contradict the refusal, and the caller would then ask again at
            // once.
            let least = status.refuses().map_or(0, |_| wanted.room.saturating_add(1));
            self.free(status.used.max(least));
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
