//! The sliding window log: admissions in time order, even if the clock has stepped back.
//!
//! A unit with the recorded time `t` counts as long as `now < t + window`. At exactly `t + window`,
//! it is gone. An exact log stores an admission's time. A compact log stores the time at which the
//! admission's sub-window ends. A fixed window stores the time at which that window starts. A
//! reservation is stored under the time one window before its lease ends, so that it leaves when
//! the lease ends.
//!
//! Most entries are added at the back and dropped at the front. If an entry is added or removed in
//! the middle, the entries after it are moved. A search for an id is linear: it begins at the time
//! that the caller passes in, and goes from there to older entries. It takes up to a millisecond
//! among half a million entries, the most that a log has by default.

use std::collections::VecDeque;

use super::entry::{Entry, Kind, Sum, UnitsOf};
use crate::check::AdmissionId;

/// One limit's units for one key: the entries in the window.
pub(crate) struct Log {
    /// The oldest entry's time, or `u64::MAX` in an empty log. With this copy, most checks need not
    /// read the entry itself, which is seldom in the processor's cache.
    oldest_at: u64,
    entries: Entries,
    /// The entries before this index have left the window.
    start: u32,
    /// The number of entries for which the store has reserved capacity. Only the store uses this
    /// field. It is here because a store record then fits into one cache line.
    pub(crate) taken: u32,
}

/// An entry's time and id.
type Stamp = (u64, AdmissionId);

/// Most logs have only single units: named entries of one unit, which take 16 bytes each. Other
/// entries take 24 bytes. A first entry that is a single unit or a sum needs no allocation.
enum Entries {
    Single([Stamp; 1]),
    /// One sum, with its units in place of an id.
    Sum([Stamp; 1]),
    Singles(Vec<Stamp>),
    Mixed(Box<Mixed>),
}

/// Entries of any kind, their packed units, and their sum.
struct Mixed {
    stamps: Vec<Stamp>,
    packed: VecDeque<u64>,
    sum: Sum,
}

/// The initial capacity of a list.
const FEWEST: usize = 4;

impl Default for Log {
    fn default() -> Self {
        Self {
            oldest_at: u64::MAX,
            entries: Entries::Singles(Vec::new()),
            start: 0,
            taken: 0,
        }
    }
}

