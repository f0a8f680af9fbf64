//! What a limiter has to know to repeat a store's refusal without asking again.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::clock::Clock;

/// A time in which nothing is given back through a store and its clones: see [`Store::epoch`](super::Store::epoch).
///
/// A refusal holds for as long as nothing is given back. So a store that has an epoch [ends](Self::end) it whenever a key
/// is reset through it, and what was refused before is asked again. Clones of an epoch are one epoch, and clones of a
/// store have to have the same.
#[derive(Clone, Debug)]
pub struct Epoch {
    clock: Clock,
    number: Arc<AtomicU64>,
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
        Self { clock, number: Arc::default() }
    }

    /// Ends the epoch. A store calls it both before it sends a reset and when that is done, so that no refusal from in
    /// between is repeated.
    pub fn end(&self) {
        self.number.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn moment(&self) -> Moment {
        Moment { micros: self.clock.now(), epoch: self.number.load(Ordering::SeqCst) }
    }
}

impl Default for Epoch {
    fn default() -> Self {
        Self::new()
    }
}
