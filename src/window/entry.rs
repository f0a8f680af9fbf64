//! An entry of a log: units, their time, and the id of their admission.

use crate::admission::AdmissionId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The units count until a window after this time.
    pub(super) at: u64,
    units: PackedUnits,
    /// Meaningless in a sum.
    pub(super) id: AdmissionId,
}

/// The units of several entries, and how many of them are reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) units: u64,
    pub(super) reserved: u64,
}

/// Chooses units of a sum: [`Sum::all`] or [`Sum::not_reserved`].
pub(super) type UnitsOf = fn(Sum) -> u64;

/// How long to wait until a check fits, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetryWait {
    /// If all reserved units are given back now; 0 if the check would fit then.
    pub(crate) least: u64,
    /// If nothing is given back before its lease ends.
    pub(crate) most: u64,
}

impl RetryWait {
    /// `until_fit` is called with and without the `reserved` units.
    pub(super) fn of(reserved: u64, until_fit: impl Fn(UnitsOf) -> u64) -> Self {
        let most = until_fit(Sum::all);
        let least = if reserved > 0 { until_fit(Sum::not_reserved) } else { most };
        Self { least, most }
    }
}

impl Sum {
    pub(super) fn all(self) -> u64 {
        self.units
    }

    pub(super) fn not_reserved(self) -> u64 {
        self.units.saturating_sub(self.reserved)
    }

    pub(super) fn add(&mut self, other: Self) {
        self.units = self.units.saturating_add(other.units);
        self.reserved = self.reserved.saturating_add(other.reserved);
    }

    pub(super) fn subtract(&mut self, other: Self) {
        self.units = self.units.saturating_sub(other.units);
        self.reserved = self.reserved.saturating_sub(other.reserved);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One admission, found by its id.
    Named = 0,
    /// The same, until it is settled.
    Reserved = 1,
    /// All other admissions of one time.
    Sum = 2,
    /// A settled admission.
    Settled = 3,
}

/// Units, and above them the kind of their entry: one word for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedUnits(u64);

impl Entry {
    pub(super) fn new(kind: Kind, at: u64, units: u64, id: AdmissionId) -> Self {
        Self { at, units: PackedUnits::new(kind, units), id }
    }

    pub(super) fn count(&self) -> u64 {
        self.units.0 & PackedUnits::MOST
    }

    pub(super) fn sum(&self) -> Sum {
        let units = self.count();
        Sum { units, reserved: if self.is(Kind::Reserved) { units } else { 0 } }
    }

    /// Whether it is a named entry of one unit.
    pub(super) fn is_single(&self) -> bool {
        self.units == PackedUnits::new(Kind::Named, 1)
    }

    pub(super) fn is(&self, kind: Kind) -> bool {
        self.units.0 >> PackedUnits::KIND == kind as u64
    }

    /// Adds units to a sum.
    pub(super) fn add(&mut self, units: u64) {
        self.units = PackedUnits::new(Kind::Sum, self.count().saturating_add(units).min(PackedUnits::MOST));
    }
}

impl PackedUnits {
    /// The lowest bit of the kind.
    const KIND: u32 = 62;

    /// The most units of an entry.
    const MOST: u64 = (1 << Self::KIND) - 1;

    fn new(kind: Kind, units: u64) -> Self {
        Self((kind as u64) << Self::KIND | units & Self::MOST)
    }
}
