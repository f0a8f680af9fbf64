//! Limits as text, such as `login=5/min`, and the rules for names, units and windows.

use std::{
    borrow::Cow,
    fmt::{self, Write},
    str::FromStr,
    time::Duration,
};

#[cfg(feature = "serde")]
use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, Visitor},
};

use super::{Limit, prefetch::DEFAULT_LIFE};
#[cfg(feature = "calendar")]
use crate::calendar::Calendar;
use crate::{
    algorithm::{Algorithm, Kind},
    clock::micros,
    config_error::ConfigError,
};

const NAME_RULE: &str = "a limit's name must be 1 to 64 characters of A-Z a-z 0-9 _ . -";
pub(super) const UNITS_RULE: &str = "a limit's units must be 0 to 2^52";
const WINDOW_RULE: &str = "a limit's window must be 1 ms to 365 days";

pub(super) const LIFE_RULE: &str = "the window of a concurrent limit must be 1 s to 365 days";

/// True if the window is allowed for a concurrent limit. Such a limit's window is the time for
/// which a place is kept without a renewal. Below a second, there would be too little time to
/// repeat a failed renewal.
pub(super) const fn is_life(window: Duration) -> bool {
    window.as_secs() >= 1 && window.as_nanos() <= Limit::MAX_WINDOW.as_nanos()
}

/// Returns the rule that a name, units or a window breaks; `None` if all three are allowed.
pub(super) const fn broken_rule(name: &str, units: u64, window: Duration) -> Option<&'static str> {
    if !is_fixed_alphabet(name) {
        Some(NAME_RULE)
    } else if units > Limit::MAX_UNITS {
        Some(UNITS_RULE)
    } else if window.as_nanos() < Limit::MIN_WINDOW.as_nanos()
        || window.as_nanos() > Limit::MAX_WINDOW.as_nanos()
    {
        Some(WINDOW_RULE)
    } else {
        None
    }
}

/// True if `text` is 1 to 64 characters of `[A-Za-z0-9_.-]`. These characters need no escapes in
/// Redis keys and headers.
pub(crate) const fn is_fixed_alphabet(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if !(bytes[at].is_ascii_alphanumeric() || matches!(bytes[at], b'_' | b'.' | b'-')) {
            return false;
        }
        at += 1;
    }
    !bytes.is_empty() && bytes.len() <= 64
}

/// The time units for windows: the microseconds in each, and its names. `to_string` writes the
/// first name.
const WINDOW_UNITS: [(u64, &[&str]); 6] = [
    (86_400_000_000, &["d", "day", "days"]),
    (3_600_000_000, &["h", "hour", "hours"]),
    (60_000_000, &["min", "m", "minute", "minutes"]),
    (1_000_000, &["s", "sec", "second", "seconds"]),
    (1_000, &["ms"]),
    (1, &["us"]),
];

impl Limit {
    /// A limit with this name, from a text such as `100/min`.
    ///
    /// | text | limit |
    /// |---|---|
    /// | `100/min` | 100 in any minute |
    /// | `10/s`, `5000/h`, `1/d` | 10 in any second, 5,000 in any hour, 1 in any 24 hours |
    /// | `100/10s`, `3 / 500ms` | 100 in any 10 seconds, 3 in any half second |
    /// | `1000000/d compact(128)` | the same with an [algorithm](Self::with_algorithm): `log`, the default, `compact(n)`, `counter` or `fixed` |
    /// | `4 concurrent`, `4/10s concurrent` | 4 [at once](Self::concurrent); the places of a process that has died are free after 10 s |
    /// | `10000/month Europe/Berlin`, `10000/month(15)`, `100/week UTC`, `50/d Asia/Tokyo`, `5/h UTC` | by the calendar, with the feature `calendar`: in this time zone, or in UTC; from the 15th |
    /// | `600000/min prefetch`, `600000/min log prefetch(50ms)` | the same with [prefetch](Self::prefetch), with the default life or one of 50 ms |
    ///
    /// * The window is a whole number with a time unit, or such a unit alone, which means one: `us`
    ///   (microseconds), `ms`, `s` `sec` `second` `seconds`, `m` `min` `minute` `minutes`, `h`
    ///   `hour` `hours`, `d` `day` `days`. There are no fractions: write `1500ms`.
    /// * Spaces may be around `/` and between words. Everything except time zones is in lower case.
    /// * [`str::parse`] reads this text with the name in front, as in `login=5/min`, and
    ///   `to_string` writes this form. Parsing the written text gives an equal limit. With the
    ///   feature `serde`,
    ///   [configurations](crate::guide::limits_by_plan#limits-from-a-configuration) have the same
    ///   form.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the text is not in this form, or if the name, the units or the window is
    /// outside the [rules](super). The error names the part that is wrong.
    ///
    /// ```
    /// use tower_sliding_window::Limit;
    ///
    /// assert_eq!(Limit::parse("login", "5/min")?, Limit::per_minute("login", 5));
    /// assert_eq!("login=5/min".parse::<Limit>()?, Limit::per_minute("login", 5));
    /// assert_eq!(Limit::per_minute("login", 5).to_string(), "login=5/min");
    ///
    /// let error = Limit::parse("login", "5/fortnight").unwrap_err();
    /// assert!(error.to_string().contains("fortnight"));
    /// # Ok::<_, tower_sliding_window::ConfigError>(())
    /// ```
    pub fn parse(name: impl Into<Cow<'static, str>>, text: &str) -> Result<Self, ConfigError> {
        let name = name.into();
        let whole_text = format!("{name}={text}");
        read(name, text).map_err(|problem| ConfigError::of_limit(&whole_text, problem))
    }
}

