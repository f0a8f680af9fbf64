//! Reads from an upstream's response whether it asks the client to back off, and for how long.
//!
//! 1. `Retry-After` (RFC 9110, section 10.2.3) in a 429 or 503, in seconds or as a date, takes
//!    precedence over everything else. In other responses, this header has a different meaning.
//! 2. In any response, an upstream limit with nothing left asks the client to stay away until its
//!    reset. The limit may be reported in a `RateLimit` member (a list since
//!    draft-ietf-httpapi-ratelimit-headers-08), or in `X-RateLimit-Remaining` and `-Reset`, with or
//!    without the `X-`. If several limits have nothing left, the longest time counts.
//! 3. A `-Reset` is in seconds up to a billion, since no upstream asks to stay away for thirty
//!    years. Above a billion, it is a Unix time in seconds. Above a trillion, it is a Unix time in
//!    milliseconds.
//! 4. Malformed values and past times are ignored. If no other value is left, a 429 asks for one
//!    second.
//! 5. Blocks last at most a day.
//! 6. A 429, a 503 with `Retry-After`, and a 403 with nothing left are refusals: the upstream has
//!    counted more calls than the layer's limit has. Any other response with nothing left does not
//!    show this, since the limit may have counted the same calls.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, StatusCode, header::RETRY_AFTER};

use super::super::headers::split;
use crate::limit::text::whole_number;

/// The time to stay away after a 429 that has no valid time.
const DEFAULT: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);
/// The largest wait in seconds. Larger numbers are Unix times, after September 2001.
const LONGEST_WAIT: u64 = 1_000_000_000;
/// The largest Unix time in seconds. Larger numbers are in milliseconds.
const LAST_IN_SECONDS: u64 = 1_000 * LONGEST_WAIT;

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// Header pairs for remaining units and reset: first the pair that most APIs send, then the one
/// from drafts before -07.
static PAIRS: [(HeaderName, HeaderName); 2] = [
    (
        HeaderName::from_static("x-ratelimit-remaining"),
        HeaderName::from_static("x-ratelimit-reset"),
    ),
    (
        HeaderName::from_static("ratelimit-remaining"),
        HeaderName::from_static("ratelimit-reset"),
    ),
];

#[derive(Clone, Copy, Debug)]
pub(super) struct BlockRequest {
    pub(super) time: Duration,
    /// True if the upstream refused the call.
    pub(super) is_refusal: bool,
}

/// Reads what the upstream asks for: see the module docs. `None` if it does not ask to back off.
pub(super) fn block_request(
    status: StatusCode,
    headers: &HeaderMap,
    now: SystemTime,
) -> Option<BlockRequest> {
    // Zero until something is found.
    let mut time = Duration::ZERO;
    if let StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE = status {
        for value in values(headers, &RETRY_AFTER) {
            time = time.max(retry_after(value, now).unwrap_or_default());
        }
    }
    let is_refusal = !time.is_zero()
        || matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::FORBIDDEN
        );
    if time.is_zero() {
        time = used_up(headers, now).unwrap_or_default();
    }
    if time.is_zero() {
        if status != StatusCode::TOO_MANY_REQUESTS {
            return None;
        }
        time = DEFAULT;
    }
    Some(BlockRequest {
        time: time.min(LONGEST),
        is_refusal,
    })
}

/// The longest time until the reset, among limits with nothing left.
fn used_up(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let listed = values(headers, &RATE_LIMIT).filter_map(longest_used_up);
    let mut longest = listed.max().map(Duration::from_secs);
    for (remaining, reset) in &PAIRS {
        if values(headers, remaining).any(|value| whole_number(value) == Some(0)) {
            for value in values(headers, reset) {
                longest = longest.max(reset_after(value, now));
            }
        }
    }
    longest
}

fn values<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> impl Iterator<Item = &'a str> + use<'a> {
    headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok())
        .map(str::trim)
}

fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    match whole_number(value) {
        Some(seconds) => Some(Duration::from_secs(seconds)),
        None => httpdate::parse_http_date(value)
            .ok()?
            .duration_since(now)
            .ok(),
    }
}

fn reset_after(value: &str, now: SystemTime) -> Option<Duration> {
    let time = match whole_number(value)? {
        seconds @ ..=LONGEST_WAIT => return Some(Duration::from_secs(seconds)),
        seconds @ ..=LAST_IN_SECONDS => Duration::from_secs(seconds),
        millis => Duration::from_millis(millis),
    };
    time.checked_sub(now.duration_since(SystemTime::UNIX_EPOCH).ok()?)
}

/// The longest time in seconds among `RateLimit` members with nothing left.
fn longest_used_up(field: &str) -> Option<u64> {
    let mut longest = None;
    for member in split(field, ',') {
        if number_of(member, "r") == Some(0) {
            longest = longest.max(number_of(member, "t"));
        }
    }
    longest
}

