//! A part of a long log: entries in the order of their times, their sum, and a filter of their ids.

use std::{collections::VecDeque, sync::LazyLock};

use super::entry::{Entry, Sum};
use crate::admission::{AdmissionId, random};

/// The entries of a new chunk. A chunk with twice as many is split. So an insertion moves few entries.
/// Short in unit tests, so that there are many chunks.
pub(super) const CHUNK: usize = if cfg!(test) { 8 } else { 1_024 };

#[derive(Debug)]
pub(super) struct Chunk {
    entries: VecDeque<Entry>,
    sum: Sum,
    filter: IdFilter,
}

/// A Bloom filter of ids, with a false positive in some hundreds of look-ups.
#[derive(Debug)]
struct IdFilter(Box<[u64; Self::WORDS]>);

/// The bits of an id in every filter.
#[derive(Clone, Copy, Debug)]
pub(super) struct FilterBits {
    word: usize,
    bits: u64,
}

impl Chunk {
    pub(super) fn new(entries: VecDeque<Entry>) -> Self {
        let (mut sum, mut filter) = (Sum::default(), IdFilter(Box::new([0; IdFilter::WORDS])));
        for entry in &entries {
            sum.add(entry.sum());
            filter.add(FilterBits::of(entry.id));
        }
        Self { entries, sum, filter }
    }

    pub(super) fn entries(&self) -> &VecDeque<Entry> {
        &self.entries
    }

    pub(super) fn sum(&self) -> Sum {
        self.sum
    }

    pub(super) fn may_contain(&self, bits: FilterBits) -> bool {
        self.filter.may_contain(bits)
    }

    pub(super) fn first(&self) -> u64 {
        self.entries.front().map_or(0, |entry| entry.at)
    }

    pub(super) fn last(&self) -> u64 {
        self.entries.back().map_or(0, |entry| entry.at)
    }

    /// Inserts an entry behind those of its time, and returns the second half of a chunk that is too long then.
    pub(super) fn insert(&mut self, entry: Entry) -> Option<Self> {
        self.entries.insert(up_to(&self.entries, entry.at), entry);
        if self.entries.len() == 2 * CHUNK {
            let half = Self::new(self.entries.split_off(CHUNK));
            *self = Self::new(std::mem::take(&mut self.entries));
            return Some(half);
        }
        self.sum.add(entry.sum());
        self.filter.add(FilterBits::of(entry.id));
        None
    }

    /// Changes an entry, but neither its time nor its id.
    pub(super) fn change(&mut self, index: usize, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.get_mut(index) {
            self.sum.subtract(entry.sum());
            change(entry);
            self.sum.add(entry.sum());
        }
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<Entry> {
        let removed = self.entries.remove(index)?;
        self.sum.subtract(removed.sum());
        shrink(&mut self.entries);
        Some(removed)
    }

    /// Drops the oldest entries while they are gone, and returns their number and their units.
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(&Entry) -> bool) -> (usize, Sum) {
        let (entries, sum) = drop_while(&mut self.entries, is_gone);
        self.sum.subtract(sum);
        (entries, sum)
    }

    /// Moves at most `most` entries of a later time back to this one, and returns how many.
    pub(super) fn pull_back(&mut self, at: u64, most: usize) -> usize {
        pull_back(&mut self.entries, at, most)
    }
}

impl IdFilter {
    /// 16 bits for each entry of a new chunk.
    const WORDS: usize = CHUNK / 4;

    fn add(&mut self, bits: FilterBits) {
        self.0[bits.word] |= bits.bits;
    }

    fn may_contain(&self, bits: FilterBits) -> bool {
        self.0[bits.word] & bits.bits == bits.bits
    }
}

impl FilterBits {
    /// By a random key of the process, so that no client can choose ids that collide.
    pub(super) fn of(id: AdmissionId) -> Self {
        static KEY: LazyLock<[u64; 2]> = LazyLock::new(|| [random() | 1, random() | 1]);
        let [first, second] = *KEY;
        // Multiplied twice, so that every bit of the id changes the upper bits.
        let hash = u64::from_be_bytes(id.to_bytes()).wrapping_mul(first);
        let hash = (hash ^ hash >> 32).wrapping_mul(second);
        let bit = |place: u32| 1 << (hash >> place & 63);
        Self { word: (hash >> 32) as usize % IdFilter::WORDS, bits: bit(58) | bit(52) | bit(46) | bit(40) }
    }
}

/// The number of entries that are not later than this time.
pub(super) fn up_to(entries: &VecDeque<Entry>, at: u64) -> usize {
    entries.partition_point(|entry| entry.at <= at)
}

pub(super) fn drop_while(entries: &mut VecDeque<Entry>, is_gone: impl Fn(&Entry) -> bool) -> (usize, Sum) {
    let (mut dropped, mut sum) = (0, Sum::default());
    while let Some(entry) = entries.front().filter(|entry| is_gone(entry)) {
        dropped += 1;
        sum.add(entry.sum());
        entries.pop_front();
    }
    (dropped, sum)
}

pub(super) fn pull_back(entries: &mut VecDeque<Entry>, at: u64, most: usize) -> usize {
    let later = up_to(entries, at);
    let pulled = (entries.len() - later).min(most);
    entries.range_mut(later..later + pulled).for_each(|entry| entry.at = at);
    pulled
}

/// Gives back the memory of a burst.
pub(super) fn shrink(entries: &mut VecDeque<Entry>) {
    if entries.capacity() / 4 > entries.len() {
        entries.shrink_to_fit();
    }
}
