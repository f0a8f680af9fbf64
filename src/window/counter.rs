//! The counter: the units of the clock's current window and of the one before.
//!
//! The units of the previous window count in proportion to its overlap with the sliding window. The estimate is made in
//! double precision, as in Lua, so that every store gets the same result.

use super::{
    entry::{RetryWait, Sum, UnitsOf},
    log::Log,
};

/// The most units of one of the clock's windows: a double counts no more exactly.
const LARGEST: u64 = 1 << 53;

/// Two counters, and beside them a log of the entries with an id.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    counts: Counts,
    /// Counted in full, until they are settled or leave.
    named: Log,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// When the clock's current window began.
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
        self.named.trim(now, window) + usize::from(!was_zero && self.is_zero())
    }

    pub(super) fn len(&self) -> usize {
        self.named.len() + usize::from(!self.is_zero())
    }

    pub(super) fn shrink(&mut self) {
        self.named.shrink();
    }

    pub(super) fn is_zero(&self) -> bool {
        self.counts.current + self.counts.previous == 0
    }

    pub(super) fn named(&self) -> &Log {
        &self.named
    }

    pub(super) fn named_mut(&mut self) -> &mut Log {
        &mut self.named
    }

    pub(super) fn used(&self, now: u64, window: u64) -> u64 {
        self.named.used().saturating_add(self.counts.at(now, window).estimate(now, window))
    }

    /// The time until the estimate falls.
    pub(super) fn reset_after(&self, now: u64, window: u64) -> u64 {
        self.used(now, window).checked_sub(1).map_or(0, |less| self.first_fit(less, now, window, Sum::all) - now)
    }

    pub(super) fn wait_for(&mut self, most: u64, now: u64, window: u64) -> RetryWait {
        self.counts = self.counts.at(now, window);
        self.named.pull_back(now);
        RetryWait::of(self.named.reserved(), |units_of| self.first_fit(most, now, window, units_of) - now)
    }

    pub(super) fn add(&mut self, now: u64, window: u64, units: u64) {
        self.counts = self.counts.at(now, window);
        self.counts.current = (self.counts.current + units).min(LARGEST);
    }

    /// Adds units to the clock's window of their admission, if it still counts.
    pub(super) fn add_at(&mut self, at: u64, now: u64, window: u64, units: u64) {
        self.counts = self.counts.at(now, window);
        if at >= self.counts.start {
            self.counts.current = (self.counts.current + units).min(LARGEST);
        } else if at >= self.counts.start.saturating_sub(window) {
            self.counts.previous = (self.counts.previous + units).min(LARGEST);
        }
    }

    /// The first moment from now on at which at most `most` units are used. Of the units with an id, only the chosen count.
    fn first_fit(&self, most: u64, now: u64, window: u64, units_of: UnitsOf) -> u64 {
        let counts = self.counts;
        let (mut named, mut from) = (units_of(self.named.sum()), now);
        let fit = |named: u64, from: u64| most.checked_sub(named).map(|most| counts.first_fit(most, from, window));
        // The used units never rise. So if the check fits after a departure, the first fit is then or just before it.
        for (leaves, sum) in self.named.departures(window) {
            let (leaves, left) = (leaves.max(from), named.saturating_sub(units_of(sum)));
            if left.saturating_add(counts.at(leaves, window).estimate(leaves, window)) <= most {
                return fit(named, from).map_or(leaves, |fits| fits.min(leaves));
            }
            (named, from) = (left, leaves);
        }
        fit(named, from).unwrap_or(from)
    }
}

impl Counts {
    /// The counters at this time. Units from the future count as counted now.
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

    /// The used units at a time in the current window.
    fn estimate(self, now: u64, window: u64) -> u64 {
        let overlap = (self.start + window - now) as f64;
        self.current + (self.previous as f64 * overlap / window as f64).ceil() as u64
    }

    /// The first moment from this one on at which the estimate is at most `most`: at most two windows later, or later than
    /// that by how far the clock has stepped back.
    fn first_fit(self, most: u64, from: u64, window: u64) -> u64 {
        // If the clock has stepped back, nothing changes until the window in which they were counted.
        let is_ahead = self.start > from && self.current + self.previous > most;
        let mut from = if is_ahead { self.start } else { from };
        let mut counts = self.at(from, window);
        loop {
            let end = counts.start + window;
            if counts.estimate(from, window) <= most {
                return from;
            }
            if let Some(previous) = most.checked_sub(counts.current) {
                // Doubles are not exact, so the moment is corrected by a step or two.
                let overlap = (previous as f64 * window as f64 / counts.previous as f64).floor() as u64;
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

    /// A counter with so many units in the previous window of the clock, and so many in the current one.
    fn counter(previous: u64, current: u64) -> Counter {
        Counter { counts: Counts { start: WINDOW, current, previous }, named: Log::default() }
    }

    /// 8 units before, 3 now, 45 of 60 seconds gone: a quarter of 8 is 2.
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
