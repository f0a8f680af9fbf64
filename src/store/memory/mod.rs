//! The in-process store.
//!
//! 1. It obeys every rule of a decision but the shared clock: its own clock is monotonic.
//! 2. It remembers at most [`capacity`](MemoryStoreBuilder::capacity) admissions. When they are all still in their
//!    windows, it goes on refusing, but what would be admitted fails with an error, and the failure mode decides:
//!    forgetting an admission instead would let somebody spend the same unit twice.
//! 3. What has expired is swept in passing, one shard at a time, in a cycle of one second as long as checks arrive.
//! 4. It needs no runtime and no task, and decides at once.

mod address;
mod room;
mod shard;
mod shared;
mod slot;

use std::{
    fmt,
    future::{Future, Ready, ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use self::{room::Room, shared::Shared};
use super::{
    Store,
    clock::{Clock, ManualClock},
};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
};

/// Limits shared within one process. See the [crate docs](crate#stores).
///
/// Clones share what they remember.
#[derive(Clone)]
pub struct MemoryStore(Arc<Shared>);

/// How to build a [`MemoryStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct MemoryStoreBuilder {
    capacity: usize,
    clock: Option<ManualClock>,
}

impl MemoryStore {
    /// A store that remembers up to a million admissions: see [`capacity`](MemoryStoreBuilder::capacity).
    #[must_use]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// A store with settings of its own.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder { capacity: 1_000_000, clock: None }
    }

    /// The number of keys that are remembered, expired ones included until they are swept.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.0.keys()
    }
}

impl MemoryStoreBuilder {
    /// How many admissions to remember at most, about 24 bytes each. Default: 1,000,000.
    ///
    /// A full store still refuses, but fails where it would admit, and the failure mode decides. It is full when so many
    /// units, or keys, are in their windows at once: give it room for the limits times the keys that you expect.
    pub fn capacity(mut self, admissions: usize) -> Self {
        self.capacity = admissions;
        self
    }

    /// Decides by this clock instead of the system's: for tests.
    pub fn clock(mut self, clock: &ManualClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// The store.
    #[must_use]
    pub fn build(self) -> MemoryStore {
        let clock = self.clock.map_or_else(Clock::monotonic, Clock::Manual);
        MemoryStore(Arc::new(Shared::new(clock, Room::new(self.capacity))))
    }
}

impl Store for MemoryStore {
    type Decide = MemoryDecide;
    type Settle = Ready<Result<Settled, StoreError>>;
    type Reset = Ready<Result<(), StoreError>>;

    fn decide(&self, check: Check) -> MemoryDecide {
        MemoryDecide { store: self.clone(), check }
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        Some(self.0.decide(check))
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        ready(Ok(self.0.settle(&settlement)))
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        self.0.reset(&limit, &key);
        ready(Ok(()))
    }
}

/// The future of a [`MemoryStore`]'s decision: it decides when it is first polled, and is then ready.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct MemoryDecide {
    store: MemoryStore,
    check: Check,
}

impl Future for MemoryDecide {
    type Output = Result<Decision, StoreError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(self.store.0.decide(&self.check))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("capacity", &self.0.capacity()).finish_non_exhaustive()
    }
}
