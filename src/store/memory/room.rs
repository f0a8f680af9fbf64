//! How many admissions a store may remember, and how many it does.

use std::{
    error, fmt,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::error::StoreError;

// On cache lines of its own: while a store fills up, every thread writes here, and all else that threads share is read.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Room {
    capacity: usize,
    taken: AtomicUsize,
}

/// Every admission that the store has room for is still in its window.
#[derive(Debug)]
pub(super) struct Full {
    capacity: usize,
}

impl Room {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, taken: AtomicUsize::new(0) }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Gives back the room of admissions that are gone, and takes that of new ones; if it is full, only gives back.
    ///
    /// Where as many come as go, nothing is written, so that threads do not meet here.
    pub(super) fn exchange(&self, gone: usize, new: usize) -> Result<(), Full> {
        if new <= gone {
            self.give_back(gone - new);
            return Ok(());
        }
        if self.taken.load(Ordering::Relaxed) + (new - gone) > self.capacity {
            self.give_back(gone);
            return Err(Full { capacity: self.capacity });
        }
        self.taken.fetch_add(new - gone, Ordering::Relaxed);
        Ok(())
    }

    /// Takes room for what has to be counted.
    pub(super) fn take(&self, new: usize) {
        if new > 0 {
            self.taken.fetch_add(new, Ordering::Relaxed);
        }
    }

    /// Gives back the room of admissions that are gone.
    pub(super) fn give_back(&self, gone: usize) {
        if gone > 0 {
            self.taken.fetch_sub(gone, Ordering::Relaxed);
        }
    }
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the in-process store is full: all of its {} admissions are still in their windows", self.capacity)
    }
}

impl error::Error for Full {}

impl From<Full> for StoreError {
    fn from(full: Full) -> Self {
        // What would be refused still is, and goes on being so.
        Self::new("deciding a check", full).of_one_check()
    }
}
