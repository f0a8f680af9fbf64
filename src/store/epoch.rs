//! What a limiter has to know to repeat a store's refusal without asking again.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::clock::Clock;

/// A time in which this process gave nothing back to a store: see [`Store::epoch`](super::Store::epoch).
///
/// A refusal holds for as long as nothing is given back. So a store that has an epoch [ends](Self::end) it whenever
/// something is given back through it, and what was refused before is asked again. Clones are one epoch.
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

    /// Ends the epoch, since a key is reset, units are refunded, or the like: to be called both before this is sent to
    /// where it is remembered, and after, so that no refusal from in between is repeated.
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
