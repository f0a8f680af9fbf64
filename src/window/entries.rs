//! The entries of a log, in the order of their times.
//!
//! The newest entries are in one queue, and most logs have no others. The older entries of a long log are in chunks: so
//! finding, inserting and removing an entry, or dropping a chunk, takes microseconds even among a million.

use std::{collections::vec_deque, mem};

use super::{
    chunk::{CHUNK, Chunk, FilterBits, Position},
    entry::{Entry, Sum, UnitsOf},
    older_chunks::OlderChunks,
    queue::Queue,
};
use crate::admission::AdmissionId;

/// The most entries that one check moves when the clock has stepped back. The next check goes on.
const PULLED_BACK: usize = if cfg!(test) { 8 } else { 1_000 };

#[derive(Debug)]
pub(super) struct Entries {
    newest: Queue,
    older: Option<Box<OlderChunks>>,
    /// The time of the oldest entry, or the latest of all times. It is here so that most checks need not read the entry itself,
    /// which is seldom in the processor's cache.
    oldest_at: u64,
    /// The time of the last entry, or 0.
    last_at: u64,
}

impl Entries {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.newest.len() + self.older.as_ref().map_or(0, |older| older.len)
    }

    #[inline]
    pub(super) fn sum(&self) -> Sum {
        let mut sum = self.newest.sum();
        if let Some(older) = &self.older {
            sum.add(older.sum);
        }
        sum
    }

    /// The time of the oldest entry; the latest of all times if there is none.
    #[inline]
    pub(super) fn oldest_at(&self) -> u64 {
        self.oldest_at
    }

    fn oldest(&self) -> Option<Entry> {
        let first = self.older.as_ref().and_then(|older| older.chunks.front());
        first.map_or(&self.newest, Chunk::entries).front()
    }

    fn last(&self) -> Option<Entry> {
        self.newest.back().or_else(|| self.older.as_ref()?.chunks.back()?.entries().back())
    }

    /// The newest entry, unless it is in a chunk.
    pub(super) fn newest(&self) -> Option<(Position, Entry)> {
        let place = || Position { chunk: self.chunks().len(), index: self.newest.len() - 1 };
        self.newest.back().map(|entry| (place(), entry))
    }

    /// All entries, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        self.chunks().map(Chunk::entries).chain([&self.newest]).flat_map(Queue::iter)
    }

    /// The entries of this very time, the newest first.
    pub(super) fn of(&self, at: u64) -> impl Iterator<Item = (Position, Entry)> {
        let begun = self.older.as_ref().map_or(0, |older| older.chunks.partition_point(|chunk| chunk.first() <= at));
        let all = self.chunks().len();
        let places = [all].into_iter().chain((0..begun).rev());
        places.flat_map(move |chunk| self.until(at, chunk)).take_while(move |(_, entry)| entry.at == at)
    }

    /// An entry with this id of this time, or of an earlier one, since the clock may have stepped back.
    pub(super) fn find(&self, id: AdmissionId, at: u64, is_it: impl Fn(&Entry) -> bool) -> Option<Position> {
        let is_it = |(_, entry): &(Position, Entry)| entry.id == id && is_it(entry);
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

    pub(super) fn get(&self, Position { chunk, index }: Position) -> Option<Entry> {
        let chunk = self.older.as_ref().and_then(|older| older.chunks.get(chunk));
        chunk.map_or(&self.newest, Chunk::entries).get(index)
    }

    /// The entry with whose departure this many of the chosen units have left.
    pub(super) fn departure(&self, mut units: u64, units_of: UnitsOf) -> Option<Entry> {
        let older = self.older.as_ref().and_then(|older| older.with_units(&mut units, units_of));
        older.unwrap_or(&self.newest).iter().find(|entry| {
            units = units.saturating_sub(units_of(entry.sum()));
            units == 0
        })
    }

    /// Inserts an entry behind those of its time.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        if self.newest.len() == CHUNK {
            let full = mem::replace(&mut self.newest, Queue::with_capacity(CHUNK));
            self.older.get_or_insert_default().push(full);
        }
        self.oldest_at = self.oldest_at.min(entry.at);
        if self.last_at <= entry.at {
            self.last_at = entry.at;
            self.newest.push_back(entry);
        } else {
            self.insert_between(entry);
        }
    }

    fn insert_between(&mut self, entry: Entry) {
        match &mut self.older {
            Some(older) if older.last() > entry.at => older.insert(entry),
            _ => self.newest.insert(entry),
        }
    }

    /// Changes an entry, but neither its time nor its id.
    pub(super) fn change(&mut self, place: Position, change: impl FnOnce(&mut Entry)) {
        match &mut self.older {
            Some(older) if place.chunk < older.chunks.len() => older.change(place, change),
            _ => self.newest.change(place.index, change),
        }
    }

    pub(super) fn remove(&mut self, place: Position) -> Option<Entry> {
        let removed = match &mut self.older {
            Some(older) if place.chunk < older.chunks.len() => {
                let removed = older.remove(place);
                self.older.take_if(|older| older.chunks.is_empty());
                removed
            }
            _ => self.newest.remove(place.index),
        };
        self.note_ends();
        removed
    }

    /// Drops the oldest entries while their times are gone, and returns how many.
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(u64) -> bool) -> usize {
        let mut dropped = 0;
        if let Some(older) = &mut self.older {
            dropped = older.drop_while(&is_gone);
            self.older.take_if(|older| older.chunks.is_empty());
        }
        if self.older.is_none() {
            dropped += self.newest.drop_while(is_gone);
        }
        match self.oldest() {
            Some(oldest) => self.oldest_at = oldest.at,
            None => self.note_ends(),
        }
        dropped
    }

    /// Moves entries of a later time back to this one; of very many only the first.
    pub(super) fn pull_back(&mut self, at: u64) {
        if self.last_at > at {
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
        self.newest.pull_back(at, left);
        self.note_ends();
    }

    fn note_ends(&mut self) {
        self.oldest_at = self.oldest().map_or(u64::MAX, |entry| entry.at);
        self.last_at = self.last().map_or(0, |entry| entry.at);
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        self.newest.shrink();
    }

    fn chunks(&self) -> vec_deque::Iter<'_, Chunk> {
        self.older.as_ref().map_or_else(Default::default, |older| older.chunks.iter())
    }

    /// The entries of a chunk up to this time, the newest first.
    fn until(&self, at: u64, chunk: usize) -> impl Iterator<Item = (Position, Entry)> {
        let of_chunk = self.older.as_ref().and_then(|older| older.chunks.get(chunk));
        let entries = of_chunk.map_or(&self.newest, Chunk::entries);
        let until = (0..entries.up_to(at)).rev();
        until.filter_map(move |index| Some((Position { chunk, index }, entries.get(index)?)))
    }
}

