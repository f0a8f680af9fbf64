//! The sliding log: the arithmetic of one limit for one key, with the time passed in.
//!
//! Times and windows are microseconds. A unit admitted at `t` counts at `now` while `now − window < t`; at `t + window`
//! exactly it is gone. Entries stand in the order of their times, also when the clock has stepped back.
//!
//! `store/redis/sliding_log.lua` is the same arithmetic in Lua; the conformance suite holds both to the same rules.

use std::collections::VecDeque;

use crate::admission::AdmissionId;

/// The admissions of one limit for one key that are still in the window, and their sum.
#[derive(Debug, Default)]
pub(crate) struct Log {
    entries: VecDeque<Entry>,
    used: u64,
}

#[derive(Debug)]
struct Entry {
    at: u64,
    units: u64,
    id: AdmissionId,
}

impl Log {
    /// Drops what has left the window and says how many entries that were.
    pub(crate) fn trim(&mut self, now: u64, window: u64) -> usize {
        let before = self.entries.len();
        while let Some(entry) = self.entries.front().filter(|entry| entry.at.saturating_add(window) <= now) {
            self.used -= entry.units;
            self.entries.pop_front();
        }
        before - self.entries.len()
    }

    /// The units in the log.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// The number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is left to remember.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Gives back memory that a burst left behind.
    pub(crate) fn shrink(&mut self) {
        if self.entries.capacity() / 4 > self.entries.len() {
            self.entries.shrink_to_fit();
        }
    }

    /// The time until the oldest entry leaves the window; 0 if there is none.
    pub(crate) fn reset_after(&self, now: u64, window: u64) -> u64 {
        self.entries.front().map_or(0, |entry| leaves_after(entry.at, now, window))
    }

    /// Whether this very admission is in the log. Linear, newest first: what is repeated is mostly recent.
    pub(crate) fn contains(&self, id: AdmissionId, units: u64) -> bool {
        self.entries.iter().rev().any(|entry| entry.id == id && entry.units == units)
    }

    /// The time until at least `units` units have left the window: 0 for none, and never more than the window.
    ///
    /// To be asked where a check is refused: if the clock has stepped back, entries from the future then count as having
    /// happened now, so that the key is right again after one window.
    pub(crate) fn wait_for(&mut self, units: u64, now: u64, window: u64) -> u64 {
        for entry in self.entries.iter_mut().rev().take_while(|entry| entry.at > now) {
            entry.at = now;
        }
        let mut left = 0;
        let departure = self.entries.iter().find(|entry| {
            left += entry.units;
            left >= units
        });
        departure.filter(|_| units > 0).map_or(0, |entry| leaves_after(entry.at, now, window))
    }

    /// Records an admission.
    pub(crate) fn admit(&mut self, now: u64, units: u64, id: AdmissionId) {
        // Looked for from the new end, where it nearly always is: a binary search would read all over a long log.
        let later = self.entries.iter().rev().take_while(|entry| entry.at > now).count();
        self.entries.insert(self.entries.len() - later, Entry { at: now, units, id });
        self.used += units;
    }
}

/// An entry from the future counts as having happened now.
fn leaves_after(at: u64, now: u64, window: u64) -> u64 {
    at.min(now).saturating_add(window).saturating_sub(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u64 = 1_000;

    fn log(entries: &[(u64, u64)]) -> Log {
        let mut log = Log::default();
        for &(at, units) in entries {
            log.admit(at, units, AdmissionId::fresh());
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
        let waits = [0, 1, 2, 5, 6].map(|units| log.wait_for(units, 5_300, WINDOW));
        assert_eq!(waits, [0, 700, 800, 800, 900]);
    }

    #[test]
    fn entries_from_the_future_count_as_now_once_they_refuse() {
        let mut log = log(&[(5_000, 1), (9_000, 1), (9_500, 1)]);
        assert_eq!(log.wait_for(1, 5_500, WINDOW), 500, "the past entry is what is waited for");
        assert_eq!(log.wait_for(2, 5_500, WINDOW), WINDOW, "the others count as now");
        assert_eq!((log.trim(6_500, WINDOW), log.used()), (3, 0), "one window later the key is right again");
    }

    #[test]
    fn entries_stay_in_order_when_the_clock_steps_back() {
        let mut log = log(&[(9_000, 2), (5_000, 1)]);
        assert_eq!((log.trim(6_000, WINDOW), log.used()), (1, 2));
    }
}
