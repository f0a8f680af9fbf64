//! The in-process store.
//!
//! 1. The store needs no runtime and no task. It decides at once, and never fails. Its clock
//!    follows steps of the system clock. Its retry times are exact while there is room.
//! 2. A decision reads the clock under its last lock. So threads that wait for a lock decide in
//!    the order of their times, and admit no more than one thread would.
//! 3. It remembers at most [`capacity`](MemoryStore::capacity) admissions one by one. It never
//!    forgets an admission that is still in its window, since a client could then spend the same
//!    unit twice.
//! 4. A limit takes more capacity only while it has less capacity than is still free. So one limit
//!    stops at half of the capacity, and two limits that grow together stop at a third each. The
//!    other limits find room and stay exact.
//! 5. A limit without room still decides the checks of every key, and admits no more units of a key
//!    than the algorithm of the limit allows. If a key has admissions already, its further
//!    admissions are added up by half windows. So each further admission counts too long, by less
//!    than half a window. Keys without admissions are counted together, in a fixed number of cells.
//!    Their counts may be too high, but never too low.
//! 6. An honest new key of a limit without room may be refused too early, if other keys have raised
//!    the counts of its cells. [`large_limits`](crate::guide::large_limits#a-full-memorystore) has
//!    the figures, and the tests in `stores/full_memory.rs` measure them.
//! 7. So a client with endless keys, such as the addresses of an IPv6 network, cannot make a limit
//!    admit too much. But such a client can make the limit refuse other clients. To prevent these
//!    refusals, count clients under a wider prefix as well, by another limit.
//! 8. Without room, a reservation counts for the whole window, and its settlement does not find it.
//!    The settlement only adds the units that were spent above the estimate. A check that comes
//!    again under the same id may count again. A [reset](crate::Limiter::reset) leaves cells as
//!    they are. The units of cells leave within one and a half windows.
//! 9. While checks arrive, they sweep expired admissions in passing: one shard at a time, and all
//!    shards within a second. The first check after a pause makes up for the sweeps that are due,
//!    but takes no longer than about a millisecond for them.

mod capacity;
mod cells;
mod shard;
mod table;

use std::{fmt, future::ready, sync::Arc};

use self::{
    capacity::{Capacity, DEFAULT_CAPACITY},
    table::Table,
};
use super::{Store, StoreFuture};
use crate::{
    check::{Charge, Check},
    clock::{Clock, ManualClock},
    decision::{Decision, Settled, Settlement},
    error::StoreError,
    key::Key,
    limit::Limit,
};

/// A store for limits within one process. See the [crate docs](crate#stores).
///
/// Clones share what they remember.
///
/// # When it is full
///
/// The store remembers up to its [`capacity`](Self::capacity) of admissions. A limit that has used
/// up its share of the capacity still decides every check, so there is no error and no failure
/// mode. The limit never admits too many units of a key, but it may refuse a key too early:
///
/// * New keys of this limit share counts. A flood of new keys can make the limit refuse all other
///   new keys, for up to one and a half windows. So a retry time can be longer than the window.
/// * A [settlement](crate::settlement) gives back no units that were counted without room: its
///   [`was_applied`](crate::settlement::Settled::was_applied) is `false`.
/// * A [reset](crate::Limiter::reset) does not change shared counts.
/// * A [ban](crate::KeyedLimit::ban) does not begin.
///
/// [`large_limits`](crate::guide::large_limits#a-full-memorystore) has the rules and measurements.
///
/// # Its clock
///
/// The clock of a store begins with the system time, and goes on by a monotonic clock. At most once
/// a second, a check compares the store's clock with the system clock. If the two clocks differ by
/// more than a second, because the system clock was set or the machine was suspended, the store's
/// clock follows. After a step back, no limit admits too much, and each key is right again after at
/// most one window. After a step forward, windows end too early by the length of the step. A step
/// of a Redis server's clock has the same effects.
///
/// # In tests
///
/// Unless it has a [clock](MemoryStore::clock) of its own, a store uses tokio's time. So a test
/// that [pauses](https://docs.rs/tokio/latest/tokio/time/fn.pause.html) tokio's time controls the
/// windows:
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
/// Time is paused only on the thread of the test's runtime. A test with other threads uses a
/// [`ManualClock`].
#[derive(Clone)]
#[must_use]
pub struct MemoryStore(Arc<Table>);

impl MemoryStore {
    /// A store that remembers up to a million admissions, and at most half of them under a single
    /// limit: see [`capacity`](Self::capacity).
    pub fn new() -> Self {
        Self::with(Clock::following(), DEFAULT_CAPACITY)
    }

    fn with(clock: Clock, capacity: usize) -> Self {
        Self(Arc::new(Table::new(Capacity::new(clock, capacity))))
    }

    /// An empty store with the same clock and this capacity. The capacity is the largest number of
    /// admissions that the store remembers, at most 2^32 − 1. Default: 1,000,000.
    ///
    /// A key takes 75 to 150 bytes, whatever its length, and its first admission is included. Each
    /// further admission takes 16 to 32 bytes. It takes 24 to 48 bytes if an admission of the key
    /// costs several units, or is reserved or settled.
    ///
    /// A single limit gets half of the capacity, rounded up, and each further limit gets half of
    /// the rest. So a new limit always finds capacity. A limit that has used up its share still
    /// decides: its new keys [share counts](Self#when-it-is-full), and some or all of these keys
    /// are refused too early. The shared counts of all limits together take at most 24 bytes more
    /// for each admission of the capacity.
    ///
    /// Give the store at least twice as much capacity as the number of admissions that all limits
    /// together are expected to have. Double the capacity again for each limit that clients can
    /// fill.
    ///
    /// A check takes microseconds, however many admissions of its key are remembered. There are six
    /// exceptions, which take up to a millisecond if the key has half a million admissions: a check
    /// with an [id](crate::Check::id) of the caller's, the refusal of a large cost where admissions
    /// have different costs, a reservation whose lease ends in the middle of the window, the
    /// settlement of an old admission, the first refusal after a step back of the clock, and an
    /// admission for which the list of the key is moved, as one of 100,000 is.
    /// After a pause, a check also sweeps expired admissions of other keys, for up to a
    /// millisecond.
    pub fn capacity(&self, admissions: usize) -> Self {
        Self::with(self.0.capacity.clock.clone(), admissions)
    }

    /// An empty store with the same capacity, and this clock instead of [tokio's](#in-tests): for
    /// tests.
    pub fn clock(&self, clock: &ManualClock) -> Self {
        Self::with(Clock::Manual(clock.clone()), self.0.capacity.admissions)
    }

    /// The number of keys that are remembered one by one. Expired keys count until they are swept.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.0.keys()
    }
}

impl Store for MemoryStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let table = Arc::clone(&self.0);
        Box::pin(async move { Ok(table.decide(&check)) })
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        Some(Ok(self.0.decide(check)))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        Box::pin(ready(Ok(self.0.settle(&settlement))))
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        if !limit.is_concurrent() {
            self.0.reset(&Charge::fitting(limit, key, 0));
        }
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
        let capacity = &self.0.capacity;
        f.debug_struct("MemoryStore")
            .field("capacity", &capacity.admissions)
            .field("admissions", &capacity.taken())
            .field("limits", &capacity.limits())
            .finish_non_exhaustive()
    }
}
