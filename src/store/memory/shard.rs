//! A shard, which has the records under one lock.

use std::sync::Arc;

use hashbrown::{HashTable, hash_table::OccupiedEntry};

use super::capacity::{Capacity, LimitUsage};
use crate::{
    check::{AdmissionId, Charge},
    decision::Settlement,
    window::{CheckContext, Figures, Log},
};

/// The records of the keys under which units are counted. A record without units is removed before
/// the lock of the shard is released.
#[derive(Default)]
pub(super) struct Shard(HashTable<Record>);

/// The record of one limit and key, in one cache line.
#[repr(align(64))]
struct Record {
    /// Stands for the limit and the key. Two of them never have the same digest, since clients
    /// cannot compute the digests of a process.
    digest: u128,
    /// How much capacity all keys of the limit have together.
    usage: Arc<LimitUsage>,
    /// The entries, and the number of them for which capacity is taken. This number is 0 in a new
    /// record, whose log begins with the units that [cells](super::cells) have counted for the key.
    log: Log,
}

/// The record of a charge, while the lock of its shard is held.
pub(super) struct OpenRecord<'a> {
    record: OccupiedEntry<'a, Record>,
    capacity: &'a Capacity,
}

/// The state of a charge's limit and key before its check is counted or refused.
pub(super) struct Look<'a> {
    pub(super) charge: &'a Charge,
    /// The time at which this check was counted before, or `None` if it was not.
    counted_at: Option<u64>,
    /// True if the charge does not fit.
    refuses: bool,
}

/// The outcome of a check.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verdict {
    Admitted,
    Refused,
    /// The check was counted before, at this time.
    Known(u64),
}

impl Shard {
    /// Finds the record of a charge, or adds it.
    #[inline]
    pub(super) fn open<'a>(
        &'a mut self,
        digest: u128,
        charge: &Charge,
        capacity: &'a Capacity,
    ) -> OpenRecord<'a> {
        let hash = digest as u64;
        let found = self.0.entry(hash, |it| it.digest == digest, Record::hash);
        OpenRecord {
            record: found.or_insert_with(|| Record::new(digest, charge, capacity)),
            capacity,
        }
    }

    /// Forgets the key of a charge. Units that were counted in cells stay.
    pub(super) fn remove(&mut self, digest: u128, capacity: &Capacity) {
        if let Ok(record) = self.0.find_entry(digest as u64, |it| it.digest == digest) {
            let Record { usage, log, .. } = record.remove().0;
            capacity.change(&usage, log.taken, 0);
        }
    }

    /// Drops all expired entries.
    pub(super) fn sweep(&mut self, now: u64, capacity: &Capacity) {
        self.0.retain(|Record { log, usage, .. }| {
            log.sweep(now, usage.identity.window_micros);
            let before = log.taken;
            log.taken = before.min(log.len() as u32);
            capacity.change(usage, before, log.taken);
            log.len() > 0
        });
        // Gives memory back after most of the keys have left.
        if self.0.capacity() / 4 > self.0.len() {
            self.0.shrink_to_fit(Record::hash);
        }
    }

    pub(super) fn keys(&self) -> usize {
        self.0.len()
    }
}