/// Reads a name and the text of [`Limit::parse`], such as `login=5/min`.
impl FromStr for Limit {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let limit = match text.split_once('=') {
            Some((name, terms)) => read(name.trim().to_owned().into(), terms),
            None => {
                Err("there is no = between the name and the units, as in login=5/min".to_owned())
            }
        };
        limit.map_err(|problem| ConfigError::of_limit(text, problem))
    }
}

/// With the feature `serde`: writes the text, such as `"login=5/min"`.
#[cfg(feature = "serde")]
impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// With the feature `serde`: reads the text of [`Limit::parse`] with the name in front, such as
/// `"login=5/min"`.
///
/// ```
/// use tower_sliding_window::Limit;
///
/// # fn main() -> Result<(), serde_json::Error> {
/// let limits: Vec<Limit> = serde_json::from_str(r#"["login=5/min", "export=100/h"]"#)?;
/// assert_eq!(limits, [Limit::per_minute("login", 5), Limit::per_hour("export", 100)]);
/// assert_eq!(serde_json::to_string(&limits)?, r#"["login=5/min","export=100/h"]"#);
/// # Ok(()) }
/// ```
#[cfg(feature = "serde")]
impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Parses the text within the deserializer, so that a format such as TOML can name the line
        /// with the error.
        struct LimitText;

        impl Visitor<'_> for LimitText {
            type Value = Limit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a limit as text, such as \"login=5/min\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Limit, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_str(LimitText)
    }
}

/// Writes the name and the text of [`Limit::parse`], such as `login=5/min`.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name(), self.units)?;
        #[cfg(feature = "calendar")]
        if let Kind::Calendar(calendar) = self.algorithm().kind {
            return write!(f, "/{calendar}");
        }
        write!(f, "/{}", window_text(self.window_micros()))?;
        if self.algorithm() != Algorithm::SLIDING_LOG {
            write!(f, " {}", self.algorithm().word())?;
        }
        match self.prefetch_life() {
            Some(life) => write!(f, " {}", prefetch_text(life)),
            None => Ok(()),
        }
    }
}

/// Returns a window's text, in the largest unit that divides the window.
fn window_text(window_micros: u64) -> String {
    let mut text = String::new();
    write_window(&mut text, window_micros);
    text
}

/// Appends a window's text, in the largest unit that divides the window.
pub(crate) fn write_window(text: &mut String, window_micros: u64) {
    let mut units = WINDOW_UNITS.iter();
    let unit = units.find(|(micros, _)| window_micros.is_multiple_of(*micros));
    let (micros, names) = unit.unwrap_or(&(1, &["us"]));
    let count = window_micros / micros;
    if count > 1 {
        // Writing to a String cannot fail.
        let _ = write!(text, "{count}");
    }
    text.push_str(names[0]);
}

fn prefetch_text(life: Duration) -> String {
    if life == DEFAULT_LIFE {
        return "prefetch".to_owned();
    }
    format!("prefetch({})", window_text(micros(life)))
}

