//! The log: admissions in the order of their times, even if the clock has stepped back.
//!
//! A unit of time `t` counts at `now` while `now − window < t`; at `t + window` exactly it is gone. An exact log stores the
//! time of the admission, a compact log the end of its sub-window, a fixed window its start. A reservation is stored under
//! the time of a window before its lease ends, so that it leaves then.
//!
//! The newest entries are in one chunk, and most logs have no others. So finding, inserting and removing an entry, or
//! dropping a chunk, takes microseconds even among a million.

use std::{collections::VecDeque, iter, mem, sync::LazyLock};

use super::chunk::{CHUNK, Chunk, Entry, Kind, Sum, UnitsOf};
use crate::check::{AdmissionId, random};

/// The most entries that one check moves when the clock has stepped back. The next check goes on.
const PULLED_BACK: usize = if cfg!(test) { 8 } else { 1_000 };

/// The entries in the window.
#[derive(Debug)]
pub(super) struct Log {
    newest: Chunk,
    older: Option<Box<Older>>,
    /// The time of the oldest entry, or the latest of all times. It is here so that most checks need not read the entry itself,
    /// which is seldom in the processor's cache.
    oldest_at: u64,
}

/// The entries before the newest: at least one chunk, and no empty one.
#[derive(Debug, Default)]
struct Older {
    chunks: VecDeque<(Chunk, IdFilter)>,
    /// The number of their entries.
    len: usize,
    sum: Sum,
}

/// A Bloom filter of the ids in a chunk, with a false positive in some hundreds of look-ups.
#[derive(Debug)]
struct IdFilter(Box<[u64; Self::WORDS]>);

/// The number of a chunk, and the index of an entry there. The newest chunk has the last number.
type Position = (usize, usize);

impl Log {
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

