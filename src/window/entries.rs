//! The entries of a log, in the order of their times.
//!
//! The newest stand in a queue, and so do all that most logs ever have. Of a long log the older ones stand in chunks, each
//! with its sum: so an entry is found, put in its place or taken out, and a whole chunk drops out, in microseconds, also
//! among millions.

use std::{collections::VecDeque, mem};

use super::{entry::Entry, ids::Ids};
use crate::admission::AdmissionId;

/// The most entries in the queue of the newest, and half of the most in a chunk. To move some of so many takes a
/// microsecond at most. The unit tests have short chunks, so that there are many.
const CHUNK: usize = if cfg!(test) { 4 } else { 1_024 };

/// How many entries are looked through for one that cannot be found by its time: that takes some ten microseconds.
const LOOKED_THROUGH: usize = if cfg!(test) { 8 } else { 10_000 };

/// How many entries one check pulls back when the clock has stepped back. The next one goes on.
const PULLED_BACK: usize = if cfg!(test) { 8 } else { 1_000 };

#[derive(Debug, Default)]
pub(super) struct Entries {
    newest: VecDeque<Entry>,
    older: Option<Box<Older>>,
}

/// What stands before the newest: at least one chunk, and none of them empty.
#[derive(Debug, Default)]
struct Older {
    chunks: VecDeque<Chunk>,
    len: usize,
    /// Finds what callers have given ids to, if they do.
    ids: Option<Ids>,
}

#[derive(Debug)]
struct Chunk {
    entries: VecDeque<Entry>,
    units: u64,
}

/// Where an entry stands: in which chunk, or behind the last of them among the newest, and at which place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    chunk: usize,
    index: usize,
}

impl Entries {
    pub(super) fn len(&self) -> usize {
        self.newest.len() + self.older.as_ref().map_or(0, |older| older.len)
    }

    pub(super) fn oldest(&self) -> Option<&Entry> {
        let chunk = self.older.as_ref().and_then(|older| older.chunks.front());
        chunk.map_or(&self.newest, |chunk| &chunk.entries).front()
    }

    pub(super) fn last(&self) -> Option<&Entry> {
        self.newest.back().or_else(|| self.older.as_ref()?.chunks.back()?.entries.back())
    }