/// Reads a limit. The error says why the text is not a limit.
fn read(name: Cow<'static, str>, text: &str) -> Result<Limit, String> {
    let default_life = text
        .strip_suffix(" concurrent")
        .map(|units| (units, "10s concurrent"));
    let (units, terms) = text
        .split_once('/')
        .or(default_life)
        .ok_or("there is no / between the units and the window, as in 5/min")?;
    let units = units.trim();
    let units = whole_number(units)
        .ok_or_else(|| format!("the number of units must be a whole number, not {units:?}"))?;

    let mut words = terms.split_whitespace().peekable();
    let window_text = words
        .next()
        .ok_or("there is no window after the /, as in 5/min")?;
    // A time zone is a word such as `Europe/Berlin` or `Japan`. No other word has a slash, or
    // begins with a capital.
    let zone = words
        .next_if(|word| word.contains('/') || word.starts_with(|c: char| c.is_ascii_uppercase()));
    let calendar = calendar(window_text, zone)?;
    let window = if calendar.is_some() {
        Limit::MAX_WINDOW
    } else {
        window(window_text)?
    };
    let algorithm = words
        .next_if(|word| !word.starts_with("prefetch"))
        .map(algorithm_of)
        .transpose()?;
    if calendar.is_some() && algorithm.is_some() {
        return Err("a limit by the calendar has no other algorithm".to_owned());
    }
    let algorithm = calendar.or(algorithm).unwrap_or_default();
    let life = words.next().map(prefetch_life).transpose()?;
    if let Some(word) = words.next() {
        return Err(format!(
            "prefetch is the last word, such as prefetch(50ms), so {word:?} must not follow"
        ));
    }

    if let Some(rule) = broken_rule(&name, units, window) {
        return Err(rule.to_owned());
    }
    if algorithm.kind == Kind::Concurrent && !is_life(window) {
        return Err(LIFE_RULE.to_owned());
    }
    let limit = Limit::of_valid(name.into(), units, window).with_algorithm(algorithm);
    match life {
        Some(life) => limit.with_prefetch(life),
        None => Ok(limit),
    }
}

/// Reads a number that has only digits. A number that is too large becomes `u64::MAX`, which no
/// rule allows.
pub(crate) fn whole_number(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().unwrap_or(u64::MAX))
}

/// Returns a calendar limit's algorithm; `None` for a window that does not follow the calendar.
fn calendar(window: &str, zone: Option<&str>) -> Result<Option<Algorithm>, String> {
    #[cfg(feature = "calendar")]
    return Ok(Calendar::read(window, zone)?.map(|calendar| Algorithm {
        kind: Kind::Calendar(calendar),
    }));
    #[cfg(not(feature = "calendar"))]
    match zone {
        None if !window.starts_with("month") && window != "week" => Ok(None),
        _ => Err("a limit by the calendar needs the feature `calendar`".to_owned()),
    }
}

/// A window such as `min` or `10s`.
fn window(text: &str) -> Result<Duration, String> {
    let (count, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let mut units = WINDOW_UNITS.into_iter();
    let (micros, _) = units.find(|(_, names)| names.contains(&unit)).ok_or_else(|| {
        format!("the window must be a whole number with a unit right behind it (us, ms, s, min, h or d), such as 10s, or of \
             the calendar, such as month or week, not {text:?}")
    })?;
    Ok(Duration::from_micros(
        whole_number(count).unwrap_or(1).saturating_mul(micros),
    ))
}

/// The algorithm that `word` names.
fn algorithm_of(word: &str) -> Result<Algorithm, String> {
    let entries = word
        .strip_prefix("compact(")
        .and_then(|rest| rest.strip_suffix(')'))
        .and_then(whole_number);
    match (word, entries) {
        ("log", _) => Ok(Algorithm::SLIDING_LOG),
        ("counter", _) => Ok(Algorithm::SLIDING_WINDOW_COUNTER),
        ("fixed", _) => Ok(Algorithm::FIXED_WINDOW),
        ("concurrent", _) => Ok(Algorithm {
            kind: Kind::Concurrent,
        }),
        (_, Some(entries @ 3..=1024)) => Ok(Algorithm::compact_log(entries as u16)),
        _ => Err(format!(
            "the algorithm must be log, compact(n) with 3 to 1024 entries, counter, fixed or concurrent, or prefetches \
             follow, not {word:?}"
        )),
    }
}

/// Returns the prefetch life that a word such as `prefetch` or `prefetch(50ms)` sets.
fn prefetch_life(word: &str) -> Result<Duration, String> {
    if word == "prefetch" {
        return Ok(DEFAULT_LIFE);
    }
    let life = word
        .strip_prefix("prefetch(")
        .and_then(|rest| rest.strip_suffix(')'));
    match life.map(window) {
        Some(Ok(life)) => Ok(life),
        _ => Err(format!(
            "the prefetch must be written prefetch or prefetch(50ms), not {word:?}"
        )),
    }
}
