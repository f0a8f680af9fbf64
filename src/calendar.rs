//! Calendar limits, with the feature `calendar`: a number of units for each hour, day, week or
//! month in a time zone. [`Limit::parse`](crate::Limit::parse) reads them from text. Time zones
//! come from the [IANA database](https://www.iana.org/time-zones): the system's copy, or else the
//! one in this crate.
//!
//! 1. A period begins at midnight in its time zone, or at the full hour. So a day on which daylight
//!    saving begins or ends has 23 or 25 hours, and an hour that the clock repeats is a two-hour
//!    period. Weeks begin on Monday (ISO 8601). Months begin on day 1, or on another day from 1 to
//!    28 if you choose one. For example, `month(15)` fits a contract that began on the 15th.
//! 2. All units come back at once when the period ends. So a client can spend the limit just before
//!    the end and again just after it, as with a [fixed window](crate::Algorithm::FIXED_WINDOW).
//! 3. The store's clock decides. With Redis, this is the server's clock. A process only sends the
//!    ends of the periods around its current one. So if its clock is off by less than two periods,
//!    a period never begins twice or ends early. If the clock is more than two periods ahead, or
//!    more than three behind, the process's checks fail.
//! 4. `Retry-After`, the reset time, `RateLimit` and a refusal's body all give the period's end.
//! 5. Limits that differ in period, first day or time zone are counted separately. Time zones are
//!    compared by name, so `Asia/Calcutta` and `Asia/Kolkata` count as two zones, although their
//!    rules are the same.
//! 6. Processes that share limits need the same edition of the time zone database. If editions
//!    disagree about a period's end, each admission counts until the end that its own process
//!    knows. So the processes never admit more than the limit between two neighbouring ends, but
//!    they may admit up to twice the limit in a period of either edition. Update all processes
//!    before the first end that differs.
//!
//! ```
//! use tower_sliding_window::Limit;
//!
//! let quota = Limit::parse("quota", "10000/month Europe/Berlin")?;
//! assert_eq!(quota.to_string(), "quota=10000/month Europe/Berlin");
//!
//! let error = Limit::parse("daily", "100/d Europe/Atlantis").unwrap_err();
//! assert!(error.to_string().contains("Europe/Atlantis"));
//! # Ok::<(), tower_sliding_window::ConfigError>(())
//! ```

use std::{
    fmt,
    sync::{PoisonError, RwLock},
};

use jiff::{
    Timestamp, ToSpan,
    civil::{DateTime, Weekday},
    tz::TimeZone,
};

/// Time zones in use. A [`Calendar`] refers to its zone by index. The list is never longer than the
/// time zone database, which has about 600 names. [`Calendar::number`] has room for 1,024.
static ZONES: RwLock<Vec<TimeZone>> = RwLock::new(Vec::new());

const HOUR: u64 = 3_600_000_000;

/// The periods in which a limit counts, and their time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Calendar {
    period: Period,
    /// The index into [`ZONES`].
    zone: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Period {
    Hour,
    Day,
    Week,
    /// A month that begins on this day. All months have the days 1 to 28.
    Month(i8),
}

impl Calendar {
    /// An upper bound on the length of a period. Each one counts as a window of this length that
    /// ends with the period.
    pub(crate) const fn longest(self) -> u64 {
        // A clock may repeat up to two hours, so each length has two hours to spare.
        match self.period {
            Period::Hour => 3 * HOUR,
            Period::Day => 26 * HOUR,
            Period::Week => (7 * 24 + 2) * HOUR,
            Period::Month(_) => (31 * 24 + 2) * HOUR,
        }
    }

    /// Returns a number that other algorithms do not use. Calendars with the same time zone and
    /// first day share this number even if their periods differ, since their windows tell them
    /// apart.
    pub(crate) const fn number(self) -> u16 {
        let from_day = if let Period::Month(day) = self.period {
            day
        } else {
            1
        };
        1 << 15 | self.zone << 5 | from_day as u16
    }

    /// Returns the end of the period that contains `time`, in microseconds since the Unix epoch.
    pub(crate) fn end_of(self, time: u64) -> u64 {
        self.ends(time)
            .find(|end| *end > time)
            .unwrap_or_else(|| time.saturating_add(self.longest()))
    }

