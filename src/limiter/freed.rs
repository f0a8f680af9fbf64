//! Keeps the callers that a limit and key refuses, and chooses which of them ask when units are
//! freed.
//!
//! 1. The first caller in a line asks when all limits and keys that refuse it have units for it.
//!    The caller is not woken earlier, since it would be refused again.
//! 2. Of the callers that fit into the freed units, the caller that arrived first asks. Later
//!    callers ask as well if they fit into the rest of these units.
//! 3. A settlement or a reply tells how many units are left. By the time that a woken caller asks,
//!    the number may have changed. So from then on, only the reply to the last caller that has
//!    asked tells how many units are left for other callers. If that reply does not come, the next
//!    caller asks. Until its reply, a caller that asks again counts as admitted.
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
    /// The callers that the limit and key refuses, by number. A caller that was woken stays here
    /// until it asks.
    refused: BTreeMap<u64, (Wanted, Arc<Caller>)>,
    /// The largest [`Wanted::room`] of the refused callers that were not woken, or a larger number.
    /// `room` is the number of used units up to which a caller fits. While more units than
    /// `most_room` are used, no caller would fit, so none is searched for.
    most_room: u64,
    /// The callers that were refused and now ask again, until their replies: the number of each,
    /// and the units that its admission takes.
    asking: BTreeMap<u64, u64>,
    /// The caller in `asking` that was the last to ask, until its reply.
    last_asked: Option<u64>,
    /// At least this many units were used when a reply or a settlement last told. `None` before
    /// that, and from the time that a refused caller asks again until its reply.
    used: Option<u64>,
}

impl Pair {
    pub(super) fn refuse(&mut self, caller: &Arc<Caller>, wanted: Wanted) {
        self.refused
            .insert(caller.number, (wanted, Arc::clone(caller)));
        self.most_room = self.most_room.max(wanted.room);
    }

    /// Takes note that at least `used` units are used; zero if the number is unknown. Figures may
    /// arrive in another order than the store has counted them, so the lowest figure holds.
    pub(super) fn free(&mut self, used: u64) {
        self.used = Some(self.used.map_or(used, |known| known.min(used)));
    }

    /// Wakes the callers that fit into the units that are left, in the order of their arrival.
    /// `wake` wakes a caller, and returns whether no other limit and key refuses this caller.
    pub(super) fn pass_on(&mut self, mut wake: impl FnMut(&Arc<Caller>) -> bool) {
        let Some(used) = self.used else { return };
        let mut all_used = self
            .asking
            .values()
            .fold(used, |all, takes| all.saturating_add(*takes));
        let mut most_room = 0;
        let mut refused_by_others = Vec::new();
        for (number, (wanted, caller)) in &self.refused {
            if all_used > self.most_room {
                most_room = self.most_room;
                break;
            }
            if wanted.room < all_used {
                most_room = most_room.max(wanted.room);
                continue;
            }
            if !wake(caller) {
                refused_by_others.push(*number);
            } else if used == 0 {
                // While the number of used units is unknown, only one caller is woken to find out.
                all_used = u64::MAX;
            } else {
                all_used = all_used.saturating_add(wanted.takes);
            }
        }
        self.most_room = most_room;
        refused_by_others
            .iter()
            .for_each(|number| drop(self.refused.remove(number)));
    }

    /// Takes note that the caller asks. If the caller was refused, its reply will bring a newer
    /// figure, so the known figure is dropped.
    pub(super) fn ask(&mut self, number: u64) {
        if let Some((wanted, _)) = self.refused.remove(&number) {
            self.asking.insert(number, wanted.takes);
            (self.last_asked, self.used) = (Some(number), None);
        }
    }

    /// Takes note of the reply to a caller.
    pub(super) fn answer(&mut self, number: u64, wanted: &Wanted, status: &LimitStatus) {
        self.asking.remove(&number);
        if self.last_asked.take_if(|last| *last == number).is_some() {
            // If the store's figures contradict its refusal, the caller would seem to fit, and
            // would ask again at once. So after a refusal, at least so many units count as used
            // that the caller does not fit.
            let least = status
                .refuses()
                .map_or(0, |_| wanted.room.saturating_add(1));
            self.free(status.used.max(least));
        }
    }

    /// Takes note that the caller does not ask, or that its reply does not come. If the caller was
    /// the last to ask, its reply would have told how many units are left, so the next caller has
    /// to find out.
    pub(super) fn leave(&mut self, number: u64) {
        self.refused.remove(&number);
        self.asking.remove(&number);
        if self.last_asked.take_if(|last| *last == number).is_some() {
            self.free(0);
        }
    }
}
