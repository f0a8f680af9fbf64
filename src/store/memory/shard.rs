//! A shard, which has the records under one lock.

use std::{mem, sync::Arc};

use hashbrown::{HashTable, hash_table::OccupiedEntry};

use super::capacity::{Capacity, LimitUsage};
use crate::{
    check::{AdmissionId, Charge},
    decision::Settlement,
    key::Key,
    window::{CheckContext, Figures, Log},
};

/// The records of the keys under which units are counted. A record without units is removed before
/// the lock of the shard is released.
#[derive(Default)]
pub(super) struct Shard(HashTable<Record>);

/// The record of one limit and key, found by the digest of both. A record takes two cache lines,
/// which processors load together.
#[repr(align(128))]
struct Record {
    digest: u64,
    key: Key,
    /// How much capacity all keys of the limit have together.
    usage: Arc<LimitUsage>,
    /// The number of entries for which capacity is taken. The number is 0 in a new record. The
    /// log of a new record begins with the units that [cells](super::cells) have counted for the
    /// key.
    entries: usize,
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
    /// Whether the charge does not fit.
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
        digest: u64,
        charge: &Charge,
        now: u64,
        capacity: &'a Capacity,
    ) -> OpenRecord<'a> {
        let found = self.0.entry(
            digest,
            |record| record.is_of(digest, charge),
            |record| record.digest,
        );
        OpenRecord {
            record: found.or_insert_with(|| Record::new(digest, charge, now, capacity)),
            capacity,
        }
    }

    /// Forgets the key of a charge. Units that were counted in cells stay.
    pub(super) fn remove(&mut self, digest: u64, charge: &Charge, capacity: &Capacity) {
        if let Ok(record) = self
            .0
            .find_entry(digest, |record| record.is_of(digest, charge))
        {
            let Record { usage, entries, .. } = record.remove().0;
            capacity.change(&usage, entries, 0);
        }
    }

    /// Drops all expired entries.
    pub(super) fn sweep(&mut self, now: u64, capacity: &Capacity) {
        self.0.retain(
            |Record {
                 log,
                 usage,
                 entries,
                 ..
             }| {
                log.sweep(now, usage.identity.window_micros);
                let before = mem::replace(entries, log.len().min(*entries));
                capacity.change(usage, before, *entries);
                log.len() > 0
            },
        );
        // Gives memory back after most of the keys have left.
        if self.0.capacity() / 4 > self.0.len() {
            self.0.shrink_to_fit(|record| record.digest);
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
        let may_be_counted = context.has_caller_id && charge.units() > 0;
        let recorded_at = may_be_counted
            .then(|| log.time_of(context.id, charge.cost()))
            .flatten();
        // The time of a place is the time of its last renewal. That time may be in the future if
        // the clock has stepped back.
        let counted_at = recorded_at.map(|at| {
            if charge.takes_place() {
                at.min(context.now)
            } else {
                charge.admitted_at(at)
            }
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
        self.leave(0, context.now, false);
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
        self.leave(
            if begins { charge.units() } else { 0 },
            context.now,
            has_room,
        );
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
        self.record
            .get_mut()
            .log
            .trim(now, charge.limit().window_micros());
        let has_room = self.has_room(1);
        let is_new = self.is_new();
        let Record {
            usage,
            log,
            entries,
            ..
        } = self.record.get_mut();
        let is_known =
            cost.is_some_and(|cost| log.settle(now, settlement, charge, cost, has_room || is_new));
        let above = cost.unwrap_or_default().saturating_sub(charge.cost());
        let is_recent = settlement
            .at_micros()
            .saturating_add(charge.limit().window_micros())
            > now;
        if !is_known && above > 0 && is_recent && usage.has_cells() {
            // The admission may have been counted in cells, at its estimate. So the units above the
            // estimate are added.
            let context = CheckContext {
                now,
                id: AdmissionId::fresh(),
                has_caller_id: false,
            };
            return (
                self.admit(
                    &Charge::spent(charge.limit().clone(), charge.key().clone(), above),
                    context,
                ),
                false,
            );
        }
        let figures = log.figures(charge, now);
        let counted = if is_known {
            cost.unwrap_or_default()
        } else {
            0
        };
        let has_room = has_room || log.len() <= *entries;
        self.leave(counted, now, has_room);
        (figures, is_known)
    }

    fn is_new(&self) -> bool {
        self.record.get().entries == 0
    }

    /// Whether there is room for this number of further entries. The store's count of taken
    /// capacity is read only if the record has taken too little capacity itself, because other
    /// threads often write that count.
    #[inline]
    fn has_room(&self, further: usize) -> bool {
        let Record {
            usage,
            log,
            entries,
            ..
        } = self.record.get();
        let entries_after = log.len() + further;
        entries_after <= *entries || self.capacity.has_room(usage, entries_after - entries)
    }

    /// Takes capacity for the entries of the record if there is room, and gives back capacity that
    /// is no longer needed. If there is no room, counts the units in cells. Removes the record if
    /// `entries` is then 0.
    #[inline]
    fn leave(mut self, counted: u64, now: u64, has_room: bool) {
        let capacity = self.capacity;
        let is_new = self.is_new();
        let Record {
            digest,
            usage,
            log,
            entries,
            ..
        } = self.record.get_mut();
        if counted > 0 && !has_room {
            capacity.count_in_cells(usage, *digest, now, if is_new { counted } else { 0 });
        }
        let before = *entries;
        *entries = if counted > 0 && has_room {
            log.len()
        } else {
            log.len().min(before)
        };
        capacity.change(usage, before, *entries);
        if *entries == 0 {
            self.record.remove();
        }
    }
}

impl Verdict {
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
    fn new(digest: u64, charge: &Charge, now: u64, capacity: &Capacity) -> Self {
        let usage = capacity.usage(charge.limit());
        let log = usage.log_of(charge.limit(), digest, now);
        Self {
            digest,
            key: charge.key().clone(),
            usage,
            entries: 0,
            log,
        }
    }

    #[inline]
    fn is_of(&self, digest: u64, charge: &Charge) -> bool {
        self.digest == digest
            && self.key == *charge.key()
            && self.usage.identity == charge.limit().identity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_two_cache_lines() {
        assert_eq!(size_of::<Record>(), 128);
    }
}
