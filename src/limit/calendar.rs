//! Limits by the calendar, with the feature `calendar`: a number of units for each hour, day, week
//! or month of a time zone.
//!
//! 1. A period begins at midnight of its time zone, or at the full hour. So a day of daylight
//!    saving has 23 or 25 hours, and an hour that the clock repeats has two. Weeks begin on Monday
//!    (ISO 8601), and months on the first or on [another day](Limit::from_day).
//! 2. All units come back at once when the period ends. So a client can spend the limit just before
//!    the end and again just after it, as with a [fixed window](crate::Algorithm::fixed_window).
//! 3. The clock of the store decides: with Redis, the clock of the server. The processes only tell
//!    the store when the periods around the present one end. So a process whose clock is wrong by
//!    less than two periods opens no period twice, and ends no period early. If its clock is ahead
//!    by more than two periods, or behind by more than three, its checks fail.
//! 4. `Retry-After`, the reset, `RateLimit` and the body of a refusal all tell the end of the
//!    period.
//! 5. Limits of another period, first day or time zone count apart. A time zone is its name:
//!    `Asia/Calcutta` and `Asia/Kolkata` are two time zones, although they have the same rules.
//!
//! ```
//! use tower_sliding_window::Limit;
//!
//! let quota = Limit::per_calendar_month("quota", 10_000).in_time_zone("Europe/Berlin")?;
//! assert_eq!(quota.to_string(), "quota=10000/month Europe/Berlin");
//! assert_eq!("quota=10000/month Europe/Berlin".parse(), Ok(quota));
//!
//! let error = Limit::per_calendar_day("daily", 100).in_time_zone("Europe/Atlantis").unwrap_err();
//! assert!(error.to_string().contains("Europe/Atlantis"));
//! # Ok::<(), tower_sliding_window::ConfigError>(())
//! ```

use super::{Limit, text::invalid};
use crate::{
    algorithm::Algorithm,
    calendar::{Calendar, DAY_RULE, LAST_DAY, Period},
    config_error::ConfigError,
};

/// With the feature `calendar`: limits by the [calendar](super::calendar), in UTC unless
/// [`in_time_zone`](Limit::in_time_zone) says otherwise.
impl Limit {
    /// A limit for each hour of the clock.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_calendar_hour(name: &'static str, units: u64) -> Self {
        Self::per_period(name, units, Period::Hour)
    }

    /// A limit for each day, from midnight to midnight.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_calendar_day(name: &'static str, units: u64) -> Self {
        Self::per_period(name, units, Period::Day)
    }

    /// A limit for each week, from Monday on.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_calendar_week(name: &'static str, units: u64) -> Self {
        Self::per_period(name, units, Period::Week)
    }

    /// A limit for each month, from the first, or from [another day](Self::from_day).
    ///
    /// # Panics
    ///
    /// As [`Limit::per`].
    #[track_caller]
    pub const fn per_calendar_month(name: &'static str, units: u64) -> Self {
        Self::per_period(name, units, Period::Month)
    }

    #[track_caller]
    const fn per_period(name: &'static str, units: u64, period: Period) -> Self {
        Self::per(name, units, Self::MAX_WINDOW).with_algorithm(Algorithm::calendar(Calendar::of(period)))
    }

    /// The same limit, in a time zone of the [IANA database](https://www.iana.org/time-zones) such
    /// as `Europe/Berlin`: the system's, or the one that this crate brings along.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there is no such time zone, or if the limit is not by the calendar.
    pub fn in_time_zone(self, name: &str) -> Result<Self, ConfigError> {
        let calendar =
            self.algorithm.in_calendar().ok_or_else(|| "only a limit by the calendar has a time zone".to_owned());
        match calendar.and_then(|calendar| calendar.in_zone(name)) {
            Ok(calendar) => Ok(self.with_algorithm(Algorithm::calendar(calendar))),
            Err(problem) => Err(invalid(self.name(), &problem)),
        }
    }

    /// The same limit with months that begin on this day, such as the one on which a contract
    /// began.
    ///
    /// # Panics
    ///
    /// If the limit is not by the month, or the day is not 1 to 28, which all months have; in a
    /// `const`, that does not compile.
    #[track_caller]
    pub const fn from_day(self, day: u8) -> Self {
        assert!(day >= 1 && day <= LAST_DAY, "{}", DAY_RULE);
        let calendar = match self.algorithm.in_calendar() {
            Some(calendar) => calendar.beginning_on(day),
            None => None,
        };
        match calendar {
            Some(calendar) => self.with_algorithm(Algorithm::calendar(calendar)),
            None => panic!("only a limit by the calendar month has a first day"),
        }
    }
}