    /// All entries, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        self.chunks().flat_map(Chunk::iter)
    }

    /// Drops entries that have left the window.
    #[inline]
    pub(super) fn trim(&mut self, now: u64, window: u64) {
        let Some(gone) = now.checked_sub(window) else { return };
        while self.oldest_at <= gone {
            self.in_chunk(0, |chunk| chunk.drop_until(gone));
        }
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        self.newest.shrink();
    }

    /// The time until the oldest entry leaves the window; 0 if there is none.
    #[inline]
    pub(super) fn reset_after(&self, now: u64, window: u64) -> u64 {
        if self.len() == 0 { 0 } else { leaves_after(self.oldest_at, now, window) }
    }

    /// The time until at most `most` of the chosen units are left; 0 if it is so now. No entry counts as later than `present`.
    pub(super) fn wait_for(&self, most: u64, now: u64, present: u64, window: u64, units_of: UnitsOf) -> u64 {
        let mut excess = units_of(self.sum()).saturating_sub(most);
        if excess == 0 {
            return 0;
        }
        let leaves_last = self.chunks().find(|chunk| {
            let units = units_of(chunk.sum());
            let is_it = units >= excess;
            excess -= if is_it { 0 } else { units };
            is_it
        });
        let departure = leaves_last.and_then(|chunk| {
            chunk.iter().find(|entry| {
                excess = excess.saturating_sub(units_of(entry.sum()));
                excess == 0
            })
        });
        departure.map_or(0, |entry| leaves_after(entry.at.min(present), now, window))
    }

    /// Moves entries of a later time back to the present; of very many only the first.
    pub(super) fn pull_back(&mut self, present: u64) {
        let last = self.newest.last().or_else(|| self.older.as_ref()?.last());
        if last > Some(present) {
            self.pull_back_later(present);
        }
    }

    #[cold]
    fn pull_back_later(&mut self, present: u64) {
        let mut left = PULLED_BACK;
        let (first, newest) = self.older.as_ref().map_or((0, 0), |older| (older.place_of(present), older.chunks.len()));
        for place in first..=newest {
            left -= self.in_chunk(place, |chunk| chunk.pull_back(present, left));
        }
    }

    /// The time of this very admission, if the log has it.
    pub(super) fn time_of(&self, id: AdmissionId, units: u64) -> Option<u64> {
        let is_it = |entry: &Entry| entry.units == units && matches!(entry.kind, Kind::Named | Kind::Reserved);
        self.of_id(id, u64::MAX).map(|(_, entry)| entry).find(is_it).map(|entry| entry.at)
    }

    /// Whether the log has a settlement of this id and time.
    pub(super) fn has_settled(&self, id: AdmissionId, at: u64) -> bool {
        self.of_id_and_time(id, at).any(|(_, entry)| entry.kind == Kind::Settled)
    }

    /// The sum of this time, to which units can be added without a new entry.
    pub(super) fn sum_at(&self, at: u64) -> Option<Position> {
        let mut of_time = self.of_id_and_time(AdmissionId::from(0), at);
        of_time.find(|(_, entry)| entry.kind == Kind::Sum).map(|(place, _)| place)
    }

    /// Adds units to the sum of their time.
    pub(super) fn add_to_sum(&mut self, at: u64, units: u64) {
        match self.sum_at(at) {
            Some((chunk, index)) => self.in_chunk(chunk, |chunk| chunk.add(index, units)),
            None => self.insert(Entry { at, id: AdmissionId::from(0), kind: Kind::Sum, units }),
        }
    }

    /// Adds units to the newest entry if it is a sum of the same part of the clock's time, or any of a later time: a sum of the later
    /// time. So there is at most one new entry for each part.
    pub(super) fn merge(&mut self, mut at: u64, part: u64, mut units: u64) {
        let (last, place) =
            (self.newest.len().saturating_sub(1), self.older.as_ref().map_or(0, |older| older.chunks.len()));
        let is_it = |newest: &Entry| newest.at > at || newest.kind == Kind::Sum && newest.at / part == at / part;
        if let Some(newest) = self.newest.get(last).filter(is_it) {
            (at, units) = (at.max(newest.at), units.saturating_add(newest.units));
            self.in_chunk(place, |chunk| chunk.remove(last));
        }
        self.insert(Entry { at, id: AdmissionId::from(0), kind: Kind::Sum, units });
    }

    /// Removes an admission, and returns its time. If the clock has stepped back since, that may be before `at`. A later
    /// entry is another admission under the same id.
    pub(super) fn take(&mut self, id: AdmissionId, units: u64, kind: Kind, at: u64) -> Option<u64> {
        let mut of_id = self.of_id(id, at);
        let ((chunk, index), entry) = of_id.find(|(_, entry)| entry.units == units && entry.kind == kind)?;
        drop(of_id);
        self.in_chunk(chunk, |chunk| chunk.remove(index));
        Some(entry.at)
    }

    /// Inserts an entry behind those of its time.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        if self.newest.len() == CHUNK {
            self.close_newest();
        }
        self.oldest_at = self.oldest_at.min(entry.at);
        let is_last = self.newest.last().is_some_and(|last| last <= entry.at);
        match &mut self.older {
            Some(older) if !is_last && older.last() > Some(entry.at) => older.insert(entry),
            _ => self.newest.insert(entry),
        }
    }

    #[cold]
    fn close_newest(&mut self) {
        let full = mem::replace(&mut self.newest, Chunk::with_capacity(CHUNK));
        self.older.get_or_insert_default().push(full);
    }

    /// The entries with this id up to this time, since the clock may have stepped back: the newest first.
    fn of_id(&self, id: AdmissionId, at: u64) -> impl Iterator<Item = (Position, Entry)> {
        let newest = (self.older.as_ref().map_or(0, |older| older.chunks.len()), &self.newest);
        let older = self.older.iter().flat_map(move |older| older.with_id(id, at));
        iter::once(newest)
            .chain(older)
            .flat_map(move |(place, chunk)| chunk.of_id(id, at).map(move |(index, entry)| ((place, index), entry)))
    }

    fn of_id_and_time(&self, id: AdmissionId, at: u64) -> impl Iterator<Item = (Position, Entry)> {
        self.of_id(id, at).take_while(move |(_, entry)| entry.at == at)
    }

    fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.older.iter().flat_map(|older| &older.chunks).map(|(chunk, _)| chunk).chain([&self.newest])
    }

    /// Changes a chunk, and updates what is known of it.
    fn in_chunk<T>(&mut self, place: usize, change: impl FnOnce(&mut Chunk) -> T) -> T {
        let changed = match &mut self.older {
            Some(older) if place < older.chunks.len() => older.in_chunk(place, change),
            _ => change(&mut self.newest),
        };
        self.older.take_if(|older| older.chunks.is_empty());
        let first = self.older.as_ref().and_then(|older| older.chunks.front());
        let oldest = first.map_or(&self.newest, |(chunk, _)| chunk);
        self.oldest_at = oldest.first().unwrap_or(u64::MAX);
        changed
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { newest: Chunk::default(), older: None, oldest_at: u64::MAX }
    }
}

