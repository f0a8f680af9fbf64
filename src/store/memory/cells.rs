//! Cells, in which a limit counts the keys for which it has no room: many keys in few cells.
//!
//! 1. The digest of a key chooses the key's [`PLACES`] cells. Each of these cells counts at least
//!    the units of the key. So the lowest of their counts is the most units that the key may have.
//!    It may be too high, but never too low.
//! 2. Of the time of a unit, cells only know in which half window of the clock it was. So a unit
//!    counts for at least one window, and for less than one and a half.
//! 3. An admission raises only those of the key's cells that count less than the key may have after
//!    the admission. It compares only the units of the newest part, because the units of older
//!    parts leave earlier.
//! 4. A cell moves on to a new part when a check comes for one of its keys. So a check takes no
//!    longer if a limit has more cells. There is one exception: the first check after the clock has
//!    stepped back by more than two parts moves all cells back.

use std::array;

/// The number of cells of a key.
const PLACES: usize = 3;

/// The number of a part, modulo 2^32, and the units of this part and of the two parts before it.
type Cell = (u32, [u32; 3]);

pub(super) struct Cells {
    window: u64,
    /// The number of the newest part, counted since the Unix epoch. Each part is half of a window.
    newest: u64,
    /// The time at which all units of all cells have left.
    pub(super) over_at: u64,
    pub(super) cells: Box<[Cell]>,
}

impl Cells {
    /// Makes one more cell than `further`, so that there is at least one cell.
    pub(super) fn new(window: u64, further: usize) -> Self {
        Self { window, newest: 0, over_at: 0, cells: vec![Cell::default(); further + 1].into() }
    }

    /// Returns two numbers for each part, the oldest part first: the latest time at which the units
    /// of the part may have come, and the most units that the key may have in the part.
    pub(super) fn of_key(&mut self, digest: u64, now: u64) -> impl Iterator<Item = (u64, u64)> {
        let cells = self.places(digest, now).map(|place| self.cells[place].1);
        (0..3).rev().filter_map(move |age| {
            let part = self.newest.checked_sub(age as u64)?;
            Some((self.end_of(part), least(cells.map(|units| units[age]))))
        })
    }

    pub(super) fn add(&mut self, digest: u64, now: u64, units: u64) {
        let places = self.places(digest, now);
        let before = least(places.map(|place| self.cells[place].1[0]));
        let raised = u32::try_from(before.saturating_add(units)).unwrap_or(u32::MAX);
        for place in places {
            let (_, [newest, ..]) = &mut self.cells[place];
            *newest = raised.max(*newest);
        }
        self.over_at = self.over_at.max(self.end_of(self.newest).saturating_add(self.window));
    }

    fn part(&self) -> u64 {
        self.window.div_ceil(2)
    }

    fn end_of(&self, part: u64) -> u64 {
        (part + 1) * self.part() - 1
    }

    /// Moves the cells of a key on to the newest part, and returns the indices of these cells.
    fn places(&mut self, digest: u64, now: u64) -> [usize; PLACES] {
        let part = now / self.part();
        // Threads may come here in another order than the one in which they have read the clock. So
        // `newest` may be up to two parts ahead of `part`. If `newest` is further ahead, the clock
        // has stepped back.
        if !(part..=part + 2).contains(&self.newest) {
            if part < self.newest {
                // All cells go back at once. Otherwise the cells of a key would be at different
                // parts, and the lowest count of a part would be too low.
                self.cells.iter_mut().for_each(|cell| go_on(cell, part as u32));
            }
            self.newest = part;
        }
        let newest = self.newest as u32;
        let step = digest.rotate_left(32) | 1;
        array::from_fn(|number| {
            let place = digest.wrapping_add(step.wrapping_mul(number as u64)) % self.cells.len() as u64;
            go_on(&mut self.cells[place as usize], newest);
            place as usize
        })
    }
}

/// Moves a cell to another part, later or earlier.
fn go_on((part, units): &mut Cell, newest: u32) {
    let [a, b, c] = *units;
    *units = match newest.wrapping_sub(*part) as i32 {
        // The clock has stepped back, so all units count as if they came now.
        ..0 => [a.saturating_add(b).saturating_add(c), 0, 0],
        0 => [a, b, c],
        1 => [0, a, b],
        2 => [0, 0, a],
        3.. => [0; 3],
    };
    *part = newest;
}

/// The lowest count of a key's cells. The key has used at most this many units. A cell that has
/// reached the largest number of its type may stand for any number of units.
fn least(cells: [u32; PLACES]) -> u64 {
    match cells.into_iter().min() {
        Some(u32::MAX) | None => u64::from(u32::MAX) << 21,
        Some(units) => units.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock steps back. Then another key asks, which may share cells with the first key. Then
    /// the next part begins, and the first key still has its units.
    #[test]
    fn a_step_back_loses_no_units() {
        for other in 0..1_000 {
            let mut cells = Cells::new(8, 9);
            cells.add(7, 1_000, 5);
            drop(cells.of_key(other, 980));
            assert!(cells.of_key(7, 984).map(|(_, units)| units).sum::<u64>() >= 5, "{other}");
        }
    }
}