impl Log {
    /// The number of entries.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.stamps().len()
    }

    /// All entries' times and ids, the oldest first.
    #[inline]
    fn stamps(&self) -> &[Stamp] {
        let all: &[Stamp] = match &self.entries {
            Entries::Single(one) | Entries::Sum(one) => one,
            Entries::Singles(stamps) => stamps,
            Entries::Mixed(mixed) => &mixed.stamps,
        };
        all.get(self.start as usize..).unwrap_or_default()
    }

    /// The list of times and ids, including entries that have left the window; `None` if the log
    /// does not need a list.
    #[inline]
    fn list(&mut self) -> Option<&mut Vec<Stamp>> {
        match &mut self.entries {
            Entries::Single(_) | Entries::Sum(_) => None,
            Entries::Singles(stamps) => Some(stamps),
            Entries::Mixed(mixed) => Some(&mut mixed.stamps),
        }
    }

    #[inline]
    pub(super) fn sum(&self) -> Sum {
        let units = match &self.entries {
            Entries::Mixed(mixed) => return mixed.sum,
            Entries::Sum([(_, units)]) => units.0,
            Entries::Single(_) | Entries::Singles(_) => self.len() as u64,
        };
        Sum { units, reserved: 0 }
    }

    /// All entries, the oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// Drops entries that have left the window.
    #[inline]
    pub(crate) fn trim(&mut self, now: u64, window: u64) {
        let Some(gone) = now.checked_sub(window) else {
            return;
        };
        if self.oldest_at > gone {
            return;
        }
        let stamps = self.stamps();
        let leaving = match stamps.last() {
            Some((last, _)) if *last <= gone => stamps.len(),
            _ => stamps.iter().take_while(|(at, _)| *at <= gone).count(),
        };
        if let Entries::Mixed(mixed) = &mut self.entries {
            for packed in mixed.packed.drain(..leaving) {
                mixed.sum.subtract(Entry::sum_of(packed));
            }
        }
        self.start += leaving as u32;
        self.changed();
    }

    /// Drops entries that have left the window, and frees the memory that a burst needed.
    pub(crate) fn sweep(&mut self, now: u64, window: u64) {
        self.trim(now, window);
        let (start, len) = (self.start as usize, self.len());
        if let Some(stamps) = self.list()
            && stamps.capacity() / 4 > len
        {
            stamps.drain(..start);
            stamps.shrink_to_fit();
            self.start = 0;
            if let Entries::Mixed(mixed) = &mut self.entries {
                mixed.packed.shrink_to_fit();
            }
        }
    }

    /// The time until the oldest entry leaves the window; 0 if there is none.
    #[inline]
    pub(super) fn reset_after(&self, now: u64, window: u64) -> u64 {
        if self.len() == 0 {
            0
        } else {
            leaves_after(self.oldest_at, now, window)
        }
    }

    /// The time until at most `most` of the units that `units_of` chooses are left; 0 if there are
    /// already at most `most`.
    pub(super) fn time_until(&self, most: u64, now: u64, window: u64, units_of: UnitsOf) -> u64 {
        let mut excess = units_of(self.sum()).saturating_sub(most);
        if excess == 0 {
            return 0;
        }
        let leaves_last = match &self.entries {
            Entries::Single(_) | Entries::Singles(_) => Some(excess as usize - 1),
            Entries::Sum(_) => Some(0),
            Entries::Mixed(mixed) => mixed.packed.iter().position(|packed| {
                excess = excess.saturating_sub(units_of(Entry::sum_of(*packed)));
                excess == 0
            }),
        };
        let departure = leaves_last.and_then(|index| self.stamps().get(index));
        departure.map_or(0, |(at, _)| leaves_after(*at, now, window))
    }

    /// Moves entries after `present` back to `present`.
    #[inline]
    pub(super) fn pull_back(&mut self, present: u64) {
        let later = self.up_to(present)..self.len();
        if later.is_empty() {
            return;
        }
        let moved: Vec<Entry> = self.iter().skip(later.start).collect();
        for index in later.rev() {
            self.remove(index);
        }
        for entry in moved {
            self.insert(Entry {
                at: present,
                ..entry
            });
        }
    }

    /// The time of this admission's entry, if the log has one.
    pub(crate) fn time_of(&self, id: AdmissionId, units: u64) -> Option<u64> {
        for (_, entry) in self.of_id(id, u64::MAX) {
            if entry.units == units && matches!(entry.kind, Kind::Named | Kind::Reserved) {
                return Some(entry.at);
            }
        }
        None
    }

    /// True if the log has a settlement with this id and time.
    pub(super) fn has_settled(&self, id: AdmissionId, at: u64) -> bool {
        self.of_id(id, at)
            .any(|(_, entry)| entry.kind == Kind::Settled && entry.at == at)
    }

    /// The sum at this time and its index, if the log has one. Units can be added to it without a
    /// new entry.
    pub(super) fn sum_at(&self, at: u64) -> Option<(usize, Entry)> {
        let until = (0..self.up_to(at))
            .rev()
            .filter_map(|index| Some((index, self.get(index)?)));
        until
            .take_while(|(_, entry)| entry.at == at)
            .find(|(_, entry)| entry.kind == Kind::Sum)
    }

    /// Removes the sums after this time, and returns their units.
    pub(super) fn take_sums_after(&mut self, at: u64) -> u64 {
        let mut units = 0_u64;
        for index in (self.up_to(at)..self.len()).rev() {
            if let Some(sum) = self.get(index).filter(|entry| entry.kind == Kind::Sum) {
                self.remove(index);
                units = units.saturating_add(sum.units);
            }
        }
        units
    }

    /// Adds units to the sum at their time.
    pub(super) fn add_to_sum(&mut self, at: u64, units: u64) {
        match self.sum_at(at) {
            Some((index, _)) => self.add(index, units),
            None => self.insert(Entry::new_sum(at, units)),
        }
    }

    /// Adds units to the newest entry if that is a sum in the same clock sub-window, or if it has a
    /// later time. The entry then becomes a sum with the later of the two times. Otherwise the
    /// units get a new entry. So there is at most one new entry per sub-window, if no other entries
    /// come in between.
    pub(super) fn add_to_sub_window(&mut self, mut at: u64, length: u64, mut units: u64) {
        let last = self.len().saturating_sub(1);
        if let Some(newest) = self.get(last)
            && (newest.at > at || newest.kind == Kind::Sum && newest.at / length == at / length)
        {
            at = at.max(newest.at);
            units = units.saturating_add(newest.units);
            self.remove(last);
        }
        self.insert(Entry::new_sum(at, units));
    }

    /// Removes an admission's entry, and returns its time. If the clock has stepped back since the
    /// admission, this time may be before `at`. An entry after `at` belongs to another admission
    /// with the same id.
    pub(super) fn take(&mut self, id: AdmissionId, units: u64, kind: Kind, at: u64) -> Option<u64> {
        let (index, entry) = self
            .of_id(id, at)
            .find(|(_, entry)| entry.units == units && entry.kind == kind)?;
        self.remove(index);
        Some(entry.at)
    }

    /// Inserts an entry behind those with the same time.
    #[inline]
    pub(super) fn insert(&mut self, entry: Entry) {
        let (index, stamp) = (self.up_to(entry.at), (entry.at, entry.id));
        let is_single = entry.packed() == Entry::SINGLE;
        self.oldest_at = self.oldest_at.min(entry.at);
        match &mut self.entries {
            Entries::Singles(stamps) if is_single && stamps.capacity() == 0 => {
                self.entries = Entries::Single([stamp]);
                return;
            }
            Entries::Singles(stamps) if entry.kind == Kind::Sum && stamps.capacity() == 0 => {
                self.entries = Entries::Sum([(entry.at, AdmissionId(entry.units))]);
                return;
            }
            Entries::Singles(_) if is_single => {}
            Entries::Single([first]) if is_single => {
                let mut stamps = Vec::with_capacity(FEWEST);
                stamps.push(*first);
                self.entries = Entries::Singles(stamps);
            }
            _ => {
                let mixed = self.mixed();
                mixed.packed.insert(index, entry.packed());
                mixed.sum.add(entry.sum());
            }
        }
        let mut start = self.start as usize;
        if let Some(stamps) = self.list() {
            if stamps.len() == stamps.capacity() && start > stamps.len() / 4 {
                stamps.drain(..start);
                start = 0;
            }
            stamps.insert(start + index, stamp);
            self.start = start as u32;
        }
    }

    /// Adds units to an entry.
    fn add(&mut self, index: usize, units: u64) {
        let Some(before) = self.get(index) else {
            return;
        };
        let after = Entry {
            units: before.units.saturating_add(units),
            ..before
        };
        if let Entries::Sum([(_, sum)]) = &mut self.entries {
            sum.0 = after.units;
            return;
        }
        let mixed = self.mixed();
        mixed.packed[index] = after.packed();
        mixed.sum.subtract(before.sum());
        mixed.sum.add(after.sum());
    }

    /// Returns the mixed entries. If the log has entries in a different form, converts them first.
    #[cold]
    fn mixed(&mut self) -> &mut Mixed {
        if !matches!(self.entries, Entries::Mixed(_)) {
            let all = self
                .iter()
                .map(|entry| ((entry.at, entry.id), entry.packed()));
            let (stamps, packed) = all.unzip();
            let sum = self.sum();
            self.entries = Entries::Mixed(Box::new(Mixed {
                stamps,
                packed,
                sum,
            }));
            self.start = 0;
        }
        match &mut self.entries {
            Entries::Mixed(mixed) => mixed,
            _ => unreachable!("the lists were made above"),
        }
    }

    fn remove(&mut self, index: usize) {
        let Some(entry) = self.get(index) else { return };
        if let Entries::Mixed(mixed) = &mut self.entries {
            mixed.packed.remove(index);
            mixed.sum.subtract(entry.sum());
        }
        let index = self.start as usize + index;
        match self.list() {
            Some(stamps) => _ = stamps.remove(index),
            None => self.entries = Entries::Singles(Vec::new()),
        }
        self.changed();
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<Entry> {
        let (at, id) = *self.stamps().get(index)?;
        let packed = match &self.entries {
            Entries::Single(_) | Entries::Singles(_) => Entry::SINGLE,
            Entries::Mixed(mixed) => *mixed.packed.get(index)?,
            Entries::Sum(_) => return Some(Entry::new_sum(at, id.0)),
        };
        Some(Entry::unpacked(at, id, packed))
    }

    /// The entries with this id up to the time `at`, the newest first, each with its index. Earlier
    /// entries are included, since a step back of the clock may have moved them.
    fn of_id(&self, id: AdmissionId, at: u64) -> impl Iterator<Item = (usize, Entry)> {
        let until = self.stamps().iter().take(self.up_to(at)).enumerate().rev();
        until
            .filter(move |(_, (_, other))| *other == id)
            .filter_map(|(index, _)| Some((index, self.get(index)?)))
    }

    /// The number of entries that are not later than this time.
    #[inline]
    pub(super) fn up_to(&self, at: u64) -> usize {
        let stamps = self.stamps();
        if stamps.last().is_none_or(|(last, _)| *last <= at) {
            return stamps.len();
        }
        stamps.partition_point(|(other, _)| *other <= at)
    }

    /// Updates the fields that depend on the entries, after entries were removed or moved. A list
    /// of single units keeps its allocation until the log is swept.
    #[inline]
    fn changed(&mut self) {
        let oldest = self.stamps().first().map(|(at, _)| *at);
        self.oldest_at = oldest.unwrap_or(u64::MAX);
        if oldest.is_none() {
            self.start = 0;
            match &mut self.entries {
                Entries::Singles(stamps) => stamps.clear(),
                _ => self.entries = Entries::Singles(Vec::new()),
            }
        }
    }
}

