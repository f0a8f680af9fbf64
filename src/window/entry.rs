//! Log entries: units that leave the window together.

use crate::check::AdmissionId;

/// Units in a log: their time, and their admission's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The units count until a window after this time.
    pub(super) at: u64,
    /// The admission's id; zero in a sum.
    pub(super) id: AdmissionId,
    pub(super) kind: Kind,
    pub(super) units: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One admission, found by its id.
    Named,
    /// One reserved admission, until it is settled.
    Reserved,
    /// All units at one recorded time whose admissions do not have their own entries.
    Sum,
    /// A settled admission's actual cost.
    Settled,
}

/// The kinds, indexed by their numbers.
const KINDS: [Kind; 4] = [Kind::Named, Kind::Reserved, Kind::Sum, Kind::Settled];

/// The units in several entries, and how many of them are reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) units: u64,
    pub(super) reserved: u64,
}

/// Chooses units from a sum: [`Sum::all`] or [`Sum::not_reserved`].
pub(super) type UnitsOf = fn(Sum) -> u64;

impl Entry {
    pub(super) fn new(at: u64, id: AdmissionId, kind: Kind, units: u64) -> Self {
        Self {
            at,
            id,
            kind,
            units,
        }
    }

    /// A sum for units that do not have their own entry.
    pub(super) fn new_sum(at: u64, units: u64) -> Self {
        Self::new(at, AdmissionId(0), Kind::Sum, units)
    }

    /// The kind's lowest bit in a packed entry.
    const KIND: u32 = 62;

    /// The most units in an entry.
    const MOST: u64 = (1 << Self::KIND) - 1;

    /// The packed units for a named entry with one unit, as most entries are.
    pub(super) const SINGLE: u64 = 1;

    /// Packs the units and the kind into one number: the kind is in the two bits above the units.
    pub(super) fn packed(self) -> u64 {
        (self.kind as u64) << Self::KIND | self.units.min(Self::MOST)
    }

    pub(super) fn unpacked(at: u64, id: AdmissionId, packed: u64) -> Self {
        let kind = KINDS[(packed >> Self::KIND) as usize];
        Self::new(at, id, kind, packed & Self::MOST)
    }

    /// The sum for packed units.
    pub(super) fn sum_of(packed: u64) -> Sum {
        Self::unpacked(0, AdmissionId(0), packed).sum()
    }

    pub(super) fn sum(self) -> Sum {
        Sum {
            units: self.units,
            reserved: if self.kind == Kind::Reserved {
                self.units
            } else {
                0
            },
        }
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
