//! Limits by the calendar, with the feature `calendar`: a number of units for each hour, day, week
//! or month of a time zone.
//!
//! 1. A period begins at midnight of its time zone, or at the full hour. So a day on which daylight
//!    saving begins or ends has 23 or 25 hours. An hour that the clock repeats is a period of two
//!    hours. Weeks begin on Monday (ISO 8601), and months on [a day of your choice](Period::Month).
//! 2. All units come back at once when the period ends. So a client can spend the limit just before
//!    the end and again just after it, as with a [fixed window](crate::Algorithm::fixed_window).
//! 3. The clock of the store decides: with Redis, the clock of the server. A process only tells the
//!    store when the periods around the present period end. So if the clock of a process is wrong
//!    by less than two periods, no period begins twice, and no period ends early. If the clock of a
//!    process is ahead by more than two periods, or behind by more than three, the checks of the
//!    process fail.
//! 4. `Retry-After`, the reset, `RateLimit` and the body of a refusal all tell the end of the
//!    period.
//! 5. Limits of another period, first day or time zone count apart. Time zones are told apart by
//!    their names. So `Asia/Calcutta` and `Asia/Kolkata` are two time zones, although both have the
//!    same rules.
//!
//! ```
//! use tower_sliding_window::{Limit, limit::calendar::Period};
//!
//! let quota = Limit::per_calendar("quota", 10_000, Period::Month(1)).in_time_zone("Europe/Berlin")?;
//! assert_eq!(quota.to_string(), "quota=10000/month Europe/Berlin");
//! assert_eq!("quota=10000/month Europe/Berlin".parse(), Ok(quota));
//!
//! let error = Limit::per_calendar("daily", 100, Period::Day).in_time_zone("Europe/Atlantis").unwrap_err();
//! assert!(error.to_string().contains("Europe/Atlantis"));
//! # Ok::<(), tower_sliding_window::ConfigError>(())
//! ```

use super::Limit;
pub use crate::calendar::Period;
use crate::{
    algorithm::{Algorithm, Kind},
    calendar::{Calendar, DAY_RULE, LAST_DAY},
    config_error::ConfigError,
};

/// With the feature `calendar`: limits by the [calendar](super::calendar).
impl Limit {
    /// A limit for each period of the calendar, in UTC by default.
    /// [`in_time_zone`](Self::in_time_zone) sets another time zone.
    ///
    /// # Panics
    ///
    /// As [`Limit::per`], and if a month does not begin on a day from 1 to 28. All months have
    /// these days.
    #[track_caller]
    pub const fn per_calendar(name: &'static str, units: u64, period: Period) -> Self {
        if let Period::Month(day) = period {
            assert!(day >= 1 && day <= LAST_DAY, "{}", DAY_RULE);
        }
        Self::per(name, units, Self::MAX_WINDOW).with_algorithm(Algorithm(Kind::Calendar(Calendar::of(period))))
    }

    /// The same limit, in a time zone of the [IANA database](https://www.iana.org/time-zones) such
    /// as `Europe/Berlin`. The database is that of the system, or else the copy in this crate.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there is no such time zone, or if the limit is not by the calendar.
    pub fn in_time_zone(self, name: &str) -> Result<Self, ConfigError> {
        let problem = |problem: &str| ConfigError::of_limit(self.name(), problem);
        let Kind::Calendar(calendar) = self.algorithm().kind() else {
            return Err(problem("only a limit by the calendar has a time zone"));
        };
        let calendar = calendar.in_zone(name).map_err(|text| problem(&text))?;
        Ok(self.with_algorithm(Algorithm(Kind::Calendar(calendar))))
    }
}
