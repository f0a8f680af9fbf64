//! How the distance of the store changes the prefetches of a limit: their life, when the next one
//! is asked for, and how busy a key must be. Next to the store, all of these are as the limit's
//! settings say. This file has numbers alone, so that a simulation of the benchmarks can take it
//! and `size.rs`.

/// A life is at least this many times as long as most replies take. So a process spends a prefetch
/// for longer than it waits for the prefetch.
const LEAST_TRIPS: u64 = 4;

/// The next prefetch is asked for earlier by this part of a life: the task needs time to run, and
/// the call waits for prefetches of other keys.
const PART_OF_LIFE: u64 = 32;

/// The rate of a key is measured for at least this part of a life: a few requests are no rate.
const MEASURED: u64 = 4;

/// The next prefetch is asked for when at least this part of the units is left.
const LOW: u64 = 4;

/// The fewest requests in a life that a prefetch is taken for. Next to the store, a prefetch for
/// half as many saves little or nothing. A long round trip makes each request that needs none a
/// greater saving. So the number is [`SAVED`] divided by the round trip, between `LEAST_REQUESTS`
/// and `MOST_REQUESTS`.
const MOST_REQUESTS: u64 = 16;
const LEAST_REQUESTS: u64 = 2;
const SAVED: u64 = 64_000;

/// Requests of a key within a round trip, or within a millisecond, mostly travel in one batch.
pub(super) const LONGEST_BATCH: u64 = 1_000;

/// Times are microseconds.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    pub(super) life: u64,
    /// The next prefetch is asked for this time before the present one ends.
    pub(super) lead: u64,
    pub(super) fewest_requests: u64,
    /// Requests of a key within this time mostly travel in one batch.
    pub(super) batch: u64,
}

impl Pace {
    /// The pace of a limit whose life is set to `set`, and may be at most `longest`. A round trip
    /// takes `trip`, and most replies take at most `mostly`.
    pub(super) fn new(set: u64, longest: u64, trip: u64, mostly: u64) -> Self {
        let life = mostly.saturating_mul(LEAST_TRIPS).min(longest).max(set);
        let lead = mostly.saturating_add(life / PART_OF_LIFE).min(life / 2);
        // If the life is shorter, since the window is short, a prefetch would be over when it
        // arrives.
        let is_worth_it = life >= 2 * trip;
        let fewest_requests =
            if is_worth_it { (SAVED / trip.max(1)).clamp(LEAST_REQUESTS, MOST_REQUESTS) } else { u64::MAX };
        Self { life, lead, fewest_requests, batch: trip.min(LONGEST_BATCH) }
    }

    /// The rate of a key is measured for at least this time.
    pub(super) fn measured(self) -> u64 {
        self.life / MEASURED
    }

    /// The next prefetch is asked for when this number of units of the present one is left.
    pub(super) fn low(self, units: u64) -> u64 {
        let during_lead = (u128::from(units) * u128::from(self.lead)).div_ceil(self.life.max(1).into()) as u64;
        // Three deviations are added, since requests come at random.
        (units / LOW).max(during_lead + 3 * during_lead.isqrt() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of the guide `redis_is_far_away`, in milliseconds.
    #[test]
    fn a_life_follows_the_round_trip() {
        for (trip, life, fewest) in [
            (0, 100, 16),
            (4, 100, 16),
            (25, 100, 2),
            (50, 200, 2),
            (80, 320, 2),
            (150, 600, 2),
            (250, 1_000, 2),
            (300, 1_000, 2),
        ] {
            let pace = Pace::new(100_000, 1_000_000, trip * 1_000, trip * 1_000);
            assert_eq!((pace.life, pace.fewest_requests), (life * 1_000, fewest), "{trip} ms");
        }
        assert_eq!(Pace::new(500_000, 1_000_000, 80_000, 80_000).life, 500_000, "a longer life that is set");
    }
}
