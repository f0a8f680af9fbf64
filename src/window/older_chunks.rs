//! The older entries of a long log.

use std::collections::VecDeque;

use super::{
    chunk::{Chunk, Position},
    entry::{Entry, Sum, UnitsOf},
    queue::Queue,
};

/// The entries before the newest: at least one chunk, and no empty one.
#[derive(Debug, Default)]
pub(super) struct OlderChunks {
    pub(super) chunks: VecDeque<Chunk>,
    /// The number of their entries.
    pub(super) len: usize,
    pub(super) sum: Sum,
}

impl OlderChunks {
    pub(super) fn last(&self) -> u64 {
        self.chunks.back().map_or(0, Chunk::last)
    }

    pub(super) fn push(&mut self, entries: Queue) {
        self.len += entries.len();
        self.sum.add(entries.sum());
        self.chunks.push_back(Chunk::new(entries));
    }

    /// Inserts an entry that is older than the last into its chunk.
    pub(super) fn insert(&mut self, entry: Entry) {
        let place = self.chunks.partition_point(|chunk| chunk.last() <= entry.at);
        let Some(chunk) = self.chunks.get_mut(place) else { return };
        if let Some(half) = chunk.insert(entry) {
            self.chunks.insert(place + 1, half);
        }
        self.len += 1;
        self.sum.add(entry.sum());
    }

    pub(super) fn change(&mut self, place: Position, change: impl FnOnce(&mut Entry)) {
        if let Some(chunk) = self.chunks.get_mut(place.chunk) {
            self.sum.subtract(chunk.sum());
            chunk.change(place.index, change);
            self.sum.add(chunk.sum());
        }
    }

    pub(super) fn remove(&mut self, place: Position) -> Option<Entry> {
        let chunk = self.chunks.get_mut(place.chunk)?;
        let removed = chunk.remove(place.index)?;
        if chunk.entries().len() == 0 {
            self.chunks.remove(place.chunk);
        }
        self.len -= 1;
        self.sum.subtract(removed.sum());
        Some(removed)
    }

    /// The entries of the chunk that is the last to leave until so many of the chosen units have left. Subtracts the units of
    /// the chunks before it.
    pub(super) fn with_units(&self, units: &mut u64, units_of: UnitsOf) -> Option<&Queue> {
        let is_it = |chunk: &&Chunk| {
            let of_chunk = units_of(chunk.sum());
            let is_it = of_chunk >= *units;
            *units -= if is_it { 0 } else { of_chunk };
            is_it
        };
        self.chunks.iter().find(is_it).map(Chunk::entries)
    }

    pub(super) fn drop_while(&mut self, is_gone: impl Fn(u64) -> bool) -> usize {
        let before = self.len;
        while let Some(chunk) = self.chunks.front_mut() {
            let (len, sum) = (chunk.entries().len(), chunk.sum());
            let is_whole = is_gone(chunk.last());
            let dropped = if is_whole { len } else { chunk.drop_while(&is_gone) };
            self.len -= dropped;
            self.sum.subtract(sum);
            if !is_whole {
                self.sum.add(chunk.sum());
                break;
            }
            self.chunks.pop_front();
        }
        before - self.len
    }
}
