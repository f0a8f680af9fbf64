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

    /// Whether there is room for so many more, whichever limits they are of.
    pub(super) fn is_ample(&self, new: usize) -> bool {
        // No limit holds more than all of them do.
        self.taken().saturating_add(new) <= self.capacity / 2
    }

    /// Gives back the room of admissions that are gone, and takes that of new ones, of which it is known that there is
    /// enough.
    ///
    /// Where as many come as go, nothing is written, so that threads do not meet here.
    pub(super) fn change(&self, holding: &Holding, gone: usize, new: usize) {
        if new <= gone {
            return self.give_back(holding, gone - new);
        }
        holding.add(new - gone);
        self.taken.0.fetch_add(new - gone, Ordering::Relaxed);
    }

    /// The same where there may be none. Then it only gives back.
    #[inline]
    pub(super) fn exchange(&self, holding: &Holding, gone: usize, new: usize) -> Result<(), Full> {
        if new > gone && !self.has_room(holding, new - gone) {
            self.give_back(holding, gone);
            return Err(Full { limit: holding.name().clone(), held: holding.admissions(), capacity: self.capacity });
        }
        self.change(holding, gone, new);
        Ok(())
    }

    /// As if they came one after the other: the last of them, too, finds more free than the limit holds.
    fn has_room(&self, holding: &Holding, more: usize) -> bool {
        let (held, taken) = (holding.admissions() + more - 1, self.taken() + more - 1);
        held < self.capacity.saturating_sub(taken)
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
