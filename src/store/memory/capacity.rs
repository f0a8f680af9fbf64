//! The number of admissions that a store may remember, and the usage of it by each limit.
//!
//! A limit gets more capacity only as long as it holds less than is free. So a limit that takes all it can get leaves half of
//! the capacity to others, two leave a third, and any other limit can get as much as each of them has.

use std::{
    borrow::Cow,
    collections::HashMap,
    error, fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    error::{StoreError, StoreErrorKind},
    limit::Limit,
};

#[derive(Debug)]
pub(super) struct Capacity {
    admissions: usize,
    taken: Counter,
    usages: Mutex<LimitUsages>,
}

// On cache lines of its own: threads write it, and read what stands beside it for every check.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

/// The admissions under one limit's name. It lives as long as a record of the limit.
#[derive(Debug)]
pub(super) struct LimitUsage {
    name: Cow<'static, str>,
    admissions: Counter,
}

/// The usage of each limit that has records. Names may come from a database, so those without records are forgotten.
#[derive(Debug, Default)]
pub(super) struct LimitUsages(HashMap<Cow<'static, str>, Weak<LimitUsage>>);

/// A limit holds as much as is free, all of it still in its window.
#[derive(Debug)]
pub(super) struct OutOfCapacity {
    limit: Cow<'static, str>,
    held: usize,
    capacity: usize,
}

impl Capacity {
    pub(super) fn new(admissions: usize) -> Self {
        Self { admissions, taken: Counter::default(), usages: Mutex::default() }
    }

    pub(super) fn admissions(&self) -> usize {
        self.admissions
    }

    pub(super) fn taken(&self) -> usize {
        self.taken.get()
    }

    /// The number of limits with records, and of those that have lost their last one within a second.
    pub(super) fn limits(&self) -> usize {
        self.usages().0.len()
    }

    /// The usage of a limit that is new to a shard.
    pub(super) fn usage(&self, limit: &Limit) -> Arc<LimitUsage> {
        let new = || Arc::new(LimitUsage { name: limit.shared_name(), admissions: Counter::default() });
        self.usages().get_or_insert_with(limit, new)
    }

    pub(super) fn forget_unused(&self) {
        self.usages().forget_unused();
    }

    fn usages(&self) -> MutexGuard<'_, LimitUsages> {
        self.usages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is enough for this many more, whichever limits they are of.
    pub(super) fn is_ample(&self, new: usize) -> bool {
        // No limit holds more than all of them do.
        self.taken().saturating_add(new) <= self.admissions / 2
    }

    /// Gives back the capacity of admissions that are gone, and takes that of new ones, which is known to be free.
    ///
    /// If as many are new as are gone, nothing is written, so that threads do not meet here.
    #[inline]
    pub(super) fn change(&self, usage: &LimitUsage, gone: usize, new: usize) {
        if new <= gone {
            return self.give_back(usage, gone - new);
        }
        usage.admissions.add(new - gone);
        self.taken.add(new - gone);
    }

    /// The same if the capacity may not be free. Then it only gives back.
    #[inline]
    pub(super) fn try_change(&self, usage: &LimitUsage, gone: usize, new: usize) -> Result<(), OutOfCapacity> {
        if new > gone && !self.has(usage, new - gone) {
            self.give_back(usage, gone);
            let (limit, held) = (usage.name.clone(), usage.admissions.get());
            return Err(OutOfCapacity { limit, held, capacity: self.admissions });
        }
        self.change(usage, gone, new);
        Ok(())
    }

    /// As if they came one after the other: the last of them, too, finds more free than the limit holds.
    #[inline]
    fn has(&self, usage: &LimitUsage, more: usize) -> bool {
        let (held, taken) = (usage.admissions.get() + more - 1, self.taken() + more - 1);
        held < self.admissions.saturating_sub(taken)
    }

    pub(super) fn give_back(&self, usage: &LimitUsage, gone: usize) {
        if gone > 0 {
            usage.admissions.subtract(gone);
            self.taken.subtract(gone);
        }
    }
}

impl Counter {
    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, more: usize) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn subtract(&self, less: usize) {
        self.0.fetch_sub(less, Ordering::Relaxed);
    }
}

impl LimitUsage {
    #[inline]
    pub(super) fn is_of(&self, limit: &Limit) -> bool {
        self.name == limit.name()
    }
}

impl LimitUsages {
    pub(super) fn get_or_insert_with(
        &mut self,
        limit: &Limit,
        new: impl FnOnce() -> Arc<LimitUsage>,
    ) -> Arc<LimitUsage> {
        if let Some(usage) = self.0.get(limit.name()).and_then(Weak::upgrade) {
            return usage;
        }
        let usage = new();
        self.0.insert(limit.shared_name(), Arc::downgrade(&usage));
        usage
    }

    pub(super) fn forget_unused(&mut self) {
        self.0.retain(|_, usage| usage.strong_count() > 0);
        if self.0.capacity() / 4 > self.0.len() {
            self.0.shrink_to_fit();
        }
    }
}

impl OutOfCapacity {
    pub(super) fn when(self, doing: &'static str) -> StoreError {
        // Other limits have capacity, and this one still refuses.
        StoreError::new(doing, self).of_kind(StoreErrorKind::OutOfMemory).of_one_check()
    }
}

impl fmt::Display for OutOfCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, held, capacity } = self;
        write!(
            f,
            "the in-process store has no capacity left for the limit {limit:?}: {held} of its {capacity} admissions \
             are of this limit, all still in their windows, and no more are free"
        )
    }
}

impl error::Error for OutOfCapacity {}
