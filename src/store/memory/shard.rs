//! The records under one lock.

use std::sync::Arc;

use hashbrown::{HashTable, hash_table::OccupiedEntry};

use super::capacity::{Capacity, LimitUsage};
use crate::{
    check::Charge,
    key::Key,
    limit::Limit,
    window::{ChargeSettlement, CheckContext, Figures, Window},
};

/// The records of keys that have units counted: those of other keys are removed before the lock is free.
#[derive(Debug, Default)]
pub(super) struct Shard(HashTable<Record>);

/// One limit and key: two cache lines that processors load together. It is found by the digest of both.
#[derive(Debug)]
#[repr(align(128))]
struct Record {
    digest: u64,
    key: Key,
    /// Of all keys under the limit.
    usage: Arc<LimitUsage>,
    window: Window,
}

/// The record of a charge, under its lock. A new one has no entries.
pub(super) struct Place<'a> {
    record: OccupiedEntry<'a, Record>,
    capacity: &'a Capacity,
}

/// What a charge finds before its check is counted or refused.
#[derive(Debug)]
pub(super) struct Look<'a> {
    pub(super) charge: &'a Charge,
    /// The entries for which capacity is taken. Some of them are dropped by now.
    entries: usize,
    /// The entries if the charge is counted; without a change if it does not fit.
    entries_after: usize,
    /// The entries of all keys under the limit, if the charge needs capacity.
    held: usize,
    /// When this very check was counted, if it was.
    counted_at: Option<u64>,
    /// Whether the charge does not fit.
    refuses: bool,
}

/// What becomes of a check.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verdict<'a> {
    Admitted,
    Refused,
    /// It was counted before, at this time.
    Known(u64),
    /// This limit gets no capacity.
    Full(&'a Limit),
}

impl Shard {
    /// Finds the record of a charge, or adds it.
    #[inline]
    pub(super) fn place<'a>(&'a mut self, digest: u64, charge: &Charge, capacity: &'a Capacity) -> Place<'a> {
        let record = match self.0.find_entry(digest, |record| record.is_of(digest, charge)) {
            Ok(found) => found,
            Err(absent) => Record::insert(absent.into_table(), digest, charge, capacity),
        };
        Place { record, capacity }
    }

    /// Forgets the key of a charge.
    pub(super) fn remove(&mut self, digest: u64, charge: &Charge, capacity: &Capacity) {
        if let Ok(record) = self.0.find_entry(digest, |record| record.is_of(digest, charge)) {
            let Record { usage, window, .. } = record.remove().0;
            capacity.change(&usage, window.len(), 0);
        }
    }

    /// Drops all expired entries, and returns whether there were any.
    pub(super) fn sweep(&mut self, now: u64, capacity: &Capacity) -> bool {
        let mut is_any = false;
        self.0.retain(|Record { window, usage, .. }| {
            let before = window.len();
            window.sweep(now, usage.identity.window_micros);
            capacity.change(usage, before, window.len());
            is_any |= window.len() < before;
            window.len() > 0
        });
        // Gives back the memory of a crowd of keys.
        if self.0.capacity() / 4 > self.0.len() {
            self.0.shrink_to_fit(|record| record.digest);
        }
        is_any
    }

    pub(super) fn keys(&self) -> usize {
        self.0.len()
    }
}

