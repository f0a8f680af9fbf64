//! Limits as text: any text is read or refused, and a limit that is written is read again.

use std::time::Duration;

use proptest::{collection::vec, prelude::*, sample::select};
use tower_sliding_window::{Algorithm, Limit, store};

use super::fuzz;

fn limits() -> impl Strategy<Value = Limit> {
    const DAY: u64 = 86_400_000_000;
    let window = prop_oneof![
        2 => 1_000..=365 * DAY,
        2 => (1_u64..=365, select(vec![1_000, 1_000_000, 60_000_000, 3_600_000_000, DAY])).prop_map(|(n, unit)| n * unit),
        1 => select(vec![1_000, 1_001, 999_999, 1_500_000, 365 * DAY - 1, 365 * DAY]),
    ];
    let units = prop_oneof![1_u64..100, 1..=Limit::MAX_UNITS, Just(Limit::MAX_UNITS)];
    let algorithm = prop_oneof![
        select(vec![
            Algorithm::SLIDING_LOG,
            Algorithm::SLIDING_WINDOW_COUNTER,
            Algorithm::FIXED_WINDOW
        ]),
        (3_u16..=1_024).prop_map(Algorithm::compact_log),
    ];
    ("[A-Za-z0-9_.-]{1,64}", units, window, algorithm).prop_map(
        |(name, units, window, algorithm)| {
            let limit = Limit::new(name, units, Duration::from_micros(window)).unwrap();
            limit.with_algorithm(algorithm)
        },
    )
}

#[test]
fn a_limit_that_is_written_is_read_as_an_equal_limit() {
    fuzz(&limits(), |limit| {
        prop_assert_eq!(&limit.to_string().parse::<Limit>().unwrap(), &limit);
        let text = limit.to_string();
        let (name, terms) = text.split_once('=').unwrap();
        prop_assert_eq!(&Limit::parse(name.to_owned(), terms).unwrap(), &limit);
        #[cfg(feature = "serde")]
        {
            let json = serde_json::to_string(&limit).unwrap();
            prop_assert_eq!(&serde_json::from_str::<Limit>(&json).unwrap(), &limit);
        }
        Ok(())
    });
}

/// Texts of the pieces that have a meaning, and of any others.
#[test]
fn any_text_is_read_or_refused_without_a_panic() {
    let pieces = vec![
        "login",
        "=",
        "/",
        " ",
        "\t",
        "0",
        "1",
        "5",
        "60",
        "365",
        "4503599627370496",
        "18446744073709551616",
        "-",
        "+",
        ".",
        "us",
        "ms",
        "s",
        "sec",
        "m",
        "min",
        "h",
        "d",
        "days",
        "requests",
        "content-bytes",
        "log",
        "counter",
        "fixed",
        "compact(",
        "compact(3)",
        "compact(70000)",
        ")",
        "µs",
        "é",
        "\u{a0}",
        "\0",
    ];
    let piece = prop_oneof![8 => select(pieces).prop_map(str::to_owned), 1 => ".{0,3}"];
    let texts = prop_oneof![
        vec(piece, 0..8).prop_map(|pieces| pieces.concat()),
        "[a-c]=[0-9]{1,21} ?/ ?[0-9]{0,21}[a-z]{0,3}"
    ];
    fuzz(&texts, |text| {
        let beginning = format!("limit {text:?}: ");
        match text.parse::<Limit>() {
            Ok(limit) => prop_assert_eq!(&limit.to_string().parse::<Limit>().unwrap(), &limit),
            Err(error) => prop_assert!(error.to_string().starts_with(&beginning)),
        }
        let _ = Limit::parse("login", &text);
        #[cfg(feature = "serde")]
        let _ = serde_json::from_value::<Limit>(text.clone().into());
        let _ = store::from_url(&text);
        Ok(())
    });
}
