//! The in-process store.
//!
//! 1. It obeys every rule of a decision but the shared clock: its own clock is monotonic, and tokio's. Its retry times are exact, however
//!    much a key remembers.
//! 2. It remembers at most [`capacity`](MemoryStoreBuilder::capacity) admissions, and forgets none that is still in its
//!    window: that would let somebody spend the same unit twice.
//! 3. A limit gets more room only as long as it holds less than is free. So a limit can take half of what those before it
//!    have left, and always leaves as much to others. Two that fill at once take a third each. Limits are told apart by their
//!    names.
//! 4. Where room is short, expired admissions are swept first, under every limit. Then the limits that hold the most get no
//!    more: their admissions fail with an error, and the failure mode of the layer decides. They still refuse, and a key whose
//!    admissions leave as fast as new ones come goes on.
//! 5. So a client with endless keys, such as the addresses of an IPv6 network, cannot keep another limit from being
//!    enforced. But new keys of the same limit fail while it is without room. Count such keys under a wider prefix, too, by
//!    a limit of another name.
//! 6. A settlement after its lease needs room as an admission does, and fails where there is none.
//! 7. Expired admissions are swept in passing, one shard at a time, in a cycle of one second as long as checks arrive.
//! 8. It needs no runtime and no task, and decides at once.

mod address;
mod holding;
mod room;
mod shard;
mod shared;
mod slot;
mod sweeps;

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
///
/// # In tests
///
/// Unless it has a [clock](MemoryStoreBuilder::clock) of its own, a store goes by tokio's time. So a test that
/// [pauses](https://docs.rs/tokio/latest/tokio/time/fn.pause.html) it has the windows in its hands:
///
/// ```
/// # /*
/// #[tokio::test(start_paused = true)] // with tokio's feature `test-util`
/// async fn a_minute_later_there_is_room() {
/// # */
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
///     use std::time::Duration;
///     use tower_sliding_window::{Limit, Limiter, MemoryStore};
///
///     let (limiter, once) = (Limiter::new(MemoryStore::new()), Limit::per_minute("once", 1));
///     assert!(limiter.check(&once, "ada", 1).await.is_ok_and(|first| first.is_allowed()));
///     assert!(limiter.check(&once, "ada", 1).await.is_ok_and(|second| !second.is_allowed()));
///     tokio::time::advance(Duration::from_secs(60)).await;
///     assert!(limiter.check(&once, "ada", 1).await.is_ok_and(|third| third.is_allowed()));
/// }
/// ```
///
/// For a thread outside of the test's runtime, time is not paused. A test that has such threads uses a
/// [`ManualClock`].
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
    /// A store that remembers up to a million admissions, half of them under one limit: see
    /// [`capacity`](MemoryStoreBuilder::capacity).
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
    /// A limit that is alone gets half of it, rounded up, and each further limit half of what is left then: so there is always
    /// room for another limit. A limit without room still refuses, but fails where it would admit, and the failure mode
    /// decides. It is without room when so many of its units, or keys, are in their windows at once. Give the store at least
    /// twice what all limits together are expected to hold, and twice more for each limit that clients can fill.
    pub fn capacity(mut self, admissions: usize) -> Self {
        self.capacity = admissions;
        self
    }

    /// Decides by this clock instead of [tokio's](MemoryStore#in-tests): for tests.
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
        ready(self.0.settle(&settlement))
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
        let room = self.0.room();
        f.debug_struct("MemoryStore")
            .field("capacity", &room.capacity())
            .field("admissions", &room.taken())
            .field("limits", &room.limits())
            .finish_non_exhaustive()
    }
}
