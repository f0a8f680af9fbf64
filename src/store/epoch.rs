//! What a limiter has to know to repeat a store's refusal without asking again.

use std::{
    array,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::clock::Clock;
use crate::{check::Check, limit::Limit};

/// Limits fall into so many parts, each with an epoch of its own, so that those that are settled all the time leave the
/// refusals of others alone.
const PARTS: usize = 64;

/// A time in which nothing is given back through a store and its clones: see [`Store::epoch`](super::Store::epoch).
///
/// A refusal holds for as long as nothing is given back. So a store that has an epoch [ends](Self::end) it for a limit
/// whenever a key is reset or an admission settled through it, and what the limit has refused before is asked again.
/// Clones of an epoch are one epoch, and clones of a store have to have the same.
#[derive(Clone, Debug)]
pub struct Epoch {
    clock: Clock,
    numbers: Arc<[AtomicU64; PARTS]>,
}

/// A moment: by the epoch's clock, and in which epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) micros: u64,
    pub(crate) epoch: u64,
}

impl Epoch {
    /// An epoch by a monotonic clock of this process.
    #[must_use]
    pub fn new() -> Self {
        Self::by(Clock::monotonic())
    }

    pub(super) fn by(clock: Clock) -> Self {
        Self { clock, numbers: Arc::new(array::from_fn(|_| AtomicU64::new(0))) }
    }

    /// Ends the epoch for a limit, whatever the key. A store calls it both before it sends what gives units back and when
    /// that is done, so that no refusal from in between is repeated.
    pub fn end(&self, limit: &Limit) {
        self.numbers[part(limit)].fetch_add(1, Ordering::SeqCst);
    }

    /// The present moment, for a check.
    pub(crate) fn moment(&self, check: &Check) -> Moment {
        // None of the numbers ever falls, so their sum is the same only if each of them is.
        let epoch = check.charges().map(|charge| self.numbers[part(charge.limit())].load(Ordering::SeqCst)).sum();
        Moment { micros: self.clock.now(), epoch }
    }

    /// The present time by the epoch's clock.
    pub(crate) fn micros(&self) -> u64 {
        self.clock.now()
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