    /// Returns the ends of the seven periods around `time`: three that have passed, and four to
    /// come.
    pub(crate) fn ends(self, time: u64) -> impl Iterator<Item = u64> {
        let zone = self.zone();
        let time = i64::try_from(time)
            .ok()
            .and_then(|time| Timestamp::from_microsecond(time).ok());
        let local = zone.to_datetime(time.unwrap_or(Timestamp::MAX));
        (-2..=4).filter_map(move |number| {
            let start = zone.to_timestamp(self.start(local, number)?).ok()?;
            Some(u64::try_from(start.as_microsecond()).unwrap_or(0))
        })
    }

    /// Returns the start of the period `number` periods after the one that contains `local`.
    fn start(self, local: DateTime, number: i64) -> Option<DateTime> {
        let date = local.date();
        let (present, distance) = match self.period {
            Period::Hour => (date.at(local.hour(), 0, 0, 0), number.hours()),
            Period::Day => (date.into(), number.days()),
            Period::Week => {
                let tomorrow = date.tomorrow().ok()?;
                let monday = tomorrow.nth_weekday(-1, Weekday::Monday).ok()?;
                (monday.into(), number.weeks())
            }
            Period::Month(day) => {
                // A date before `day` belongs to the period that began in the previous month.
                let after_first = i64::from(day - 1).days();
                let first = date.checked_sub(after_first).ok()?.first_of_month();
                (first.checked_add(after_first).ok()?.into(), number.months())
            }
        };
        present.checked_add(distance).ok()
    }

    fn zone(self) -> TimeZone {
        let zones = ZONES.read().unwrap_or_else(PoisonError::into_inner);
        let zone = zones.get(usize::from(self.zone)).cloned();
        zone.unwrap_or(TimeZone::UTC)
    }

    /// Reads a calendar from a limit's text: a period such as `month` or `month(15)`, and a time
    /// zone, UTC by default. `None` if the window is not a calendar period.
    pub(crate) fn read(window: &str, zone: Option<&str>) -> Result<Option<Self>, String> {
        let day = window
            .strip_prefix("month(")
            .and_then(|rest| rest.strip_suffix(')'));
        let period = match (window, day.map(str::parse)) {
            (_, Some(Ok(day @ 1..=28))) => Period::Month(day),
            (_, Some(_)) => {
                return Err(format!(
                    "months can begin on the days 1 to 28, not {window:?}"
                ));
            }
            ("month", _) => Period::Month(1),
            ("week", _) => Period::Week,
            _ if zone.is_none() => return Ok(None),
            ("d" | "day", _) => Period::Day,
            ("h" | "hour", _) => Period::Hour,
            _ => {
                return Err(format!(
                    "with a time zone, the window must be h, d, week, month or month(15), not {window:?}"
                ));
            }
        };
        Ok(Some(Self {
            period,
            zone: zone_number(zone.unwrap_or("UTC"))?,
        }))
    }
}

/// Returns the index of a time zone in [`ZONES`].
fn zone_number(name: &str) -> Result<u16, String> {
    let zone =
        TimeZone::get(name).map_err(|error| format!("there is no time zone {name:?}: {error}"))?;
    // A name without a capital is local to this system, such as "localtime".
    if !zone
        .iana_name()
        .is_some_and(|name| name.starts_with(|c: char| c.is_ascii_uppercase()))
    {
        return Err(format!("there is no time zone {name:?}"));
    }
    let mut zones = ZONES.write().unwrap_or_else(PoisonError::into_inner);
    // Zones are compared by name, since Redis keys contain it. If two names with the same rules
    // were one zone, keys would contain the name that the process met first.
    let number = zones
        .iter()
        .position(|known| known.iana_name() == zone.iana_name())
        .unwrap_or_else(|| {
            zones.push(zone);
            zones.len() - 1
        });
    Ok(number as u16)
}