impl Older {
    fn last(&self) -> Option<u64> {
        self.chunks.back().and_then(|(chunk, _)| chunk.last())
    }

    /// The first chunk with an entry later than this time.
    fn place_of(&self, at: u64) -> usize {
        self.chunks.partition_point(|(chunk, _)| chunk.last() <= Some(at))
    }

    /// The chunks that may have entries with this id up to this time, the newest first.
    fn with_id(&self, id: AdmissionId, at: u64) -> impl Iterator<Item = (usize, &Chunk)> {
        let begun = self.chunks.partition_point(|(chunk, _)| chunk.first() <= Some(at));
        let bits = IdFilter::bits_of(id);
        let begun = self.chunks.range(..begun).enumerate().rev();
        begun.filter(move |(_, (_, filter))| filter.has(bits)).map(|(place, (chunk, _))| (place, chunk))
    }

    fn push(&mut self, chunk: Chunk) {
        self.len += chunk.len();
        self.sum.add(chunk.sum());
        self.chunks.push_back(with_filter(chunk));
    }

    /// Inserts an entry that is older than the last. Splits a chunk that is too long then.
    fn insert(&mut self, entry: Entry) {
        let place = self.place_of(entry.at);
        let half = self.in_chunk(place, |chunk| {
            chunk.insert(entry);
            (chunk.len() == 2 * CHUNK).then(|| chunk.split_off(CHUNK))
        });
        let (chunk, filter) = &mut self.chunks[place];
        match half {
            Some(half) => {
                *filter = IdFilter::of(chunk);
                self.len += half.len();
                self.sum.add(half.sum());
                self.chunks.insert(place + 1, with_filter(half));
            }
            None => filter.add(entry.id),
        }
    }

    fn in_chunk<T>(&mut self, place: usize, change: impl FnOnce(&mut Chunk) -> T) -> T {
        let (chunk, _) = &mut self.chunks[place];
        let (len, sum) = (chunk.len(), chunk.sum());
        let changed = change(chunk);
        self.len = self.len - len + chunk.len();
        self.sum.subtract(sum);
        self.sum.add(chunk.sum());
        match chunk.len() {
            0 => drop(self.chunks.remove(place)),
            _ => chunk.shrink(),
        }
        changed
    }
}

impl IdFilter {
    /// 16 bits for each entry of a full chunk.
    const WORDS: usize = CHUNK / 4;

    fn of(chunk: &Chunk) -> Self {
        let mut filter = Self(Box::new([0; Self::WORDS]));
        chunk.iter().for_each(|entry| filter.add(entry.id));
        filter
    }

    fn add(&mut self, id: AdmissionId) {
        let (word, bits) = Self::bits_of(id);
        self.0[word] |= bits;
    }

    /// Whether the bits of an id are set.
    fn has(&self, (word, bits): (usize, u64)) -> bool {
        self.0[word] & bits == bits
    }

    /// The word of an id in every filter, and its bits there. They depend on a random key of the process, so that no client can
    /// choose ids that collide.
    fn bits_of(id: AdmissionId) -> (usize, u64) {
        static KEY: LazyLock<[u64; 2]> = LazyLock::new(|| [random() | 1, random() | 1]);
        let [first, second] = *KEY;
        // Multiplied twice, so that every bit of the id changes the upper bits.
        let hash = id.0.wrapping_mul(first);
        let hash = (hash ^ hash >> 32).wrapping_mul(second);
        let bit = |place: u32| 1 << (hash >> place & 63);
        ((hash >> 32) as usize % Self::WORDS, bit(58) | bit(52) | bit(46) | bit(40))
    }
}

