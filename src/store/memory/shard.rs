//! The records under one lock.

use std::sync::Arc;

use hashbrown::HashTable;

use super::{
    capacity::{Capacity, LimitUsage, LimitUsages, OutOfCapacity},
    keyed_window::{Figures, KeyedWindow, Preview},
};
use crate::{
    algorithm::Algorithm,
    check::Charge,
    key::Key,
    window::{ChargeSettlement, CheckContext},
};

/// The records of keys that have units counted: a refused or free check adds none.
#[derive(Debug, Default)]
pub(super) struct Shard {
    records: HashTable<Record>,
    /// Of the limits that have records here, so that a new key needs no lock that all shards share.
    usages: LimitUsages,
}

/// One limit and key: two cache lines that processors load together. It is found by the digest of the limit's
/// name and the key.
#[derive(Debug)]
#[repr(align(128))]
struct Record {
    digest: u64,
    key: Key,
    algorithm: Algorithm,
    /// Of all keys under the limit's name.
    usage: Arc<LimitUsage>,
    window: KeyedWindow,
}

impl Shard {
    /// Decides a charge that is alone in its check, and returns when it was counted if that was before.
    #[inline]
    pub(super) fn decide(
        &mut self,
        digest: u64,
        charge: &Charge,
        context: CheckContext,
        capacity: &Capacity,
    ) -> Result<(Figures, Option<u64>), OutOfCapacity> {
        if let Some(Record { window, usage, .. }) = self.find(digest, charge) {
            return window.decide(charge, context, |gone, new| capacity.try_change(usage, gone, new));
        }
        let (mut window, mut usage) = (KeyedWindow::new(charge.limit()), None);
        let decided = window.decide(charge, context, |gone, new| {
            if new == 0 {
                return Ok(());
            }
            capacity.try_change(usage.insert(self.usage(charge, capacity)), gone, new)
        })?;
        self.insert(digest, charge, window, usage);
        Ok(decided)
    }

    /// Looks at a charge that is decided together with others.
    pub(super) fn preview(&mut self, digest: u64, charge: &Charge, context: CheckContext) -> Preview {
        match self.find(digest, charge) {
            Some(record) => record.window.preview(charge, context),
            None => KeyedWindow::new(charge.limit()).preview(charge, context),
        }
    }

    /// The figures of a charge in a check that is not counted: it is refused, or was counted before.
    pub(super) fn pass_over(
        &mut self,
        digest: u64,
        charge: &Charge,
        context: CheckContext,
        (preview, is_refused): (&Preview, bool),
        capacity: &Capacity,
    ) -> Figures {
        let figures = |window: &mut KeyedWindow| {
            if is_refused { window.refuse(charge, context) } else { window.figures(charge, context.now, None) }
        };
        match self.find(digest, charge) {
            Some(Record { window, usage, .. }) => {
                capacity.give_back(usage, preview.gone);
                figures(window)
            }
            None => figures(&mut KeyedWindow::new(charge.limit())),
        }
    }

    /// Counts a charge of a check that is admitted.
    pub(super) fn admit(
        &mut self,
        digest: u64,
        charge: &Charge,
        context: CheckContext,
        preview: Preview,
        capacity: &Capacity,
    ) -> Figures {
        if let Some(Record { window, usage, .. }) = self.find(digest, charge) {
            capacity.change(usage, preview.gone, preview.new);
            return window.admit(charge, context);
        }
        let mut window = KeyedWindow::new(charge.limit());
        let figures = window.admit(charge, context);
        if !window.is_empty() {
            let usage = preview.usage.unwrap_or_else(|| self.usage(charge, capacity));
            capacity.change(&usage, preview.gone, preview.new);
            self.insert(digest, charge, window, Some(usage));
        }
        figures
    }

