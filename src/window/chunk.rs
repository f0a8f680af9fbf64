//! A part of a long log: a queue of entries, and a filter of their ids.

use std::sync::LazyLock;

use super::{
    entry::{Entry, Sum},
    queue::Queue,
};
use crate::admission::{AdmissionId, random};

/// The entries of a new chunk. A chunk with twice as many is split. So an insertion moves few entries.
/// Short in unit tests, so that there are many chunks.
pub(super) const CHUNK: usize = if cfg!(test) { 8 } else { 1_024 };

#[derive(Debug)]
pub(super) struct Chunk {
    entries: Queue,
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

/// The chunk of an entry, and the index of the entry there. The newest entries count as the chunk after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) chunk: usize,
    pub(super) index: usize,
}

impl Chunk {
    pub(super) fn new(entries: Queue) -> Self {
        let mut filter = IdFilter(Box::new([0; IdFilter::WORDS]));
        entries.iter().for_each(|entry| filter.add(FilterBits::of(entry.id)));
        Self { entries, filter }
    }

    pub(super) fn entries(&self) -> &Queue {
        &self.entries
    }

    pub(super) fn sum(&self) -> Sum {
        self.entries.sum()
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
        self.entries.insert(entry);
        if self.entries.len() == 2 * CHUNK {
            let half = Self::new(self.entries.split_off(CHUNK));
            *self = Self::new(std::mem::take(&mut self.entries));
            return Some(half);
        }
        self.filter.add(FilterBits::of(entry.id));
        None
    }

    /// Changes an entry, but neither its time nor its id.
    pub(super) fn change(&mut self, index: usize, change: impl FnOnce(&mut Entry)) {
        self.entries.change(index, change);
    }

    pub(super) fn remove(&mut self, index: usize) -> Option<Entry> {
        let removed = self.entries.remove(index)?;
        self.entries.shrink();
        Some(removed)
    }

    /// Drops the oldest entries while their times are gone, and returns how many.
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(u64) -> bool) -> usize {
        self.entries.drop_while(is_gone)
    }

    /// Moves at most `most` entries of a later time back to this one, and returns how many.
    pub(super) fn pull_back(&mut self, at: u64, most: usize) -> usize {
        self.entries.pull_back(at, most)
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
        let hash = id.0.wrapping_mul(first);
        let hash = (hash ^ hash >> 32).wrapping_mul(second);
        let bit = |place: u32| 1 << (hash >> place & 63);
        Self { word: (hash >> 32) as usize % IdFilter::WORDS, bits: bit(58) | bit(52) | bit(46) | bit(40) }
    }
}
