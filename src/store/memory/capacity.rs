//! The number of admissions that a store may remember, and how many of them each limit holds.
//!
//! A limit gets more capacity only as long as it holds less than is free. So a limit that takes all it can get leaves half of
//! the capacity to others, two leave a third, and any other limit can get as much as each of them has.

use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::{
    error::{StoreError, StoreErrorKind},
    limit::{Identity, Limit},
};

#[derive(Debug)]
pub(super) struct Capacity {
    pub(super) admissions: usize,
    taken: Counter,
    /// Names may come from a database, so limits without records are forgotten.
    limits: RwLock<HashMap<Identity<'static>, Arc<LimitUsage>>>,
}

/// The admissions under one limit.
#[derive(Debug)]
pub(super) struct LimitUsage {
    pub(super) identity: Identity<'static>,
    admissions: Counter,
}

// On cache lines of its own: threads write it, and read what stands beside it for every check.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

impl Capacity {
    pub(super) fn new(admissions: usize) -> Self {
        Self { admissions, taken: Counter::default(), limits: RwLock::default() }
    }

    pub(super) fn taken(&self) -> usize {
        self.taken.0.load(Ordering::Relaxed)
    }

    /// The number of limits with records.
    pub(super) fn limits(&self) -> usize {
        let limits = self.limits.read().unwrap_or_else(PoisonError::into_inner);
        limits.values().filter(|usage| Arc::strong_count(usage) > 1).count()
    }

    /// The usage of a limit, for a new record.
    pub(super) fn usage(&self, limit: &Limit) -> Arc<LimitUsage> {
        let known = self.limits.read().unwrap_or_else(PoisonError::into_inner).get(&limit.identity()).cloned();
        known.unwrap_or_else(|| {
            let mut limits = self.limits.write().unwrap_or_else(PoisonError::into_inner);
            let new = || LimitUsage { identity: limit.own_identity(), admissions: Counter::default() };
            Arc::clone(limits.entry(limit.own_identity()).or_insert_with(|| new().into()))
        })
    }

    pub(super) fn forget_unused(&self) {
        let mut limits = self.limits.write().unwrap_or_else(PoisonError::into_inner);
        limits.retain(|_, usage| Arc::strong_count(usage) > 1);
        if limits.capacity() / 4 > limits.len() {
            limits.shrink_to_fit();
        }
    }

    /// Whether a limit that holds this many admissions, of all that are taken, gets one more.
    #[inline]
    pub(super) fn has_room(&self, held: usize, taken: usize) -> bool {
        held < self.admissions.saturating_sub(taken)
    }

    /// Takes or gives back capacity, so that it is taken for this many admissions instead of `before`.
    ///
    /// If nothing changes, nothing is written, so that threads do not meet here.
    #[inline]
    pub(super) fn change(&self, usage: &LimitUsage, before: usize, admissions: usize) {
        for Counter(counter) in [&usage.admissions, &self.taken] {
            if admissions > before {
                counter.fetch_add(admissions - before, Ordering::Relaxed);
            } else if admissions < before {
                counter.fetch_sub(before - admissions, Ordering::Relaxed);
            }
        }
    }

    /// A failure because a limit gets nothing more.
    pub(super) fn error(&self, doing: &'static str, limit: &Limit) -> StoreError {
        let (limit, held, capacity) = (limit.name(), self.usage(limit).held(), self.admissions);
        let cause = format!(
            "the in-process store has no capacity left for the limit {limit:?}: {held} of its {capacity} admissions \
             are of this limit, all still in their windows, and no more are free"
        );
        // Other limits have capacity, and this one still refuses.
        StoreError::new(doing, StoreErrorKind::OutOfMemory, cause).of_one_check()
    }
}

impl LimitUsage {
    #[inline]
    pub(super) fn held(&self) -> usize {
        self.admissions.0.load(Ordering::Relaxed)
    }
}
