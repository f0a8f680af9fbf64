//! The in-process store.
//!
//! 1. It obeys every rule of a decision but the shared clock: its own clock is monotonic.
//! 2. It remembers at most [`capacity`](MemoryStoreBuilder::capacity) admissions. When they are all still in their
//!    windows, it goes on refusing, but what would be admitted fails with an error, and the failure mode decides:
//!    forgetting an admission instead would let somebody spend the same unit twice.
//! 3. What has expired is swept in passing, one shard at a time, in a cycle of one second as long as checks arrive.
//! 4. It needs no runtime and no task.

mod shard;

use std::{
    error, fmt,
    future::{Future, Ready, ready},
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use self::shard::Shard;
use super::{
    Store,
    clock::{Clock, ManualClock, system_time},
};
use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
};

/// Many locks, so that threads seldom meet at one.
const SHARDS: usize = 64;

/// One shard is swept this often, in microseconds, so that all of them are within a second.
const SWEEP_INTERVAL: u64 = 1_000_000 / SHARDS as u64;

/// Limits shared within one process. See the [crate docs](crate#stores).
///
/// Clones share what they remember.
#[derive(Clone)]
pub struct MemoryStore(Arc<Shared>);

struct Shared {
    shards: Vec<Mutex<Shard>>,
    hasher: RandomState,
    clock: Clock,
    capacity: usize,
    /// Admissions remembered at the moment, counted by the shards.
    admissions: Arc<AtomicUsize>,
    /// When the next shard is to be swept.
    next_sweep: AtomicU64,
    /// Which one that is.
    sweeping: AtomicUsize,
}

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
        (0..SHARDS).map(|index| self.0.lock(index).keys()).sum()
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
        let admissions = Arc::new(AtomicUsize::new(0));
        MemoryStore(Arc::new(Shared {
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::new(Arc::clone(&admissions)))).collect(),
            hasher: RandomState::new(),
            clock: self.clock.map_or_else(Clock::monotonic, Clock::Manual),
            capacity: self.capacity,
            admissions,
            next_sweep: AtomicU64::new(0),
            sweeping: AtomicUsize::new(0),
        }))
    }
}

impl Store for MemoryStore {
    type Decide = MemoryDecide;
    type Reset = Ready<Result<(), StoreError>>;

    fn decide(&self, check: Check) -> MemoryDecide {
        MemoryDecide { store: self.clone(), check }
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        self.0.lock(self.0.index(&limit, &key)).remove(&limit, &key);
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

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(self.store.0.decide(&self.check))
    }
}

impl Shared {
    fn decide(&self, check: &Check) -> Result<Decision, StoreError> {
        let now = self.clock.now();
        self.sweep_in_passing(now);

        let mut locked = Locked::of(self, check);
        let refused = check.charges().any(|charge| locked.shard(charge).refuses(charge, check.id(), now));
        // A refusal needs no room, nor does a check that spends nothing.
        let needs_room = !refused && check.charges().any(|charge| charge.cost() > 0);
        if needs_room && self.admissions.load(Ordering::Relaxed) >= self.capacity {
            return Err(StoreError::new("deciding a check", Full { capacity: self.capacity }));
        }
        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        Ok(Decision::new(check, system_time(now), id, |charge| {
            let shard = locked.shard(charge);
            if refused { shard.refuse(charge, check.id(), now) } else { shard.admit(charge, check.id(), id, now) }
        }))
    }

    fn index(&self, limit: &Limit, key: &Key) -> usize {
        self.hasher.hash_one((limit.name(), key)) as usize % SHARDS
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, Shard> {
        // No code that can panic runs under the lock, and a shard is whole between any two of its operations.
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sweeps the next shard if it is time, and leaves it to somebody else if its lock is taken.
    fn sweep_in_passing(&self, now: u64) {
        let due = self.next_sweep.load(Ordering::Relaxed);
        let next = now.saturating_add(SWEEP_INTERVAL);
        // A due time far ahead is left over from a clock that has stepped back.
        let is_due = due <= now || due > next;
        if is_due && self.next_sweep.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let index = self.sweeping.fetch_add(1, Ordering::Relaxed) % SHARDS;
            if let Ok(mut shard) = self.shards[index].try_lock() {
                shard.sweep(now);
            }
        }
    }
}

/// The locks of all shards that a check needs, taken in the order of the shards, so that two checks never wait for
/// each other.
struct Locked<'a> {
    shared: &'a Shared,
    guards: Vec<(usize, MutexGuard<'a, Shard>)>,
}

impl<'a> Locked<'a> {
    fn of(shared: &'a Shared, check: &Check) -> Self {
        let mut indexes: Vec<usize> =
            check.charges().map(|charge| shared.index(charge.limit(), charge.key())).collect();
        indexes.sort_unstable();
        indexes.dedup();
        Self { shared, guards: indexes.into_iter().map(|index| (index, shared.lock(index))).collect() }
    }

    /// The shard of one of the check's charges.
    fn shard(&mut self, charge: &Charge) -> &mut Shard {
        let index = self.shared.index(charge.limit(), charge.key());
        let place = self.guards.partition_point(|(locked, _)| *locked < index);
        &mut self.guards[place].1
    }
}

/// Every admission that the store has room for is still in its window.
#[derive(Debug)]
struct Full {
    capacity: usize,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the in-process store is full: all of its {} admissions are still in their windows", self.capacity)
    }
}

impl error::Error for Full {}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("capacity", &self.0.capacity).finish_non_exhaustive()
    }
}