fn leaves_after(at: u64, now: u64, window: u64) -> u64 {
    at.saturating_add(window).saturating_sub(now)
}

#[cfg(test)]
mod tests {
    use std::mem;

    use proptest::prelude::*;

    use super::*;

    const WINDOW: u64 = 1_000;

    fn log(entries: &[(u64, u64)]) -> Log {
        let mut log = Log::default();
        for &(at, units) in entries {
            log.insert(Entry {
                at,
                id: AdmissionId::fresh(),
                kind: Kind::Named,
                units,
            });
        }
        log
    }

    /// Trims the log, and returns how many entries and units it has.
    fn trimmed(log: &mut Log, now: u64) -> (usize, u64) {
        log.trim(now, WINDOW);
        (log.len(), log.sum().units)
    }

    /// The wait until at most `most` units are left, after a refusal has moved entries back.
    fn wait_for(log: &mut Log, most: u64, now: u64) -> u64 {
        log.pull_back(now);
        log.time_until(most, now, WINDOW, Sum::all)
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
        log.insert(Entry {
            at: 4_900,
            id: AdmissionId::fresh(),
            kind: Kind::Reserved,
            units: 3,
        });
        let wait_for = |most, units_of| log.time_until(most, 5_300, WINDOW, units_of);
        let waits = [6, 5, 3, 2, 1, 0]
            .map(|most| (wait_for(most, Sum::not_reserved), wait_for(most, Sum::all)));
        assert_eq!(
            waits,
            [
                (0, 0),
                (0, 600),
                (0, 600),
                (700, 700),
                (900, 900),
                (900, 900)
            ]
        );
    }

