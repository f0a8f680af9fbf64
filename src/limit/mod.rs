//! Limits: a number of units, a window and a name.
//!
//! 1. A limit of `n` units in a window `W` means that no span of length `W` ever admits more than
//!    `n` units: for every instant `x`, the units admitted in `(x − W, x]` never exceed `n`. No
//!    window has a boundary that a client could wait for or exploit.
//! 2. Limits with the same name, window and [algorithm](crate::algorithm) share their units for the
//!    same key, whatever their numbers of units. All other limits count separately: `api=100/s` and
//!    `api=100/h` are two different limits. For example, if a key has spent 14 units under
//!    `api=20/s`, then `api=5/s` shows 14 used and 0 remaining.
//! 3. A limit counts by an exact log, unless you choose another [algorithm](crate::algorithm).
//! 4. The store decides every admission, unless the limit is [prefetched](prefetch).
//! 5. Units are 0 to [`Limit::MAX_UNITS`], windows 1 ms to 365 days, names 1 to 64 characters of
//!    `A-Z a-z 0-9 _ . -`.
//! 6. A limit of 0 units admits nothing, for example to keep out a tenant: each cost of 1 or more
//!    is [`NeverFits`](crate::error::NeverFits). The store is not asked, so the limit also keeps
//!    the tenant out while the store is gone.
//!
//! ```
//! use std::time::Duration;
//! use tower_sliding_window::Limit;
//!
//! // Literals: a mistake in a `const` does not compile.
//! const LOGIN: Limit = Limit::per_minute("login", 5);
//! assert_eq!(LOGIN.window(), Duration::from_secs(60));
//!
//! // Values from a configuration: a mistake is an error that names the value.
//! let error = Limit::new("up stream", 9_500, Duration::from_secs(86_400)).unwrap_err();
//! assert!(error.to_string().contains("up stream"));
//!
//! // Text from a configuration: see `Limit::parse`.
//! assert_eq!("login=5/min".parse(), Ok(LOGIN));
//! ```

mod name;
pub mod prefetch;
pub(crate) mod text;

use std::{borrow::Cow, num::NonZeroU32, time::Duration};

pub(crate) use self::name::Name;
use self::text::{LIFE_RULE, is_life};
use crate::{
    algorithm::{Algorithm, Kind},
    config_error::ConfigError,
    key::{Digester, Key},
};

/// The default for [`Limit::freed_after`].
const DEFAULT_LIFE: Duration = Duration::from_secs(10);

/// Limits with one identity share their units for the same key, whatever their numbers of units.
/// Limits with different identities count separately: with a different window or algorithm, a unit
/// would leave at a different time. A store or process keeps all its state for a limit under this
/// identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub(crate) name: Name,
    pub(crate) window_micros: u64,
    pub(crate) algorithm: Algorithm,
}

/// A number of units, a window and a name. See the [module docs](self).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct Limit {
    pub(crate) identity: Identity,
    units: u64,
    /// The life of [prefetches](prefetch) in microseconds; `None` without prefetch.
    prefetch_micros: Option<u32>,
}

impl Limit {
    /// The most units, 2^52. Redis scripts count in doubles, which are exact up to 2^53, so the sum
    /// of a limit and a cost is exact.
    pub const MAX_UNITS: u64 = 1 << 52;
    /// The shortest window, 1 ms.
    pub const MIN_WINDOW: Duration = Duration::from_millis(1);
    /// The longest window, 365 days.
    pub const MAX_WINDOW: Duration = Duration::from_secs(365 * 24 * 60 * 60);