impl OpenRecord<'_> {
    /// Drops entries that have left the window, and tells whether the charge fits beside the other
    /// entries.
    #[inline]
    pub(super) fn look<'a>(&mut self, charge: &'a Charge, context: CheckContext) -> Look<'a> {
        let log = &mut self.record.get_mut().log;
        log.trim(context.now, charge.limit().window_micros());
        let mut counted_at = None;
        if context.has_caller_id && charge.units() > 0 {
            counted_at = log.time_of(context.id, charge.cost());
        }
        // The time of a place is the time of its last renewal. That time may be in the future if
        // the clock has stepped back.
        let counted_at = counted_at.map(|at| {
            if charge.takes_place() {
                return at.min(context.now);
            }
            charge.admitted_at(at)
        });
        Look {
            charge,
            counted_at,
            refuses: !log.fits(charge, context.now),
        }
    }

    /// Counts the charge if its check is admitted and the charge fits.
    #[inline]
    pub(super) fn conclude(
        mut self,
        look: &Look<'_>,
        context: CheckContext,
        verdict: Verdict,
    ) -> Figures {
        let charge = look.charge;
        let is_new = self.is_new();
        let log = &mut self.record.get_mut().log;
        let figures = match verdict {
            Verdict::Admitted if !look.refuses => return self.admit(charge, context),
            Verdict::Admitted | Verdict::Refused if look.refuses => {
                log.refuse(charge, context.now, is_new)
            }
            _ => log.figures(charge, context.now),
        };
        self.leave(0, false);
        figures
    }

    #[inline]
    fn admit(mut self, charge: &Charge, context: CheckContext) -> Figures {
        let grows = self.record.get().log.grows(charge, context);
        let has_room = self.has_room(usize::from(grows));
        let is_new = self.is_new();
        let log = &mut self.record.get_mut().log;
        // A ban without room does not begin. Otherwise cells would count the ban, and all keys of
        // these cells would be banned, for as long as the longest ban among them.
        let begins = has_room || !charge.is_ban;
        if begins {
            log.admit(charge, context, has_room || is_new);
        }
        let figures = log.figures(charge, context.now);
        self.leave(if begins { charge.units() } else { 0 }, has_room);
        figures
    }

    /// Sets the actual cost of one charge of an admission. Also returns whether the admission was
    /// known.
    pub(super) fn settle(
        mut self,
        now: u64,
        settlement: &Settlement,
        charge: &Charge,
        cost: Option<u64>,
    ) -> (Figures, bool) {
        let limit = charge.limit();
        let log = &mut self.record.get_mut().log;
        log.trim(now, limit.window_micros());
        let has_room = self.has_room(1);
        let is_new = self.is_new();
        let Record { usage, log, .. } = self.record.get_mut();
        let is_known =
            cost.is_some_and(|cost| log.settle(now, settlement, charge, cost, has_room || is_new));
        let cost = cost.unwrap_or_default();
        let above = cost.saturating_sub(charge.cost());
        let until = settlement.at_micros().saturating_add(limit.window_micros());
        if !is_known && above > 0 && until > now && usage.has_cells() {
            // The admission may have been counted in cells, at its estimate. So the units above the
            // estimate are added.
            let context = CheckContext {
                now,
                id: AdmissionId::fresh(),
                has_caller_id: false,
            };
            let above = Charge::spent(limit.clone(), charge.key().clone(), above);
            return (self.admit(&above, context), false);
        }
        let figures = log.figures(charge, now);
        let has_room = has_room || log.len() <= log.taken as usize;
        self.leave(if is_known { cost } else { 0 }, has_room);
        (figures, is_known)
    }

    /// The time by which the record is decided, if its shard was locked at the time `now`. A new
    /// record may have units of cells, which were read after a wait for another lock.
    #[inline]
    pub(super) fn opened_at(&self, now: u64) -> u64 {
        if self.is_new() {
            self.capacity.clock.now()
        } else {
            now
        }
    }

    fn is_new(&self) -> bool {
        self.record.get().log.taken == 0
    }

    /// True if there is room for this number of further entries. The store's count of taken
    /// capacity is read only if the record has taken too little capacity itself, because other
    /// threads often write that count.
    #[inline]
    fn has_room(&self, further: usize) -> bool {
        let Record { usage, log, .. } = self.record.get();
        let (taken, needed) = (log.taken as usize, log.len() + further);
        needed <= taken || self.capacity.has_room(usage, needed - taken)
    }

    /// Takes capacity for the entries of the record if there is room, and gives back capacity that
    /// is no longer needed. If there is no room, counts the units in cells. Removes the record if
    /// it then has no capacity.
    #[inline]
    fn leave(mut self, counted: u64, has_room: bool) {
        let capacity = self.capacity;
        let Record { digest, usage, log } = self.record.get_mut();
        let before = log.taken;
        if counted > 0 && !has_room {
            let counted = if before == 0 { counted } else { 0 };
            capacity.count_in_cells(usage, *digest as u64, counted);
        }
        log.taken = log.len() as u32;
        if counted == 0 || !has_room {
            log.taken = log.taken.min(before);
        }
        capacity.change(usage, before, log.taken);
        if log.taken == 0 {
            self.record.remove();
        }
    }
}

impl Verdict {
    /// The time of the decision, if the check is decided `now`.
    pub(super) fn at(self, now: u64) -> u64 {
        if let Self::Known(at) = self { at } else { now }
    }

    /// The verdict on a check. The check is admitted if each charge that is not in the shadow fits.
    /// If the record of one of its charges shows that the check was admitted before, the check is
    /// not counted again.
    // Most checks have a single charge. For such a check, the inlined function needs few
    // instructions.
    #[inline(always)]
    pub(super) fn of(looks: &[Look<'_>]) -> Self {
        let known = looks
            .iter()
            .filter_map(|look| Some((look.charge.keeps_time(), look.counted_at?)));
        // The time of an exact log is preferred, since only an exact log is sure to know the time
        // to the microsecond.
        if let Some((_, at)) = known.max() {
            return Self::Known(at);
        }
        let refuses = looks
            .iter()
            .any(|look| look.refuses && !look.charge.is_shadow());
        if refuses {
            Self::Refused
        } else {
            Self::Admitted
        }
    }
}

impl Record {
    #[cold]
    fn new(digest: u128, charge: &Charge, capacity: &Capacity) -> Self {
        let usage = capacity.usage(charge.limit());
        let log = capacity.log_of(&usage, charge.limit(), digest as u64);
        Self { digest, usage, log }
    }

    fn hash(&self) -> u64 {
        self.digest as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_cache_line() {
        assert_eq!(size_of::<Record>(), 64);
    }
}
