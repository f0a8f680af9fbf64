//! Limits in configurations, by the feature `serde`.

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::{Limit, text};
use crate::config_error::ConfigError;

/// With the feature `serde`: writes the text of [`Limit::parse`] with the name in front, such as
/// `"login=5/min"`.
impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// With the feature `serde`: reads a text, or a map.
///
/// * The text is that of [`Limit::parse`] with the name in front, such as `"login=5/min"`.
/// * The map has a `name`, the `units`, and a `window`: a text such as `"min"`, `"10s"` or
///   `"month Europe/Berlin"`, or a whole number of seconds. `algorithm` and `prefetch` are optional
///   texts, with the words of [`Limit::parse`]. Other fields are errors.
/// * Formats that do not describe themselves, such as postcard, have the text only.
///
/// ```
/// use tower_sliding_window::Limit;
///
/// # fn main() -> Result<(), serde_json::Error> {
/// let limits: Vec<Limit> = serde_json::from_str(
///     r#"["login=5/min", {"name": "export", "units": 100, "window": "1h"}, {"name": "burst", "units": 10, "window": 1}]"#,
/// )?;
/// assert_eq!(limits, [Limit::per_minute("login", 5), Limit::per_hour("export", 100), Limit::per_second("burst", 10)]);
/// assert_eq!(serde_json::to_string(&limits)?, r#"["login=5/min","export=100/h","burst=10/s"]"#);
/// # Ok(()) }
/// ```
impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            deserializer.deserialize_any(LimitVisitor)
        } else {
            deserializer.deserialize_str(LimitVisitor)
        }
    }
}

struct LimitVisitor;

impl<'de> Visitor<'de> for LimitVisitor {
    type Value = Limit;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a limit: a text such as \"login=5/min\", or a map with name, units and window")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Limit, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Limit, A::Error> {
        let Fields { name, units, window, algorithm, prefetch } = Fields::deserialize(MapAccessDeserializer::new(map))?;
        let window = match window {
            Window::Text(text) => text,
            Window::Seconds(seconds) => format!("{seconds}s"),
        };
        // With an algorithm in front, the word of a prefetch cannot be taken for the algorithm.
        let algorithm = algorithm.or_else(|| prefetch.as_ref().map(|_| "log".to_owned()));
        let [algorithm, prefetch] = [algorithm, prefetch].map(Option::unwrap_or_default);
        let limit = text::read(name.clone().into(), &format!("{units}/{window} {algorithm} {prefetch}"));
        limit.map_err(|problem| A::Error::custom(ConfigError::of_limit(&name, problem)))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    name: String,
    units: u64,
    window: Window,
    algorithm: Option<String>,
    prefetch: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a window: a text such as \"10s\", or a whole number of seconds")]
enum Window {
    Text(String),
    Seconds(u64),
}