impl Place<'_> {
    /// Drops entries that have left the window, and looks at the others.
    #[inline]
    pub(super) fn look<'a>(&mut self, charge: &'a Charge, context: CheckContext) -> Look<'a> {
        let Record { usage, window, .. } = self.record.get_mut();
        let entries = window.len();
        window.trim(context.now, charge.limit().window_micros());
        let may_be_counted = context.has_caller_id && charge.units() > 0;
        let counted_at = may_be_counted.then(|| window.counted_at(charge, context.id)).flatten();
        let refuses = !window.fits(charge, context.now);
        let entries_after = window.len() + usize::from(!refuses && window.grows(charge, context));
        // Other threads write this number, so it is read only if it matters.
        let held = if entries_after > entries { usage.held() } else { 0 };
        Look { charge, entries, entries_after, held, counted_at, refuses }
    }

    /// Counts the charge, or does not.
    #[inline]
    pub(super) fn conclude(mut self, look: &Look<'_>, context: CheckContext, verdict: Verdict<'_>) -> Figures {
        let (charge, window) = (look.charge, &mut self.record.get_mut().window);
        let figures = match verdict {
            Verdict::Admitted if !look.refuses => {
                window.admit(charge, context);
                window.figures(charge, context.now)
            }
            Verdict::Admitted | Verdict::Refused if look.refuses => window.refuse(charge, context.now),
            _ => window.figures(charge, context.now),
        };
        self.leave(look.entries);
        figures
    }

    /// Sets the actual cost of an admission, and returns whether it was known. Without capacity it returns the limit.
    pub(super) fn settle<'a>(
        mut self,
        now: u64,
        settlement: ChargeSettlement<'a>,
    ) -> Result<(Figures, bool), &'a Limit> {
        let Record { usage, window, .. } = self.record.get_mut();
        let (charge, entries) = (settlement.charge, window.len());
        window.trim(now, charge.limit().window_micros());
        let has_room = window.len() < entries || self.capacity.has_room(usage.held(), self.capacity.taken());
        let is_known = window.settle(now, settlement, has_room);
        let figures = window.figures(charge, now);
        self.leave(entries);
        is_known.map(|is_known| (figures, is_known)).ok_or_else(|| charge.limit())
    }

    /// Takes or gives back capacity, if there are other entries than those for which it is taken. Removes a record without
    /// entries.
    #[inline]
    fn leave(self, entries: usize) {
        let Record { usage, window, .. } = self.record.get();
        let entries_after = window.len();
        if entries_after != entries {
            self.capacity.change(usage, entries, entries_after);
        }
        if entries_after == 0 {
            self.record.remove();
        }
    }
}

impl<'a> Verdict<'a> {
    /// A check is admitted if all of its charges fit, but for those in the shadow. If one of them knows that it was admitted
    /// before, it is not counted again.
    // Little is left of it for a single charge, as in most checks.
    #[inline(always)]
    pub(super) fn of(looks: &[Look<'a>], capacity: &Capacity) -> Self {
        let known = looks.iter().filter_map(|look| Some((look.charge.is_exact(), look.counted_at?)));
        // Only an exact log is sure to know the time to the microsecond.
        if let Some((_, at)) = known.max() {
            return Self::Known(at);
        }
        if looks.iter().any(|look| look.refuses && !look.charge.is_shadow()) {
            return Self::Refused;
        }
        // As if the charges came one after the other.
        let lacks_capacity = |(place, look): &(usize, &Look<'_>)| {
            let (limit, before) = (look.charge.limit(), &looks[..*place]);
            let of_limit = before.iter().filter(|other| other.charge.limit().is_one_with(limit));
            look.entries_after > look.entries
                && !capacity.has_room(held_after(of_limit, look.held), held_after(before.iter(), capacity.taken()))
        };
        let lacking = looks.iter().enumerate().find(lacks_capacity);
        lacking.map_or(Self::Admitted, |(_, look)| Self::Full(look.charge.limit()))
    }

    /// When the check was counted, if that was before. Without capacity it returns the limit.
    #[inline]
    pub(super) fn counted_at(self) -> Result<Option<u64>, &'a Limit> {
        match self {
            Self::Admitted | Self::Refused => Ok(None),
            Self::Known(at) => Ok(Some(at)),
            Self::Full(limit) => Err(limit),
        }
    }
}

/// The number of entries for which capacity is taken once these charges are counted.
#[inline]
fn held_after<'a>(charges: impl Iterator<Item = &'a Look<'a>>, held: usize) -> usize {
    charges.fold(held, |held, look| (held + look.entries_after).saturating_sub(look.entries))
}

impl Record {
    #[cold]
    fn insert<'a>(
        records: &'a mut HashTable<Self>,
        digest: u64,
        charge: &Charge,
        capacity: &Capacity,
    ) -> OccupiedEntry<'a, Self> {
        let limit = charge.limit();
        let (key, usage) = (charge.key().clone(), capacity.usage(limit));
        let record = Self { digest, key, usage, window: Window::new(limit) };
        records.insert_unique(digest, record, |record| record.digest)
    }

    #[inline]
    fn is_of(&self, digest: u64, charge: &Charge) -> bool {
        self.digest == digest && self.key == *charge.key() && self.usage.identity == charge.limit().identity()
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
