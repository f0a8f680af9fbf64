//! Finds the heavy hitters, the keys that are asked for often, in fixed memory. Also limits the
//! price of prefetches by a token bucket: rule 11 in [`limit::prefetch`](crate::limit::prefetch).
//!
//! Each check earns a fraction of a prefetch's price, whether it has asked the store or not. The
//! first 64 prefetches are free. After them, the process takes a prefetch only if checks have
//! earned its price. So further prefetches never cost more than checks have earned, in any traffic,
//! and at any distance from the store.

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{
    super::lock,
    pace::{LONGEST_BATCH, Pace, rate},
};

/// Keys share sets of a few counts: see [`Demand::count`].
const SETS: usize = 1 << 13;
const SET: usize = 4;

pub(super) struct Demand(Box<[Mutex<[Count; SET]>]>);

/// One key's requests between two times in microseconds.
#[derive(Clone, Copy, Default)]
struct Count {
    digest: u64,
    began: u64,
    ends: u64,
    requests: u64,
}

impl Demand {
    /// Counts a request, and returns how many requests come in a life at the present rate; `None`
    /// if there were too few to tell.
    ///
    /// A count lasts for a life of its key's prefetches. A key that finds its set full lowers the
    /// smallest count by one, much as in Misra–Gries, which lowers all of them. So busy keys keep
    /// their counts, and many rare keys together do not look like a busy key.
    pub(super) fn count(&self, digest: u64, now: u64, pace: Pace) -> Option<u64> {
        let mut set = lock(&self.0[digest as usize % SETS]);
        // A time before the count began means that the clock has stepped back.
        let is_alive = |count: &Count| (count.began..count.ends).contains(&now);
        let requests = |count: &Count| if is_alive(count) { count.requests } else { 0 };
        if let Some(own) = set
            .iter_mut()
            .find(|count| count.digest == digest && requests(count) > 0)
        {
            own.requests += 1;
            return (own.requests >= pace.fewest_requests)
                .then(|| rate(own.requests, now - own.began, pace.life));
        }
        let smallest = set.iter_mut().min_by_key(|count| requests(count))?;
        if requests(smallest) > 0 {
            smallest.requests -= 1;
        } else {
            *smallest = Count {
                digest,
                began: now,
                ends: now.saturating_add(pace.life),
                requests: 1,
            };
        }
        None
    }
}

impl Default for Demand {
    fn default() -> Self {
        Self((0..SETS).map(|_| Mutex::default()).collect())
    }
}

/// The price of a call. A process takes a prefetch by one call, and gives it back by another. Each
/// takes Redis about three times as long as a plain check. A check that asks the store earns 1.
/// These earnings pay for less than 5 % more calls, which take an eighth more of Redis's time.
const CALL: u64 = 24;
const PREFETCH: u64 = 2 * CALL;

/// A check that does not ask the store earns a third of a call's price. It saves Redis the time for
/// a plain check, and a call takes about three times as long.
pub(super) const SAVED: u64 = CALL / 3;

/// The most that a process may owe: the price of 64 prefetches. It never saves up more than this,
/// so quiet hours do not pay for a bad hour.
const MOST: u64 = 64 * PREFETCH;

/// A token bucket that checks refill. Its value is the price of the prefetches taken, minus what
/// checks have earned since.
#[derive(Default)]
pub(super) struct Budget {
    owed: AtomicU64,
    asked_at: AtomicU64,
}

impl Budget {
    /// True if a prefetch can be paid for.
    pub(super) fn has_room(&self) -> bool {
        self.owed.load(Relaxed) + PREFETCH <= MOST
    }

    /// Pays for one prefetch: for the call that takes it, and for the call that gives it back. If
    /// the process would then owe too much, does not pay and returns `false`.
    pub(super) fn pay(&self) -> bool {
        let paid = self.owed.fetch_update(Relaxed, Relaxed, |owed| {
            Some(owed + PREFETCH).filter(|owed| *owed <= MOST)
        });
        paid.is_ok()
    }

    /// Counts a check that has asked the store. `trip` is a round trip. Checks within one batch
    /// earn once, since together they cost little more than one check.
    pub(super) fn count_asked(&self, now: u64, trip: u64) {
        if now.abs_diff(self.asked_at.load(Relaxed)) >= trip.min(LONGEST_BATCH) {
            self.asked_at.store(now, Relaxed);
            self.earn(1);
        }
    }

