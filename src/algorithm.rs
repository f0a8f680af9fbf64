//! Rate-limiting algorithms: how a limit counts admissions, how exact it is, and how much memory it
//! needs.
//!
//! The default is an exact [`SLIDING_LOG`](Algorithm::SLIDING_LOG):
//!
//! ```
//! use tower_sliding_window::{Algorithm, Limit};
//!
//! const SEARCHES: Limit = Limit::per_day("searches", 1_000_000).with_algorithm(Algorithm::compact_log(128));
//! assert_eq!(SEARCHES.algorithm(), Algorithm::compact_log(128));
//! ```
//!
//! With `L` for the limit and `W` for the window:
//!
//! | | admits in any window | refuses too early | use it |
//! |---|---|---|---|
//! | [`SLIDING_LOG`](Algorithm::SLIDING_LOG) | at most `L` | never | unless memory matters |
//! | [`compact_log(n)`](Algorithm::compact_log) | at most `L` | by less than `W / (n − 2)` | for large limits |
//! | [`SLIDING_WINDOW_COUNTER`](Algorithm::SLIDING_WINDOW_COUNTER) | less than `2 L` | by less than `W` | if an estimate is enough |
//! | [`FIXED_WINDOW`](Algorithm::FIXED_WINDOW) | up to `2 L` | never within its window | if a contract defines the window, such as a day in UTC |
//!
//! An exact log has at most one entry per admission, so a large cost takes no more memory than a
//! cost of 1. For bytes per key in Redis, see
//! [`running_redis`](crate::guide::running_redis#memory); for bytes per entry in the process,
//! [`MemoryStore::capacity`](crate::MemoryStore::capacity).
//!
//! One check can combine limits of different algorithms. For all algorithms:
//!
//! 1. `retry_after` is exact: it ends at the first moment at which the check is admitted if no
//!    other check arrives. [`decision`](crate::decision) lists the exceptions.
//! 2. An admission with an id from its caller has its own entry. A
//!    [reservation](crate::Limiter::reserve) also has one until it is settled or expires. All other
//!    admissions have their own entries only under `log`. The other algorithms add such admissions
//!    up, so a repeated check counts twice and cannot be refunded.
//! 3. Except under `log`, a key has at most 10,000 entries for admissions with ids and for
//!    reservations. Admissions beyond that count for their whole window. Settling such an admission
//!    before its lease ends changes nothing. A settlement after the lease has ended counts in
//!    addition.
//! 4. A limit whose algorithm changes starts anew. The old entries expire.

use std::borrow::Cow;

#[cfg(feature = "calendar")]
use crate::calendar::Calendar;

/// The most entries with an id per key, except under a log or a concurrent limit. Bounds a key's
/// memory and the work per check.
pub(crate) const MOST_NAMED: usize = 10_000;

/// How a limit counts. See the [module docs](self).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[must_use]
pub struct Algorithm {
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    // Exact kinds come first, so one comparison tells them from the others.
    #[default]
    Log,
    /// Used by [`Limit::concurrent`](crate::Limit::concurrent).
    Concurrent,
    Compact {
        entries: u16,
    },
    Counter,
    Fixed,
    /// Used by [calendar](crate::calendar) limits.
    #[cfg(feature = "calendar")]
    Calendar(Calendar),
}

/// The time at which a local store records a place. A place is held until it is freed, so its
/// entry never leaves the window by itself.
const UNTIL_FREED: u64 = 1 << 62;

impl Algorithm {
    /// The fewest entries of a [`compact`](Self::compact_log) log.
    pub const MIN_ENTRIES: u16 = 3;
    /// The most entries of a [`compact`](Self::compact_log) log.
    pub const MAX_ENTRIES: u16 = 1024;

    /// A log of every admission, exact to the microsecond. The default.
    pub const SLIDING_LOG: Self = Self { kind: Kind::Log };

    /// Two counters, one for the current clock window and one for the previous. Units in the
    /// previous window are weighted by that window's overlap with the sliding window. Clock windows
    /// begin at multiples of their length since the Unix epoch.
    ///
    /// The estimate assumes that the previous window's units are spread evenly, and is rounded up.
    /// If they came late, the estimate is too low, and up to `2 L − 1` units can be in a sliding
    /// window. If they came early, the estimate is too high, and units count for up to a window
    /// longer than they should.
    pub const SLIDING_WINDOW_COUNTER: Self = Self {
        kind: Kind::Counter,
    };

    /// A fixed clock window. All units come back at once when it ends. Windows end at multiples of
    /// their length since the Unix epoch: for a day, at midnight UTC.
    ///
    /// A client can spend the limit just before a window ends and again just after, so up to twice
    /// the limit may be admitted within moments.
    pub const FIXED_WINDOW: Self = Self { kind: Kind::Fixed };

    /// A log of at most `entries` entries, whatever the limit. It never admits more than the limit,
    /// and refuses too early by less than a sub-window: the window divided by `entries − 2`.
    ///
    /// Units admitted within a sub-window count as admitted at its end. Redis stores up to 128
    /// entries as a listpack (before 7.0, a ziplist), which takes less memory.
    ///
    /// # Panics
    ///
    /// If `entries` is less than [`MIN_ENTRIES`](Self::MIN_ENTRIES) or more than
    /// [`MAX_ENTRIES`](Self::MAX_ENTRIES). In a `const`, this does not compile.
    #[track_caller]
    pub const fn compact_log(entries: u16) -> Self {
        assert!(
            entries >= Self::MIN_ENTRIES && entries <= Self::MAX_ENTRIES,
            "a compact log must have 3 to 1024 entries"
        );
        Self {
            kind: Kind::Compact { entries },
        }
    }

    /// True if the algorithm is a log, exact or compact.
    pub(crate) const fn is_log(self) -> bool {
        matches!(self.kind, Kind::Log | Kind::Compact { .. })
    }

    /// The algorithm's word in a limit's text. Redis keys and script arguments use it too, with two
    /// exceptions: both write a compact log differently, and scripts get period ends for a
    /// calendar.
    pub(crate) fn word(self) -> Cow<'static, str> {
        match self.kind {
            Kind::Log => "log".into(),
            Kind::Compact { entries } => format!("compact({entries})").into(),
            Kind::Counter => "counter".into(),
            Kind::Fixed => "fixed".into(),
            Kind::Concurrent => "concurrent".into(),
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar) => calendar.to_string().into(),
        }
    }

    /// The time recorded for an admission at `now`. The admission counts until one window after
    /// that time.
    pub(crate) fn recorded_at(self, now: u64, window: u64) -> u64 {
        match self.kind {
            Kind::Log => now,
            Kind::Compact { entries } => {
                let sub_window = window.div_ceil(u64::from(entries) - 2);
                (now - now % sub_window).saturating_add(sub_window - 1)
            }
            Kind::Fixed => now - now % window,
            Kind::Counter => (now - now % window).saturating_add(window),
            Kind::Concurrent => UNTIL_FREED,
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar) => calendar.end_of(now).saturating_sub(window),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compact_log_rounds_up_to_the_end_of_a_sub_window_and_a_fixed_window_down_to_its_start() {
        let compact = Algorithm::compact_log(12);
        let times = [6_000, 6_099, 6_100].map(|now| compact.recorded_at(now, 1_000));
        assert_eq!(times, [6_099, 6_099, 6_199]);
        let fixed =
            [6_000, 6_999, 7_000].map(|now| Algorithm::FIXED_WINDOW.recorded_at(now, 1_000));
        assert_eq!(fixed, [6_000, 6_000, 7_000]);
    }
}
