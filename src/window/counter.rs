//! The counter: what was admitted in the present window of the clock and in the one before.
//!
//! The units of the previous window count by how much of it the sliding window still overlaps. The estimate is made in
//! double precision, as Lua makes it, so that every store comes to the same.

use super::{
    Wait,
    entry::{Sum, Which},
    log::Log,
};

/// The most units that a window of the clock counts: as many as a double counts exactly.
const LARGEST: u64 = 1 << 53;

/// Two counters, and beside them what is known by its id.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    counts: Counts,
    /// Counted in full, until it is settled or leaves.
    held: Log,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// When the present window of the clock has begun.
    start: u64,
    current: u64,
    previous: u64,
}

impl Counter {
    pub(super) fn trim(&mut self, now: u64, window: u64) -> usize {
        let was_zero = self.is_zero();
        if self.counts.start <= now {
            self.counts = self.counts.at(now, window);
        }
        self.held.trim(now, window) + usize::from(!was_zero && self.is_zero())
    }

    pub(super) fn len(&self) -> usize {
        self.held.len() + usize::from(!self.is_zero())
    }

    pub(super) fn shrink(&mut self) {
        self.held.shrink();
    }

    pub(super) fn is_zero(&self) -> bool {
        self.counts.current + self.counts.previous == 0
    }

    pub(super) fn held(&self) -> &Log {
        &self.held
    }

    pub(super) fn held_mut(&mut self) -> &mut Log {
        &mut self.held
    }

    pub(super) fn used(&self, now: u64, window: u64) -> u64 {
        self.held.used().saturating_add(self.counts.at(now, window).estimate(now, window))
    }

    /// The time until the estimate is less than now.
    pub(super) fn reset_after(&self, now: u64, window: u64) -> u64 {
        self.used(now, window).checked_sub(1).map_or(0, |less| self.first_fit(less, now, window, Sum::all) - now)
    }

    pub(super) fn wait_for(&mut self, most: u64, now: u64, window: u64) -> Wait {
        self.counts = self.counts.at(now, window);
        self.held.pull_back(now);
        Wait::of(self.held.held(), |which| self.first_fit(most, now, window, which) - now)
    }

    pub(super) fn add(&mut self, now: u64, window: u64, units: u64) {
        self.counts = self.counts.at(now, window);
        self.counts.current = (self.counts.current + units).min(LARGEST);
    }

    /// Adds units to the window of the clock in which they were admitted, unless it counts no longer.
    pub(super) fn add_at(&mut self, at: u64, now: u64, window: u64, units: u64) {
        self.counts = self.counts.at(now, window);
        if at >= self.counts.start {
            self.counts.current = (self.counts.current + units).min(LARGEST);
        } else if at >= self.counts.start.saturating_sub(window) {
            self.counts.previous = (self.counts.previous + units).min(LARGEST);
        }
    }

    /// The first moment from now on at which at most so many units are used, those with an id being only these.
    fn first_fit(&self, most: u64, now: u64, window: u64, which: Which) -> u64 {
        let counts = self.counts;
        let (mut held, mut from) = (which(self.held.sum()), now);
        let fit = |held: u64, from: u64| most.checked_sub(held).map(|room| counts.first_fit(room, from, window));
        // What is used never rises. So it fits after one departure or before it, if it does when that has been.
        for (leaves, sum) in self.held.departures(window) {
            let (leaves, left) = (leaves.max(from), held.saturating_sub(which(sum)));
            if left.saturating_add(counts.at(leaves, window).estimate(leaves, window)) <= most {
                return fit(held, from).map_or(leaves, |fits| fits.min(leaves));
            }
            (held, from) = (left, leaves);
        }
        fit(held, from).unwrap_or(from)
    }
}

impl Counts {
    /// The counters as they are at this time. What was counted later than that counts as counted now.
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

    /// The units used at a time in the present window.
    fn estimate(self, now: u64, window: u64) -> u64 {
        let overlap = (self.start + window - now) as f64;
        self.current + (self.previous as f64 * overlap / window as f64).ceil() as u64
    }

    /// The first moment from this one on at which the estimate is at most `most`, which is at most two windows later, or
    /// later than that by how far the clock has stepped back.
    fn first_fit(self, most: u64, from: u64, window: u64) -> u64 {
        // Until the window of the clock in which they were counted, nothing changes.
        let is_ahead = self.start > from && self.current + self.previous > most;
        let mut from = if is_ahead { self.start } else { from };
        let mut counts = self.at(from, window);
        loop {
            let end = counts.start + window;
            if counts.estimate(from, window) <= most {
                return from;
            }
            if let Some(room) = most.checked_sub(counts.current) {
                // The estimate is of doubles, so the moment it comes down to is looked for by a step or two.
                let overlap = (room as f64 * window as f64 / counts.previous as f64).floor() as u64;
                let mut fits = (end - overlap.min(window)).max(from + 1);
                while fits > from + 1 && counts.estimate(fits - 1, window) <= most {
                    fits -= 1;
                }
                while fits < end && counts.estimate(fits, window) > most {
                    fits += 1;
                }
                if fits < end {
                    return fits;
                }
            }
            (counts, from) = (counts.at(end, window), end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 60_000_000;

    /// Of one unit in each second: so many in the previous window of the clock, so many in the present one.
    fn counter(previous: u64, current: u64) -> Counter {
        Counter { counts: Counts { start: WINDOW, current, previous }, held: Log::default() }
    }

    /// System D's examples: 8 before, 3 now, 45 of 60 seconds gone. A quarter of 8 is 2.
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
            let mut counter = counter(previous, current);
            let fits = now + counter.wait_for(most, now, WINDOW).most;
            assert!(counter.used(fits, WINDOW) <= most);
            assert!(counter.used(fits - 1, WINDOW) > most, "{previous} {current} {most}");
        }
    }
}