/// The number in a member's first `name=number` parameter.
fn number_of(member: &str, name: &str) -> Option<u64> {
    split(member, ';').skip(1).find_map(|parameter| {
        let (key, value) = parameter.split_once('=')?;
        (key.trim() == name).then(|| whole_number(value.trim()))?
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::{collection::vec, prelude::any, proptest};

    use super::*;

    /// Wed, 15 Jul 2026 10:36:17 GMT.
    const NOW: u64 = 1_784_111_777;

    fn seconds(status: u16, headers: &[(&'static str, &[u8])]) -> Option<u64> {
        at_now(status, headers).map(|block| block.time.as_secs())
    }

    fn at_now(status: u16, headers: &[(&'static str, &[u8])]) -> Option<BlockRequest> {
        block_at(
            SystemTime::UNIX_EPOCH + Duration::from_secs(NOW),
            status,
            headers,
        )
    }

    fn block_at(
        now: SystemTime,
        status: u16,
        headers: &[(&'static str, &[u8])],
    ) -> Option<BlockRequest> {
        let headers = headers.iter().map(|(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_bytes(value).unwrap_or(HeaderValue::from_static("")),
            )
        });
        block_request(
            StatusCode::from_u16(status).unwrap(),
            &headers.collect(),
            now,
        )
    }

    #[test]
    fn retry_after_counts_on_a_429_and_a_503() {
        for (status, value, expected) in [
            (429, "30", Some(30)),
            (503, " 30 ", Some(30)),
            (200, "30", None),
            (301, "30", None),
            (429, "Wed, 15 Jul 2026 10:37:47 GMT", Some(90)),
            (429, "Wednesday, 15-Jul-26 10:37:47 GMT", Some(90)),
            (429, "Wed Jul 15 10:37:47 2026", Some(90)),
            (503, "Wed, 15 Jul 2026 10:35:37 GMT", None),
            (429, "Wed, 15 Jul 2026 10:35:36 GMT", Some(1)),
            (429, "Fri, 31 Dec 9999 23:59:59 GMT", Some(86_400)),
            (429, "99999999999999999999999999", Some(86_400)),
            (429, "0", Some(1)),
            (429, "soon", Some(1)),
            (429, "-5", Some(1)),
            (503, "1.5", None),
            (503, "", None),
        ] {
            assert_eq!(
                seconds(status, &[("retry-after", value.as_bytes())]),
                expected,
                "{status} {value}"
            );
        }
        assert_eq!(
            (seconds(429, &[]), seconds(503, &[]), seconds(200, &[])),
            (Some(1), None, None)
        );
    }

    #[test]
    fn a_rate_limit_field_counts_where_nothing_is_left() {
        for (value, expected) in [
            (r#""default";r=0;t=30"#, Some(30)),
            (r#""default";r=1;t=30"#, None),
            (
                r#""burst";r=0;t=3, "daily";r=0;t=900,"other";r=7;t=9999"#,
                Some(900),
            ),
            (r#""default"; t=30; r=0; pk=:sdfjLJUOUH==:"#, Some(30)),
            (r#""odd, \";r=0;t=99";r=5;t=30"#, None),
            (r#""odd, \";r=5;t=99";r=0;t=30"#, Some(30)),
            (r#""default";r=0"#, None),
            (r#""default";r=0;t=-4"#, None),
            (r#""default";r=0;t=0"#, None),
            (r#""default";r=0;t=100000"#, Some(86_400)),
            (r#"default;r=0;t=30"#, Some(30)),
            ("limit=100, remaining=0, reset=30", None),
            ("remaining=0", None),
            ("r=0;t=", None),
            (r#"";r=0;t=30"#, None),
        ] {
            assert_eq!(
                seconds(200, &[("ratelimit", value.as_bytes())]),
                expected,
                "{value}"
            );
        }
        let two: [(&str, &[u8]); 2] = [
            ("ratelimit", br#""a";r=0;t=3"#),
            ("ratelimit", br#""b";r=0;t=5"#),
        ];
        assert_eq!(
            seconds(200, &two),
            Some(5),
            "a list may be of several lines"
        );
    }

    #[test]
    fn x_rate_limit_counts_where_nothing_is_left() {
        for (remaining, reset, expected) in [
            ("0", "30", Some(30)),
            ("1", "30", None),
            ("0", "1784111807", Some(30)),
            ("0", "1784111777", None),
            ("0", "1784000000", None),
            ("0", "1784111807000", Some(30)),
            ("0", "1784111777000", None),
            ("0", "1000000000", Some(86_400)),
            ("0", "tomorrow", None),
            ("", "30", None),
            ("00", "30", Some(30)),
        ] {
            for [left, until] in [
                ["x-ratelimit-remaining", "x-ratelimit-reset"],
                ["ratelimit-remaining", "ratelimit-reset"],
            ] {
                let headers = [(left, remaining.as_bytes()), (until, reset.as_bytes())];
                assert_eq!(seconds(403, &headers), expected, "{remaining} {reset}");
            }
        }
        assert_eq!(seconds(403, &[("x-ratelimit-remaining", b"0")]), None);
    }

    #[test]
    fn retry_after_goes_before_the_others_and_these_before_the_default() {
        let rate_limit: (&str, &[u8]) = ("ratelimit", br#""default";r=0;t=30"#);
        let x_rate_limit: [(&str, &[u8]); 2] = [
            ("x-ratelimit-remaining", b"0"),
            ("x-ratelimit-reset", b"40"),
        ];
        let all = |first: &[(&'static str, &'static [u8])]| {
            [first, &[rate_limit], &x_rate_limit].concat()
        };
        assert_eq!(seconds(429, &all(&[("retry-after", b"5")])), Some(5));
        assert_eq!(seconds(429, &all(&[("retry-after", b"soon")])), Some(40));
        assert_eq!(seconds(200, &all(&[("retry-after", b"5")])), Some(40));
        assert_eq!(seconds(429, &all(&[])), Some(40));
    }

    #[test]
    fn a_refusal_is_told_from_other_responses() {
        let used_up: (&str, &[u8]) = ("ratelimit", br#""default";r=0;t=30"#);
        let retry_after: (&str, &[u8]) = ("retry-after", b"5");
        for (status, headers, expected) in [
            (429, &[][..], Some(true)),
            (429, &[used_up], Some(true)),
            (503, &[retry_after, used_up], Some(true)),
            (503, &[used_up], Some(false)),
            (403, &[used_up], Some(true)),
            (403, &[], None),
            (403, &[retry_after], None),
            (200, &[used_up], Some(false)),
            (404, &[used_up], Some(false)),
        ] {
            assert_eq!(
                at_now(status, headers).map(|block| block.is_refusal),
                expected,
                "{status} {headers:?}"
            );
        }
    }

    #[test]
    fn an_absurd_value_blocks_for_a_day_or_not_at_all() {
        for (status, header, value, expected) in [
            (429, "retry-after", "99999999999", Some(86_400)),
            (503, "retry-after", "99999999999", Some(86_400)),
            (429, "retry-after", "Thu, 01 Jan 1970 00:00:00 GMT", Some(1)),
            (503, "retry-after", "Thu, 01 Jan 1970 00:00:00 GMT", None),
            (503, "retry-after", "Wed, 31 Dec 1969 23:59:59 GMT", None),
            (200, "x-ratelimit-reset", "-1", None),
            (
                200,
                "x-ratelimit-reset",
                "99999999999999999999",
                Some(86_400),
            ),
            (200, "ratelimit-reset", "-1", None),
            (200, "ratelimit", "limit=1, remaining=0, reset=-1", None),
            (
                200,
                "ratelimit",
                "limit=1, remaining=0, reset=99999999999",
                None,
            ),
            (200, "ratelimit", r#""x";r=0;t=-1"#, None),
            (200, "ratelimit", r#""x";r=-1;t=5"#, None),
        ] {
            let headers = [
                (header, value.as_bytes()),
                ("x-ratelimit-remaining", b"0"),
                ("ratelimit-remaining", b"0"),
            ];
            assert_eq!(
                seconds(status, &headers),
                expected,
                "{status} {header} {value}"
            );
        }
    }

    /// With several well-formed header lines, the longest time counts.
    #[test]
    fn each_header_may_have_many_lines() {
        let texts = |text: &dyn Fn(u64) -> String| {
            (1..=20)
                .map(text)
                .chain(["?".to_owned(), "-1".to_owned()])
                .collect()
        };
        let pairs = |name| (name, texts(&|number| (100 + number).to_string()));
        let lines: [(&str, Vec<String>); 6] = [
            ("retry-after", texts(&|number| number.to_string())),
            (
                "ratelimit",
                texts(&|number| format!(r#""x";r={};t={}"#, number % 2, 200 + number)),
            ),
            (
                "x-ratelimit-remaining",
                texts(&|number| (number % 2).to_string()),
            ),
            (
                "ratelimit-remaining",
                texts(&|number| (number % 2).to_string()),
            ),
            pairs("x-ratelimit-reset"),
            pairs("ratelimit-reset"),
        ];
        let headers: Vec<(&str, &[u8])> = lines
            .iter()
            .flat_map(|(name, lines)| lines.iter().map(|line| (*name, line.as_bytes())))
            .collect();
        assert_eq!(
            (seconds(429, &headers), seconds(200, &headers)),
            (Some(20), Some(220))
        );
        assert_eq!(
            seconds(200, &headers[44..]),
            Some(120),
            "without `RateLimit`"
        );
    }

    proptest! {
        #[test]
        fn no_value_panics_or_blocks_for_more_than_a_day(
            status in 100_u16..600,
            bytes in vec(any::<u8>(), 0..40),
            text in r#"[ "\\;,=rt0-9remaingst]{0,60}"#,
            now in 0..u64::MAX / 4_000_000_000,
        ) {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(now);
            for value in [&bytes[..], text.as_bytes()] {
                let names = ["retry-after", "ratelimit", "x-ratelimit-reset", "ratelimit-reset"];
                let headers = names.map(|name| (name, value));
                let block = block_at(now, status, &[&headers[..], &[("x-ratelimit-remaining", b"0")]].concat());
                assert!(block.is_none_or(|block| block.time <= LONGEST));
            }
        }
    }
}
