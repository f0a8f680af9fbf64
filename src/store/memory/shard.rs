//! A shard: the records under one lock.

use std::sync::Arc;

use hashbrown::{HashTable, hash_table::OccupiedEntry};

use super::capacity::{Capacity, LimitUsage};
use crate::{
    check::{AdmissionId, Charge},
    decision::Settlement,
    window::{CheckContext, Figures, Log},
};

/// The records that have units. A record without any is removed before the shard's lock is
/// released.
#[derive(Default)]
pub(super) struct Shard(HashTable<Record>);

/// The record for one limit and key, in one cache line.
#[repr(align(64))]
struct Record {
    /// Identifies the limit and key. Digests never collide, since clients cannot compute them.
    digest: u128,
    /// The capacity and cells that the limit uses for all its keys.
    usage: Arc<LimitUsage>,
    /// The entries, and how many of them take capacity. In a new record, none do, and the log
    /// begins with the units that [cells](super::cells) have counted for the key.
    log: Log,
}

/// A charge's record, while its shard is locked.
pub(super) struct OpenRecord<'a> {
    record: OccupiedEntry<'a, Record>,
    capacity: &'a Capacity,
}

/// The state under a charge's limit and key, before the check is counted or refused.
pub(super) struct Look<'a> {
    pub(super) charge: &'a Charge,
    /// The time at which this check was counted before. `None` if it was not.
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
    /// Finds or adds a charge's record.
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

    /// Forgets a charge's key. Units that were counted in cells stay.
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
        // Frees memory after most keys have left.
        if self.0.capacity() / 4 > self.0.len() {
            self.0.shrink_to_fit(Record::hash);
        }
    }

    pub(super) fn keys(&self) -> usize {
        self.0.len()
    }
}

impl OpenRecord<'_> {
    /// Drops entries that have left the window, and checks whether the charge still fits under the
    /// limit.
    #[inline]
    pub(super) fn look<'a>(&mut self, charge: &'a Charge, context: CheckContext) -> Look<'a> {
        let log = &mut self.record.get_mut().log;
        log.trim(context.now, charge.limit().window_micros());
        let mut counted_at = None;
        if context.has_caller_id && charge.units() > 0 {
            counted_at = log.time_of(context.id, charge.cost());
        }
        // A place's time is that of its last renewal. It may be in the future if the clock has
        // stepped back.
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
        // A ban without room does not begin. Otherwise, cells would count it, and all keys that
        // share them would be banned for as long as the longest ban among them.
        let begins = has_room || !charge.is_ban;
        if begins {
            log.admit(charge, context, has_room || is_new);
        }
        let figures = log.figures(charge, context.now);
        self.leave(if begins { charge.units() } else { 0 }, has_room);
        figures
    }

    /// Sets the actual cost of one charge. Also returns whether the admission was known.
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
            // Cells may have counted the admission at its estimated cost. So only the units above
            // the estimate are added.
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

    /// The time to use for a decision on this record, if its shard was locked at `now`. A new
    /// record needs a later time: it may have units from cells, which were read after a wait for
    /// another lock.
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

    /// True if there is room for this many further entries. Other threads often write the counter
    /// that the whole store shares, so it is read only if the record has not already taken enough
    /// capacity.
    #[inline]
    fn has_room(&self, further: usize) -> bool {
        let Record { usage, log, .. } = self.record.get();
        let (taken, needed) = (log.taken as usize, log.len() + further);
        needed <= taken || self.capacity.has_room(usage, needed - taken)
    }

    /// Takes capacity for the record's entries if there is room, and gives back capacity that the
    /// record no longer needs. If there is no room, counts the units in cells. Removes the record
    /// if it has no capacity.
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
    /// The time of the decision: that of the earlier admission if there was one, or else `now`.
    pub(super) fn at(self, now: u64) -> u64 {
        if let Self::Known(at) = self { at } else { now }
    }

    /// Returns the verdict on a check. The check is admitted if every charge outside the shadow
    /// fits. If any record shows that the check was admitted before, it is not counted again.
    // Most checks have a single charge. For such a check, the inlined function needs few
    // instructions.
    #[inline(always)]
    pub(super) fn of(looks: &[Look<'_>]) -> Self {
        let known = looks
            .iter()
            .filter_map(|look| Some((look.charge.keeps_time(), look.counted_at?)));
        // An exact log's time takes precedence, since only an exact log always records
        // microseconds.
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
