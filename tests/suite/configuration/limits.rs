//! Limits of names, units and windows out of range, and limits as text.

use std::time::Duration;

use tower_sliding_window::{Algorithm, Limit, limit::prefetch::DEFAULT_LIFE};

#[test]
fn a_window_is_rounded_up_to_microseconds() {
    let limit = Limit::new("a", 1, Duration::from_nanos(1_000_001)).unwrap();
    assert_eq!(limit.window(), Duration::from_micros(1_001));
}

#[test]
fn an_error_names_the_value_that_is_out_of_range() {
    let (second, year) = (Duration::from_secs(1), Limit::MAX_WINDOW);
    for (name, units, window, named) in [
        ("", 1, second, "\"=1/1s\""),
        ("a:b", 1, second, "\"a:b=1/1s\""),
        ("ä", 1, second, "\"ä=1/1s\""),
        (&*"a".repeat(65), 1, second, "aaaa"),
        ("a", Limit::MAX_UNITS + 1, second, "4503599627370497"),
        ("a", 1, Duration::ZERO, "0ns"),
        ("a", 1, Duration::from_nanos(999_999), "999.999µs"),
        (
            "a",
            1,
            year + Duration::from_nanos(1),
            "31536000.000000001s",
        ),
    ] {
        let error = Limit::new(name.to_owned(), units, window)
            .unwrap_err()
            .to_string();
        assert!(error.contains(named), "{error}");
    }
    assert!(Limit::new("A-z_0.9", Limit::MAX_UNITS, year).is_ok());
    assert_eq!(Limit::new("a", 0, second), Ok(Limit::per_second("a", 0)));
}

fn limit(units: u64, window: Duration) -> Limit {
    Limit::new("a", units, window).unwrap()
}

#[test]
fn a_text_is_read_with_each_unit_and_spacing() {
    let second = Duration::from_secs(1);
    for (text, units, window) in [
        ("100/min", 100, 60 * second),
        ("10/s", 10, second),
        ("5000/h", 5_000, 3_600 * second),
        ("1/d", 1, 86_400 * second),
        ("100/10s", 100, 10 * second),
        ("3 / 500ms", 3, second / 2),
        ("  3\t/\t1500000us  ", 3, second * 3 / 2),
        ("007/007sec", 7, 7 * second),
        ("0/s", 0, second),
        ("1/1second", 1, second),
        ("1/2seconds", 1, 2 * second),
        ("1/m", 1, 60 * second),
        ("1/minute", 1, 60 * second),
        ("1/90minutes", 1, 5_400 * second),
        ("1/hour", 1, 3_600 * second),
        ("1/2hours", 1, 7_200 * second),
        ("1/day", 1, 86_400 * second),
        ("1/365days", 1, Limit::MAX_WINDOW),
        ("1/1ms", 1, Limit::MIN_WINDOW),
        ("1/1000us", 1, Limit::MIN_WINDOW),
        ("4503599627370496/s", Limit::MAX_UNITS, second),
        ("1/s log", 1, second),
    ] {
        assert_eq!(
            Limit::parse("a", text).unwrap(),
            limit(units, window),
            "{text}"
        );
        assert_eq!(
            format!(" a = {text}").parse::<Limit>().unwrap(),
            limit(units, window),
            "{text}"
        );
    }
    let calls = limit(9, second);
    for (word, algorithm) in [
        ("counter", Algorithm::SLIDING_WINDOW_COUNTER),
        ("fixed", Algorithm::FIXED_WINDOW),
        ("compact(3)", Algorithm::compact_log(3)),
        ("compact(1024)", Algorithm::compact_log(1024)),
    ] {
        let text = format!("9 / s {word}");
        assert_eq!(
            Limit::parse("a", &text).unwrap(),
            calls.clone().with_algorithm(algorithm)
        );
    }
}

#[test]
fn a_limit_is_written_in_the_largest_unit_that_divides_its_window() {
    for (micros, text) in [
        (1_000, "a=7/ms"),
        (1_001, "a=7/1001us"),
        (1_500_000, "a=7/1500ms"),
        (60_000_000, "a=7/min"),
        (61_000_000, "a=7/61s"),
        (5_400_000_000, "a=7/90min"),
        (86_400_000_000, "a=7/d"),
        (31_536_000_000_000, "a=7/365d"),
    ] {
        assert_eq!(limit(7, Duration::from_micros(micros)).to_string(), text);
    }
    let searches = Limit::per_day("searches", Limit::MAX_UNITS);
    let text = searches
        .with_algorithm(Algorithm::compact_log(128))
        .to_string();
    assert_eq!(text, "searches=4503599627370496/d compact(128)");
}

