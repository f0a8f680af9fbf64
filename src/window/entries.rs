//! The entries of a log, in the order of their times.
//!
//! The newest entries are in one queue, and most logs have no others. The older entries of a long log are in chunks: so
//! finding, inserting and removing an entry, or dropping a chunk, takes microseconds even among a million.

use std::{
    collections::{VecDeque, vec_deque},
    mem,
};

use super::{
    chunk::{CHUNK, Chunk, FilterBits, drop_while, pull_back, shrink, up_to},
    entry::{Entry, Sum, UnitsOf},
};
use crate::admission::AdmissionId;

/// The most entries that one check moves when the clock has stepped back. The next check goes on.
const PULLED_BACK: usize = if cfg!(test) { 8 } else { 1_000 };

#[derive(Debug, Default)]
pub(super) struct Entries {
    newest: VecDeque<Entry>,
    older: Option<Box<OlderChunks>>,
}

/// The entries before the newest: at least one chunk, and no empty one.
#[derive(Debug, Default)]
struct OlderChunks {
    chunks: VecDeque<Chunk>,
    /// The number of their entries.
    len: usize,
}

/// The chunk of an entry and its index there. The newest entries count as the chunk after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    chunk: usize,
    index: usize,
}

impl Entries {
    pub(super) fn len(&self) -> usize {
        self.newest.len() + self.older.as_ref().map_or(0, |older| older.len)
    }

    pub(super) fn oldest(&self) -> Option<&Entry> {
        let first = self.older.as_ref().and_then(|older| older.chunks.front());
        first.map_or(&self.newest, Chunk::entries).front()
    }

    fn last(&self) -> Option<&Entry> {
        self.newest.back().or_else(|| self.older.as_ref()?.chunks.back()?.entries().back())
    }

    /// The newest entry, unless it is in a chunk.
    pub(super) fn newest(&self) -> Option<(Position, &Entry)> {
        let place = || Position { chunk: self.chunks().len(), index: self.newest.len() - 1 };
        self.newest.back().map(|entry| (place(), entry))
    }

