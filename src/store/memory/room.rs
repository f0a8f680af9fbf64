//! How many admissions a store may remember, how many it does, and how limits share that.
//!
//! A limit gets more room only as long as it holds less than is free. So one that takes all it can get leaves half of the
//! room to others, two leave a third, and any other limit finds as much room as each of them has.

use std::{
    borrow::Cow,
    error, fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::holding::{AllHoldings, Holding};
use crate::{error::StoreError, limit::Limit};

#[derive(Debug)]
pub(super) struct Room {
    capacity: usize,
    taken: Taken,
    holdings: AllHoldings,
}

// On cache lines of its own: while a store fills up, every thread writes here, and all else that threads share is read.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Taken(AtomicUsize);

/// A limit holds as much as is free, all of it still in its window.
#[derive(Debug)]
pub(super) struct Full {
    limit: Cow<'static, str>,
    held: usize,
    capacity: usize,
}

impl Room {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, taken: Taken::default(), holdings: AllHoldings::default() }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn taken(&self) -> usize {
        self.taken.0.load(Ordering::Relaxed)
    }

    /// How many limits hold anything, but for those that have been left in the last second.
    pub(super) fn limits(&self) -> usize {
        self.holdings.len()
    }

    /// The holding of a limit, for a shard that does not know it.
    pub(super) fn holding(&self, limit: &Limit) -> Arc<Holding> {
        self.holdings.of(limit)
    }

    pub(super) fn forget_empty_holdings(&self) {
        self.holdings.forget_empty();
    }

    /// Gives back the room of admissions that are gone, and takes that of new ones; if there is none, only gives back.
    ///
    /// Where as many come as go, nothing is written, so that threads do not meet here.
    pub(super) fn exchange(&self, holding: &Holding, gone: usize, new: usize) -> Result<(), Full> {
        if new <= gone {
            self.give_back(holding, gone - new);
            return Ok(());
        }
        let more = new - gone;
        // As if they came one after the other: the last of them, too, finds more free than the limit holds.
        let (held, taken) = (holding.admissions() + more - 1, self.taken() + more - 1);
        if held >= self.capacity.saturating_sub(taken) {
            self.give_back(holding, gone);
            return Err(Full { limit: holding.name().clone(), held: holding.admissions(), capacity: self.capacity });
        }
        holding.add(more);
        self.taken.0.fetch_add(more, Ordering::Relaxed);
        Ok(())
    }

    /// Gives back the room of admissions that are gone.
    pub(super) fn give_back(&self, holding: &Holding, gone: usize) {
        if gone > 0 {
            holding.subtract(gone);
            self.taken.0.fetch_sub(gone, Ordering::Relaxed);
        }
    }
}

impl Full {
    pub(super) fn when(self, doing: &'static str) -> StoreError {
        // What would be refused still is, and other limits have room.
        StoreError::new(doing, self).of_one_check()
    }
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, held, capacity } = self;
        write!(
            f,
            "the in-process store has no room for more under the limit {limit:?}: {held} of its {capacity} admissions \
             are of this limit, all still in their windows, and no more are free"
        )
    }
}

impl error::Error for Full {}