    /// All of them, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let chunks = self.older.iter().flat_map(|older| &older.chunks);
        chunks.flat_map(|chunk| &chunk.entries).chain(&self.newest)
    }

    /// Those up to this time, the newest first.
    pub(super) fn until(&self, at: u64) -> impl Iterator<Item = (Place, &Entry)> {
        let chunks = self.older.as_ref().map_or(0, |older| older.chunks.len());
        let first_later = |older: &Older| older.chunks.partition_point(|chunk| chunk.first() <= at);
        let begun = self.older.as_ref().map_or(0, |older| first_later(older));
        [chunks].into_iter().chain((0..begun).rev()).flat_map(move |chunk| {
            let entries = self.chunk(chunk);
            let end = later_than(entries, at);
            entries.range(..end).enumerate().rev().map(move |(index, entry)| (Place { chunk, index }, entry))
        })
    }

    /// Those of this very time, the newest first.
    pub(super) fn of(&self, at: u64) -> impl Iterator<Item = (Place, &Entry)> {
        self.until(at).take_while(move |(_, entry)| entry.at == at)
    }

    /// One with this id and so many units that stands at this time or before it: all of this time are looked at, and the
    /// next before it, and all whose ids were given by callers.
    pub(super) fn find(
        &self,
        at: u64,
        (id, units): (AdmissionId, u64),
        is_it: impl Fn(&Entry) -> bool,
    ) -> Option<Place> {
        let is_it = |entry: &Entry| entry.id == id && entry.count() == units && is_it(entry);
        let place = |(place, _)| place;
        let near = self.until(at).enumerate().take_while(|(n, (_, entry))| *n < LOOKED_THROUGH || entry.at == at);
        if let Some(found) = near.map(|(_, found)| found).find(|(_, entry)| is_it(entry)) {
            return Some(place(found));
        }
        let known = self.older.as_ref()?.ids.as_ref()?.time_of(id, units).filter(|known| *known <= at)?;
        self.of(known).find(|(_, entry)| is_it(entry)).map(place)
    }

    /// The entry with which so many units have left, the oldest first.
    pub(super) fn departure(&self, mut units: u64) -> Option<&Entry> {
        let mut entries = &self.newest;
        for chunk in self.older.iter().flat_map(|older| &older.chunks) {
            if chunk.units >= units {
                entries = &chunk.entries;
                break;
            }
            units -= chunk.units;
        }
        entries.iter().find(|entry| {
            units = units.saturating_sub(entry.count());
            units == 0
        })
    }

    /// Puts an entry behind those of its time.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        if self.newest.len() == CHUNK {
            self.seal();
        }
        if self.last().is_none_or(|last| last.at <= entry.at) {
            self.newest.push_back(entry);
        } else {
            self.insert_between(entry);
        }
    }

    fn insert_between(&mut self, entry: Entry) {
        let oldest = self.oldest().map_or(0, |oldest| oldest.at);
        match &mut self.older {
            Some(older) if older.last() > entry.at => older.insert(entry, oldest),
            _ => self.newest.insert(later_than(&self.newest, entry.at), entry),
        }
    }

    /// Changes an entry, but not its time.
    pub(super) fn change(&mut self, place: Place, change: impl FnOnce(&mut Entry)) {
        match &mut self.older {
            Some(older) if place.chunk < older.chunks.len() => older.chunks[place.chunk].change(place.index, change),
            _ => self.newest.get_mut(place.index).map_or((), change),
        }
    }

    pub(super) fn remove(&mut self, place: Place) -> Option<Entry> {
        match &mut self.older {
            Some(older) if place.chunk < older.chunks.len() => {
                let removed = older.remove(place);
                if older.chunks.is_empty() {
                    self.older = None;
                }
                removed
            }
            _ => self.newest.remove(place.index),
        }
    }

    /// Drops the oldest, as long as they are gone, and says how many entries and units that were.
    #[inline]
    pub(super) fn drop_while(&mut self, is_gone: impl Fn(&Entry) -> bool) -> (usize, u64) {
        let (mut entries, mut units) = (0, 0_u64);
        if let Some(older) = &mut self.older {
            (entries, units) = older.drop_while(&is_gone);
            if !older.chunks.is_empty() {
                return (entries, units);
            }
            self.older = None;
        }
        while let Some(entry) = self.newest.front().filter(|entry| is_gone(entry)) {
            (entries, units) = (entries + 1, units.saturating_add(entry.count()));
            self.newest.pop_front();
        }
        (entries, units)
    }

    /// Lets those of a later time be of this one. Of very many only the first are changed.
    pub(super) fn pull_back(&mut self, at: u64) {
        if self.last().is_none_or(|last| last.at <= at) {
            return;
        }
        let (mut left, oldest) = (PULLED_BACK, self.oldest().map_or(0, |oldest| oldest.at));
        if let Some(older) = &mut self.older {
            left -= older.pull_back(at, oldest.min(at), left);
        }
        let place = later_than(&self.newest, at);
        self.newest.range_mut(place..).take(left).for_each(|entry| entry.at = at);
    }

    /// Gives back memory that a burst left behind.
    pub(super) fn shrink(&mut self) {
        shrink(&mut self.newest);
    }

    fn chunk(&self, chunk: usize) -> &VecDeque<Entry> {
        let chunk = self.older.as_ref().and_then(|older| older.chunks.get(chunk));
        chunk.map_or(&self.newest, |chunk| &chunk.entries)
    }

    /// Makes a chunk of the newest.
    fn seal(&mut self) {
        let oldest = self.oldest().map_or(0, |oldest| oldest.at);
        let entries = mem::replace(&mut self.newest, VecDeque::with_capacity(CHUNK));
        self.older.get_or_insert_default().push(entries, oldest);
    }
}

