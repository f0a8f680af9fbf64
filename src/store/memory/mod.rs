//! The in-process store.
//!
//! 1. The store needs no runtime and no task. It decides at once, and never fails. If the system
//!    clock steps, the store's clock follows. Retry times are exact while there is room.
//! 2. A decision reads the clock only after it has taken its last lock. So threads that wait for a
//!    lock decide in time order, and together admit no more than one thread would.
//! 3. It remembers at most [`capacity`](MemoryStore::capacity) admissions one by one. It never
//!    evicts an admission that is still in its window, since a client could then spend the same
//!    unit twice.
//! 4. A limit takes more capacity only while it uses less than is still free. So one limit stops at
//!    half the capacity, and two limits that grow together stop at a third each. Other limits find
//!    room and stay exact.
//! 5. A limit without room still decides every check, and never admits more units than its
//!    algorithm allows. If a key already has admissions, further ones are added up per half window,
//!    so each counts for up to half a window too long. Keys without admissions share a count-min
//!    sketch of fixed size, whose counts may be too high, but never too low.
//! 6. An honest new key may be refused too early under a limit without room, if other keys have
//!    raised the counts in its cells.
//!    [`large_limits`](crate::guide::large_limits#a-full-memorystore) has the figures, and the
//!    tests in `stores/full_memory.rs` measure them.
//! 7. So a client with endless keys, such as the addresses in an IPv6 network, cannot make a limit
//!    admit too much. But it can make the limit refuse other clients. To prevent that, add a second
//!    limit that counts clients under a wider prefix.
//! 8. Without room, a reservation counts for the whole window. Its settlement cannot find it, and
//!    only adds the units spent above the estimate. A repeated check with the same id may count
//!    again. A [reset](crate::Limiter::reset) does not change the sketch's cells. Units leave the
//!    cells within one and a half windows.
//! 9. While checks arrive, they also sweep out expired admissions: one shard at a time, and all
//!    shards within a second. The first check after a pause catches up on the sweeps that are due,
//!    for at most about a millisecond.

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

/// An in-process store. See the [crate docs](crate#stores).
///
/// Clones share their state.
///
/// # When it is full
///
/// The store remembers up to [`capacity`](Self::capacity) admissions. A limit that has used up its
/// share still decides every check, so there is no error and no failure mode. It never admits too
/// many units, but it may refuse a key too early:
///
/// * New keys share counts. A flood of new keys can make the limit refuse all other new keys, for
///   up to one and a half windows. So a retry time can be longer than the window.
/// * A [settlement](crate::settlement) does not give back units that were counted without room: its
///   [`was_applied`](crate::settlement::Settled::was_applied) is `false`.
/// * A [reset](crate::Limiter::reset) does not change shared counts.
/// * A [ban](crate::KeyedLimit::ban) does not begin.
///
/// [`large_limits`](crate::guide::large_limits#a-full-memorystore) has the rules and measurements.
///
/// # Its clock
///
/// A store's clock starts at the system time, and advances with a monotonic clock. At most once a
/// second, a check compares it with the system clock. If they differ by more than a second, because
/// the system clock was set or the machine was suspended, the store's clock is set to the system
/// time. After a step back, no limit admits too much, and each key's counts are correct again
/// within one window. After a step forward, windows end too early by the length of the step. If a
/// Redis server's clock steps, the effects are the same.
///
/// # In tests
///
/// Unless a test sets a [clock](MemoryStore::clock), the store uses tokio's time. So a test that
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
/// Time is paused only on the thread that the test's runtime uses. A test with other threads uses a
/// [`ManualClock`].
#[derive(Clone)]
#[must_use]
pub struct MemoryStore(Arc<Table>);

impl MemoryStore {
    /// A store that remembers up to a million admissions, and at most half of them under one limit:
    /// see [`capacity`](Self::capacity).
    pub fn new() -> Self {
        Self::with(Clock::following(), DEFAULT_CAPACITY)
    }

    fn with(clock: Clock, capacity: usize) -> Self {
        Self(Arc::new(Table::new(Capacity::new(clock, capacity))))
    }

    /// Returns an empty store with the same clock and this capacity. The capacity is the most
    /// admissions that the store remembers, up to 2^32 − 1. Default: 1,000,000.
    ///
    /// A key and its first admission take 75 to 150 bytes, whatever the key's length. Each further
    /// admission takes 16 to 32 bytes, or 24 to 48 if any admission under the key costs several
    /// units, or is reserved or settled.
    ///
    /// A single limit gets half the capacity, rounded up, and each further limit gets half the
    /// rest. So a new limit always finds capacity. A limit that has used up its share still decides
    /// every check: its new keys [share counts](Self#when-it-is-full), and some or all of them are
    /// refused too early. All shared counts together take at most 24 bytes more per admission in
    /// the capacity.
    ///
    /// Set at least twice the number of admissions that you expect under all limits together.
    /// Double it again for each limit that clients can fill.
    ///
    /// A check takes microseconds, however many admissions its key has. Six exceptions take up to a
    /// millisecond with half a million admissions: a check with an [id](crate::Check::id) from the
    /// caller, refusing a large cost among admissions with different costs, a reservation whose
    /// lease ends in the middle of the window, settling an old admission, the first refusal after
    /// the clock steps back, and an admission that makes a long list, such as one with 100,000
    /// entries, grow and move in memory. After a pause, a check also sweeps other keys' expired
    /// admissions, for up to a millisecond.
    pub fn capacity(&self, admissions: usize) -> Self {
        Self::with(self.0.capacity.clock.clone(), admissions)
    }

    /// Returns an empty store with the same capacity, for tests. It uses this clock instead of
    /// [tokio's](#in-tests).
    pub fn clock(&self, clock: &ManualClock) -> Self {
        Self::with(Clock::Manual(clock.clone()), self.0.capacity.admissions)
    }

    /// The number of keys with their own records. Expired keys count until they are swept.
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
