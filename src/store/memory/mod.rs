//! The in-process store.
//!
//! 1. It needs no runtime and no task, and decides at once, by a monotonic clock of its own. Its retry times are exact.
//! 2. It remembers at most [`capacity`](MemoryStore::capacity) admissions, and forgets none that is still in its
//!    window, since a client could then spend the same unit twice.
//! 3. A limit grows only while it holds less than is still free. So one limit stops at half of the capacity. Two that
//!    grow together stop at a third each.
//! 4. If the capacity is used up, expired admissions are swept first, under every limit. Then new admissions fail with
//!    an error under the limits that hold the most, and the failure mode decides. These limits still refuse. A key goes
//!    on working if its admissions expire as fast as new ones come.
//! 5. So a client with endless keys, such as the addresses of an IPv6 network, cannot stop the enforcement of another limit.
//!    But new keys of the same limit fail meanwhile. To avoid that, count such clients under a wider prefix as well, by a
//!    limit of its own.
//! 6. A settlement after its lease needs capacity as an admission does.
//! 7. Expired admissions are swept in passing, one shard at a time, in a cycle of one second as long as checks arrive.

mod capacity;
mod shard;
mod table;

use std::{fmt, future::ready, sync::Arc};

use self::{capacity::Capacity, table::Table};
use super::{Store, StoreFuture};
use crate::{
    check::{Charge, Check},
    clock::{Clock, ManualClock},
    decision::Decision,
    decision::settlement::{Settled, Settlement},
    error::StoreError,
    key::Key,
    limit::Limit,
};

/// A store for limits within one process. See the [crate docs](crate#stores).
///
/// Clones share what they remember.
///
/// # In tests
///
/// Unless it has a [clock](MemoryStore::clock) of its own, a store uses tokio's time. So a test that
/// [pauses](https://docs.rs/tokio/latest/tokio/time/fn.pause.html) it controls the windows:
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
/// Time is paused only on the thread of the test's runtime. A test with other threads uses a [`ManualClock`].
#[derive(Clone)]
pub struct MemoryStore(Arc<Table>);

impl MemoryStore {
    /// A store that remembers up to a million admissions, half of them under one limit: see
    /// [`capacity`](Self::capacity).
    #[must_use]
    pub fn new() -> Self {
        Self::with(Clock::monotonic(), 1_000_000)
    }

    fn with(clock: Clock, capacity: usize) -> Self {
        Self(Arc::new(Table::new(clock, Capacity::new(capacity))))
    }

    /// An empty store with the same clock and this capacity: the largest number of admissions to remember, about 16 bytes each, or
    /// 24 if they cost several units or are reserved or settled. Default: 1,000,000.
    ///
    /// A single limit gets half of it, rounded up, and each further limit half of the rest, so a new limit always finds
    /// capacity. A limit that has used up its part still refuses, but fails if it would admit, and the failure mode decides.
    /// Give the store at least twice the number of admissions that all limits together are expected to hold, and twice more
    /// for each limit that clients can fill.
    #[must_use]
    pub fn capacity(&self, admissions: usize) -> Self {
        Self::with(self.0.clock().clone(), admissions)
    }

    /// An empty store with the same capacity, and this clock instead of [tokio's](#in-tests): for tests.
    #[must_use]
    pub fn clock(&self, clock: &ManualClock) -> Self {
        Self::with(Clock::Manual(clock.clone()), self.0.capacity().admissions)
    }

    /// The number of remembered keys, including expired ones that are not swept yet.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.0.keys()
    }
}

impl Store for MemoryStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let table = Arc::clone(&self.0);
        Box::pin(async move { table.decide(&check) })
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        Some(self.0.decide(check))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        Box::pin(ready(self.0.settle(&settlement)))
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(&Charge::of_nothing(limit, key));
        Box::pin(ready(Ok(())))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let capacity = self.0.capacity();
        f.debug_struct("MemoryStore")
            .field("capacity", &capacity.admissions)
            .field("admissions", &capacity.taken())
            .field("limits", &capacity.limits())
            .finish_non_exhaustive()
    }
}
