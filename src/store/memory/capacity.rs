//! The store's capacity in admissions, and each limit's share.
//!
//! A limit gets more capacity only while it uses less than is free. So one greedy limit leaves half
//! the capacity to the others, and two leave a third. A later limit gets half the capacity that is
//! free when it begins.
//!
//! Places under concurrent limits do not take capacity. A place takes less memory than the request
//! that holds it, and it needs its own entry, so that it can be found and freed.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::cells::Cells;
use crate::{
    algorithm::Kind,
    clock::Clock,
    limit::{Identity, Limit},
    local::lock,
    window::Log,
};

/// The default capacity.
pub(super) const DEFAULT_CAPACITY: usize = 1_000_000;

/// The largest capacity: a record counts its admissions in 32 bits. This many admissions would take
/// 64 GiB.
const MOST_ADMISSIONS: usize = u32::MAX as usize;

/// The number of cells per admission in the capacity, which all limits share. Two cells take 24
/// bytes.
const CELLS: usize = 2;

pub(super) struct Capacity {
    pub(super) admissions: usize,
    /// The store's clock. Each limit's cells have their own lock. The clock is read after that lock
    /// has been taken.
    pub(super) clock: Clock,
    taken: CacheLines<AtomicUsize>,
    /// The cells left for further limits. A limit that needs cells gets half of them.
    cells: AtomicUsize,
    /// Names may come from a database, so limits without records or cells are forgotten.
    limits: Mutex<HashMap<Identity, Arc<LimitUsage>>>,
}

/// The capacity and cells that one limit uses.
pub(super) struct LimitUsage {
    pub(super) identity: Identity,
    cells: Mutex<Option<Cells>>,
    admissions: CacheLines<AtomicUsize>,
}

/// A value in its own cache lines, to avoid false sharing: threads write it often.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct CacheLines<T>(pub(super) T);

impl Capacity {
    pub(super) fn new(clock: Clock, admissions: usize) -> Self {
        let admissions = admissions.min(MOST_ADMISSIONS);
        Self {
            admissions,
            clock,
            taken: CacheLines::default(),
            cells: AtomicUsize::new(admissions.saturating_mul(CELLS)),
            limits: Mutex::default(),
        }
    }

    pub(super) fn taken(&self) -> usize {
        self.taken.0.load(Ordering::Relaxed)
    }

    /// The number of limits with records or cells.
    pub(super) fn limits(&self) -> usize {
        let limits = lock(&self.limits);
        limits.values().filter(|usage| is_in_use(usage)).count()
    }

    /// Returns a limit's usage, which all its records share, or makes it.
    pub(super) fn usage(&self, limit: &Limit) -> Arc<LimitUsage> {
        let mut limits = lock(&self.limits);
        if let Some(usage) = limits.get(&limit.identity) {
            return Arc::clone(usage);
        }
        let usage = Arc::new(LimitUsage {
            identity: limit.identity.clone(),
            cells: Mutex::default(),
            admissions: CacheLines::default(),
        });
        limits.insert(limit.identity.clone(), Arc::clone(&usage));
        usage
    }

    pub(super) fn forget_unused(&self) {
        let mut limits = lock(&self.limits);
        limits.retain(|_, usage| {
            if let Some(over) = lock(&usage.cells).take_if(|cells| cells.are_over(self.clock.now()))
            {
                // Each limit has one extra cell, which was not taken from `self.cells`.
                self.cells.fetch_add(over.len - 1, Ordering::Relaxed);
            }
            is_in_use(usage)
        });
        if limits.capacity() / 4 > limits.len() {
            limits.shrink_to_fit();
        }
    }

    /// True if there is room for this many further admissions under a limit.
    #[inline]
    pub(super) fn has_room(&self, usage: &LimitUsage, further: usize) -> bool {
        let own = usage.admissions.0.load(Ordering::Relaxed);
        usage.is_of_places()
            || own + further <= self.admissions.saturating_sub(self.taken() + further - 1)
    }

    /// Changes the capacity taken for a limit from `before` admissions to `admissions`.
    ///
    /// If the two numbers are equal, nothing is written, so that threads do not contend for a cache
    /// line.
    #[inline]
    pub(super) fn change(&self, usage: &LimitUsage, before: u32, admissions: u32) {
        if before == admissions || usage.is_of_places() {
            return;
        }
        // A negative change has wrapped around. Adding it makes the counter wrap around as well,
        // which lowers it.
        let change = (admissions as usize).wrapping_sub(before as usize);
        usage.admissions.0.fetch_add(change, Ordering::Relaxed);
        self.taken.0.fetch_add(change, Ordering::Relaxed);
    }

    /// Counts a key's units in its limit's cells, because there is no room for a record.
    #[cold]
    pub(super) fn count_in_cells(&self, usage: &LimitUsage, digest: u64, units: u64) {
        let mut cells = lock(&usage.cells);
        let now = self.clock.now();
        let cells = cells.get_or_insert_with(|| {
            let relaxed = Ordering::Relaxed;
            let left = self
                .cells
                .fetch_update(relaxed, relaxed, |free| Some(free / 2));
            let free = left.unwrap_or_default();
            Cells::new(usage.identity.window_micros, free.div_ceil(2))
        });
        cells.add(digest, now, units);
    }

    /// Returns the log for a key's new record. It is empty, or has the units that cells have
    /// counted.
    pub(super) fn log_of(&self, usage: &LimitUsage, limit: &Limit, digest: u64) -> Log {
        let mut cells = lock(&usage.cells);
        let Some(cells) = &mut *cells else {
            return Log::default();
        };
        let now = self.clock.now();
        Log::of_sums(limit, cells.of_key(digest, now), now)
    }
}

impl LimitUsage {
    fn is_of_places(&self) -> bool {
        self.identity.algorithm.kind == Kind::Concurrent
    }

    /// True if cells have recently counted keys under this limit.
    pub(super) fn has_cells(&self) -> bool {
        lock(&self.cells).is_some()
    }
}

/// True if a limit has records or cells.
fn is_in_use(usage: &Arc<LimitUsage>) -> bool {
    Arc::strong_count(usage) > 1 || usage.has_cells()
}
