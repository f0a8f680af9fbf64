//! Limits in JSON and TOML, and in a format that does not describe itself.

use std::collections::BTreeMap;

use serde::{
    Deserialize, Deserializer,
    de::{Visitor, value::Error},
    forward_to_deserialize_any,
};
use tower_sliding_window::{Algorithm, Limit};

use crate::support::ms;

#[derive(Debug, Deserialize)]
struct Routes {
    routes: BTreeMap<String, Vec<Limit>>,
}

#[test]
fn a_configuration_has_limits_as_text() {
    let expected = [
        Limit::per_minute("login", 5),
        Limit::per_hour("export", 100),
        Limit::per("slow", 1, ms(1_500)),
        Limit::per("burst", 0, ms(30_000)),
        Limit::per_day("upload", 1 << 52).with_algorithm(Algorithm::compact_log(16)),
        Limit::per_minute("api", 600_000).prefetch(ms(50)),
    ];
    let texts = r#"[
        "login=5/min",
        "export=100/1h",
        "slow = 1 / 1500ms log",
        "burst=0/30s",
        "upload=4503599627370496/d compact(16)",
        "api=600000/min prefetch(50ms)"
    ]"#;
    let json = format!(r#"{{"routes": {{"/": {texts}}}}}"#);
    let toml = format!("[routes]\n'/' = {texts}");
    let read: [Routes; 2] = [
        serde_json::from_str(&json).unwrap(),
        toml::from_str(&toml).unwrap(),
    ];
    for Routes { routes } in read {
        assert_eq!(routes["/"], expected);
        assert_eq!(
            serde_json::to_value(&routes["/"]).unwrap(),
            serde_json::json!(expected.each_ref().map(Limit::to_string))
        );
        let written = toml::to_string(&BTreeMap::from([("routes", &routes)])).unwrap();
        assert_eq!(toml::from_str::<Routes>(&written).unwrap().routes, routes);
    }
}

#[test]
fn an_error_keeps_its_reason_and_its_place() {
    for (limit, reason) in [
        (
            r#""login=5/fortnight""#,
            "limit \"login=5/fortnight\": the window must be a whole number with a unit",
        ),
        (r#""5/min""#, "there is no = between the name and the units"),
        (
            "5",
            "invalid type: integer `5`, expected a limit as text, such as \"login=5/min\"",
        ),
        (r#""a=4503599627370497/s""#, "units must be 0 to 2^52"),
        (r#""a=5/31536001s""#, "window must be 1 ms to 365 days"),
        (r#""a=5/s compact(2)""#, "compact(n) with 3 to 1024 entries"),
        (
            r#""a=5/s prefetch(1)(2)""#,
            "the prefetch must be written prefetch or ",
        ),
        (
            r#""a b=5/s""#,
            "limit \"a b=5/s\": a limit's name must be 1 to 64 characters",
        ),
    ] {
        let text = format!("[routes]\n'/' = [\"ok=1/s\", {limit}]");
        let error = toml::from_str::<Routes>(&text).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        // The place of this text, not of its list.
        assert!(error.contains("line 2, column 18"), "{error}");
    }
}

/// As in postcard or bincode: the reader has to know that a text comes.
#[test]
fn a_format_that_does_not_describe_itself_has_the_text() {
    struct Bare<'a>(&'a str);

    impl<'de> Deserializer<'de> for Bare<'de> {
        type Error = Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            panic!("the format does not know what comes");
        }

        fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            visitor.visit_borrowed_str(self.0)
        }

        fn is_human_readable(&self) -> bool {
            false
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
        }
    }

    assert_eq!(
        Limit::deserialize(Bare("login=5/min")).unwrap(),
        Limit::per_minute("login", 5)
    );
}