fn with_filter(chunk: Chunk) -> (Chunk, IdFilter) {
    let filter = IdFilter::of(&chunk);
    (chunk, filter)
}

fn leaves_after(at: u64, now: u64, window: u64) -> u64 {
    at.saturating_add(window).saturating_sub(now)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: u64 = 1_000;

    fn log(entries: &[(u64, u64)]) -> Log {
        let mut log = Log::default();
        for &(at, units) in entries {
            log.insert(Entry { at, id: AdmissionId::fresh(), kind: Kind::Named, units });
        }
        log
    }

    /// The entries and the units after the others have left.
    fn trimmed(log: &mut Log, now: u64) -> (usize, u64) {
        log.trim(now, WINDOW);
        (log.len(), log.sum().units)
    }

    /// The waits for all units, after a refusal.
    fn wait_for(log: &mut Log, most: u64, now: u64) -> u64 {
        log.pull_back(now);
        log.wait_for(most, now, now, WINDOW, Sum::all)
    }

    #[test]
    fn a_unit_counts_until_its_window_has_passed_and_not_a_microsecond_longer() {
        let mut log = log(&[(5_000, 3)]);
        assert_eq!(trimmed(&mut log, 5_999), (1, 3));
        assert_eq!(trimmed(&mut log, 6_000), (0, 0));
    }

    #[test]
    fn waiting_for_units_means_waiting_for_the_entry_that_frees_enough() {
        let mut log = log(&[(5_000, 1), (5_100, 4), (5_200, 1)]);
        let waits = [6, 5, 4, 1, 0].map(|most| wait_for(&mut log, most, 5_300));
        assert_eq!(waits, [0, 700, 800, 800, 900]);
    }

    #[test]
    fn reserved_units_count_for_the_longest_wait_only() {
        let mut log = log(&[(5_000, 1), (5_200, 2)]);
        log.insert(Entry { at: 4_900, id: AdmissionId::fresh(), kind: Kind::Reserved, units: 3 });
        let wait_for = |most, units_of| log.wait_for(most, 5_300, 5_300, WINDOW, units_of);
        let waits = [6, 5, 3, 2, 1, 0].map(|most| (wait_for(most, Sum::not_reserved), wait_for(most, Sum::all)));
        assert_eq!(waits, [(0, 0), (0, 600), (0, 600), (700, 700), (900, 900), (900, 900)]);
    }

    #[test]
    fn entries_from_the_future_count_as_now_once_they_refuse() {
        let mut log = log(&[(5_000, 1), (9_000, 1), (9_500, 1)]);
        assert_eq!(log.reset_after(4_000, WINDOW), 2_000, "as long as nothing is refused, they leave when they say");
        assert_eq!(wait_for(&mut log, 2, 5_500), 500, "the past entry is what is waited for");
        assert_eq!(wait_for(&mut log, 1, 5_500), WINDOW, "the others count as now");
        assert_eq!((log.len(), trimmed(&mut log, 6_500)), (3, (0, 0)), "one window later the key is right again");
    }

    #[test]
    fn entries_stay_in_order_when_the_clock_steps_back() {
        let mut log = log(&[(9_000, 2), (5_000, 1)]);
        assert_eq!(trimmed(&mut log, 6_000), (1, 2));
    }

    #[test]
    fn admissions_of_one_time_are_one_entry_and_one_with_an_id_is_not_among_them() {
        let mut log = Log::default();
        let id = AdmissionId::from(0);
        log.add_to_sum(5_099, 2);
        log.insert(Entry { at: 5_099, id, kind: Kind::Reserved, units: 3 });
        log.add_to_sum(5_099, 4);
        assert_eq!((log.len(), log.sum(), log.time_of(id, 6)), (2, Sum { units: 9, reserved: 3 }, None));
        let mut take = |kind, at| log.take(id, 3, kind, at);
        assert_eq!((take(Kind::Named, 5_099), take(Kind::Reserved, 5_098)), (None, None), "another kind, another time");
        assert_eq!((take(Kind::Reserved, 5_099), take(Kind::Reserved, 5_099)), (Some(5_099), None));
        assert_eq!((log.len(), log.sum().units), (1, 6));
    }

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
        let (mut log, mut plain, mut since, mut next_id) = (Log::default(), Plain::default(), 0, 0);
        for step in steps {
            match *step {
                Step::Insert { at, units, is_reserved } => {
                    let kind = if is_reserved { Kind::Reserved } else { Kind::Named };
                    let entry = Entry { at: since + at, id: AdmissionId::from(next_id), kind, units };
                    next_id += 1;
                    log.insert(entry);
                    plain.insert(entry);
                }
                Step::Settle { nth } if !plain.0.is_empty() => {
                    let entry = plain.0.remove(nth % plain.0.len());
                    assert_eq!(log.take(entry.id, entry.units, entry.kind, entry.at), Some(entry.at));
                }
                Step::Add { nth, units } if !plain.0.is_empty() => {
                    let nth = nth % plain.0.len();
                    let entry = plain.0[nth];
                    let ((chunk, index), _) = log.of_id(entry.id, entry.at).next().unwrap();
                    log.in_chunk(chunk, |chunk| chunk.add(index, units));
                    plain.0[nth].units += units;
                }
                Step::Drop { until } => {
                    since += until;
                    let left = plain.0.split_off(plain.0.partition_point(|entry| entry.at <= since));
                    let (gone, before) = (mem::replace(&mut plain.0, left), (log.len(), log.sum()));
                    log.trim(since + WINDOW, WINDOW);
                    let mut whole = log.sum();
                    gone.iter().for_each(|entry| whole.add(entry.sum()));
                    assert_eq!((log.len() + gone.len(), whole), before);
                }
                Step::PullBack { at } => {
                    log.pull_back(since + at);
                    let later = plain.0.iter_mut().filter(|entry| entry.at > since + at);
                    later.take(PULLED_BACK).for_each(|entry| entry.at = since + at);
                }
                Step::Find { nth, later } if !plain.0.is_empty() => {
                    let nth = nth % plain.0.len();
                    let (entry, at) = (plain.0[nth], plain.0[nth].at + later);
                    let find = |at| log.of_id(entry.id, at).map(|(_, entry)| entry).collect::<Vec<_>>();
                    assert_eq!(find(at), [entry]);
                    assert!(log.of_id_and_time(entry.id, entry.at).eq(log.of_id(entry.id, at)));
                    assert!(entry.at == 0 || find(entry.at - 1).is_empty(), "what is later is not found");
                }
                Step::Departure { units, is_reserved } => {
                    let units_of: UnitsOf = if is_reserved { Sum::all } else { Sum::not_reserved };
                    let all = plain.0.iter().map(|entry| units_of(entry.sum())).sum::<u64>();
                    // No more can leave than there are.
                    let mut left = units.min(all);
                    let departs = |entry: &&Entry| {
                        left = left.saturating_sub(units_of(entry.sum()));
                        left == 0
                    };
                    let departure = plain.0.iter().find(departs).filter(|_| all > 0);
                    let waits = departure.map_or(0, |entry| leaves_after(entry.at, since, WINDOW));
                    let most = all.saturating_sub(units);
                    assert_eq!(log.wait_for(most, since, u64::MAX, WINDOW, units_of), waits);
                }
                Step::Settle { .. } | Step::Add { .. } | Step::Find { .. } => {}
            }
            assert!(log.iter().eq(plain.0.iter().copied()));
            let (oldest, last) = (plain.0.first().copied(), plain.0.last().copied());
            let at = |entry: Option<Entry>| entry.map(|entry| entry.at);
            assert_eq!((log.len(), log.oldest_at), (plain.0.len(), at(oldest).unwrap_or(u64::MAX)));
            assert_eq!(log.chunks().filter_map(Chunk::last).last(), at(last));
            let mut sum = Sum::default();
            plain.0.iter().for_each(|entry| sum.add(entry.sum()));
            assert_eq!(log.sum(), sum);
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
