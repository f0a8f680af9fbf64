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

/// Limits fall into so many parts, each with a local state of its own, so that those that are settled all the time leave the
/// refusals of others alone.
const PARTS: usize = 64;

/// What the clones of a store share in this process, so that all limiters and layers on them know the same of it: see
/// [`Store::local_state`](super::Store::local_state).
///
/// 1. Clones share one local state, and all clones of a store return the same one. A store that wraps another returns the
///    other's, if it passes limits and keys on as they are: then what one of the two has refused, both refuse.
/// 2. It knows whether the store answers: its [`Breaker`].
/// 3. It knows what the store has refused: its [`DenyCache`]. A refusal holds for as long as nothing is given back. So the
///    store [forgets the refusals](Self::forget_refusals) of a limit whenever a key is reset or an admission settled
///    through it, and asks again.
#[derive(Clone)]
pub struct LocalState(Arc<Shared>);

struct Shared {
    clock: Clock,
    numbers: [AtomicU64; PARTS],
    health: Arc<Health>,
    memory: Arc<Memory>,
}

impl LocalState {
    /// A local state by a monotonic clock of this process, which is tokio's: a test may pause it.
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

    /// Forgets all refusals of a limit, whatever the key. A store calls it twice: before it sends something that gives units
    /// back, and when that is done. So no refusal from in between is repeated.
    pub fn forget_refusals(&self, limit: &Limit) {
        self.0.numbers[part(limit)].fetch_add(1, Ordering::SeqCst);
    }

    /// Changes whenever the refusals of a limit are forgotten.
    pub(super) fn number(&self, limit: &Limit) -> u64 {
        self.0.numbers[part(limit)].load(Ordering::SeqCst)
    }

    /// The present time by the local state's clock, in microseconds.
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

impl Default for LocalState {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for LocalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalState")
            .field("health", &self.0.health)
            .field("memory", &self.0.memory)
            .finish_non_exhaustive()
    }
}
