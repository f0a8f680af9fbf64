//! Finds the keys that are asked for often, in a fixed amount of memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// Keys share sets of a few counts: see [`Demand::count`].
const SETS: usize = 1 << 13;
const SET: usize = 4;

/// The fewest requests in a life that a prefetch is taken for. With half as many, a prefetch saves little or nothing.
pub(super) const FEWEST_REQUESTS: u64 = 16;

/// A word has the requests of a key in its lowest bits, above them the time of the first one, and a part of the key's digest.
const COUNT_BITS: u32 = 16;
const TIME_BITS: u32 = 32;

/// The rate of a key is measured for at least this part of a life, so that a few requests at once are no high rate.
const SHORTEST_MEASUREMENT: u64 = 8;

pub(super) struct Demand(Box<[[AtomicU64; SET]]>);

/// The requests of one key since a time, in microseconds.
#[derive(Clone, Copy)]
struct Count {
    tag: u64,
    began: u64,
    requests: u64,
}

impl Demand {
    /// Counts a request, and returns the requests of a life at the present rate, if there have been enough to tell.
    ///
    /// A count lasts for a life. A key that finds all counts of its set taken takes one off the smallest. So busy keys keep theirs, and
    /// many rare keys together do not look like a busy one. Threads may overwrite each other's counts, which delays a prefetch.
    pub(super) fn count(&self, digest: u64, now: u64, life: u64) -> Option<u64> {
        let set = &self.0[digest as usize % SETS];
        let counts = set.each_ref().map(|word| Count::of(word.load(Ordering::Relaxed)).within(now, life));
        let key = Count::first(digest, now);
        let own = counts.iter().position(|count| count.tag == key.tag && count.requests > 0);
        let place = own.or_else(|| (0..SET).min_by_key(|place| counts[*place].requests))?;
        let count = counts[place];
        let is_full = count.requests == Count::MOST;
        let counted = match own {
            Some(_) if !is_full => Count { requests: count.requests + 1, ..count },
            None if count.requests > 0 => Count { requests: count.requests - 1, ..count },
            _ => key,
        };
        set[place].store(counted.word(), Ordering::Relaxed);
        let is_often = own.is_some() && counted.requests >= FEWEST_REQUESTS;
        is_often.then(|| rate(counted.requests, counted.elapsed(now), life))
    }
}

impl Count {
    const MOST: u64 = (1 << COUNT_BITS) - 1;

    fn first(digest: u64, now: u64) -> Self {
        Self { tag: digest >> (COUNT_BITS + TIME_BITS), began: now & Self::LATEST, requests: 1 }
    }

    /// Times are stored without their upper bits.
    const LATEST: u64 = (1 << TIME_BITS) - 1;

    fn of(word: u64) -> Self {
        let (tag, began) = (word >> (COUNT_BITS + TIME_BITS), word >> COUNT_BITS & Self::LATEST);
        Self { tag, began, requests: word & Self::MOST }
    }

    fn word(self) -> u64 {
        self.tag << (COUNT_BITS + TIME_BITS) | self.began << COUNT_BITS | self.requests
    }

    fn elapsed(self, now: u64) -> u64 {
        now.wrapping_sub(self.began) & Self::LATEST
    }

    /// The same if it began less than a life ago; otherwise no requests.
    fn within(self, now: u64, life: u64) -> Self {
        Self { requests: if self.elapsed(now) < life { self.requests } else { 0 }, ..self }
    }
}

impl Default for Demand {
    fn default() -> Self {
        Self((0..SETS).map(|_| [const { AtomicU64::new(0) }; SET]).collect())
    }
}

/// How many of something are expected in a life, if there were so many in this time.
pub(super) fn rate(count: u64, elapsed: u64, life: u64) -> u64 {
    let measured = elapsed.max(life / SHORTEST_MEASUREMENT).max(1);
    let expected = u128::from(count) * u128::from(life) / u128::from(measured);
    u64::try_from(expected).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: u64 = 100_000;

    #[test]
    fn a_rate_is_that_of_at_least_sixteen_requests_within_a_life() {
        let demand = Demand::default();
        let count = |after: u64| demand.count(7, 1_000_000 + after, LIFE);
        assert_eq!((0..15).map(|request| count(request * 2_000)).max(), Some(None));
        assert_eq!((count(40_000), count(80_000)), (Some(40), Some(21)));
        assert_eq!(demand.count(8, 1_080_000, LIFE), None, "another key has its own count");
        assert_eq!(count(100_000), None, "a life later, counting begins anew");
    }

    #[test]
    fn a_burst_is_taken_for_an_eighth_of_a_life() {
        let demand = Demand::default();
        let counts = [(); 20].map(|()| demand.count(7, 5, LIFE));
        assert_eq!(counts[19], Some(160));
    }

    /// A key of the same set.
    fn neighbour(key: u64) -> u64 {
        key << 48 | 7
    }

    #[test]
    fn rare_keys_are_no_busy_key_together() {
        let demand = Demand::default();
        let rare = (0..1_000).map(|key: u64| demand.count(neighbour(key), key, LIFE));
        assert_eq!(rare.max(), Some(None));
    }

    #[test]
    fn busy_keys_of_one_set_are_found_among_rare_ones() {
        let demand = Demand::default();
        let mut is_found = [false; SET - 1];
        for request in 0..100 {
            let _ = demand.count(neighbour(100 + request), 300 * request, LIFE);
            for (key, is_found) in is_found.iter_mut().enumerate() {
                *is_found |= demand.count(neighbour(key as u64), 300 * request + 100, LIFE).is_some();
            }
        }
        assert_eq!(is_found, [true; SET - 1]);
    }

    #[test]
    fn a_full_count_begins_anew() {
        let demand = Demand::default();
        let counts = (0..=Count::MOST).map(|_| demand.count(7, 5, LIFE)).collect::<Vec<_>>();
        assert_eq!(counts.last(), Some(&None));
        assert!(counts[counts.len() - 2].is_some());
    }
}
