//! The counter: the units of the clock's current window and of the window before.
//!
//! The units of the previous window count in proportion to the overlap of that window with the
//! sliding window. The estimate is made in double precision, as in Lua, so that every store gets
//! the same result.

use super::{entry::UnitsOf, log::Log};

/// The most units that one of the clock's windows counts. Doubles are not exact beyond this number.
const LARGEST: u64 = 1 << 53;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counter {
    /// When the clock's current window began.
    start: u64,
    current: u64,
    previous: u64,
}

impl Counter {
    /// Drops units that have left the window.
    pub(super) fn trim(&mut self, now: u64, window: u64) {
        if self.start <= now {
            *self = self.at(now, window);
        }
    }

    /// Counts units of a later window as if they were admitted now: the clock has stepped back.
    pub(super) fn pull_back(&mut self, now: u64, window: u64) {
        *self = self.at(now, window);
    }

    pub(super) fn is_zero(self) -> bool {
        self.current + self.previous == 0
    }

    /// The units in the window, except those of entries with an id.
    pub(super) fn used(self, now: u64, window: u64) -> u64 {
        self.at(now, window).estimate(now, window)
    }

    /// Adds units to the clock's window in which they were admitted, if that window still counts.
    pub(super) fn add(&mut self, at: u64, now: u64, window: u64, units: u64) {
        *self = self.at(now, window);
        if at >= self.start {
            self.current = (self.current + units).min(LARGEST);
        } else if at >= self.start.saturating_sub(window) {
            self.previous = (self.previous + units).min(LARGEST);
        }
    }

    /// The time until at most `most` units are used. The used units are the estimate of this
    /// counter and the units of the entries with an id. Of these entries, only the units count that
    /// `units_of` chooses.
    pub(super) fn wait_for(self, most: u64, now: u64, window: u64, (named, units_of): (&Log, UnitsOf)) -> u64 {
        let mut units = units_of(named.sum());
        let mut from = now;
        let fit = |units: u64, from: u64| most.checked_sub(units).map(|most| self.first_fit(most, from, window));
        // The used units never rise as time passes. So if the check fits when an entry leaves, it
        // fits from this moment on, or from an earlier moment since the entry before has left.
        for entry in named.iter() {
            let leaves = entry.at.saturating_add(window).max(from);
            let left = units.saturating_sub(units_of(entry.sum()));
            if left.saturating_add(self.used(leaves, window)) <= most {
                return fit(units, from).map_or(leaves, |fits| fits.min(leaves)) - now;
            }
            (units, from) = (left, leaves);
        }
        fit(units, from).unwrap_or(from) - now
    }

    /// The counter as it stands at `now`. Units of a later window count as if they were admitted at
    /// `now`.
    fn at(self, now: u64, window: u64) -> Self {
        let start = now - now % window;
        if self.start == start {
            self
        } else if self.start > start {
            Self { start, current: self.current + self.previous, previous: 0 }
        } else if self.start + window >= start {
            Self { start, current: 0, previous: self.current }
        } else {
            Self { start, current: 0, previous: 0 }
        }
    }

    /// The used units at `now`, a time in the current window.
    fn estimate(self, now: u64, window: u64) -> u64 {
        let overlap = (self.start + window - now) as f64;
        self.current + (self.previous as f64 * overlap / window as f64).ceil() as u64
    }

    /// The first moment, not before `from`, at which the estimate is at most `most`. It is at most
    /// two windows after `from`. If the clock has stepped back, it may be later by the length of
    /// that step.
    fn first_fit(self, most: u64, from: u64, window: u64) -> u64 {
        // After a step back of the clock, the estimate stays the same until the window begins in
        // which the units were counted.
        let is_ahead = self.start > from && self.current + self.previous > most;
        let from = if is_ahead { self.start } else { from };
        if self.used(from, window) <= most {
            return from;
        }
        let counts = self.at(from, window);
        // Units leave in the window after the one in which they were counted.
        let (leaving, left, end) = match most.checked_sub(counts.current) {
            Some(left) => (counts.previous, left, counts.start + window),
            None => (counts.current, most, counts.start + 2 * window),
        };
        // Doubles are not exact, so the true moment may be a microsecond or two before or after the
        // computed one.
        let overlap = (left as f64 * window as f64 / leaving as f64).floor() as u64;
        let mut fits = (end - overlap.min(window)).saturating_sub(2).max(from);
        while self.used(fits, window) > most {
            fits += 1;
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::entry::Sum;

    const WINDOW: u64 = 60_000_000;

    /// A counter with these units in the clock's previous window and in its current window.
    fn counter(previous: u64, current: u64) -> Counter {
        Counter { start: WINDOW, current, previous }
    }

    /// The first counter has 8 units in the previous window and 3 in the current one. Of the
    /// current window, 45 of 60 seconds have passed. So a quarter of the 8 units still counts,
    /// which is 2.
    #[test]
    fn the_previous_window_counts_by_its_overlap() {
        let now = WINDOW + 45_000_000;
        assert_eq!(counter(8, 3).used(now, WINDOW), 5);
        assert_eq!(counter(4, 3).used(now, WINDOW), 4);
        assert_eq!(counter(5, 3).used(now, WINDOW), 5, "a part of a unit counts as one");
    }

    #[test]
    fn a_wait_ends_with_the_first_microsecond_that_fits() {
        for (previous, current, most) in [(8, 3, 4), (8, 3, 3), (8, 3, 2), (8, 3, 0), (7, 0, 1), (0, 9, 5)] {
            let now = WINDOW + 7;
            let counter = counter(previous, current);
            let fits = now + counter.wait_for(most, now, WINDOW, (&Log::default(), Sum::all));
            assert!(counter.used(fits, WINDOW) <= most);
            assert!(counter.used(fits - 1, WINDOW) > most, "{previous} {current} {most}");
        }
    }
}
