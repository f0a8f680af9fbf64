//! Cells, in which a limit counts the keys for which it has no room: many keys in few cells.
//!
//! 1. The digest of a key chooses the key's [`CELLS_OF_KEY`] cells. Each of these cells counts at
//!    least the units of the key. So the lowest of their counts is the most units that the key may
//!    have. This number may be too high, but never too low.
//! 2. Cells do not know the time of a unit. They only know in which half window of the clock it
//!    came. This half window is a sub-window. So a unit counts for at least one window, and for
//!    less than one and a half.
//! 3. An admission raises the counts of the key's cells to the number of units that the key may
//!    then have. Cells that already count as many stay as they are. Only the units of the newest
//!    sub-window are compared, because the units of older sub-windows leave earlier.
//! 4. Each sub-window has a list of its own, and the list is dropped when its units have left. So a
//!    check takes no longer if a limit has more cells. There is one exception: the first check
//!    after the clock has stepped back by more than two sub-windows adds up the lists.

use std::{array, collections::BTreeMap, mem};

/// The number of cells of a key.
const CELLS_OF_KEY: usize = 3;

pub(super) struct Cells {
    /// The number of cells. It is at least 1.
    pub(super) len: usize,
    /// The microseconds of a sub-window, which is half of the window, rounded up.
    sub_window: u64,
    /// The units of each cell, by the number of their sub-window since the Unix epoch. There are at
    /// most three sub-windows.
    sub_windows: BTreeMap<u64, Box<[u32]>>,
}

impl Cells {
    /// Makes one more cell than `further`, so that there is at least one cell.
    pub(super) fn new(window: u64, further: usize) -> Self {
        Self {
            len: further + 1,
            sub_window: window.div_ceil(2),
            sub_windows: BTreeMap::new(),
        }
    }

    /// Returns two numbers for each sub-window, the oldest one first: the latest time at which the
    /// units of the sub-window may have come, and the most units that the key may have in it.
    pub(super) fn of_key(&mut self, digest: u64, now: u64) -> impl Iterator<Item = (u64, u64)> {
        self.trim(now);
        let cells = self.cells(digest);
        let length = self.sub_window;
        self.sub_windows
            .iter()
            .map(move |(number, counts)| ((number + 1) * length - 1, least(counts, cells)))
    }

    pub(super) fn add(&mut self, digest: u64, now: u64, units: u64) {
        self.trim(now);
        let cells = self.cells(digest);
        // After a small step back of the clock, the newest sub-window is ahead of `now`. The units
        // then count longer.
        let newest = self.newest().max(now / self.sub_window);
        let counts = self
            .sub_windows
            .entry(newest)
            .or_insert_with(|| vec![0; self.len].into());
        let raised = u32::try_from(least(counts, cells).saturating_add(units)).unwrap_or(u32::MAX);
        for cell in cells {
            counts[cell] = raised.max(counts[cell]);
        }
    }

    /// True if all units of all cells have left.
    pub(super) fn are_over(&mut self, now: u64) -> bool {
        self.trim(now);
        self.sub_windows.is_empty()
    }

    /// Drops the sub-windows whose units have left. If the newest sub-window is more than two
    /// ahead, the clock has stepped back, and all units count as if they came now.
    fn trim(&mut self, now: u64) {
        let present = now / self.sub_window;
        self.sub_windows.retain(|number, _| number + 2 >= present);
        if self.newest() > present + 2 {
            let sums = mem::take(&mut self.sub_windows).into_values().reduce(added);
            self.sub_windows.extend(sums.map(|sums| (present, sums)));
        }
    }

    fn newest(&self) -> u64 {
        self.sub_windows
            .last_key_value()
            .map_or(0, |(number, _)| *number)
    }

    /// The indices of the cells of a key.
    fn cells(&self, digest: u64) -> [usize; CELLS_OF_KEY] {
        let step = digest.rotate_left(32) | 1;
        array::from_fn(|number| {
            let hash = digest.wrapping_add(step.wrapping_mul(number as u64));
            (hash % self.len as u64) as usize
        })
    }
}

/// The lowest count of a key's cells. The key has used at most this many units. A cell that has
/// reached the largest number of its type may stand for any number of units.
fn least(counts: &[u32], cells: [usize; CELLS_OF_KEY]) -> u64 {
    match cells.map(|cell| counts[cell]).into_iter().min() {
        Some(u32::MAX) | None => u64::from(u32::MAX) << 21,
        Some(units) => units.into(),
    }
}

/// The counts of two sub-windows, added up for each cell.
fn added(mut counts: Box<[u32]>, others: Box<[u32]>) -> Box<[u32]> {
    for (count, other) in counts.iter_mut().zip(others) {
        *count = count.saturating_add(other);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock steps back. Then another key asks, which may share cells with the first key. Then
    /// the next sub-window begins, and the first key still has its units.
    #[test]
    fn a_step_back_loses_no_units() {
        for other in 0..1_000 {
            let mut cells = Cells::new(8, 9);
            cells.add(7, 1_000, 5);
            drop(cells.of_key(other, 980));
            assert!(
                cells.of_key(7, 984).map(|(_, units)| units).sum::<u64>() >= 5,
                "{other}"
            );
        }
    }
}