    /// Sets the actual cost of an admission, and returns whether it was known.
    pub(super) fn settle(
        &mut self,
        digest: u64,
        now: u64,
        settlement: ChargeSettlement<'_>,
        capacity: &Capacity,
    ) -> Result<(Figures, bool), OutOfCapacity> {
        let charge = settlement.charge;
        if let Some(Record { window, usage, .. }) = self.find(digest, charge) {
            let take_capacity = |gone, new| capacity.try_change(usage, gone, new);
            let settled = window.settle(now, settlement, take_capacity);
            if window.is_empty() {
                self.remove(digest, charge, capacity);
            }
            return settled;
        }
        let (mut window, mut usage) = (KeyedWindow::new(charge.limit()), None);
        let settled = window.settle(now, settlement, |gone, new| {
            if new == 0 {
                return Ok(());
            }
            capacity.try_change(usage.insert(self.usage(charge, capacity)), gone, new)
        })?;
        self.insert(digest, charge, window, usage);
        Ok(settled)
    }

    /// Forgets the key of a charge under its limit.
    pub(super) fn remove(&mut self, digest: u64, charge: &Charge, capacity: &Capacity) {
        if let Ok(record) = self.records.find_entry(digest, |record| record.is_of(digest, charge)) {
            let Record { window, usage, .. } = record.remove().0;
            capacity.give_back(&usage, window.entries());
        }
    }

    /// Takes capacity for `new` entries and gives back that of those that are gone. Returns the usage if there is no record
    /// yet.
    pub(super) fn take_capacity(
        &mut self,
        digest: u64,
        charge: &Charge,
        (gone, new): (usize, usize),
        capacity: &Capacity,
    ) -> Result<Option<Arc<LimitUsage>>, OutOfCapacity> {
        if let Some(record) = self.find(digest, charge) {
            capacity.try_change(&record.usage, gone, new)?;
            return Ok(None);
        }
        if new == 0 {
            return Ok(None);
        }
        let usage = self.usage(charge, capacity);
        capacity.try_change(&usage, gone, new)?;
        Ok(Some(usage))
    }

    /// Gives back the capacity that was taken for a charge.
    pub(super) fn give_back(&mut self, digest: u64, charge: &Charge, taken: &Preview, capacity: &Capacity) {
        let usage = taken.usage.as_deref();
        if let Some(usage) = usage.or_else(|| self.find(digest, charge).map(|record| &*record.usage)) {
            capacity.give_back(usage, taken.new);
        }
    }

    /// The usage of a charge that has no record yet.
    fn usage(&mut self, charge: &Charge, capacity: &Capacity) -> Arc<LimitUsage> {
        self.usages.get_or_insert_with(charge.limit(), || capacity.usage(charge.limit()))
    }

    #[inline]
    fn find(&mut self, digest: u64, charge: &Charge) -> Option<&mut Record> {
        self.records.find_mut(digest, |record| record.is_of(digest, charge))
    }

    /// Inserts a new record if it has entries: then capacity was taken for them.
    fn insert(&mut self, digest: u64, charge: &Charge, window: KeyedWindow, usage: Option<Arc<LimitUsage>>) {
        if let Some(usage) = usage.filter(|_| !window.is_empty()) {
            let (key, algorithm) = (charge.key().clone(), charge.limit().algorithm());
            let record = Record { digest, key, algorithm, usage, window };
            self.records.insert_unique(digest, record, |record| record.digest);
        }
    }

    /// Drops all expired entries, and returns whether there were any.
    pub(super) fn sweep(&mut self, now: u64, capacity: &Capacity) -> bool {
        let mut is_any = false;
        self.records.retain(|Record { window, usage, .. }| {
            let gone = window.sweep(now);
            capacity.give_back(usage, gone);
            is_any |= gone > 0;
            !window.is_empty()
        });
        // Gives back the memory of a crowd of keys.
        if self.records.capacity() / 4 > self.records.len() {
            self.records.shrink_to_fit(|record| record.digest);
        }
        self.usages.forget_unused();
        is_any
    }

    pub(super) fn keys(&self) -> usize {
        self.records.len()
    }
}

impl Record {
    #[inline]
    fn is_of(&self, digest: u64, charge: &Charge) -> bool {
        self.digest == digest
            && self.key == *charge.key()
            && self.usage.is_of(charge.limit())
            && self.algorithm == charge.limit().algorithm()
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