impl Older {
    fn last(&self) -> u64 {
        self.chunks.back().and_then(|chunk| chunk.entries.back()).map_or(0, |entry| entry.at)
    }

    fn push(&mut self, entries: VecDeque<Entry>, oldest: u64) {
        self.len += entries.len();
        entries.iter().for_each(|entry| self.know(entry, oldest));
        self.chunks.push_back(Chunk::new(entries));
    }

    /// Puts an entry into the chunk that it belongs to, which there is if it is older than the last.
    fn insert(&mut self, entry: Entry, oldest: u64) {
        let place = self.chunks.partition_point(|chunk| chunk.last() <= entry.at);
        let Some(chunk) = self.chunks.get_mut(place) else { return };
        let half = chunk.insert(entry);
        if let Some(half) = half {
            self.chunks.insert(place + 1, half);
        }
        self.len += 1;
        self.know(&entry, oldest);
    }

    fn remove(&mut self, place: Place) -> Option<Entry> {
        let chunk = self.chunks.get_mut(place.chunk)?;
        let removed = chunk.remove(place.index)?;
        if chunk.entries.is_empty() {
            self.chunks.remove(place.chunk);
        }
        self.len -= 1;
        if let Some(ids) = self.ids.as_mut().filter(|_| removed.is_given()) {
            ids.forget(removed.id, removed.count());
        }
        Some(removed)
    }

    fn drop_while(&mut self, is_gone: impl Fn(&Entry) -> bool) -> (usize, u64) {
        let (mut entries, mut units) = (0, 0_u64);
        while let Some(chunk) = self.chunks.front_mut() {
            if chunk.entries.back().is_some_and(|last| !is_gone(last)) {
                let (some, of_them) = chunk.drop_while(is_gone);
                (entries, units) = (entries + some, units.saturating_add(of_them));
                break;
            }
            (entries, units) = (entries + chunk.entries.len(), units.saturating_add(chunk.units));
            self.chunks.pop_front();
        }
        self.len -= entries;
        (entries, units)
    }

    /// Pulls back so many at most, and says how many that were.
    fn pull_back(&mut self, at: u64, oldest: u64, most: usize) -> usize {
        let (place, mut left) = (self.chunks.partition_point(|chunk| chunk.last() <= at), most);
        let mut given = Vec::new();
        for chunk in self.chunks.range_mut(place..) {
            let later = later_than(&chunk.entries, at);
            for entry in chunk.entries.range_mut(later..).take(left) {
                (entry.at, left) = (at, left - 1);
                given.extend(entry.is_given().then_some(*entry));
            }
        }
        given.iter().for_each(|entry| self.know(entry, oldest));
        most - left
    }

    /// Remembers where an entry is, if its id was given. Nothing is older than the oldest.
    fn know(&mut self, entry: &Entry, oldest: u64) {
        if entry.is_given() {
            self.ids.get_or_insert_default().know(entry.id, entry.count(), entry.at, oldest);
        }
    }
}

impl Chunk {
    fn new(entries: VecDeque<Entry>) -> Self {
        let units = entries.iter().fold(0, |units: u64, entry| units.saturating_add(entry.count()));
        Self { entries, units }
    }

    fn first(&self) -> u64 {
        self.entries.front().map_or(0, |entry| entry.at)
    }

    fn last(&self) -> u64 {
        self.entries.back().map_or(0, |entry| entry.at)
    }

    /// Puts an entry behind those of its time, and returns the second half if there are too many then.
    fn insert(&mut self, entry: Entry) -> Option<Self> {
        self.units = self.units.saturating_add(entry.count());
        self.entries.insert(later_than(&self.entries, entry.at), entry);
        (self.entries.len() == 2 * CHUNK).then(|| {
            let half = Self::new(self.entries.split_off(CHUNK));
            self.units = self.units.saturating_sub(half.units);
            half
        })
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.get_mut(index) {
            let before = entry.count();
            change(entry);
            self.units = self.units.saturating_sub(before).saturating_add(entry.count());
        }
    }