#[test]
fn a_limit_with_prefetch_is_read_as_it_is_written() {
    let millis = Duration::from_millis;
    for (text, prefetches) in [
        ("a=500/s prefetch", DEFAULT_LIFE),
        ("a=500/s prefetch(50ms)", millis(50)),
        ("a=500/s prefetch(1500us)", Duration::from_micros(1_500)),
        ("a=500/s compact(16) prefetch(s)", millis(1_000)),
    ] {
        let limit: Limit = text.parse().unwrap();
        let unprefetched: Limit = text.split(" prefetch").next().unwrap().parse().unwrap();
        assert_eq!(
            (&limit, &*limit.to_string()),
            (&unprefetched.prefetch(prefetches), text)
        );
    }
    assert_eq!(Limit::parse("a", "5/min log  prefetch( 5)").ok(), None);
    assert_eq!(
        Limit::parse("a", "5/min log prefetch(100ms)"),
        Ok(Limit::per_minute("a", 5).prefetch(DEFAULT_LIFE))
    );
}

#[test]
fn an_error_says_which_part_is_wrong() {
    for (text, problem) in [
        ("", "there is no / between the units and the window"),
        ("100", "there is no / between the units and the window"),
        (
            "3 per minute",
            "there is no / between the units and the window",
        ),
        (
            "/min",
            "the number of units must be a whole number, not \"\"",
        ),
        (
            "-5/min",
            "the number of units must be a whole number, not \"-5\"",
        ),
        (
            "+5/min",
            "the number of units must be a whole number, not \"+5\"",
        ),
        (
            "1.5/min",
            "the number of units must be a whole number, not \"1.5\"",
        ),
        (
            "1_000/min",
            "the number of units must be a whole number, not \"1_000\"",
        ),
        (
            "٣/min",
            "the number of units must be a whole number, not \"٣\"",
        ),
        ("4503599627370497/min", "units must be 0 to 2^52"),
        ("99999999999999999999/min", "units must be 0 to 2^52"),
        (
            "5 bytes/min",
            "the number of units must be a whole number, not \"5 bytes\"",
        ),
        ("5/", "there is no window after the /"),
        (
            "5/10",
            "with a unit right behind it (us, ms, s, min, h or d)",
        ),
        ("5/10 s", "such as month or week, not \"10\""),
        ("5/fortnight", "such as month or week, not \"fortnight\""),
        ("5/MIN", "such as month or week, not \"MIN\""),
        ("5/-1s", "such as month or week, not \"-1s\""),
        ("5/1.5s", "such as month or week, not \"1.5s\""),
        ("5/1/s", "such as month or week, not \"1/s\""),
        ("5/µs", "such as month or week, not \"µs\""),
        ("5/0s", "window must be 1 ms to 365 days"),
        ("5/999us", "window must be 1 ms to 365 days"),
        ("5/366d", "window must be 1 ms to 365 days"),
        ("5/99999999999999999999d", "window must be 1 ms to 365 days"),
        ("5/min sliding", "or prefetches follow, not \"sliding\""),
        ("5/min compact", "or prefetches follow, not \"compact\""),
        ("5/min compact()", "or prefetches follow, not \"compact()\""),
        (
            "5/min compact(+5)",
            "or prefetches follow, not \"compact(+5)\"",
        ),
        ("5/min compact(2)", "compact(n) with 3 to 1024 entries"),
        (
            "5/min compact(65539)",
            "or prefetches follow, not \"compact(65539)\"",
        ),
        (
            "5/min fixed counter",
            "the prefetch must be written prefetch or prefetch(50ms), not \"counter\"",
        ),
        (
            "5/min prefetch fixed",
            "prefetch is the last word, such as prefetch(50ms), so \"fixed\" must not follow",
        ),
        (
            "5/min prefetch()",
            "the prefetch must be written prefetch or prefetch(50ms)",
        ),
        ("5/min prefetch(50)x", "not \"prefetch(50)x\""),
        ("5/min prefetch(8,7ms)", "not \"prefetch(8,7ms)\""),
        ("5/min prefetch(50)", "not \"prefetch(50)\""),
        (
            "5/min prefetch(2s)",
            "the life of a prefetch must be 1 ms to 1 s",
        ),
        (
            "5/50ms prefetch",
            "the life of a prefetch, 100 ms by default, must be at most the window",
        ),
        (
            "5/min fixed prefetch",
            "prefetches need an exact or a compact log",
        ),
    ] {
        let error = Limit::parse("login", text).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("limit {:?}: ", format!("login={text}"))),
            "{error}"
        );
        assert!(error.contains(problem), "{error}");
        assert_eq!(
            format!("login={text}")
                .parse::<Limit>()
                .unwrap_err()
                .to_string(),
            error
        );
    }
    for (text, problem) in [
        ("5/min", "there is no = between the name and the units"),
        (
            "=5/min",
            "name must be 1 to 64 characters of A-Z a-z 0-9 _ . -",
        ),
        (
            "a b=5/min",
            "name must be 1 to 64 characters of A-Z a-z 0-9 _ . -",
        ),
        (
            "a=b=5/min",
            "the number of units must be a whole number, not \"b=5\"",
        ),
    ] {
        let error = text.parse::<Limit>().unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("limit {text:?}: ")) && error.contains(problem),
            "{error}"
        );
    }
}
