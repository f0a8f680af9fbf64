//! The log: admissions and when they were, in the order of their times, also when the clock has stepped back.
//!
//! A unit recorded at `t` counts at `now` while `now − window < t`; at `t + window` exactly it is gone. What is recorded
//! is the time of the admission for an exact log, the end of its sub-window for a compact one, and the start of its window
//! for a fixed one. What is held for a lease is recorded a window before the lease ends, so that it leaves then.

use super::Wait;
use super::{
    entries::{Entries, Place},
    entry::{Entry, Kind, Sum, Which},
};
use crate::admission::AdmissionId;

/// What is still in the window, and its sum.
#[derive(Debug, Default)]
pub(crate) struct Log {
    entries: Entries,
    sum: Sum,
}

impl Log {
    /// Drops what has left the window and says how many entries that were.
    #[inline]
    pub(super) fn trim(&mut self, now: u64, window: u64) -> usize {
        let has_left = |entry: &Entry| entry.at.saturating_add(window) <= now;
        if self.entries.oldest().is_some_and(has_left) { self.drop_while(has_left) } else { 0 }
    }

    #[inline(never)]
    fn drop_while(&mut self, has_left: impl Fn(&Entry) -> bool) -> usize {
        let (entries, sum) = self.entries.drop_while(has_left);
        self.sum.subtract(sum);
        entries
    }

    /// The units in the log.
    pub(super) fn used(&self) -> u64 {
        self.sum.units
    }

    /// Those of them that are reserved.
    pub(super) fn held(&self) -> u64 {
        self.sum.held
    }

    /// The number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Gives back memory that a burst left behind.
    pub(super) fn shrink(&mut self) {
        self.entries.shrink();
    }

    /// The time until the oldest entry leaves the window; 0 if there is none.
    pub(super) fn reset_after(&self, now: u64, window: u64) -> u64 {
        self.entries.oldest().map_or(0, |entry| leaves_after(entry.at, now, window))
    }

    /// The time under which this very admission is in the log, if it is.
    pub(super) fn time_of(&self, id: AdmissionId, units: u64) -> Option<u64> {
        let is_it = |entry: &Entry| entry.count() == units && (entry.is(Kind::Kept) || entry.is(Kind::Held));
        self.entries.find(id, u64::MAX, is_it).and_then(|place| self.entries.get(place)).map(|entry| entry.at)
    }

    /// Whether what an admission has cost in the end is recorded under this id and time.
    pub(super) fn has_settled(&self, id: AdmissionId, at: u64) -> bool {
        self.entries.of(at).any(|(_, entry)| entry.id == id && entry.is(Kind::Settled))
    }

    /// Whether admissions of this time would be added to those of an entry that is there.
    pub(super) fn has_sum_at(&self, at: u64) -> bool {
        self.sum_at(at).is_some()
    }

    /// The time until at most so many units are left: 0 if that is so, and never more than a window after the `present`.
    /// What is recorded after the present is from now on recorded then.
    pub(super) fn wait_for(&mut self, most: u64, now: u64, present: u64, window: u64) -> Wait {
        self.pull_back(present);
        let until_left = |which: Which| {
            let excess = which(self.sum).saturating_sub(most);
            let departure = (excess > 0).then(|| self.entries.departure(excess, which)).flatten();
            departure.map_or(0, |entry| leaves_after(entry.at.min(present), now, window))
        };
        Wait::of(self.held(), until_left)
    }

    /// Lets what is recorded after the present be recorded then.
    pub(super) fn pull_back(&mut self, present: u64) {
        self.entries.pull_back(present);
    }

    /// The units in the log.
    pub(super) fn sum(&self) -> Sum {
        self.sum
    }

    /// When the entries leave the window, the oldest first, and which units with each.
    pub(super) fn departures(&self, window: u64) -> impl Iterator<Item = (u64, Sum)> {
        self.entries.iter().map(move |entry| (entry.at.saturating_add(window), entry.sum()))
    }

    /// Records an admission that its id tells from others.
    pub(super) fn keep(&mut self, at: u64, units: u64, id: AdmissionId) {
        self.insert(Entry::new(Kind::Kept, at, units, id));
    }

    /// Records an admission that is going to be settled.
    pub(super) fn hold(&mut self, at: u64, units: u64, id: AdmissionId) {
        self.insert(Entry::new(Kind::Held, at, units, id));
    }

    /// Records what an admission has cost in the end.
    pub(super) fn settle(&mut self, at: u64, units: u64, id: AdmissionId) {
        self.insert(Entry::new(Kind::Settled, at, units, id));
    }

    /// Records an admission together with the others of its time.
    pub(super) fn add(&mut self, at: u64, units: u64) {
        match self.sum_at(at) {
            Some(place) => {
                self.entries.change(place, |entry| entry.add(units));
                self.sum.units = self.sum.units.saturating_add(units);
            }
            None => self.insert(Entry::new(Kind::Sum, at, units, AdmissionId::from(0))),
        }
    }

    /// Takes an admission out that was recorded at this time, or, if the clock has stepped back since, before it, and says
    /// when. One that is recorded later is another, to which the id was given again.
    pub(super) fn take(&mut self, id: AdmissionId, units: u64, is_held: bool, at: u64) -> Option<u64> {
        let kind = if is_held { Kind::Held } else { Kind::Kept };
        let place = self.entries.find(id, at, |entry| entry.count() == units && entry.is(kind))?;
        let entry = self.entries.remove(place)?;
        self.sum.subtract(entry.sum());
        Some(entry.at)
    }

    fn sum_at(&self, at: u64) -> Option<Place> {
        let is_it = |(_, entry): &(Place, &Entry)| entry.at == at && entry.is(Kind::Sum);
        // Nearly always it is the newest of all.
        let sum = self.entries.newest().filter(is_it).or_else(|| self.entries.of(at).find(is_it));
        sum.map(|(place, _)| place)
    }

    #[inline]
    fn insert(&mut self, entry: Entry) {
        self.sum.add(entry.sum());
        self.entries.insert(entry);
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
            log.keep(at, units, AdmissionId::fresh());
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
    fn units_that_are_held_are_waited_for_at_most_and_not_at_least() {
        let mut log = log(&[(5_000, 1), (5_200, 2)]);
        log.hold(4_900, 3, AdmissionId::fresh());
        let waits = [6, 5, 3, 2, 1, 0].map(|most| log.wait_for(most, 5_300, 5_300, WINDOW));
        let waits = waits.map(|Wait { least, most }| (least, most));
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
        log.add(5_099, 2);
        log.hold(5_099, 3, id);
        log.add(5_099, 4);
        assert_eq!((log.len(), log.used(), log.held(), log.time_of(id, 6)), (2, 9, 3, None));
        let mut take = |is_held, at| log.take(id, 3, is_held, at);
        assert_eq!((take(false, 5_099), take(true, 5_098)), (None, None), "another kind, another time");
        assert_eq!((take(true, 5_099), take(true, 5_099)), (Some(5_099), None));
        assert_eq!((log.len(), log.used()), (1, 6));
    }
}