    #[test]
    fn entries_from_the_future_count_as_now_once_they_refuse() {
        let mut log = log(&[(5_000, 1), (9_000, 1), (9_500, 1)]);
        assert_eq!(
            log.reset_after(4_000, WINDOW),
            2_000,
            "as long as nothing is refused, they leave when they say"
        );
        assert_eq!(
            wait_for(&mut log, 2, 5_500),
            500,
            "the past entry is what is waited for"
        );
        assert_eq!(
            wait_for(&mut log, 1, 5_500),
            WINDOW,
            "the others count as now"
        );
        assert_eq!(
            (log.len(), trimmed(&mut log, 6_500)),
            (3, (0, 0)),
            "one window later the key is right again"
        );
    }

    #[test]
    fn entries_stay_in_order_when_the_clock_steps_back() {
        let mut log = log(&[(9_000, 2), (5_000, 1)]);
        assert_eq!(trimmed(&mut log, 6_000), (1, 2));
    }

    #[test]
    fn admissions_of_one_time_are_one_entry_and_one_with_an_id_is_not_among_them() {
        let mut log = Log::default();
        let id = AdmissionId(0);
        log.add_to_sum(5_099, 2);
        log.insert(Entry {
            at: 5_099,
            id,
            kind: Kind::Reserved,
            units: 3,
        });
        log.add_to_sum(5_099, 4);
        assert_eq!(
            (log.len(), log.sum(), log.time_of(id, 6)),
            (
                2,
                Sum {
                    units: 9,
                    reserved: 3
                },
                None
            )
        );
        let mut take = |kind, at| log.take(id, 3, kind, at);
        assert_eq!(
            (take(Kind::Named, 5_099), take(Kind::Reserved, 5_098)),
            (None, None),
            "another kind, another time"
        );
        assert_eq!(
            (take(Kind::Reserved, 5_099), take(Kind::Reserved, 5_099)),
            (Some(5_099), None)
        );
        assert_eq!((log.len(), log.sum().units), (1, 6));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert {
            at: u64,
            units: u64,
            is_reserved: bool,
        },
        Settle {
            nth: usize,
        },
        Add {
            nth: usize,
            units: u64,
        },
        Drop {
            until: u64,
        },
        PullBack {
            at: u64,
        },
        Find {
            nth: usize,
            later: u64,
        },
        Departure {
            units: u64,
            is_reserved: bool,
        },
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
        (0..3u64).prop_map(|at| Step::Insert {
            at,
            units: 1,
            is_reserved: false,
        })
    }

