//! An entry of a log: so many units, of which time, and whose they are.

use crate::admission::AdmissionId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Until a window after this time it counts.
    pub(super) at: u64,
    pub(super) units: Units,
    /// Means nothing in a sum.
    pub(super) id: AdmissionId,
}

/// Units of several entries together, and how many of them are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) units: u64,
    pub(super) held: u64,
}

/// Which units of a sum are meant.
pub(super) type Which = fn(Sum) -> u64;

impl Sum {
    /// All of them.
    pub(super) fn all(self) -> u64 {
        self.units
    }

    /// Those that nobody gives back.
    pub(super) fn not_held(self) -> u64 {
        self.units.saturating_sub(self.held)
    }

    pub(super) fn add(&mut self, other: Self) {
        self.units = self.units.saturating_add(other.units);
        self.held = self.held.saturating_add(other.held);
    }

    pub(super) fn subtract(&mut self, other: Self) {
        self.units = self.units.saturating_sub(other.units);
        self.held = self.held.saturating_sub(other.held);
    }
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An admission that its id tells from others.
    Kept = 0,
    /// The same, until it is settled.
    Held = 1,
    /// Admissions of one time, together.
    Sum = 2,
    /// An admission that has been settled.
    Settled = 3,
}

/// So many units, and what kind of entry it is that they stand in: one word for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units(u64);

impl Entry {
    pub(super) fn new(kind: Kind, at: u64, units: u64, id: AdmissionId) -> Self {
        Self { at, units: Units::new(kind, units), id }
    }

    pub(super) fn count(&self) -> u64 {
        self.units.0 & Units::MOST
    }

    pub(super) fn sum(&self) -> Sum {
        let units = self.count();
        Sum { units, held: if self.is(Kind::Held) { units } else { 0 } }
    }

    pub(super) fn is(&self, kind: Kind) -> bool {
        self.units.0 >> Units::KIND == kind as u64
    }

    /// Adds units to a sum.
    pub(super) fn add(&mut self, units: u64) {
        self.units = Units::new(Kind::Sum, self.count().saturating_add(units).min(Units::MOST));
    }
}

impl Units {
    /// Above it stands the kind.
    const KIND: u32 = 62;

    /// The most units that an entry can have.
    const MOST: u64 = (1 << Self::KIND) - 1;

    fn new(kind: Kind, units: u64) -> Self {
        Self((kind as u64) << Self::KIND | units & Self::MOST)
    }
}