    /// A limit from values that are not known before run time. The window is rounded up to
    /// microseconds.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], naming the values, if the name, the units or the window is outside the
    /// [rules](self).
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        units: u64,
        window: Duration,
    ) -> Result<Self, ConfigError> {
        let name = name.into();
        match text::broken_rule(&name, units, window) {
            Some(rule) => Err(ConfigError::of_limit(
                &format!("{name}={units}/{window:?}"),
                rule,
            )),
            None => Ok(Self::of_valid(name.into(), units, window)),
        }
    }

    /// A limit from literals.
    ///
    /// # Panics
    ///
    /// If a value is outside the [rules](self). In a `const`, such a value does not compile. For
    /// values that are not known before run time there is [`Limit::new`].
    #[track_caller]
    pub const fn per(name: &'static str, units: u64, window: Duration) -> Self {
        if let Some(rule) = text::broken_rule(name, units, window) {
            panic!("{}", rule);
        }
        Self::of_valid(Name::Literal(name), units, window)
    }

    const fn of_valid(name: Name, units: u64, window: Duration) -> Self {
        // The window is rounded up, so that no unit leaves before its whole window has passed.
        let window_micros = window.as_nanos().div_ceil(1_000) as u64;
        let identity = Identity {
            name,
            window_micros,
            algorithm: Algorithm::SLIDING_LOG,
        };
        Self {
            identity,
            units,
            prefetch_micros: None,
        }
    }

    /// At most `units` in any second.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_second(name: &'static str, units: u64) -> Self {
        Self::per(name, units, Duration::from_secs(1))
    }

    /// At most `units` in any 60 seconds.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_minute(name: &'static str, units: u64) -> Self {
        Self::per(name, units, Duration::from_secs(60))
    }

    /// At most `units` in any 60 minutes.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_hour(name: &'static str, units: u64) -> Self {
        Self::per(name, units, Duration::from_secs(60 * 60))
    }

    /// At most `units` in any 24 hours.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_day(name: &'static str, units: u64) -> Self {
        Self::per(name, units, Duration::from_secs(24 * 60 * 60))
    }

    /// At most `places` admissions at once for each key, across all processes. An admission takes
    /// one place (a permit), whatever it costs. A check at a cost of 0 takes none.
    ///
    /// A place is held until the last clone of its [`Decision`](crate::Decision) is dropped. A
    /// layer holds it until the response body has ended: see
    /// [`Decision::holds_place`](crate::Decision::holds_place). Before a process ends, it frees its
    /// places by calling [`shutdown`](crate::Limiter::shutdown). When a process dies, its places
    /// are free within 10 s, or within the time that [`freed_after`](Self::freed_after) sets. This
    /// time is also the limit's [window](Self::window).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore};
    ///
    /// const STREAMS: Limit = Limit::concurrent("streams", 1);
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let stream = limiter.check(&STREAMS, "ada", 1).await?;
    /// assert!(stream.is_allowed());
    /// assert!(!limiter.check(&STREAMS, "ada", 1).await?.is_allowed());
    ///
    /// drop(stream);
    /// assert!(limiter.check(&STREAMS, "ada", 1).await?.is_allowed());
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn concurrent(name: &'static str, places: u64) -> Self {
        Self::per(name, places, DEFAULT_LIFE).with_algorithm(Algorithm {
            kind: Kind::Concurrent,
        })
    }

    /// Sets how soon a process's places are free after it has died. The limit must be
    /// [concurrent](Self::concurrent). Default: 10 s.
    ///
    /// A process renews a place when half of `time`, minus one round trip to the store, has passed
    /// since the last renewal. So the reply arrives in time. If the process stands still or Redis
    /// is gone for longer than `time`, the process's places are not renewed. Then other requests
    /// may get them, and [`Decision::has_lost_place`](crate::Decision::has_lost_place) returns
    /// `true`.
    ///
    /// # Panics
    ///
    /// If the limit is not concurrent, or the time is less than a second or longer than the longest
    /// [window](Self::MAX_WINDOW). In a `const`, such a mistake does not compile.
    #[track_caller]
    pub const fn freed_after(mut self, time: Duration) -> Self {
        assert!(
            self.is_concurrent(),
            "only the places of a concurrent limit are freed after a time"
        );
        assert!(is_life(time), "{}", LIFE_RULE);
        self.identity.window_micros = time.as_nanos().div_ceil(1_000) as u64;
        self
    }

    /// Returns the same limit with a different algorithm. Default: [`Algorithm::SLIDING_LOG`],
    /// which is exact. The limit keeps its [prefetch](Self::prefetch) only if the new algorithm is
    /// an exact or a compact log. If you pass a [concurrent](Self::concurrent) limit's algorithm, a
    /// window below one second becomes 10 s, since a process has to renew its places in time.
    pub const fn with_algorithm(mut self, algorithm: Algorithm) -> Self {
        self.identity.algorithm = algorithm;
        #[cfg(feature = "calendar")]
        if let Kind::Calendar(calendar) = algorithm.kind {
            self.identity.window_micros = calendar.longest();
        }
        if self.is_concurrent() && !is_life(self.window()) {
            self = self.freed_after(DEFAULT_LIFE);
        }
        if !algorithm.is_log() {
            self.prefetch_micros = None;
        }
        self
    }

    /// Returns the same limit with a different number of units. Both limits share their units: see
    /// rule 2 in the [module docs](self). Suppose that a limit was lowered below an earlier
    /// admission's cost. To settle that admission, use this method to make the charge under a limit
    /// with enough units for the cost.
    ///
    /// # Panics
    ///
    /// If `units` is above [`MAX_UNITS`](Self::MAX_UNITS).
    #[track_caller]
    pub const fn with_units(mut self, units: u64) -> Self {
        assert!(units <= Self::MAX_UNITS, "{}", text::UNITS_RULE);
        self.units = units;
        self
    }

    /// Returns one of `processes` equal shares of the limit, rounded down. `None` if the limit has
    /// units, but the share has none.
    pub(crate) fn shared_by(&self, processes: NonZeroU32) -> Option<Self> {
        Some(self.clone().of_part(processes)).filter(|share| share.units > 0 || self.units == 0)
    }

    /// Returns the limit for each part if this limit is split into `parts`. The units are rounded
    /// down, and may be 0.
    pub(crate) const fn of_part(mut self, parts: NonZeroU32) -> Self {
        self.units /= parts.get() as u64;
        self
    }

    /// The name in stores, headers and log lines.
    pub fn name(&self) -> &str {
        &self.identity.name
    }

    /// The units that fit into one window.
    pub const fn units(&self) -> u64 {
        self.units
    }

    /// The window, exact to the microsecond. A calendar limit's periods are at most this long.
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.identity.window_micros)
    }

    /// The algorithm.
    pub const fn algorithm(&self) -> Algorithm {
        self.identity.algorithm
    }

    /// True if the limit is [concurrent](Self::concurrent), which means that it counts the
    /// admissions that have not ended yet.
    #[inline]
    pub const fn is_concurrent(&self) -> bool {
        matches!(self.identity.algorithm.kind, Kind::Concurrent)
    }

    /// True if all the limit's windows are as long as [`window`](Self::window) says. Calendar
    /// periods differ, and a concurrent limit has no windows.
    pub(crate) const fn has_length(&self) -> bool {
        matches!(
            self.identity.algorithm.kind,
            Kind::Log | Kind::Compact { .. } | Kind::Counter | Kind::Fixed
        )
    }

    pub(crate) const fn window_micros(&self) -> u64 {
        self.identity.window_micros
    }

    /// The highest cost for spent units. Higher costs are capped at this cost, which also uses up
    /// the limit.
    pub(crate) fn most_spent(&self) -> u64 {
        self.units.max(1 << 32)
    }

    pub(crate) fn is_counter(&self) -> bool {
        matches!(self.identity.algorithm.kind, Kind::Counter)
    }

    /// Returns the time under which an admission at the time `now` is recorded. The admission
    /// counts until one window after the recorded time.
    pub(crate) fn recorded_at(&self, now: u64) -> u64 {
        self.algorithm().recorded_at(now, self.window_micros())
    }

    /// True if both limits share their units.
    // Few checks compare their limits. If this were inlined, the compiler would no longer inline
    // some functions that all checks need.
    #[inline(never)]
    pub(crate) fn is_one_with(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Returns the digest of the limit's identity and a key.
    pub(crate) fn digest(&self, digester: &Digester, key: &Key) -> u64 {
        self.long_digest(digester, key) as u64
    }

    /// Returns the 128-bit digest of the limit's identity and a key.
    // Inlined as [`Digester::digest`] is.
    #[inline(always)]
    pub(crate) fn long_digest(&self, digester: &Digester, key: &Key) -> u128 {
        let Identity {
            name,
            window_micros,
            algorithm,
        } = &self.identity;
        // With the same window, different algorithms have different numbers.
        let number = match algorithm.kind {
            Kind::Log => 0,
            Kind::Counter => 1,
            Kind::Fixed => 2,
            // At least three.
            Kind::Compact { entries } => entries,
            Kind::Concurrent => u16::MAX,
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar) => calendar.number(),
        };
        // A window has at most 45 bits, so the number fits into the bits above the window.
        let rest = *window_micros | u64::from(number) << 48;
        digester.digest(name, rest, key)
    }
}