    pub(super) fn earn(&self, earned: u64) {
        let _ = self
            .owed
            .fetch_update(Relaxed, Relaxed, |owed| Some(owed.saturating_sub(earned)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: u64 = 100_000;

    /// The pace next to the store.
    fn pace(life: u64) -> Pace {
        Pace {
            life,
            lead: 0,
            fewest_requests: 16,
            batch: 0,
        }
    }

    #[test]
    fn a_rate_is_that_of_at_least_sixteen_requests_within_a_life() {
        let demand = Demand::default();
        let count = |after: u64| demand.count(7, 1_000_000 + after, pace(LIFE));
        assert_eq!(
            (0..15).map(|request| count(request * 2_000)).max(),
            Some(None)
        );
        assert_eq!((count(40_000), count(80_000)), (Some(40), Some(21)));
        assert_eq!(
            demand.count(8, 1_080_000, pace(LIFE)),
            None,
            "another key has its own count"
        );
        assert_eq!(count(100_000), None, "a life later, counting begins anew");
    }

    #[test]
    fn a_burst_is_taken_for_an_eighth_of_a_life() {
        let demand = Demand::default();
        let counts = [(); 20].map(|()| demand.count(7, 5, pace(LIFE)));
        assert_eq!(counts[19], Some(160));
    }

    /// A key in the same set.
    fn neighbour(key: u64) -> u64 {
        key << 48 | 7
    }

    #[test]
    fn rare_keys_are_no_busy_key_together() {
        let demand = Demand::default();
        let rare = (0..1_000).map(|key: u64| demand.count(neighbour(key), key, pace(LIFE)));
        assert_eq!(rare.max(), Some(None));
    }

    #[test]
    fn busy_keys_of_one_set_are_found_among_rare_ones() {
        let demand = Demand::default();
        let mut is_found = [false; SET - 1];
        for request in 0..100 {
            let _ = demand.count(neighbour(100 + request), 300 * request, pace(LIFE));
            for (key, is_found) in is_found.iter_mut().enumerate() {
                *is_found |= demand
                    .count(neighbour(key as u64), 300 * request + 100, pace(LIFE))
                    .is_some();
            }
        }
        assert_eq!(is_found, [true; SET - 1]);
    }

    /// All counts in the set are taken by keys that no longer ask.
    #[test]
    fn a_key_that_becomes_busy_takes_the_count_of_another() {
        let demand = Demand::default();
        for key in 0..SET as u64 {
            for _ in 0..8 {
                assert!(demand.count(neighbour(key), 0, pace(LIFE)).is_none());
            }
        }
        let mut rates =
            (0..30).map(|request| demand.count(neighbour(100), 1_000 * request, pace(LIFE)));
        assert!(rates.any(|rate| rate.is_some()));
    }

    /// A count ends after its own key's life, whatever the lives of other keys are.
    #[test]
    fn a_busy_key_is_found_among_rare_ones_of_another_life() {
        for life_of_rare in [LIFE / 100, LIFE, LIFE * 100] {
            let demand = Demand::default();
            let mut is_found = false;
            for request in 0..1_000 {
                let now = 1_000_000 + 2_000 * request;
                is_found |= demand.count(neighbour(1), now, pace(LIFE)).is_some();
                for rare in 0..4 * u64::from(request % 8 == 7) {
                    let _ = demand.count(
                        neighbour(100 + request + rare),
                        now + 1_500,
                        pace(life_of_rare),
                    );
                }
            }
            assert!(is_found, "among keys with a life of {life_of_rare}");
        }
    }

    #[test]
    fn a_count_has_no_end_within_a_life() {
        let demand = Demand::default();
        let last = (0..100_000).fold(None, |_, _| demand.count(7, 5, pace(LIFE)));
        assert_eq!(last, Some(800_000));
    }

    #[test]
    fn counting_begins_anew_after_a_step_back() {
        let demand = Demand::default();
        let counts = [(); 20].map(|()| demand.count(7, 2 * LIFE, pace(LIFE)));
        assert!(counts[19].is_some());
        assert_eq!(demand.count(7, 0, pace(LIFE)), None);
    }
}
