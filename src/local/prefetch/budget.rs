//! The calls that the prefetches of a process may cost its store: rule 11 of
//! [`limit::prefetch`](crate::limit::prefetch).
//!
//! Checks earn the price of a prefetch before the process takes it: those that have asked the
//! store, and those that did not have to. So prefetches never cost more than checks have earned,
//! whatever the traffic and the distance of the store are.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::pace::LONGEST_BATCH;

/// The price of a call. A process takes a prefetch by one call, and gives it back by another one.
/// Each of these calls takes Redis about three times as long as a plain check. A check that asks
/// the store earns 1, so calls rise by less than 5 %, and Redis's time by an eighth.
const CALL: u64 = 24;
const PREFETCH: u64 = 2 * CALL;

/// A check that does not ask the store earns a third of a call: the time that Redis saves by it.
pub(super) const SAVED: u64 = CALL / 3;

/// The most that a process may owe: the price of 64 prefetches. A process never saves up more than
/// this, so quiet hours do not pay for a bad hour.
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

    /// Charges the price of one prefetch: a call that takes it, and one that gives it back. `false`
    /// if the process would then owe too much.
    pub(super) fn pay(&self) -> bool {
        let more = |owed: u64| Some(owed + PREFETCH).filter(|owed| *owed <= MOST);
        self.owed.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Takes note of a check that has asked the store. A round trip takes `trip`. Checks within one
    /// batch earn once, since together they cost little more than one check.
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
