//! Computes how long prefetches live and how many units they have. This file uses only numbers, so
//! that a simulation in the benchmarks can include it.
//!
//! The store's distance changes three things: the prefetch life, the time to ask for the next
//! prefetch, and how busy a key must be. Next to the store, all three are as the limit's settings
//! say. A prefetch has as many units as the key spends in a life at its recent rate.

/// Most replies arrive within a certain time. A life lasts at least this many times that long, up
/// to the longest life. So a process usually has more time to spend a prefetch than it has waited.
const LEAST_TRIPS: u64 = 4;

/// A task asks for the next prefetch `life / PART_OF_LIFE` earlier than the reply time requires,
/// since the task needs time to run, and the call may wait for other keys' prefetches.
const PART_OF_LIFE: u64 = 32;

/// A key's spending is measured for at least `life / MEASURED`, since a few requests do not tell a
/// rate.
const MEASURED: u64 = 4;

/// A task asks for the next prefetch when `units / LOW` units are left, or earlier.
const LOW: u64 = 4;

/// The fewest requests in a life for which a prefetch is taken. Next to the store, a prefetch for
/// half of `MOST_REQUESTS` saves little or nothing. The longer the round trip, the more time a
/// request saves if it does not ask the store. So the number is [`SAVED`] divided by the round
/// trip, between `LEAST_REQUESTS` and `MOST_REQUESTS`.
const MOST_REQUESTS: u64 = 16;
const LEAST_REQUESTS: u64 = 2;
const SAVED: u64 = 64_000;

/// A key's requests within a round trip, or within a millisecond if that is shorter, usually travel
/// in one batch.
pub(super) const LONGEST_BATCH: u64 = 1_000;

/// Times are microseconds.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    pub(super) life: u64,
    /// A task asks for the next prefetch this long before the present one ends.
    pub(super) lead: u64,
    pub(super) fewest_requests: u64,
    /// A key's requests within this time usually travel in one batch.
    pub(super) batch: u64,
}

impl Pace {
    /// The pace for a limit whose prefetches live for `set`. If the store is far away, they live
    /// for longer, but for at most `longest`. A round trip takes `trip`, and most replies take at
    /// most `mostly`.
    pub(super) fn new(set: u64, longest: u64, trip: u64, mostly: u64) -> Self {
        let life = mostly.saturating_mul(LEAST_TRIPS).min(longest).max(set);
        let lead = mostly.saturating_add(life / PART_OF_LIFE).min(life / 2);
        // If the window is short, the life may be shorter than two round trips. A prefetch would
        // then be over when it arrives.
        let is_worth_it = life >= 2 * trip;
        let fewest_requests = if is_worth_it {
            (SAVED / trip.max(1)).clamp(LEAST_REQUESTS, MOST_REQUESTS)
        } else {
            u64::MAX
        };
        Self {
            life,
            lead,
            fewest_requests,
            batch: trip.min(LONGEST_BATCH),
        }
    }

    /// The least time for which a key's spending is measured.
    pub(super) fn measured(self) -> u64 {
        self.life / MEASURED
    }

    /// A task asks for the next prefetch when the present one has this many units left.
    pub(super) fn low(self, units: u64) -> u64 {
        let during_lead =
            (u128::from(units) * u128::from(self.lead)).div_ceil(self.life.max(1).into()) as u64;
        // Three deviations are added, since requests come at random.
        (units / LOW).max(during_lead + 3 * during_lead.isqrt() + 1)
    }
}

/// A prefetch has at most `1 / PART_OF_THE_REST` of the units left.
const PART_OF_THE_REST: u64 = 8;

/// A count is extrapolated as if it had taken at least `life / SHORTEST_MEASUREMENT`, so that a few
/// requests at once do not make a high rate.
const SHORTEST_MEASUREMENT: u64 = 8;

/// The units spent under a limit and key. Times are microseconds.
pub(super) struct Spending {
    /// The present measurement: when it began, and what was spent since.
    since: u64,
    spent: u64,
    requests: u64,
    /// The previous measurement: how long it took, and what was spent in it.
    before: (u64, u64),
}

/// The units in a key's first prefetch: enough for the `requests` that are expected in a life, each
/// at this `cost`. `None` if a prefetch is not worth it.
pub(super) fn first_units(
    requests: u64,
    cost: u64,
    (used, rest): (u64, u64),
    pace: Pace,
) -> Option<u64> {
    // Other requests may cost less than this one, and their costs are not known. So the prefetch
    // has at most as many units as the key has used in the window.
    let units = requests
        .saturating_mul(cost)
        .min(used)
        .min(rest / PART_OF_THE_REST);
    (units >= cost.saturating_mul(pace.fewest_requests)).then_some(units)
}

impl Spending {
    /// The spending for a key that is expected to spend `first_units` in a life. It is initialized
    /// as if the key had spent them in the previous life.
    pub(super) fn new(first_units: u64, now: u64, pace: Pace) -> Self {
        Self {
            since: now,
            spent: 0,
            requests: 0,
            before: (pace.life, first_units),
        }
    }

    pub(super) fn count(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
        self.requests += 1;
    }

    /// Begins a new measurement, unless the present one is too short to tell a rate.
    pub(super) fn measure_anew(&mut self, now: u64, pace: Pace) {
        let elapsed = now.saturating_sub(self.since);
        if elapsed >= pace.measured() {
            self.before = (elapsed, self.spent);
            (self.since, self.spent, self.requests) = (now, 0, 0);
        }
    }

    /// The units in the next prefetch; `None` if it is not worth it.
    pub(super) fn next_units(&mut self, now: u64, pace: Pace, rest: u64) -> Option<u64> {
        if now < self.since {
            // The clock has stepped back, so the measured time is unknown, and a new measurement
            // begins.
            *self = Self::new(0, now, pace);
        }
        let elapsed = now.saturating_sub(self.since);
        let present = rate(self.spent, elapsed.max(pace.measured()), pace.life);
        // The long-term rate includes the previous measurement. Requests come at random, so a short
        // pause does not mean a lower demand.
        let (elapsed_before, before) = self.before;
        let lasting = rate(
            before.saturating_add(self.spent),
            elapsed_before.saturating_add(elapsed),
            pace.life,
        );
        let units = present.max(lasting).min(rest / PART_OF_THE_REST);
        let cost = if self.requests > 0 {
            self.spent.div_ceil(self.requests)
        } else {
            1
        };
        // Half as many requests are needed as for the first prefetch. Requests come at random, so
        // with the same number, a busy key would lose its prefetches from time to time.
        let fewest = cost.saturating_mul(pace.fewest_requests / 2);
        // For a key that has become quiet, no further prefetch is taken.
        let is_quiet = present < fewest && elapsed >= pace.measured();
        (units >= fewest && !is_quiet).then_some(units)
    }
}

/// Extrapolates a `count` from the time `elapsed` to a life.
pub(super) fn rate(count: u64, elapsed: u64, life: u64) -> u64 {
    let measured = elapsed.max(life / SHORTEST_MEASUREMENT).max(1);
    let expected = u128::from(count) * u128::from(life) / u128::from(measured);
    u64::try_from(expected).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in the guide `redis_is_far_away`, in milliseconds.
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
            assert_eq!(
                (pace.life, pace.fewest_requests),
                (life * 1_000, fewest),
                "{trip} ms"
            );
        }
        assert_eq!(
            Pace::new(500_000, 1_000_000, 80_000, 80_000).life,
            500_000,
            "a longer life that is set"
        );
    }
}
