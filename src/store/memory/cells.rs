//! A count-min sketch with conservative update (Estan and Varghese, 2002) for keys that do not fit
//! into a limit's table: many keys share few cells.
//!
//! 1. The key digest picks [`CELLS_OF_KEY`] cells. Each counts at least the key's units, so their
//!    minimum is an upper bound: it may be too high, but never too low.
//! 2. Cells do not store the exact time of a unit, but only the half window of the clock in which
//!    it was counted. Such a half window is called a sub-window. So a unit counts for at least one
//!    window, and for less than one and a half.
//! 3. An admission raises the key's cells to the key's new upper bound. Cells that have already
//!    reached it do not change. Only the newest sub-window is compared, because older units leave
//!    earlier.
//! 4. Each sub-window has its own list, which is dropped when its units have left. So the time for
//!    a check does not depend on the number of cells. The exception is the first check after the
//!    clock has stepped back by more than two sub-windows, because it adds up the lists.

use std::{array, collections::BTreeMap, mem};

/// The number of cells that count each key: the sketch's depth.
const CELLS_OF_KEY: usize = 3;

pub(super) struct Cells {
    /// The number of cells, at least 1: the sketch's width.
    pub(super) len: usize,
    /// The sub-window in microseconds: half the window, rounded up.
    sub_window: u64,
    /// Each cell's units in each sub-window. Sub-windows are numbered from the Unix epoch. There
    /// are at most three sub-windows.
    sub_windows: BTreeMap<u64, Box<[u32]>>,
}

impl Cells {
    /// Makes one cell and `further` additional ones, so that there is at least one.
    pub(super) fn new(window: u64, further: usize) -> Self {
        Self {
            len: further + 1,
            sub_window: window.div_ceil(2),
            sub_windows: BTreeMap::new(),
        }
    }

    /// Returns two numbers for each sub-window, oldest first: the latest time at which its units
    /// may have been counted, and the most units that the key may have in it.
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
        // After the clock has stepped back a little, the newest sub-window is ahead of `now`, and
        // the units count longer.
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

    /// True if all units have left the window.
    pub(super) fn are_over(&mut self, now: u64) -> bool {
        self.trim(now);
        self.sub_windows.is_empty()
    }

    /// Drops sub-windows whose units have left. If the newest one is more than two sub-windows
    /// ahead, the clock has stepped back, and all units count as if they were counted now.
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

    /// The indices of a key's cells, by double hashing.
    fn cells(&self, digest: u64) -> [usize; CELLS_OF_KEY] {
        let step = digest.rotate_left(32) | 1;
        array::from_fn(|number| {
            let hash = digest.wrapping_add(step.wrapping_mul(number as u64));
            (hash % self.len as u64) as usize
        })
    }
}

/// The lowest count among a key's cells, which is the most units that it may have used. A cell at
/// `u32::MAX` is saturated, and may stand for any number.
fn least(counts: &[u32], cells: [usize; CELLS_OF_KEY]) -> u64 {
    match cells.map(|cell| counts[cell]).into_iter().min() {
        Some(u32::MAX) | None => u64::from(u32::MAX) << 21,
        Some(units) => units.into(),
    }
}

/// Adds up two sub-windows, cell by cell.
fn added(mut counts: Box<[u32]>, others: Box<[u32]>) -> Box<[u32]> {
    for (count, other) in counts.iter_mut().zip(others) {
        *count = count.saturating_add(other);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock steps back, and another key is looked up, which may share cells with the first
    /// key. When the next sub-window begins, the first key still has its units.
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
