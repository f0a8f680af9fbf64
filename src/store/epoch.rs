//! What the clones of a store share in this process.

use std::{
    array, fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    breaker::Breaker,
    clock::Clock,
    deny_cache::{DenyCache, Memory},
    health::Health,
};
use crate::limit::Limit;

/// Limits fall into so many parts, each with an epoch of its own, so that those that are settled all the time leave the
/// refusals of others alone.
const PARTS: usize = 64;

/// What the clones of a store share in this process, so that all limiters and layers on them know the same of it: see
/// [`Store::epoch`](super::Store::epoch).
///
/// 1. Clones of an epoch are one epoch, and clones of a store have to have the same. A store that wraps another hands on
///    the other's, if it hands on limits and keys as they are: what one of them has refused is refused by all.
/// 2. Whether the store answers: its [`Breaker`].
/// 3. What it has refused: its [`DenyCache`]. A refusal holds for as long as nothing is given back. So the store
///    [ends](Self::end) the epoch for a limit whenever a key is reset or an admission settled through it, and what the
///    limit has refused before is asked again.
#[derive(Clone)]
pub struct Epoch(Arc<Shared>);

struct Shared {
    clock: Clock,
    numbers: [AtomicU64; PARTS],
    health: Arc<Health>,
    memory: Arc<Memory>,
}

impl Epoch {
    /// An epoch by a monotonic clock of this process, which is tokio's: a test may pause it.
    #[must_use]
    pub fn new() -> Self {
        Self::by(Clock::monotonic())
    }

    pub(super) fn by(clock: Clock) -> Self {
        Self(Arc::new(Shared {
            clock,
            numbers: array::from_fn(|_| AtomicU64::new(0)),
            health: Arc::new(Health::new(Breaker::new())),
            memory: Arc::new(Memory::new(DenyCache::new())),
        }))
    }

    /// Ends the epoch for a limit, whatever the key. A store calls it both before it sends what gives units back and when
    /// that is done, so that no refusal from in between is repeated.
    pub fn end(&self, limit: &Limit) {
        self.0.numbers[part(limit)].fetch_add(1, Ordering::SeqCst);
    }

    /// The number of the present epoch of a limit.
    pub(super) fn number(&self, limit: &Limit) -> u64 {
        self.0.numbers[part(limit)].load(Ordering::SeqCst)
    }

    /// The present time by the epoch's clock, in microseconds.
    pub(super) fn now(&self) -> u64 {
        self.0.clock.now()
    }

    pub(super) fn health(&self) -> &Arc<Health> {
        &self.0.health
    }

    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.0.memory
    }
}

/// FNV-1a over the name.
fn part(limit: &Limit) -> usize {
    let hash = limit
        .name()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (hash >> 32) as usize % PARTS
}

impl Default for Epoch {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch").field("health", &self.0.health).field("memory", &self.0.memory).finish_non_exhaustive()
    }
}
