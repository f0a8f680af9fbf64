//! A sliding window counter's estimate. A counter is a log with one sum per clock window.
//!
//! The sum is recorded under the time at which its window ends. Until then, its units count in
//! full. During the next clock window, they count in proportion to the overlap between their window
//! and the sliding window, rounded up. The estimate is made in double precision, as in Lua, so that
//! every store gets the same result.

use super::{
    entry::{Entry, Kind, UnitsOf},
    log::Log,
};

/// The units in the clock's previous window that no longer count.
pub(super) fn faded(log: &Log, now: u64, window: u64) -> u64 {
    let previous_end = now - now % window;
    let previous = log.sum_at(previous_end).map_or(0, |(_, sum)| sum.units);
    previous.saturating_sub(overlapping(previous, previous_end, now, window))
}

/// How many units from a window that ends at `end` count at the time `at`.
fn overlapping(units: u64, end: u64, at: u64, window: u64) -> u64 {
    let overlap = end.saturating_add(window).saturating_sub(at).min(window);
    (units as f64 * overlap as f64 / window as f64).ceil() as u64
}

/// The time until at most `most` units are used. `units_of` chooses which units with an id count.
pub(super) fn wait_for(log: &Log, most: u64, now: u64, window: u64, units_of: UnitsOf) -> u64 {
    let sums = sums(log, window);
    // At the time 0, the estimate counts all units in the sums. So the difference is the number of
    // units with an id.
    let mut units = units_of(log.sum()).saturating_sub(estimate(&sums, 0, window));
    let mut from = now;
    // Until an entry with an id leaves, only the estimate falls. Without such an entry, the
    // estimate falls to 0.
    let last = sums.last().map_or(now, |sum| sum.at.saturating_add(window));
    let named = log.iter().filter(|entry| entry.kind != Kind::Sum);
    let leaving = named.map(|entry| (entry.at.saturating_add(window), units_of(entry.sum())));
    for (leaves, left) in leaving.chain([(last, 0)]) {
        let mut until = leaves.max(from);
        let rest = units.saturating_sub(left);
        if rest.saturating_add(estimate(&sums, until, window)) <= most {
            // Binary search: once the units fit, they fit at all later moments, too.
            while from < until {
                let middle = from.midpoint(until);
                if units.saturating_add(estimate(&sums, middle, window)) <= most {
                    until = middle;
                } else {
                    from = middle + 1;
                }
            }
            return from - now;
        }
        (units, from) = (rest, until);
    }
    from - now
}

/// The units that `sums` count as at the time `at`.
fn estimate(sums: &[Entry], at: u64, window: u64) -> u64 {
    let mut units = 0_u64;
    for sum in sums {
        units = units.saturating_add(overlapping(sum.units, sum.at, at, window));
    }
    units
}

/// The log's sums, the oldest first. In each window, only the first entry is examined, since a log
/// may have many entries with an id.
fn sums(log: &Log, window: u64) -> Vec<Entry> {
    let mut sums = Vec::new();
    let mut index = 0;
    while let Some(entry) = log.get(index) {
        let end = entry.at.div_ceil(window).saturating_mul(window);
        sums.extend(log.sum_at(end).map(|(_, sum)| sum));
        index = log.up_to(end);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::entry::Sum;

    const WINDOW: u64 = 60_000_000;

    /// A counter with these units in the clock's previous window and in its current window.
    fn counter(previous: u64, current: u64) -> Log {
        let mut log = Log::default();
        log.add_to_sum(WINDOW, previous);
        log.add_to_sum(2 * WINDOW, current);
        log
    }

    fn used(counter: &Log, now: u64) -> u64 {
        counter.sum().units - faded(counter, now, WINDOW)
    }

    /// The first counter has 8 units in the previous window and 3 in the current one, in which 45
    /// of 60 seconds have passed. So a quarter of the 8 units still counts, which is 2.
    #[test]
    fn the_previous_window_counts_by_its_overlap() {
        let now = WINDOW + 45_000_000;
        assert_eq!(used(&counter(8, 3), now), 5);
        assert_eq!(used(&counter(4, 3), now), 4);
        assert_eq!(
            used(&counter(5, 3), now),
            5,
            "a part of a unit counts as one"
        );
    }

    #[test]
    fn a_wait_ends_with_the_first_microsecond_that_fits() {
        for (previous, current, most) in [
            (8, 3, 4),
            (8, 3, 3),
            (8, 3, 2),
            (8, 3, 0),
            (7, 0, 1),
            (0, 9, 5),
        ] {
            let now = WINDOW + 7;
            let mut counter = counter(previous, current);
            let fits = now + wait_for(&counter, most, now, WINDOW, Sum::all);
            counter.trim(fits - 1, WINDOW);
            assert!(
                used(&counter, fits - 1) > most,
                "{previous} {current} {most}"
            );
            counter.trim(fits, WINDOW);
            assert!(used(&counter, fits) <= most);
        }
    }
}