impl Default for Entries {
    fn default() -> Self {
        Self { newest: Queue::default(), older: None, oldest_at: u64::MAX, last_at: 0 }
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

    fn single() -> impl Strategy<Value = Step> {
        (0..3u64).prop_map(|at| Step::Insert { at, units: 1, is_reserved: false })
    }

    fn drop_some() -> impl Strategy<Value = Step> {
        (0..12u64).prop_map(|until| Step::Drop { until })
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
                    let (place, _) = entries.of(entry.at).find(|(_, other)| *other == entry).unwrap();
                    assert_eq!(entries.remove(place), Some(entry));
                }
                Step::Add { nth, units } if !plain.0.is_empty() => {
                    let nth = nth % plain.0.len();
                    let entry = plain.0[nth];
                    let (place, _) = entries.of(entry.at).find(|(_, other)| *other == entry).unwrap();
                    entries.change(place, |entry| entry.add(units));
                    plain.0[nth].add(units);
                }
                Step::Drop { until } => {
                    since += until;
                    let left = plain.0.split_off(plain.0.partition_point(|entry| entry.at <= since));
                    let mut sum = Sum::default();
                    plain.0.iter().for_each(|entry| sum.add(entry.sum()));
                    let gone = plain.0.len();
                    plain.0 = left;
                    let before = entries.sum();
                    let dropped = entries.drop_while(|at| at <= since);
                    let mut whole = entries.sum();
                    whole.add(sum);
                    assert_eq!((dropped, before), (gone, whole));
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
                    assert!(entries.of(entry.at).any(|found| found == (place, entry)));
                    assert_eq!(entry.at.checked_sub(1).and_then(find), None, "what is later is not found");
                }
                Step::Departure { units, is_reserved } => {
                    let (units_of, mut left): (UnitsOf, _) =
                        (if is_reserved { Sum::all } else { Sum::not_reserved }, units);
                    let departs = |entry: &&Entry| {
                        left = left.saturating_sub(units_of(entry.sum()));
                        left == 0
                    };
                    assert_eq!(entries.departure(units, units_of), plain.0.iter().find(departs).copied());
                }
                Step::Settle { .. } | Step::Add { .. } | Step::Find { .. } => {}
            }
            assert!(entries.iter().eq(plain.0.iter().copied()));
            let (oldest, last) = (plain.0.first().copied(), plain.0.last().copied());
            assert_eq!((entries.len(), entries.oldest(), entries.last()), (plain.0.len(), oldest, last));
            let ends = (oldest.map_or(u64::MAX, |entry| entry.at), last.map_or(0, |entry| entry.at));
            assert_eq!((entries.oldest_at, entries.last_at), ends);
            let mut sum = Sum::default();
            plain.0.iter().for_each(|entry| sum.add(entry.sum()));
            assert_eq!(entries.sum(), sum);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn entries_in_chunks_are_a_list(steps in prop::collection::vec(step(), 1..200)) {
            replay(&steps);
        }

        /// Named entries of one unit, which are stored in less memory as long as they come and go in order.
        #[test]
        fn entries_of_one_unit_are_a_list(
            steps in prop::collection::vec(prop_oneof![16 => single(), 4 => drop_some(), 1 => step()], 1..200),
        ) {
            let mut at = 0;
            let in_order = steps.into_iter().map(|step| match step {
                Step::Insert { at: after, units: 1, is_reserved: false } => {
                    at += after;
                    Step::Insert { at, units: 1, is_reserved: false }
                }
                Step::Drop { until } => {
                    at = at.saturating_sub(until);
                    Step::Drop { until }
                }
                step => step,
            });
            replay(&in_order.collect::<Vec<_>>());
        }
    }
}
