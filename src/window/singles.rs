//! Entries of one unit in a ring that grows only at its end: all that most logs hold.

use super::entry::{Entry, Kind};
use crate::admission::AdmissionId;

/// The entries of the first allocation: one cache line.
const FEWEST: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Singles {
    ring: Box<[Single]>,
    first: u32,
    len: u32,
}

/// A named entry of one unit. It takes two thirds of the memory of any other entry.
#[derive(Clone, Copy, Debug)]
struct Single {
    at: u64,
    id: AdmissionId,
}

impl Singles {
    pub(super) fn with_capacity(entries: usize) -> Self {
        Self { ring: vec![Single::UNUSED; entries].into(), ..Self::default() }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<Entry> {
        if index >= self.len() {
            return None;
        }
        self.ring.get(self.place(index)).map(|single| Entry::new(Kind::Named, single.at, 1, single.id))
    }

    #[inline]
    pub(super) fn push_back(&mut self, at: u64, id: AdmissionId) {
        if self.len() == self.ring.len() {
            self.resize((2 * self.len()).max(FEWEST));
        }
        let place = self.place(self.len());
        if let Some(single) = self.ring.get_mut(place) {
            *single = Single { at, id };
            self.len += 1;
        }
    }

    /// Drops the oldest entries while their times are gone, and returns how many.
    #[inline]
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(u64) -> bool) -> usize {
        let before = self.len;
        while self.len > 0 && self.ring.get(self.first as usize).is_some_and(|single| is_gone(single.at)) {
            self.first = self.place(1) as u32;
            self.len -= 1;
        }
        (before - self.len) as usize
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        if self.ring.len() / 4 > self.len() {
            self.resize(self.len());
        }
    }

    fn resize(&mut self, entries: usize) {
        let mut ring = Vec::with_capacity(entries);
        let (second, first) = self.ring.split_at(self.first as usize);
        ring.extend(first.iter().chain(second).take(self.len()));
        ring.resize(entries, Single::UNUSED);
        *self = Self { ring: ring.into(), first: 0, len: self.len };
    }

    /// The place of an entry in the ring.
    #[inline]
    fn place(&self, index: usize) -> usize {
        let place = self.first as usize + index;
        if place < self.ring.len() { place } else { place - self.ring.len() }
    }
}

impl Single {
    const UNUSED: Self = Self { at: 0, id: AdmissionId(0) };
}