    /// All entries, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.chunks().flat_map(Chunk::entries).chain(&self.newest)
    }

    /// The entries of this very time, the newest first.
    pub(super) fn of(&self, at: u64) -> impl Iterator<Item = (Position, &Entry)> {
        let begun = self.older.as_ref().map_or(0, |older| older.chunks.partition_point(|chunk| chunk.first() <= at));
        let all = self.chunks().len();
        let places = [all].into_iter().chain((0..begun).rev());
        places.flat_map(move |chunk| self.until(at, chunk)).take_while(move |(_, entry)| entry.at == at)
    }

    /// An entry with this id of this time, or of an earlier one, since the clock may have stepped back.
    pub(super) fn find(&self, id: AdmissionId, at: u64, is_it: impl Fn(&Entry) -> bool) -> Option<Position> {
        let is_it = |(_, entry): &(Position, &Entry)| entry.id == id && is_it(entry);
        let near = self.of(at).find(is_it);
        let far = || {
            let bits = FilterBits::of(id);
            let may_contain = |(_, chunk): &(usize, &Chunk)| chunk.may_contain(bits) && chunk.first() <= at;
            let chunks = self.chunks().enumerate().rev().filter(may_contain).map(|(chunk, _)| chunk);
            let mut places = [self.chunks().len()].into_iter().chain(chunks);
            places.find_map(|chunk| self.until(at, chunk).find(is_it))
        };
        near.or_else(far).map(|(place, _)| place)
    }

    pub(super) fn get(&self, Position { chunk, index }: Position) -> Option<&Entry> {
        let chunk = self.older.as_ref().and_then(|older| older.chunks.get(chunk));
        chunk.map_or(&self.newest, Chunk::entries).get(index)
    }

    /// The entry with whose departure this many of the chosen units have left.
    pub(super) fn departure(&self, mut units: u64, units_of: UnitsOf) -> Option<&Entry> {
        let older = self.older.as_ref().and_then(|older| older.with_units(&mut units, units_of));
        older.unwrap_or(&self.newest).iter().find(|entry| {
            units = units.saturating_sub(units_of(entry.sum()));
            units == 0
        })
    }

    /// Inserts an entry behind those of its time.
    pub(super) fn insert(&mut self, entry: Entry) {
        if self.newest.len() == CHUNK {
            let full = mem::replace(&mut self.newest, VecDeque::with_capacity(CHUNK));
            self.older.get_or_insert_default().push(full);
        }
        if self.last().is_none_or(|last| last.at <= entry.at) {
            self.newest.push_back(entry);
        } else {
            self.insert_between(entry);
        }
    }

    fn insert_between(&mut self, entry: Entry) {
        match &mut self.older {
            Some(older) if older.last() > entry.at => older.insert(entry),
            _ => self.newest.insert(up_to(&self.newest, entry.at), entry),
        }
    }

    /// Changes an entry, but neither its time nor its id.
    pub(super) fn change(&mut self, Position { chunk, index }: Position, change: impl FnOnce(&mut Entry)) {
        match self.older.as_mut().and_then(|older| older.chunks.get_mut(chunk)) {
            Some(chunk) => chunk.change(index, change),
            None => self.newest.get_mut(index).map_or((), change),
        }
    }

    pub(super) fn remove(&mut self, place: Position) -> Option<Entry> {
        match &mut self.older {
            Some(older) if place.chunk < older.chunks.len() => {
                let removed = older.remove(place);
                self.older.take_if(|older| older.chunks.is_empty());
                removed
            }
            _ => self.newest.remove(place.index),
        }
    }

    /// Drops the oldest entries while they are gone, and returns their number and their units.
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(&Entry) -> bool) -> (usize, Sum) {
        let Some(older) = &mut self.older else { return drop_while(&mut self.newest, is_gone) };
        let (older_entries, mut sum) = older.drop_while(&is_gone);
        if !older.chunks.is_empty() {
            return (older_entries, sum);
        }
        self.older = None;
        let (entries, newest) = drop_while(&mut self.newest, is_gone);
        sum.add(newest);
        (older_entries + entries, sum)
    }

    /// Moves entries of a later time back to this one; of very many only the first.
    pub(super) fn pull_back(&mut self, at: u64) {
        if self.last().is_some_and(|last| last.at > at) {
            self.pull_back_later(at);
        }
    }

    #[cold]
    fn pull_back_later(&mut self, at: u64) {
        let mut left = PULLED_BACK;
        if let Some(older) = &mut self.older {
            let later = older.chunks.partition_point(|chunk| chunk.last() <= at);
            older.chunks.range_mut(later..).for_each(|chunk| left -= chunk.pull_back(at, left));
        }
        pull_back(&mut self.newest, at, left);
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        shrink(&mut self.newest);
    }

    fn chunks(&self) -> vec_deque::Iter<'_, Chunk> {
        self.older.as_ref().map_or_else(Default::default, |older| older.chunks.iter())
    }

    /// The entries of a chunk up to this time, the newest first.
    fn until(&self, at: u64, chunk: usize) -> impl Iterator<Item = (Position, &Entry)> {
        let of_chunk = self.older.as_ref().and_then(|older| older.chunks.get(chunk));
        let entries = of_chunk.map_or(&self.newest, Chunk::entries);
        let until = entries.range(..up_to(entries, at)).enumerate().rev();
        until.map(move |(index, entry)| (Position { chunk, index }, entry))
    }
}

impl OlderChunks {
    fn last(&self) -> u64 {
        self.chunks.back().map_or(0, Chunk::last)
    }

    fn push(&mut self, entries: VecDeque<Entry>) {
        self.len += entries.len();
        self.chunks.push_back(Chunk::new(entries));
    }

    /// Inserts an entry that is older than the last into its chunk.
    fn insert(&mut self, entry: Entry) {
        let place = self.chunks.partition_point(|chunk| chunk.last() <= entry.at);
        let Some(chunk) = self.chunks.get_mut(place) else { return };
        if let Some(half) = chunk.insert(entry) {
            self.chunks.insert(place + 1, half);
        }
        self.len += 1;
    }

    fn remove(&mut self, place: Position) -> Option<Entry> {
        let chunk = self.chunks.get_mut(place.chunk)?;
        let removed = chunk.remove(place.index)?;
        if chunk.entries().is_empty() {
            self.chunks.remove(place.chunk);
        }
        self.len -= 1;
        Some(removed)
    }

    /// The entries of the chunk that is the last to leave until so many of the chosen units have left. Subtracts the units of
    /// the chunks before it.
    fn with_units(&self, units: &mut u64, units_of: UnitsOf) -> Option<&VecDeque<Entry>> {
        let is_it = |chunk: &&Chunk| {
            let of_chunk = units_of(chunk.sum());
            let is_it = of_chunk >= *units;
            *units -= if is_it { 0 } else { of_chunk };
            is_it
        };
        self.chunks.iter().find(is_it).map(Chunk::entries)
    }

