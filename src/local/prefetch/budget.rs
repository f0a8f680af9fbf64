//! The calls that the prefetches of a process may cost its store: rule 11 of
//! [`limit::prefetch`](crate::limit::prefetch).
//!
//! A prefetch is paid for before it is taken, by the checks that have asked the store and by those
//! that did not have to. So no traffic can make prefetches cost more than that, whatever the
//! distance of the store is.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::pace::LONGEST_BATCH;

/// The price of a call. A process takes a prefetch by one call, and gives it back by another one.
/// Each takes Redis about three times as long as a plain check. A check that asks the store earns
/// 1: calls rise by less than 5 %, and Redis's time by an eighth.
const CALL: u64 = 24;
const PREFETCH: u64 = 2 * CALL;

/// A check that does not ask earns a third of a call, which takes Redis as long as that check would
/// have.
pub(super) const SAVED: u64 = CALL / 3;

/// A process may owe the price of 64 prefetches. It pays nothing in advance, so quiet hours do not
/// save up for a bad one.
const MOST: u64 = 64 * PREFETCH;

#[derive(Default)]
pub(super) struct Budget {
    owed: AtomicU64,
    asked_at: AtomicU64,
}

impl Budget {
    /// Whether a prefetch can be paid for.
    pub(super) fn has_room(&self) -> bool {
        self.owed.load(Relaxed) + PREFETCH <= MOST
    }

    /// Pays for a prefetch, to be taken and given back.
    pub(super) fn pay(&self) -> bool {
        let more = |owed: u64| Some(owed + PREFETCH).filter(|owed| *owed <= MOST);
        self.owed.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Takes note of a check that has asked the store, by a round trip of `trip`. Those of one
    /// batch may cost little more than one.
    pub(super) fn count_asked(&self, now: u64, trip: u64) {
        if now.abs_diff(self.asked_at.load(Relaxed)) >= trip.min(LONGEST_BATCH) {
            self.asked_at.store(now, Relaxed);
            self.earn(1);
        }
    }

    pub(super) fn earn(&self, earned: u64) {
        let _ = self.owed.fetch_update(Relaxed, Relaxed, |owed| Some(owed.saturating_sub(earned)));
    }
}
