//! The log: admissions in the order of their times, even if the clock has stepped back.
//!
//! A unit of time `t` counts at `now` while `now − window < t`; at `t + window` exactly it is gone. An exact log stores the
//! time of the admission, a compact log the end of its sub-window, a fixed window its start. A reservation is stored under
//! the time of a window before its lease ends, so that it leaves then.

use super::{
    chunk::Position,
    entries::Entries,
    entry::{Entry, Kind, RetryWait, Sum, UnitsOf},
};
use crate::admission::AdmissionId;

/// The entries in the window.
#[derive(Debug, Default)]
pub(crate) struct Log(Entries);

impl Log {
    /// Drops entries that have left the window, and returns how many.
    #[inline]
    pub(super) fn trim(&mut self, now: u64, window: u64) -> usize {
        let has_left = |at: u64| at.saturating_add(window) <= now;
        if has_left(self.0.oldest_at()) { self.0.drop_while(has_left) } else { 0 }
    }

    #[inline]
    pub(super) fn used(&self) -> u64 {
        self.0.sum().units
    }

    #[inline]
    pub(super) fn reserved(&self) -> u64 {
        self.0.sum().reserved
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        self.0.shrink();
    }

    /// The time until the oldest entry leaves the window; 0 if there is none.
    #[inline]
    pub(super) fn reset_after(&self, now: u64, window: u64) -> u64 {
        if self.len() == 0 { 0 } else { leaves_after(self.0.oldest_at(), now, window) }
    }

    /// The time of this very admission, if the log has it.
    pub(super) fn time_of(&self, id: AdmissionId, units: u64) -> Option<u64> {
        let is_it = |entry: &Entry| entry.count() == units && (entry.is(Kind::Named) || entry.is(Kind::Reserved));
        self.0.find(id, u64::MAX, is_it).and_then(|place| self.0.get(place)).map(|entry| entry.at)
    }

    /// Whether the log has a settlement of this id and time.
    pub(super) fn has_settled(&self, id: AdmissionId, at: u64) -> bool {
        self.0.of(at).any(|(_, entry)| entry.id == id && entry.is(Kind::Settled))
    }

    /// Whether there is a sum of this time, to which units can be added without a new entry.
    pub(super) fn has_sum_at(&self, at: u64) -> bool {
        self.sum_at(at).is_some()
    }

    /// The time until at most `most` units are left; 0 if it is so now, and at most until a window after `present`.
    /// Entries of a later time than `present` are moved back to it.
    pub(super) fn wait_for(&mut self, most: u64, now: u64, present: u64, window: u64) -> RetryWait {
        self.pull_back(present);
        let until_left = |units_of: UnitsOf| {
            let excess = units_of(self.sum()).saturating_sub(most);
            let departure = (excess > 0).then(|| self.0.departure(excess, units_of)).flatten();
            departure.map_or(0, |entry| leaves_after(entry.at.min(present), now, window))
        };
        RetryWait::of(self.reserved(), until_left)
    }

    /// Moves entries of a later time back to the present.
    pub(super) fn pull_back(&mut self, present: u64) {
        self.0.pull_back(present);
    }

    pub(super) fn sum(&self) -> Sum {
        self.0.sum()
    }

    /// When entries leave the window, the oldest first, and their units.
    pub(super) fn departures(&self, window: u64) -> impl Iterator<Item = (u64, Sum)> {
        self.0.iter().map(move |entry| (entry.at.saturating_add(window), entry.sum()))
    }

    #[inline]
    pub(super) fn add_named(&mut self, at: u64, units: u64, id: AdmissionId) {
        self.insert(Entry::new(Kind::Named, at, units, id));
    }

    pub(super) fn add_reserved(&mut self, at: u64, units: u64, id: AdmissionId) {
        self.insert(Entry::new(Kind::Reserved, at, units, id));
    }

    pub(super) fn add_settled(&mut self, at: u64, units: u64, id: AdmissionId) {
        self.insert(Entry::new(Kind::Settled, at, units, id));
    }

    /// Adds units to the sum of their time.
    pub(super) fn add_to_sum(&mut self, at: u64, units: u64) {
        match self.sum_at(at) {
            Some(place) => self.0.change(place, |entry| entry.add(units)),
            None => self.insert(Entry::new(Kind::Sum, at, units, AdmissionId::from(0))),
        }
    }