    fn drop_while(&mut self, is_gone: impl Fn(&Entry) -> bool) -> (usize, Sum) {
        let (mut entries, mut sum) = (0, Sum::default());
        while let Some(chunk) = self.chunks.front_mut() {
            let is_whole = chunk.entries().back().is_none_or(&is_gone);
            let (some, of_them) =
                if is_whole { (chunk.entries().len(), chunk.sum()) } else { chunk.drop_while(&is_gone) };
            entries += some;
            sum.add(of_them);
            if !is_whole {
                break;
            }
            self.chunks.pop_front();
        }
        self.len -= entries;
        (entries, sum)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::window::entry::Kind;

    #[derive(Clone, Debug)]
    enum Step {
        Insert { at: u64, units: u64, is_reserved: bool },
        Settle { nth: usize },
        Add { nth: usize, units: u64 },
        Drop { until: u64 },
        PullBack { at: u64 },
        Find { nth: usize, later: u64 },
        Departure { units: u64, is_reserved: bool },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..60u64, 1..5u64, any::<bool>())
                .prop_map(|(at, units, is_reserved)| Step::Insert { at, units, is_reserved }),
            2 => any::<usize>().prop_map(|nth| Step::Settle { nth }),
            1 => (any::<usize>(), 1..5u64).prop_map(|(nth, units)| Step::Add { nth, units }),
            1 => (0..20u64).prop_map(|until| Step::Drop { until }),
            1 => (40..60u64).prop_map(|at| Step::PullBack { at }),
            4 => (any::<usize>(), 0..60u64).prop_map(|(nth, later)| Step::Find { nth, later }),
            2 => (1..200u64, any::<bool>()).prop_map(|(units, is_reserved)| Step::Departure { units, is_reserved }),
        ]
    }

    /// The model: a plain list.
    #[derive(Default)]
    struct Plain(Vec<Entry>);

    impl Plain {
        fn insert(&mut self, entry: Entry) {
            self.0.insert(self.0.partition_point(|other| other.at <= entry.at), entry);
        }
    }

    fn replay(steps: &[Step]) {
        let (mut entries, mut plain, mut since, mut next_id) = (Entries::default(), Plain::default(), 0, 0);
        for step in steps {
            match *step {
                Step::Insert { at, units, is_reserved } => {
                    let kind = if is_reserved { Kind::Reserved } else { Kind::Named };
                    let entry = Entry::new(kind, since + at, units, AdmissionId::from(next_id));
                    next_id += 1;
                    entries.insert(entry);
                    plain.insert(entry);
                }
                Step::Settle { nth } if !plain.0.is_empty() => {
                    let entry = plain.0.remove(nth % plain.0.len());
                    let (place, _) = entries.of(entry.at).find(|(_, other)| **other == entry).unwrap();
                    assert_eq!(entries.remove(place), Some(entry));
                }
                Step::Add { nth, units } if !plain.0.is_empty() => {
                    let nth = nth % plain.0.len();
                    let entry = plain.0[nth];
                    let (place, _) = entries.of(entry.at).find(|(_, other)| **other == entry).unwrap();
                    entries.change(place, |entry| entry.add(units));
                    plain.0[nth].add(units);
                }
                Step::Drop { until } => {
                    since += until;
                    let left = plain.0.split_off(plain.0.partition_point(|entry| entry.at <= since));
                    let mut sum = Sum::default();
                    plain.0.iter().for_each(|entry| sum.add(entry.sum()));
                    let gone = (plain.0.len(), sum);
                    plain.0 = left;
                    assert_eq!(entries.drop_while(|entry| entry.at <= since), gone);
                }
                Step::PullBack { at } => {
                    entries.pull_back(since + at);
                    let later = plain.0.iter_mut().filter(|entry| entry.at > since + at);
                    later.take(PULLED_BACK).for_each(|entry| entry.at = since + at);
                }
                Step::Find { nth, later } if !plain.0.is_empty() => {
                    let nth = nth % plain.0.len();
                    let (entry, at) = (plain.0[nth], plain.0[nth].at + later);
                    let find = |at| entries.find(entry.id, at, |other| other == &entry);
                    let place = find(at).unwrap();
                    assert!(entries.of(entry.at).any(|found| found == (place, &entry)));
                    assert_eq!(entry.at.checked_sub(1).and_then(find), None, "what is later is not found");
                }
                Step::Departure { units, is_reserved } => {
                    let (units_of, mut left): (UnitsOf, _) =
                        (if is_reserved { Sum::all } else { Sum::not_reserved }, units);
                    let departs = |entry: &&Entry| {
                        left = left.saturating_sub(units_of(entry.sum()));
                        left == 0
                    };
                    assert_eq!(entries.departure(units, units_of), plain.0.iter().find(departs));
                }
                Step::Settle { .. } | Step::Add { .. } | Step::Find { .. } => {}
            }
            assert!(entries.iter().eq(&plain.0));
            assert_eq!(
                (entries.len(), entries.oldest(), entries.last()),
                (plain.0.len(), plain.0.first(), plain.0.last())
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn entries_in_chunks_are_a_list(steps in prop::collection::vec(step(), 1..200)) {
            replay(&steps);
        }
    }
}
