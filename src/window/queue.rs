//! A part of a log: entries in the order of their times, and their sum.

use std::{collections::VecDeque, mem};

use super::{
    entry::{Entry, Sum},
    singles::Singles,
};

/// The first entry that is no single, or is not the last, turns singles into a list of whole entries, until that is empty.
#[derive(Debug)]
pub(super) enum Queue {
    Singles(Singles),
    Mixed(Box<Mixed>),
}

#[derive(Debug, Default)]
pub(super) struct Mixed {
    entries: VecDeque<Entry>,
    sum: Sum,
}

impl Queue {
    pub(super) fn with_capacity(entries: usize) -> Self {
        Self::Singles(Singles::with_capacity(entries))
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Singles(singles) => singles.len(),
            Self::Mixed(mixed) => mixed.entries.len(),
        }
    }

    #[inline]
    pub(super) fn sum(&self) -> Sum {
        match self {
            Self::Singles(singles) => Sum { units: singles.len() as u64, reserved: 0 },
            Self::Mixed(mixed) => mixed.sum,
        }
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<Entry> {
        match self {
            Self::Singles(singles) => singles.get(index),
            Self::Mixed(mixed) => mixed.entries.get(index).copied(),
        }
    }

    pub(super) fn front(&self) -> Option<Entry> {
        self.get(0)
    }

    pub(super) fn back(&self) -> Option<Entry> {
        self.get(self.len().checked_sub(1)?)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The number of entries that are not later than this time.
    pub(super) fn up_to(&self, at: u64) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low.midpoint(high);
            let is_later = self.get(middle).is_none_or(|entry| entry.at > at);
            (low, high) = if is_later { (low, middle) } else { (middle + 1, high) };
        }
        low
    }

    /// Adds an entry that is not earlier than the others.
    #[inline]
    pub(super) fn push_back(&mut self, entry: Entry) {
        match self {
            Self::Singles(singles) if entry.is_single() => singles.push_back(entry.at, entry.id),
            _ => self.as_mixed(|mixed| mixed.insert(mixed.entries.len(), entry)),
        }
    }

    /// Inserts an entry behind those of its time.
    pub(super) fn insert(&mut self, entry: Entry) {
        let index = self.up_to(entry.at);
        self.as_mixed(|mixed| mixed.insert(index, entry));
    }

    /// Changes an entry, but neither its time nor its id.
    pub(super) fn change(&mut self, index: usize, change: impl FnOnce(&mut Entry)) {
        self.as_mixed(|mixed| mixed.change(index, change));
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<Entry> {
        self.as_mixed(|mixed| mixed.remove(index))
    }

    /// Drops the oldest entries while their times are gone, and returns how many.
    #[inline]
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(u64) -> bool) -> usize {
        let mixed = match self {
            Self::Singles(singles) => return singles.drop_while(is_gone),
            Self::Mixed(mixed) => mixed,
        };
        let dropped = mixed.drop_while(is_gone);
        if mixed.entries.is_empty() {
            *self = Self::default();
        }
        dropped
    }

    /// Moves at most `most` entries of a later time back to this one, and returns how many.
    pub(super) fn pull_back(&mut self, at: u64, most: usize) -> usize {
        let later = self.up_to(at);
        let pulled = (self.len() - later).min(most);
        if pulled > 0 {
            self.as_mixed(|mixed| mixed.entries.range_mut(later..later + pulled).for_each(|entry| entry.at = at));
        }
        pulled
    }

    /// Splits off the entries from this index on.
    pub(super) fn split_off(&mut self, index: usize) -> Self {
        self.as_mixed(|mixed| {
            let second = Mixed::new(mixed.entries.split_off(index));
            mixed.sum.subtract(second.sum);
            Self::Mixed(Box::new(second))
        })
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        match self {
            Self::Singles(singles) => singles.shrink(),
            Self::Mixed(mixed) => mixed.shrink(),
        }
    }

    #[inline(never)]
    fn as_mixed<T>(&mut self, change: impl FnOnce(&mut Mixed) -> T) -> T {
        let mut mixed = match mem::take(self) {
            Self::Mixed(mixed) => mixed,
            singles @ Self::Singles(_) => Box::new(Mixed::new(singles.iter().collect())),
        };
        let changed = change(&mut mixed);
        *self = Self::Mixed(mixed);
        changed
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self::Singles(Singles::default())
    }
}

impl Mixed {
    fn new(entries: VecDeque<Entry>) -> Self {
        let mut sum = Sum::default();
        entries.iter().for_each(|entry| sum.add(entry.sum()));
        Self { entries, sum }
    }

    fn insert(&mut self, index: usize, entry: Entry) {
        self.sum.add(entry.sum());
        self.entries.insert(index, entry);
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.get_mut(index) {
            self.sum.subtract(entry.sum());
            change(entry);
            self.sum.add(entry.sum());
        }
    }

    fn remove(&mut self, index: usize) -> Option<Entry> {
        let removed = self.entries.remove(index)?;
        self.sum.subtract(removed.sum());
        Some(removed)
    }

    fn drop_while(&mut self, is_gone: impl Fn(u64) -> bool) -> usize {
        let before = self.entries.len();
        while let Some(entry) = self.entries.front().filter(|entry| is_gone(entry.at)) {
            self.sum.subtract(entry.sum());
            self.entries.pop_front();
        }
        before - self.entries.len()
    }

    fn shrink(&mut self) {
        if self.entries.capacity() / 4 > self.entries.len() {
            self.entries.shrink_to_fit();
        }
    }
}
