//! How many units a prefetch has: as many as a life needs at the rate at which they were spent
//! lately. Like `pace.rs`, this file has numbers alone.

use super::pace::Pace;

/// A prefetch is at most this part of the units that are left.
const PART_OF_THE_REST: u64 = 8;

/// The rate of a key is measured for at least this part of a life, so that a few requests at once
/// are no high rate.
const SHORTEST_MEASUREMENT: u64 = 8;

/// The units that were spent under a limit and key. Times are microseconds.
pub(super) struct Spending {
    /// The least units of the first prefetch.
    first_units: u64,
    /// The present measurement: when it began, and what was spent since.
    since: u64,
    spent: u64,
    requests: u64,
    /// The measurement before the present one: when it began, and what was spent in it.
    before: (u64, u64),
}

/// The units of the first prefetch of a key: the requests that are expected in a life, at this
/// cost. `None` if a prefetch is not worth it.
pub(super) fn first_units(requests: u64, cost: u64, (used, rest): (u64, u64), most: u64, pace: Pace) -> Option<u64> {
    // The units are at most those that are used, since the costs of the other requests are not
    // known.
    let units = requests.saturating_mul(cost).min(used).min(most).min(rest / PART_OF_THE_REST);
    (units >= cost.saturating_mul(pace.fewest_requests)).then_some(units)
}

impl Spending {
    pub(super) fn new(first_units: u64, now: u64) -> Self {
        Self { first_units, since: now, spent: 0, requests: 0, before: (now, 0) }
    }

    pub(super) fn count(&mut self, cost: u64) {
        self.spent = self.spent.saturating_add(cost);
        self.requests += 1;
    }

    /// Begins a new measurement, unless the present one is too short to tell a rate.
    pub(super) fn measure_anew(&mut self, now: u64, pace: Pace) {
        if now.saturating_sub(self.since) >= pace.measured() {
            self.before = (self.since, self.spent);
            (self.since, self.spent, self.requests) = (now, 0, 0);
        }
    }

    /// The units of the next prefetch; `None` if it is not worth it.
    pub(super) fn next_units(&mut self, now: u64, pace: Pace, most: u64, rest: u64) -> Option<u64> {
        let first_units = std::mem::take(&mut self.first_units);
        if now < self.since {
            // The clock has stepped back, so the rate that was measured is that of no known time.
            *self = Self::new(0, now);
        }
        let elapsed = now.saturating_sub(self.since);
        let present = rate(self.spent, elapsed.max(pace.measured()), pace.life);
        // The lasting rate includes the measurement before. Requests come at random, so a short
        // pause is no lower demand.
        let (since_before, before) = self.before;
        let lasting = rate(before.saturating_add(self.spent), now.saturating_sub(since_before), pace.life);
        let units = present.max(lasting).max(first_units).min(most).min(rest / PART_OF_THE_REST);
        let cost = if self.requests > 0 { self.spent.div_ceil(self.requests) } else { 1 };
        // Half as many requests are needed as for the first prefetch. Requests come at random, so a
        // busy key would otherwise lose its prefetches from time to time.
        let fewest = cost.saturating_mul(pace.fewest_requests / 2);
        // A key that has fallen quiet takes no further prefetch.
        let is_quiet = present < fewest && elapsed >= pace.measured();
        (units >= fewest && !is_quiet).then_some(units)
    }
}

/// Extrapolates a `count` of the time `elapsed` to a life.
pub(super) fn rate(count: u64, elapsed: u64, life: u64) -> u64 {
    let measured = elapsed.max(life / SHORTEST_MEASUREMENT).max(1);
    let expected = u128::from(count) * u128::from(life) / u128::from(measured);
    u64::try_from(expected).unwrap_or(u64::MAX)
}
