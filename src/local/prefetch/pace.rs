//! How the distance of the store changes the prefetches of a limit: their life, when the next one
//! is asked for, and how busy a key must be. Next to the store, all of it is as the limit's
//! settings say. Numbers alone: a simulation of the benchmarks takes this file and `size.rs`.

/// A life is at least so many round trips, so that a process spends a prefetch for longer than it
/// waits for it.
const LEAST_TRIPS: u64 = 4;

/// The time of the task, and of the wait for prefetches of other keys, is this part of a life.
const PART_OF_LIFE: u64 = 32;

/// The rate of a key is measured for at least this part of a life: a few requests are no rate.
const MEASURED: u64 = 4;

/// At least this part of the units.
const LOW: u64 = 4;

/// The fewest requests in a life that a prefetch is taken for. Next to the store, a prefetch for
/// half as many saves little or nothing. The longer a round trip is, the more each request saves
/// that does not wait for one.
const MOST_REQUESTS: u64 = 16;
const LEAST_REQUESTS: u64 = 2;
const SAVED: u64 = 64_000;

/// Requests of a key within a round trip, or within a millisecond, mostly travel in one batch.
pub(super) const LONGEST_BATCH: u64 = 1_000;

/// Times are microseconds.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    pub(super) life: u64,
    /// The next prefetch is asked for so long before the present one ends.
    pub(super) lead: u64,
    pub(super) fewest_requests: u64,
    /// Requests of a key within this time mostly travel in one batch.
    pub(super) batch: u64,
}

impl Pace {
    /// Of a limit whose life is set to this, and may be at most the longest. A round trip takes
    /// `trip`, and `mostly` no longer than that.
    pub(super) fn new(set: u64, longest: u64, trip: u64, mostly: u64) -> Self {
        let life = mostly.saturating_mul(LEAST_TRIPS).min(longest).max(set);
        let lead = mostly.saturating_add(life / PART_OF_LIFE).min(life / 2);
        // In a window that is too short for that, a prefetch would be over when it is there.
        let is_worth_it = life >= 2 * trip;
        let fewest_requests =
            if is_worth_it { (SAVED / trip.max(1)).clamp(LEAST_REQUESTS, MOST_REQUESTS) } else { u64::MAX };
        Self { life, lead, fewest_requests, batch: trip.min(LONGEST_BATCH) }
    }

    /// The rate of a key is measured for at least so long.
    pub(super) fn measured(self) -> u64 {
        self.life / MEASURED
    }

    /// The next prefetch is asked for when so many units of the present one are left.
    pub(super) fn low(self, units: u64) -> u64 {
        let during_lead = (u128::from(units) * u128::from(self.lead)).div_ceil(self.life.max(1).into()) as u64;
        // And three deviations, since requests come at random.
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
