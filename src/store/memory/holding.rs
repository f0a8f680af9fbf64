//! What each limit holds of a store's room.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::limit::Limit;

/// The admissions under one limit's name. It lives for as long as a slot of the limit does.
#[derive(Debug)]
pub(super) struct Holding {
    name: Cow<'static, str>,
    admissions: Admissions,
}

// On cache lines of its own: the name is read for every check.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Admissions(AtomicUsize);

/// The holdings of the limits of which something is remembered. Their names may come from a database, so one that holds
/// nothing any more is forgotten.
#[derive(Debug, Default)]
pub(super) struct Holdings(HashMap<Cow<'static, str>, Weak<Holding>>);

impl Holding {
    fn new(limit: &Limit) -> Arc<Self> {
        Arc::new(Self { name: limit.shared_name(), admissions: Admissions::default() })
    }

    #[inline]
    pub(super) fn is_of(&self, limit: &Limit) -> bool {
        self.name == limit.name()
    }

    pub(super) fn name(&self) -> &Cow<'static, str> {
        &self.name
    }

    pub(super) fn admissions(&self) -> usize {
        self.admissions.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, new: usize) {
        self.admissions.0.fetch_add(new, Ordering::Relaxed);
    }

    pub(super) fn subtract(&self, gone: usize) {
        self.admissions.0.fetch_sub(gone, Ordering::Relaxed);
    }
}

impl Holdings {
    /// The holding of a limit, which is `made` where there is none.
    pub(super) fn of(&mut self, limit: &Limit, made: impl FnOnce() -> Arc<Holding>) -> Arc<Holding> {
        if let Some(holding) = self.0.get(limit.name()).and_then(Weak::upgrade) {
            return holding;
        }
        let holding = made();
        self.0.insert(limit.shared_name(), Arc::downgrade(&holding));
        holding
    }

    pub(super) fn forget_empty(&mut self) {
        self.0.retain(|_, holding| holding.strong_count() > 0);
        if self.0.capacity() / 4 > self.0.len() {
            self.0.shrink_to_fit();
        }
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// The holdings of all limits, for shards that do not know one yet.
#[derive(Debug, Default)]
pub(super) struct AllHoldings(Mutex<Holdings>);

impl AllHoldings {
    pub(super) fn of(&self, limit: &Limit) -> Arc<Holding> {
        self.with(|holdings| holdings.of(limit, || Holding::new(limit)))
    }

    pub(super) fn forget_empty(&self) {
        self.with(Holdings::forget_empty);
    }

    pub(super) fn len(&self) -> usize {
        self.with(|holdings| holdings.len())
    }

    fn with<T>(&self, take: impl FnOnce(&mut Holdings) -> T) -> T {
        take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