    fn drop_some() -> impl Strategy<Value = Step> {
        (0..12u64).prop_map(|until| Step::Drop { until })
    }

    /// The model: a plain list.
    #[derive(Default)]
    struct Plain(Vec<Entry>);

    impl Plain {
        fn insert(&mut self, entry: Entry) {
            self.0
                .insert(self.0.partition_point(|other| other.at <= entry.at), entry);
        }
    }

    fn replay(steps: &[Step]) {
        let mut log = Log::default();
        let mut plain = Plain::default();
        let mut since = 0;
        let mut next_id = 0;
        for step in steps {
            match *step {
                Step::Insert {
                    at,
                    units,
                    is_reserved,
                } => {
                    let kind = if is_reserved {
                        Kind::Reserved
                    } else {
                        Kind::Named
                    };
                    let entry = Entry {
                        at: since + at,
                        id: AdmissionId(next_id),
                        kind,
                        units,
                    };
                    next_id += 1;
                    log.insert(entry);
                    plain.insert(entry);
                }
                Step::Settle { nth } if !plain.0.is_empty() => {
                    let entry = plain.0.remove(nth % plain.0.len());
                    assert_eq!(
                        log.take(entry.id, entry.units, entry.kind, entry.at),
                        Some(entry.at)
                    );
                }
                Step::Add { nth, units } if !plain.0.is_empty() => {
                    let nth = nth % plain.0.len();
                    let entry = plain.0[nth];
                    let (index, _) = log.of_id(entry.id, entry.at).next().unwrap();
                    log.add(index, units);
                    plain.0[nth].units += units;
                }
                Step::Drop { until } => {
                    since += until;
                    let left = plain
                        .0
                        .split_off(plain.0.partition_point(|entry| entry.at <= since));
                    let gone = mem::replace(&mut plain.0, left);
                    let before = (log.len(), log.sum());
                    log.trim(since + WINDOW, WINDOW);
                    let mut whole = log.sum();
                    for entry in &gone {
                        whole.add(entry.sum());
                    }
                    assert_eq!((log.len() + gone.len(), whole), before);
                }
                Step::PullBack { at } => {
                    log.pull_back(since + at);
                    for entry in &mut plain.0 {
                        entry.at = entry.at.min(since + at);
                    }
                }
                Step::Find { nth, later } if !plain.0.is_empty() => {
                    let nth = nth % plain.0.len();
                    let entry = plain.0[nth];
                    let at = plain.0[nth].at + later;
                    let find = |at| {
                        log.of_id(entry.id, at)
                            .map(|(_, entry)| entry)
                            .collect::<Vec<_>>()
                    };
                    assert_eq!(find(at), [entry]);
                    assert!(
                        entry.at == 0 || find(entry.at - 1).is_empty(),
                        "what is later is not found"
                    );
                }
                Step::Departure { units, is_reserved } => {
                    let units_of: UnitsOf = if is_reserved {
                        Sum::all
                    } else {
                        Sum::not_reserved
                    };
                    let all = plain
                        .0
                        .iter()
                        .map(|entry| units_of(entry.sum()))
                        .sum::<u64>();
                    // At most as many units can leave as the list has.
                    let mut left = units.min(all);
                    let departs = |entry: &&Entry| {
                        left = left.saturating_sub(units_of(entry.sum()));
                        left == 0
                    };
                    let departure = plain.0.iter().find(departs).filter(|_| all > 0);
                    let waits = departure.map_or(0, |entry| leaves_after(entry.at, since, WINDOW));
                    let most = all.saturating_sub(units);
                    assert_eq!(log.time_until(most, since, WINDOW, units_of), waits);
                }
                Step::Settle { .. } | Step::Add { .. } | Step::Find { .. } => {}
            }
            assert!(log.iter().eq(plain.0.iter().copied()));
            let oldest = plain.0.first().copied();
            let last = plain.0.last().copied();
            let at = |entry: Option<Entry>| entry.map(|entry| entry.at);
            let oldest_at = at(oldest).unwrap_or(u64::MAX);
            assert_eq!((log.len(), log.oldest_at), (plain.0.len(), oldest_at));
            assert_eq!(at(log.iter().last()), at(last));
            let mut sum = Sum::default();
            for entry in &plain.0 {
                sum.add(entry.sum());
            }
            assert_eq!(log.sum(), sum);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn entries_of_any_kind_are_a_list(steps in prop::collection::vec(step(), 1..200)) {
            replay(&steps);
        }

        /// Named entries of one unit, which take less memory as long as they come and go in order.
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