    /// Removes an admission, and returns its time. If the clock has stepped back since, that may be before `at`. A later
    /// entry is another admission under the same id.
    pub(super) fn take(&mut self, id: AdmissionId, units: u64, is_reserved: bool, at: u64) -> Option<u64> {
        let kind = if is_reserved { Kind::Reserved } else { Kind::Named };
        let place = self.0.find(id, at, |entry| entry.count() == units && entry.is(kind))?;
        Some(self.0.remove(place)?.at)
    }

    fn sum_at(&self, at: u64) -> Option<Position> {
        let is_it = |(_, entry): &(Position, Entry)| entry.at == at && entry.is(Kind::Sum);
        // Nearly always it is the newest entry.
        let sum = self.0.newest().filter(is_it).or_else(|| self.0.of(at).find(is_it));
        sum.map(|(place, _)| place)
    }

    #[inline]
    fn insert(&mut self, entry: Entry) {
        self.0.insert(entry);
    }
}

fn leaves_after(at: u64, now: u64, window: u64) -> u64 {
    at.saturating_add(window).saturating_sub(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 1_000;

    fn log(entries: &[(u64, u64)]) -> Log {
        let mut log = Log::default();
        for &(at, units) in entries {
            log.add_named(at, units, AdmissionId::fresh());
        }
        log
    }

    #[test]
    fn a_unit_counts_until_its_window_has_passed_and_not_a_microsecond_longer() {
        let mut log = log(&[(5_000, 3)]);
        assert_eq!((log.trim(5_999, WINDOW), log.used()), (0, 3));
        assert_eq!((log.trim(6_000, WINDOW), log.used()), (1, 0));
    }

    #[test]
    fn waiting_for_units_means_waiting_for_the_entry_that_frees_enough() {
        let mut log = log(&[(5_000, 1), (5_100, 4), (5_200, 1)]);
        let waits = [6, 5, 4, 1, 0].map(|most| log.wait_for(most, 5_300, 5_300, WINDOW).most);
        assert_eq!(waits, [0, 700, 800, 800, 900]);
    }

    #[test]
    fn reserved_units_count_for_the_longest_wait_only() {
        let mut log = log(&[(5_000, 1), (5_200, 2)]);
        log.add_reserved(4_900, 3, AdmissionId::fresh());
        let waits = [6, 5, 3, 2, 1, 0].map(|most| log.wait_for(most, 5_300, 5_300, WINDOW));
        let waits = waits.map(|RetryWait { least, most }| (least, most));
        assert_eq!(waits, [(0, 0), (0, 600), (0, 600), (700, 700), (900, 900), (900, 900)]);
    }

    #[test]
    fn entries_from_the_future_count_as_now_once_they_refuse() {
        let mut log = log(&[(5_000, 1), (9_000, 1), (9_500, 1)]);
        assert_eq!(log.reset_after(4_000, WINDOW), 2_000, "as long as nothing is refused, they leave when they say");
        assert_eq!(log.wait_for(2, 5_500, 5_500, WINDOW).most, 500, "the past entry is what is waited for");
        assert_eq!(log.wait_for(1, 5_500, 5_500, WINDOW).most, WINDOW, "the others count as now");
        assert_eq!((log.trim(6_500, WINDOW), log.used()), (3, 0), "one window later the key is right again");
    }

    #[test]
    fn entries_stay_in_order_when_the_clock_steps_back() {
        let mut log = log(&[(9_000, 2), (5_000, 1)]);
        assert_eq!((log.trim(6_000, WINDOW), log.used()), (1, 2));
    }

    #[test]
    fn admissions_of_one_time_are_one_entry_and_one_with_an_id_is_not_among_them() {
        let mut log = Log::default();
        let id = AdmissionId::from(0);
        log.add_to_sum(5_099, 2);
        log.add_reserved(5_099, 3, id);
        log.add_to_sum(5_099, 4);
        assert_eq!((log.len(), log.used(), log.reserved(), log.time_of(id, 6)), (2, 9, 3, None));
        let mut take = |is_reserved, at| log.take(id, 3, is_reserved, at);
        assert_eq!((take(false, 5_099), take(true, 5_098)), (None, None), "another kind, another time");
        assert_eq!((take(true, 5_099), take(true, 5_099)), (Some(5_099), None));
        assert_eq!((log.len(), log.used()), (1, 6));
    }
}
