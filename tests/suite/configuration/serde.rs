//! Limits in JSON and TOML, and in a format that does not describe itself.

use std::collections::BTreeMap;

use serde::{
    Deserialize, Deserializer,
    de::{Visitor, value::Error},
    forward_to_deserialize_any,
};
use tower_sliding_window::{Algorithm, Limit, Prefetch};

use crate::support::ms;

#[derive(Debug, Deserialize)]
struct Routes {
    routes: BTreeMap<String, Vec<Limit>>,
}

#[test]
fn a_configuration_has_limits_as_text_or_as_maps() {
    let expected = [
        Limit::per_minute("login", 5),
        Limit::per_hour("export", 100),
        Limit::per("slow", 1, ms(1_500)),
        Limit::per("burst", 0, ms(30_000)),
        Limit::per_day("upload", 1 << 52).with_algorithm(Algorithm::compact_log(16)),
    ];
    let json = r#"{"routes": {"/": [
        "login=5/min",
        {"name": "export", "units": 100, "window": "h"},
        {"window": "1500ms", "units": 1, "name": "slow", "algorithm": "log"},
        {"name": "burst", "units": 0, "window": 30},
        {"name": "upload", "units": 4503599627370496, "window": "1d", "algorithm": "compact(16)"}
    ]}}"#;
    let toml = r#"
        [routes]
        "/" = [
            "login=5/min",
            { name = "export", units = 100, window = "h" },
            { window = "1500ms", units = 1, name = "slow", algorithm = "log" },
            { name = "burst", units = 0, window = 30 },
            { name = "upload", units = 4503599627370496, window = "1d", algorithm = "compact(16)" },
        ]
    "#;
    let read: [Routes; 2] = [serde_json::from_str(json).unwrap(), toml::from_str(toml).unwrap()];
    for Routes { routes } in read {
        assert_eq!(routes["/"], expected);
        assert_eq!(
            serde_json::to_string(&routes["/"]).unwrap(),
            r#"["login=5/min","export=100/h","slow=1/1500ms","burst=0/30s","upload=4503599627370496/d compact(16)"]"#
        );
        let written = toml::to_string(&BTreeMap::from([("routes", &routes)])).unwrap();
        assert_eq!(toml::from_str::<Routes>(&written).unwrap().routes, routes);
    }
}

#[test]
fn a_map_may_have_a_prefetch() {
    let read = |prefetch: &str| {
        let map = format!(r#"{{"name": "api", "units": 600000, "window": "min", "prefetch": "{prefetch}"}}"#);
        serde_json::from_str::<Limit>(&map)
    };
    let api = Limit::per_minute("api", 600_000);
    assert_eq!(read("prefetch").unwrap(), api.clone().prefetch(Prefetch::new()));
    assert_eq!(read("prefetch(1000,50ms)").unwrap(), api.prefetch(Prefetch::new().at_most(1_000).life(ms(50))));
    assert!(read("blocks").unwrap_err().to_string().contains("the prefetch must be written prefetch, "));
}

#[test]
fn an_error_keeps_its_reason() {
    let map = |fields: &str| format!(r#"{{ name = "a", {fields} }}"#);
    for (limit, reason) in [
        (
            r#""login=5/fortnight""#.to_owned(),
            "limit \"login=5/fortnight\": the window must be a whole number and a unit",
        ),
        (r#""5/min""#.to_owned(), "there is no = between the name and the units"),
        ("5".to_owned(), "expected a limit: a text such as \"login=5/min\", or a map with name, units and window"),
        (map("units = 5"), "missing field `window`"),
        (map("units = 4503599627370497, window = 1"), "must be 0 to 2^52, not 4503599627370497"),
        (map("units = -5, window = 1"), "-5"),
        (map("units = 5, window = 0"), "limit \"a\": a limit's window must be 1 ms to 365 days, not 0s"),
        (map("units = 5, window = 31536001"), "must be 1 ms to 365 days, not 31536001s"),
        (map("units = 5, window = 9223372036854775807"), "must be 1 ms to 365 days, not 9223372036854775807s"),
        (map("units = 5, window = -1"), "expected a window: a text such as \"10s\", or a whole number of seconds"),
        (map("units = 5, window = 0.5"), "expected a window: a text such as \"10s\", or a whole number of seconds"),
        (map("units = 5, window = '10'"), "the window \"10\" has no unit"),
        (map("units = 5, window = 1, algorithm = 'compact(2)'"), "a compact log must have 3 to 1024 entries, not 2"),
        (map("units = 5, window = 1, key = 'ip'"), "unknown field `key`"),
        (r#"{ name = "a b", units = 5, window = 1 }"#.to_owned(), "not \"a b\""),
    ] {
        let error = toml::from_str::<Routes>(&format!("[routes]\n'/' = [{limit}]")).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
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

    assert_eq!(Limit::deserialize(Bare("login=5/min")).unwrap(), Limit::per_minute("login", 5));
}