/// Writes the calendar as in a limit's text, such as `month(15) Europe/Berlin`.
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.period {
            Period::Hour => f.write_str("h")?,
            Period::Day => f.write_str("d")?,
            Period::Week => f.write_str("week")?,
            Period::Month(1) => f.write_str("month")?,
            Period::Month(day) => write!(f, "month({day})")?,
        }
        write!(f, " {}", self.zone().iana_name().unwrap_or("UTC"))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use jiff::{ZonedDateTime, civil::date, tz};

    use super::*;

    fn micros(time: &ZonedDateTime) -> u64 {
        time.timestamp().as_microsecond() as u64
    }

    fn calendar(text: &str, zone: &str) -> Calendar {
        Calendar::read(text, Some(zone)).unwrap().unwrap()
    }

    /// The library's own starts of days, from 2020 to 2040.
    fn days(zone: &str) -> impl Iterator<Item = ZonedDateTime> {
        let noon = |day: i64| {
            date(2020, 1, 1)
                .at(12, 0, 0, 0)
                .checked_add(day.days())
                .unwrap()
                .in_tz(zone)
                .unwrap()
        };
        (0..7_671).map(move |day| noon(day).start_of_day().unwrap())
    }

    /// Tests every fifth time zone: all months, the weeks of one year, and each day whose length
    /// differs from the day before. `CALENDAR=all` tests all zones and periods.
    #[test]
    fn periods_end_where_the_library_says() {
        let is_all = std::env::var("CALENDAR").is_ok();
        let mut tested = 0;
        let names = tz::db().available().map(|name| name.to_string());
        // The system database also has local names, such as "localtime".
        let zones: BTreeSet<String> = names.filter(|name| zone_number(name).is_ok()).collect();
        assert!(zones.len() > 300);
        for zone in zones.iter().step_by(if is_all { 1 } else { 5 }) {
            let [day, week, month, contract] =
                ["d", "week", "month", "month(15)"].map(|text| calendar(text, zone));
            let mut before = days(zone).next().unwrap();
            let mut length = None;
            for start in days(zone).skip(1) {
                let this_length = start.duration_since(&before);
                let is_changed = length
                    .replace(this_length)
                    .is_some_and(|length| length != this_length);
                let is_of = [
                    (day, is_all || is_changed),
                    (
                        week,
                        start.weekday() == jiff::civil::Weekday::Monday
                            && (is_all || start.year() == 2026),
                    ),
                    (month, start.day() == 1),
                    (contract, start.day() == 15),
                ];
                for (calendar, _) in is_of.iter().filter(|(_, is_start)| *is_start) {
                    assert_eq!(
                        calendar.end_of(micros(&start) - 1),
                        micros(&start),
                        "{calendar} before {start}"
                    );
                    assert!(
                        calendar.end_of(micros(&start)) > micros(&start),
                        "{calendar} at {start}"
                    );
                    tested += 1;
                }
                before = start;
            }
        }
        println!("{tested} ends in {} time zones", zones.len());
    }

    #[test]
    fn a_day_of_daylight_saving_has_23_or_25_hours_and_a_repeated_hour_two() {
        let ends = |text, time: ZonedDateTime| {
            calendar(text, "Europe/Berlin").end_of(micros(&time)) - micros(&time)
        };
        let berlin = |month, day, hour| {
            date(2026, month, day)
                .at(hour, 0, 0, 0)
                .in_tz("Europe/Berlin")
                .unwrap()
        };
        assert_eq!(ends("d", berlin(3, 29, 0)), 23 * HOUR);
        assert_eq!(ends("d", berlin(10, 25, 0)), 25 * HOUR);
        assert_eq!(ends("h", berlin(10, 25, 2)), 2 * HOUR);
        assert_eq!(ends("h", berlin(3, 29, 1)), HOUR);
        assert_eq!(ends("month(15)", berlin(2, 15, 0)), 28 * 24 * HOUR);
        assert_eq!(
            ends("month", date(2028, 2, 1).in_tz("Europe/Berlin").unwrap()),
            29 * 24 * HOUR
        );
    }

    /// A process sends several period ends. The script takes the first one after the server's time.
    #[cfg(feature = "redis")]
    #[test]
    fn a_process_tells_the_same_end_if_its_clock_is_wrong_by_two_periods() {
        for (text, period) in [
            ("h", HOUR),
            ("d", 24 * HOUR),
            ("week", 168 * HOUR),
            ("month", 28 * 24 * HOUR),
        ] {
            let calendar = calendar(text, "America/New_York");
            for step in 0..2_000 {
                let now = micros(&date(2026, 1, 1).in_tz("UTC").unwrap()) + step * (5 * HOUR + 7);
                for wrong in [0, period / 2, period, 2 * period] {
                    for told in [calendar.ends(now - wrong), calendar.ends(now + wrong)] {
                        let end = told.into_iter().find(|end| *end > now);
                        assert_eq!(
                            end,
                            Some(calendar.end_of(now)),
                            "{calendar} at {now}, wrong by {wrong}"
                        );
                    }
                }
            }
        }
    }
}
