//! A part of a long log: entries in the order of their times, their sum, and which ids may be among them.

use std::{collections::VecDeque, sync::LazyLock};

use super::entry::{Entry, Sum};
use crate::admission::{AdmissionId, random};

/// How many entries a chunk is made of; it has less than twice as many. To move some of so many takes a microsecond at most.
/// The unit tests have short chunks, so that there are many.
pub(super) const CHUNK: usize = if cfg!(test) { 8 } else { 1_024 };

#[derive(Debug)]
pub(super) struct Chunk {
    entries: VecDeque<Entry>,
    sum: Sum,
    ids: Ids,
}

/// A Bloom filter: whether an id may be in a chunk. Of those that are not, one in some hundreds may.
#[derive(Debug)]
struct Ids(Box<[u64; Self::WORDS]>);

/// Where the traces of an id are in every filter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trace {
    word: usize,
    bits: u64,
}

impl Chunk {
    pub(super) fn new(entries: VecDeque<Entry>) -> Self {
        let (mut sum, mut ids) = (Sum::default(), Ids(Box::new([0; Ids::WORDS])));
        for entry in &entries {
            sum.add(entry.sum());
            ids.add(Trace::of(entry.id));
        }
        Self { entries, sum, ids }
    }

    pub(super) fn entries(&self) -> &VecDeque<Entry> {
        &self.entries
    }

    /// The sum of the units.
    pub(super) fn sum(&self) -> Sum {
        self.sum
    }

    pub(super) fn may_have(&self, trace: Trace) -> bool {
        self.ids.may_have(trace)
    }

    pub(super) fn first(&self) -> u64 {
        self.entries.front().map_or(0, |entry| entry.at)
    }

    pub(super) fn last(&self) -> u64 {
        self.entries.back().map_or(0, |entry| entry.at)
    }

    /// Puts an entry behind those of its time, and returns the second half if there are too many then.
    pub(super) fn insert(&mut self, entry: Entry) -> Option<Self> {
        self.entries.insert(up_to(&self.entries, entry.at), entry);
        if self.entries.len() == 2 * CHUNK {
            let half = Self::new(self.entries.split_off(CHUNK));
            *self = Self::new(std::mem::take(&mut self.entries));
            return Some(half);
        }
        self.sum.add(entry.sum());
        self.ids.add(Trace::of(entry.id));
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

    /// Drops the oldest, as long as they are gone, and says how many entries that were, and of how many units.
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(&Entry) -> bool) -> (usize, Sum) {
        let (entries, sum) = drop_while(&mut self.entries, is_gone);
        self.sum.subtract(sum);
        (entries, sum)
    }

    /// Lets the first of those of a later time be of this one, at most so many, and says how many that were.
    pub(super) fn pull_back(&mut self, at: u64, most: usize) -> usize {
        pull_back(&mut self.entries, at, most)
    }
}

impl Ids {
    /// 16 bits for each of the first entries.
    const WORDS: usize = CHUNK / 4;

    fn add(&mut self, trace: Trace) {
        self.0[trace.word] |= trace.bits;
    }

    fn may_have(&self, trace: Trace) -> bool {
        self.0[trace.word] & trace.bits == trace.bits
    }
}

impl Trace {
    /// Of the process's own, so that nobody outside can choose ids that are taken for each other.
    pub(super) fn of(id: AdmissionId) -> Self {
        static KEY: LazyLock<[u64; 2]> = LazyLock::new(|| [random() | 1, random() | 1]);
        let [first, second] = *KEY;
        // Multiplied twice, so that every bit of the id has a say in the upper bits.
        let hash = u64::from_be_bytes(id.to_bytes()).wrapping_mul(first);
        let hash = (hash ^ hash >> 32).wrapping_mul(second);
        let bit = |place: u32| 1 << (hash >> place & 63);
        Self { word: (hash >> 32) as usize % Ids::WORDS, bits: bit(58) | bit(52) | bit(46) | bit(40) }
    }
}

/// How many of them are not later than this time.
pub(super) fn up_to(entries: &VecDeque<Entry>, at: u64) -> usize {
    entries.partition_point(|entry| entry.at <= at)
}

/// Drops the oldest, as long as they are gone, and says how many entries that were, and of how many units.
#[inline]
pub(super) fn drop_while(entries: &mut VecDeque<Entry>, is_gone: impl Fn(&Entry) -> bool) -> (usize, Sum) {
    let (mut dropped, mut sum) = (0, Sum::default());
    while let Some(entry) = entries.front().filter(|entry| is_gone(entry)) {
        dropped += 1;
        sum.add(entry.sum());
        entries.pop_front();
    }
    (dropped, sum)
}

/// Lets the first of those of a later time be of this one, at most so many, and says how many that were.
pub(super) fn pull_back(entries: &mut VecDeque<Entry>, at: u64, most: usize) -> usize {
    let later = up_to(entries, at);
    let pulled = (entries.len() - later).min(most);
    entries.range_mut(later..later + pulled).for_each(|entry| entry.at = at);
    pulled
}

/// Gives back memory that a burst left behind.
pub(super) fn shrink(entries: &mut VecDeque<Entry>) {
    if entries.capacity() / 4 > entries.len() {
        entries.shrink_to_fit();
    }
}
