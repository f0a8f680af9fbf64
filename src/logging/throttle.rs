//! At most one event a second.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// The time between two events that pass, in microseconds.
const INTERVAL: u64 = 1_000_000;

/// Lets one event a second pass and counts the others.
#[derive(Debug)]
pub(crate) struct Throttle {
    started: Instant,
    /// Microseconds after the start from which on the next event passes.
    next: AtomicU64,
    suppressed: AtomicU64,
}

impl Throttle {
    /// How many events were held back since the last that passed, if this one passes.
    pub(crate) fn pass(&self) -> Option<u64> {
        let now = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let next = self.next.load(Ordering::Relaxed);
        let passes = next <= now
            && self.next.compare_exchange(next, now + INTERVAL, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if passes {
            return Some(self.suppressed.swap(0, Ordering::Relaxed));
        }
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }
}

impl Default for Throttle {
    fn default() -> Self {
        Self { started: Instant::now(), next: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_event_passes_and_what_follows_at_once_is_counted() {
        let throttle = Throttle::default();
        assert_eq!(throttle.pass(), Some(0));
        assert_eq!((throttle.pass(), throttle.pass()), (None, None));
        throttle.next.store(0, Ordering::Relaxed);
        assert_eq!(throttle.pass(), Some(2));
    }
}