    fn remove(&mut self, index: usize) -> Option<Entry> {
        let removed = self.entries.remove(index)?;
        self.units = self.units.saturating_sub(removed.count());
        shrink(&mut self.entries);
        Some(removed)
    }

    fn drop_while(&mut self, is_gone: impl Fn(&Entry) -> bool) -> (usize, u64) {
        let (mut entries, mut units) = (0, 0_u64);
        while let Some(entry) = self.entries.front().filter(|entry| is_gone(entry)) {
            (entries, units) = (entries + 1, units.saturating_add(entry.count()));
            self.entries.pop_front();
        }
        self.units = self.units.saturating_sub(units);
        (entries, units)
    }
}

/// How many of them are not later than this time.
fn later_than(entries: &VecDeque<Entry>, at: u64) -> usize {
    entries.partition_point(|entry| entry.at <= at)
}

fn shrink(entries: &mut VecDeque<Entry>) {
    if entries.capacity() / 4 > entries.len() {
        entries.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::window::entry::Kind;

    #[derive(Clone, Debug)]
    enum Step {
        Insert { at: u64, units: u64, is_given: bool },
        Settle { nth: usize },
        Add { nth: usize, units: u64 },
        Drop { until: u64 },
        PullBack { at: u64 },
        Find { nth: usize, later: u64 },
        Departure { units: u64 },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..60u64, 1..5u64, any::<bool>()).prop_map(|(at, units, is_given)| Step::Insert { at, units, is_given }),
            2 => any::<usize>().prop_map(|nth| Step::Settle { nth }),
            1 => (any::<usize>(), 1..5u64).prop_map(|(nth, units)| Step::Add { nth, units }),
            1 => (0..20u64).prop_map(|until| Step::Drop { until }),
            1 => (40..60u64).prop_map(|at| Step::PullBack { at }),
            4 => (any::<usize>(), 0..60u64).prop_map(|(nth, later)| Step::Find { nth, later }),
            2 => (1..200u64).prop_map(|units| Step::Departure { units }),
        ]
    }

    /// What entries do, in a plain list.
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
                Step::Insert { at, units, is_given } => {
                    let entry = Entry::new(Kind::Kept, since + at, units, AdmissionId::from(next_id));
                    let entry = if is_given { entry.given() } else { entry };
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
                    let gone = (plain.0.len(), plain.0.iter().map(Entry::count).sum());
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
                    let found = entries.find(at, (entry.id, entry.count()), |other| other.is(Kind::Kept));
                    let is_near = plain.0[nth..].iter().filter(|other| other.at <= at).count() <= LOOKED_THROUGH;
                    if entry.is(Kind::Kept) && (entry.is_given() || is_near || later == 0) {
                        let place = found.unwrap();
                        assert_eq!(entries.until(at).find(|(other, _)| other == &place).unwrap().1, &entry);
                    }
                    if entry.at > 0 {
                        assert_eq!(
                            entries.find(entry.at - 1, (entry.id, entry.count()), |_| true),
                            None,
                            "it is later"
                        );
                    }
                }
                Step::Departure { units } => {
                    let mut left = units;
                    let departs = |entry: &&Entry| {
                        left = left.saturating_sub(entry.count());
                        left == 0
                    };
                    assert_eq!(entries.departure(units), plain.0.iter().find(departs));
                }
                Step::Settle { .. } | Step::Add { .. } | Step::Find { .. } => {}
            }
            assert!(entries.iter().eq(&plain.0));
            assert!(
                entries.until(since + 30).map(|(_, entry)| entry).eq(plain
                    .0
                    .iter()
                    .rev()
                    .filter(|e| e.at <= since + 30))
            );
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
