//! Algorithms: how a limit remembers what it has admitted, and how exact it is.
//!
//! A [`Limit`](crate::Limit) counts by a [`log`](Algorithm::log) unless it is told otherwise:
//!
//! ```
//! use tower_sliding_window::{Algorithm, Limit};
//!
//! const SEARCHES: Limit = Limit::per_day("searches", 1_000_000).with_algorithm(Algorithm::compact(128));
//! assert_eq!(SEARCHES.algorithm(), Algorithm::compact(128));
//! ```
//!
//! With `L` for the limit and `W` for the window:
//!
//! | | admits in any window | refuses too early | choose it |
//! |---|---|---|---|
//! | [`log`](Algorithm::log) | at most `L` | never | unless memory matters |
//! | [`compact(n)`](Algorithm::compact) | at most `L` | by less than `W / (n − 2)` | for large limits |
//! | [`counter`](Algorithm::counter) | less than `2 L` | by less than `W` | where an estimate will do |
//! | [`fixed`](Algorithm::fixed) | up to `2 L` | never within its window | where the window is a contract's, such as a day in UTC |
//!
//! Bytes of a key in Redis 7.0 (`MEMORY USAGE`) that is spent in full, evenly over the window:
//!
//! | | limit of 100 | 1,000 | 1,000,000 |
//! |---|---|---|---|
//! | `log`, of single units | 2,152 | 102,608 | 101,718,760 |
//! | `compact(128)` | 1,640 | 2,152 | 2,664 |
//! | `compact(16)` | 360 | 360 | 424 |
//! | `counter` | 152 | 152 | 152 |
//! | `fixed` | 136 | 152 | 152 |
//!
//! A log keeps one entry an admission, so what is spent in large costs is short. In process, an entry is 24 bytes.
//!
//! All of them are decided in the same atomic step, together with limits of other algorithms, and give the same figures.
//! What they have in common:
//!
//! 1. `retry_after` is true and tight for each of them: it is the first moment at which the algorithm admits the check
//!    if nothing else arrives.
//! 2. What has an id of its own, given by the caller or for a [reservation](crate::Limiter::reserve), is remembered under
//!    it until it is settled or gone: one more entry a key, whatever the algorithm. Without an id only `log` knows an
//!    admission from another: elsewhere a repeated check counts twice, and nothing can be refunded. Under another algorithm
//!    than `log` a key has at most 10,000 such entries. Admissions beyond them have no id: they count for their whole window,
//!    a settlement before the lease ends changes nothing, and one after it counts beside them.
//! 3. A limit whose algorithm is changed starts anew: the old history is neither read nor written any more, and expires.

/// How many entries with an id of their own a key has at most where memory is bounded: under every algorithm but the log.
/// It bounds the work of a check as well.
pub(crate) const MOST_NAMED: usize = 10_000;

/// How a limit counts. See the [module docs](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Algorithm(Kind);

/// What an algorithm is inside the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Log,
    Compact { entries: u16 },
    Counter,
    Fixed,
}

impl Algorithm {
    /// The fewest entries of a [`compact`](Self::compact) log.
    pub const MIN_ENTRIES: u16 = 3;
    /// The most entries of a [`compact`](Self::compact) log.
    pub const MAX_ENTRIES: u16 = 1024;

    /// A log of every admission, exact to the microsecond. The default.
    #[must_use]
    pub const fn log() -> Self {
        Self(Kind::Log)
    }

    /// A log of at most so many entries, at any limit: never admits more than the limit, and refuses early by less than
    /// one sub-window, which is a window divided by `entries − 2`.
    ///
    /// What is admitted within one sub-window counts as admitted at its end. One entry is the sum; one more than the
    /// window has sub-windows is needed since the oldest and the newest are both partly in the window. Up to 128
    /// entries Redis keeps in its compact encoding, of about 20 bytes each.
    ///
    /// # Panics
    ///
    /// If `entries` is less than [`MIN_ENTRIES`](Self::MIN_ENTRIES) or more than [`MAX_ENTRIES`](Self::MAX_ENTRIES); in
    /// a `const` that does not compile.
    #[must_use]
    #[track_caller]
    pub const fn compact(entries: u16) -> Self {
        assert!(
            entries >= Self::MIN_ENTRIES && entries <= Self::MAX_ENTRIES,
            "a compact log must have 3 to 1024 entries"
        );
        Self(Kind::Compact { entries })
    }

    /// Two counters: the units of the present window of the clock, and those of the one before, weighted by how much
    /// of it the sliding window still overlaps. Windows of the clock begin at multiples of the window since the Unix
    /// epoch.
    ///
    /// The estimate takes the units of the previous window for evenly spread. If they came late in it, units are
    /// missed: just before the next window begins, all but none of them count, and up to `2 L − 1` can be in a sliding
    /// window. If they came early, units that have left count as used still: at worst all of the limit, for less than a
    /// window. The estimate is rounded up to whole units.
    #[must_use]
    pub const fn counter() -> Self {
        Self(Kind::Counter)
    }

    /// A fixed window: all units come back at once when a window of the clock ends, at a multiple of the window since
    /// the Unix epoch. For a day that is midnight UTC.
    ///
    /// Its weakness is that boundary: who spends the limit just before it and again just after it has spent twice the
    /// limit within moments.
    #[must_use]
    pub const fn fixed() -> Self {
        Self(Kind::Fixed)
    }

    pub(crate) const fn kind(self) -> Kind {
        self.0
    }
}

impl Default for Algorithm {
    fn default() -> Self {
        Self::log()
    }
}

impl Kind {
    /// The time under which an admission of `now` is remembered: until a window after it the admission counts.
    pub(crate) fn recorded_at(self, now: u64, window: u64) -> u64 {
        match self {
            Self::Log => now,
            Self::Compact { entries } => {
                let part = window.div_ceil(u64::from(entries) - 2);
                (now - now % part).saturating_add(part - 1)
            }
            Self::Counter | Self::Fixed => now - now % window,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compact_log_rounds_up_to_the_end_of_a_sub_window_and_a_fixed_window_down_to_its_start() {
        let compact = Algorithm::compact(12).kind();
        let times = [6_000, 6_099, 6_100].map(|now| compact.recorded_at(now, 1_000));
        assert_eq!(times, [6_099, 6_099, 6_199]);
        let fixed = [6_000, 6_999, 7_000].map(|now| Kind::Fixed.recorded_at(now, 1_000));
        assert_eq!(fixed, [6_000, 6_000, 7_000]);
    }
}
