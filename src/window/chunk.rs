//! Entries of a log, and chunks of them in the order of their times: a short log, or a part of a long one.

use std::collections::VecDeque;

use crate::check::AdmissionId;

/// Units of a log: their time, and the id of their admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The units count until a window after this time.
    pub(super) at: u64,
    /// Zero in a sum.
    pub(super) id: AdmissionId,
    pub(super) kind: Kind,
    pub(super) units: u64,
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

/// The units of several entries, and how many of them are reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) units: u64,
    pub(super) reserved: u64,
}

/// Chooses units of a sum: [`Sum::all`] or [`Sum::not_reserved`].
pub(super) type UnitsOf = fn(Sum) -> u64;

/// The entries of a full chunk. One with twice as many is split. So an insertion moves few entries.
/// Short in unit tests, so that there are many chunks.
pub(super) const CHUNK: usize = if cfg!(test) { 8 } else { 1_024 };

/// Entries take 16 bytes each as long as all of them are single units, as in most logs, and 24 otherwise.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    entries: VecDeque<(u64, AdmissionId)>,
    /// None as long as all entries are single units.
    units: Option<Box<Units>>,
}

/// The packed units of each entry, and their sum.
#[derive(Debug)]
struct Units {
    packed: VecDeque<u64>,
    sum: Sum,
}

impl Chunk {
    pub(super) fn with_capacity(entries: usize) -> Self {
        Self { entries: VecDeque::with_capacity(entries), units: None }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    #[inline]
    pub(super) fn sum(&self) -> Sum {
        match &self.units {
            Some(units) => units.sum,
            None => Sum { units: self.len() as u64, reserved: 0 },
        }
    }

    /// The time of the first entry.
    #[inline]
    pub(super) fn first(&self) -> Option<u64> {
        self.entries.front().map(|(at, _)| *at)
    }

    /// The time of the last entry.
    #[inline]
    pub(super) fn last(&self) -> Option<u64> {
        self.entries.back().map(|(at, _)| *at)
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<Entry> {
        let (at, id) = *self.entries.get(index)?;
        let packed = self.units.as_ref().and_then(|units| units.packed.get(index));
        Some(Entry::unpacked(at, id, packed.copied().unwrap_or(Entry::SINGLE)))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The entries with this id up to this time, the newest first, and the index of each.
    pub(super) fn of_id(&self, id: AdmissionId, at: u64) -> impl Iterator<Item = (usize, Entry)> {
        let until = self.entries.range(..self.up_to(at)).enumerate().rev();
        until.filter(move |(_, (_, other))| *other == id).filter_map(|(index, _)| Some((index, self.get(index)?)))
    }

    /// The number of entries that are not later than this time.
    #[inline]
    fn up_to(&self, at: u64) -> usize {
        if self.last() <= Some(at) {
            return self.len();
        }
        self.entries.partition_point(|(other, _)| *other <= at)
    }

    /// Inserts an entry behind those of its time.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        let (index, packed) = (self.up_to(entry.at), entry.packed());
        if packed != Entry::SINGLE || self.units.is_some() {
            self.insert_units(index, entry);
        }
        if index == self.len() {
            self.entries.push_back((entry.at, entry.id));
        } else {
            self.entries.insert(index, (entry.at, entry.id));
        }
    }

    #[cold]
    fn insert_units(&mut self, index: usize, entry: Entry) {
        let units = self.units();
        units.packed.insert(index, entry.packed());
        units.sum.add(entry.sum());
    }

    /// Adds units to an entry.
    pub(super) fn add(&mut self, index: usize, units: u64) {
        let Some(before) = self.get(index) else { return };
        let after = Entry { units: before.units.saturating_add(units), ..before };
        let of_chunk = self.units();
        of_chunk.packed[index] = after.packed();
        of_chunk.sum.subtract(before.sum());
        of_chunk.sum.add(after.sum());
    }

    pub(super) fn remove(&mut self, index: usize) {
        let Some(entry) = self.get(index) else { return };
        self.entries.remove(index);
        if let Some(units) = &mut self.units {
            units.packed.remove(index);
            units.sum.subtract(entry.sum());
        }
        self.forget_units_if_empty();
    }

    /// Drops the entries up to this time.
    #[inline]
    pub(super) fn drop_until(&mut self, at: u64) {
        if self.last() <= Some(at) {
            self.entries.clear();
        }
        while self.first().is_some_and(|first| first <= at) {
            self.entries.pop_front();
            if let Some(units) = &mut self.units {
                let gone = units.packed.pop_front().unwrap_or_default();
                units.sum.subtract(sum_of(gone));
            }
        }
        self.forget_units_if_empty();
    }

    /// Moves at most `most` entries of a later time back to this one, and returns how many.
    pub(super) fn pull_back(&mut self, at: u64, most: usize) -> usize {
        let later = self.up_to(at);
        let pulled = (self.len() - later).min(most);
        self.entries.range_mut(later..later + pulled).for_each(|(of_entry, _)| *of_entry = at);
        pulled
    }

    /// Splits off the entries from this index on.
    pub(super) fn split_off(&mut self, index: usize) -> Self {
        let units = self.units.as_mut().map(|units| {
            let second = Units::new(units.packed.split_off(index));
            units.sum.subtract(second.sum);
            Box::new(second)
        });
        Self { entries: self.entries.split_off(index), units }
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        if self.entries.capacity() / 4 > self.len() {
            self.entries.shrink_to_fit();
            if let Some(units) = &mut self.units {
                units.packed.shrink_to_fit();
            }
        }
    }

    /// The units of each entry, even if all are single.
    fn units(&mut self) -> &mut Units {
        let entries = self.len();
        self.units.get_or_insert_with(|| Box::new(Units::new(vec![Entry::SINGLE; entries].into())))
    }

    #[inline]
    fn forget_units_if_empty(&mut self) {
        if self.entries.is_empty() {
            self.units = None;
        }
    }
}

impl Units {
    fn new(packed: VecDeque<u64>) -> Self {
        let mut sum = Sum::default();
        packed.iter().for_each(|packed| sum.add(sum_of(*packed)));
        Self { packed, sum }
    }
}

fn sum_of(packed: u64) -> Sum {
    Entry::unpacked(0, AdmissionId::from(0), packed).sum()
}

impl Entry {
    /// The lowest bit of the kind in a packed entry.
    const KIND: u32 = 62;

    /// The most units of an entry.
    const MOST: u64 = (1 << Self::KIND) - 1;

    /// The packed units of a named entry of one unit, which most entries are.
    pub(super) const SINGLE: u64 = 1;

    /// The units, and above them the kind: one word for both.
    pub(super) fn packed(self) -> u64 {
        (self.kind as u64) << Self::KIND | self.units.min(Self::MOST)
    }

    pub(super) fn unpacked(at: u64, id: AdmissionId, packed: u64) -> Self {
        let kind = match packed >> Self::KIND {
            0 => Kind::Named,
            1 => Kind::Reserved,
            2 => Kind::Sum,
            _ => Kind::Settled,
        };
        Self { at, id, kind, units: packed & Self::MOST }
    }

    pub(super) fn sum(self) -> Sum {
        Sum { units: self.units, reserved: if self.kind == Kind::Reserved { self.units } else { 0 } }
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
