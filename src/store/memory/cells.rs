//! Where a limit counts the keys for which it has no room: many keys in few cells.
//!
//! 1. A key has [`PLACES`] cells, by its digest. Each has at least as many units as the key, so the
//!    key has at most the least of them: cells count too much, never too little.
//! 2. Cells know no time of a unit but the half of the clock's window. So a unit counts for one
//!    window at least, and for less than one and a half.
//! 3. An admission raises only the cells that have too little. Each part is raised for itself: what
//!    an older part has says nothing about what is left when it has gone.
//! 4. Each cell goes on to a new part when one of its keys asks. So a check takes no longer with
//!    more cells, except the first one after the clock has stepped back by more than two parts: it
//!    takes all cells back.

use std::array;

/// The cells of a key.
const PLACES: usize = 3;

/// A part, modulo 2^32, and the units of that part and of the two before it.
type Cell = (u32, [u32; 3]);

pub(super) struct Cells {
    window: u64,
    /// The number of the newest part since the Unix epoch. Each part is half of a window.
    newest: u64,
    /// When all units have left.
    pub(super) over_at: u64,
    pub(super) cells: Box<[Cell]>,
}

impl Cells {
    /// One more than so many cells, so that there is one.
    pub(super) fn new(window: u64, further: usize) -> Self {
        Self { window, newest: 0, over_at: 0, cells: vec![Cell::default(); further + 1].into() }
    }

    /// The most units that a key may have in each part, the oldest first, and until when they may
    /// have come.
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

    /// The places of a key's cells, after these have gone on to the newest part.
    fn places(&mut self, digest: u64, now: u64) -> [usize; PLACES] {
        let part = now / self.part();
        // A caller may have read the clock before another did. But the clock has not stepped back
        // by more than a window unseen.
        if !(part..=part + 2).contains(&self.newest) {
            if part < self.newest {
                // All at once: the parts of a key's cells would differ otherwise, and the least of
                // each be too little.
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

/// Goes on to a part, or back to it.
fn go_on((part, units): &mut Cell, newest: u32) {
    let [a, b, c] = *units;
    *units = match newest.wrapping_sub(*part) as i32 {
        // The clock has stepped back: all units count as of now.
        ..0 => [a.saturating_add(b).saturating_add(c), 0, 0],
        0 => [a, b, c],
        1 => [0, a, b],
        2 => [0, 0, a],
        3.. => [0; 3],
    };
    *part = newest;
}

/// The units that a key has at most in its cells. One that is full may have had any number.
fn least(cells: [u32; PLACES]) -> u64 {
    match cells.into_iter().min() {
        Some(u32::MAX) | None => u64::from(u32::MAX) << 21,
        Some(units) => units.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a step back, another key that shares cells asks first, and the next part begins.
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
