//! Rate-limit headers.
//!
//! 1. `X-RateLimit-Limit`, `-Remaining` and `-Reset`, the default, show the decision's visible
//!    limit. If no limit is visible, they are not sent. They are not standardized. `-Reset` is in
//!    seconds by default, as in Envoy and Kong, or a [Unix time](HeaderSets::X_RATE_LIMIT_UNIX), as
//!    in GitHub's API.
//! 2. `RateLimit-Policy` and `RateLimit`, which are opt-in, show every limit that is not hidden:
//!    see [`HeaderSets::RATE_LIMIT`].
//! 3. Times are rounded up to whole seconds, and `Retry-After` (RFC 9110, section 10.2.3) is at
//!    least 1, so a client that obeys it never comes back too early. A refusal has `Retry-After` if
//!    waiting helps, even if the layer sends no figures. A 503 because the store cannot decide has
//!    it too. A 429 for a cost above the limit does not.
//! 4. In stacked layers, `X-RateLimit-*` shows the visible limit with the least left, in its own
//!    layer's format. So use one `-Reset` format in all layers; a log line warns if they differ.
//!    `RateLimit` lists the limits from all layers that have decided, the outermost first.
//! 5. A rejection keeps the `X-RateLimit-*` from the layer that made it: outer layers neither
//!    replace these headers nor add their own. A layer that sends no figures leaves other layers'
//!    figures alone.
//! 6. A [concurrent](crate::Limit::concurrent) limit has no reset time. Its figures are shown only
//!    if it refuses, or if the layer has no other limit.
//! 7. The figures are those at the decision, or at the settlement if there is one. The service runs
//!    after the decision, so without a settlement, a `-Reset` in seconds is too long by the
//!    service's running time.
//! 8. The figures belong to one client. If a shared cache may serve the response to others, as with
//!    `Cache-Control: public`, use [`HeaderSets::NONE`].

mod rate_limit;

use std::{
    sync::LazyLock,
    time::{Duration, SystemTime},
};

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{Entry, RETRY_AFTER},
};

pub(super) use self::rate_limit::split;
use self::rate_limit::{POLICY, RATE_LIMIT};
use crate::{
    decision::{Decision, LimitStatus},
    logging::{Throttle, warn},
};

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// A `-Reset` at or above this is read as a Unix time. Every Unix time since September 2001 is
/// above it, and seconds from now are always below it, since windows are at most a year.
const UNIX_TIMES: u64 = 1_000_000_000;

/// Returns the rate-limit header names and `Retry-After`, for `CorsLayer::expose_headers`. Scripts
/// in a browser can read these headers only if CORS exposes them.
#[must_use]
pub fn exposed_headers() -> Vec<HeaderName> {
    vec![RETRY_AFTER, LIMIT, REMAINING, RESET, POLICY, RATE_LIMIT]
}

/// The header sets that a layer sends: see
/// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct HeaderSets {
    x_rate_limit: Option<Reset>,
    rate_limit: bool,
}

/// The `X-RateLimit-Reset` format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reset {
    /// Seconds from now.
    Seconds,
    /// Unix time in seconds.
    UnixTime,
}

impl HeaderSets {
    /// No headers.
    pub const NONE: Self = Self::of(None, false);

    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`. The default.
    pub const X_RATE_LIMIT: Self = Self::of(Some(Reset::Seconds), false);

    /// `RateLimit-Policy` and `RateLimit`, from the IETF Internet-Draft
    /// [draft-ietf-httpapi-ratelimit-headers-11](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-11).
    /// The draft may change, and later versions of this crate then follow it.
    ///
    /// ```text
    /// RateLimit-Policy: "burst";q=10;w=1, "hourly";q=1000;w=3600
    /// RateLimit: "burst";r=9;t=1, "hourly";r=412;t=97
    /// ```
    ///
    /// * Both are Structured Fields (RFC 9651) with one item for each limit that clients see, in
    ///   the order of the layer. A [shadow](crate::KeyedLimit::in_shadow) limit is shown only if
    ///   all the layer's limits are in shadow mode.
    /// * `q` is the quota: the limit's units. `w` is its window in seconds, rounded up, and absent
    ///   for a window below one second, a calendar limit, and a
    ///   [concurrent](crate::Limit::concurrent) limit. `qu` is `concurrent-requests` for a
    ///   concurrent limit, and otherwise absent, which means requests.
    /// * `r` is the remaining quota. `t` is the number of seconds until more units are available,
    ///   rounded up. `t` is absent while all units are left, and for a concurrent limit that does
    ///   not refuse. For a limit that refuses, `t` is at most `Retry-After`.
    /// * After a settlement above the limit, `t` is too short. It is the time until the oldest unit
    ///   leaves the window, but even then there may be no units left. The next refusal has the
    ///   right `t`.
    /// * A line that the service has written into one of these headers is removed if it is not a
    ///   list (RFC 8941), since clients would ignore the whole field.
    /// * Numbers are capped at 999,999,999,999,999, the largest Structured Fields Integer.
    pub const RATE_LIMIT: Self = Self::of(None, true);

    /// Both sets.
    pub const BOTH: Self = Self::of(Some(Reset::Seconds), true);

    /// `X-RateLimit-*` with `-Reset` as a Unix time in seconds, rounded up, by the store's clock.
    /// In [`X_RATE_LIMIT`](Self::X_RATE_LIMIT) and [`BOTH`](Self::BOTH), `-Reset` is in seconds
    /// from now, which is right even for a client whose clock is wrong.
    ///
    /// Use this set in all stacked layers or in none: the response shows one layer's figures, in
    /// its format, and a client that takes seconds for a Unix time retries at once. If stacked
    /// layers differ, a log line warns about it. With axum, a [`Rejection`](crate::Rejection)
    /// returned by a handler always uses seconds from now.
    pub const X_RATE_LIMIT_UNIX: Self = Self::of(Some(Reset::UnixTime), false);

    /// [`X_RATE_LIMIT_UNIX`](Self::X_RATE_LIMIT_UNIX) and [`RATE_LIMIT`](Self::RATE_LIMIT).
    pub const BOTH_UNIX: Self = Self::of(Some(Reset::UnixTime), true);

    const fn of(x_rate_limit: Option<Reset>, rate_limit: bool) -> Self {
        Self {
            x_rate_limit,
            rate_limit,
        }
    }

    /// Writes `X-RateLimit-*` for the visible limit. If another layer has already written them, the
    /// limit with the least left is shown. A concurrent limit never replaces another limit.
    #[inline]
    pub(super) fn write_x_rate_limit(self, decision: &Decision, headers: &mut HeaderMap) {
        let Some(reset_format) = self.x_rate_limit else {
            return;
        };
        let Some(status) = decision.visible() else {
            return;
        };
        let remaining = status.remaining();
        let is_concurrent = status.limit.is_concurrent();
        let value = header_value(remaining);
        match headers.entry(REMAINING) {
            Entry::Vacant(entry) => drop(entry.insert(value)),
            Entry::Occupied(mut entry) => {
                let stays =
                    number(entry.get()).is_some_and(|shown| shown <= remaining || is_concurrent);
                if !stays {
                    entry.insert(value);
                }
                if !is_concurrent {
                    reset_format.warn_of_another(headers);
                }
                if stays {
                    return;
                }
            }
        }
        let mut reset = more_after(status);
        if reset_format == Reset::UnixTime {
            let now = decision.at().duration_since(SystemTime::UNIX_EPOCH);
            reset = reset.saturating_add(now.unwrap_or_default());
        }
        headers.insert(LIMIT, header_value(status.limit.units()));
        if is_concurrent {
            headers.remove(RESET);
        } else {
            headers.insert(RESET, header_value(seconds_rounded_up(reset)));
        }
    }

    /// Prepends an item for each limit that clients may see to the items already in the headers.
    #[inline]
    pub(super) fn write_rate_limit(self, decision: &Decision, headers: &mut HeaderMap) {
        if self.rate_limit {
            rate_limit::write(decision, headers);
        }
    }
}

impl Reset {
    /// Warns the operator if an inner layer has written its reset in the other format. The builder
    /// cannot warn, since layers do not know each other while they are built.
    fn warn_of_another(self, headers: &HeaderMap) {
        static LINE: LazyLock<Throttle> = LazyLock::new(Throttle::default);
        let shown = headers.get(RESET).and_then(number);
        if shown.is_some_and(|reset| (reset >= UNIX_TIMES) != (self == Self::UnixTime))
            && let Some(suppressed) = LINE.pass()
        {
            warn!(
                suppressed,
                "X-RateLimit-Reset has two formats: send `X_RATE_LIMIT_UNIX` by all stacked layers, or by none"
            );
        }
    }
}

pub(super) fn number(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.parse().ok()
}

/// The time until more units are left. After a settlement above the limit, or during a block, there
/// are no units left even once the oldest unit has left the window. In that case, a refusal uses
/// its retry time. An admission has no retry time, so it uses the time until the oldest unit leaves
/// the window. If only reserved units stand in the way, the time is at most the retry time, since
/// they may be given back before they leave the window.
fn more_after(status: &LimitStatus) -> Duration {
    match status.retry_after() {
        Some(retry) if status.used > status.limit.units() => retry,
        Some(retry) => retry.min(status.reset_after()),
        None => status.reset_after(),
    }
}

impl Decision {
    /// Writes the headers as a layer does, for a handler that calls a limiter itself. They show the
    /// limits that clients [may see](Self::visible). If there are none, nothing is written.
    ///
    /// Choose the same sets and `-Reset` format as the layers around the handler. If `headers`
    /// already have `X-RateLimit-*`, the limit with the least left is shown. The outer layers do
    /// the same, so the client sees the limit with the least left overall. The outer layers also
    /// add their limits to `RateLimit`.
    ///
    /// ```
    /// use axum::extract::State;
    /// use http::HeaderMap;
    /// use tower_sliding_window::{HeaderSets, Limit, Limiter, MemoryStore, Rejection};
    ///
    /// async fn report(State(limiter): State<Limiter>) -> Result<(HeaderMap, &'static str), Rejection> {
    ///     let decision = limiter.check(&Limit::per_hour("reports", 100), "everybody", 1).await?;
    ///     if !decision.is_allowed() {
    ///         return Err(Rejection::Limited(decision));
    ///     }
    ///     let mut headers = HeaderMap::new();
    ///     decision.write_headers(HeaderSets::BOTH, &mut headers);
    ///     Ok((headers, "done"))
    /// }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// # let (headers, _) = report(State(Limiter::new(MemoryStore::new()))).await.unwrap();
    /// # assert_eq!(headers["x-ratelimit-remaining"], "99");
    /// # assert_eq!(headers["ratelimit-policy"], r#""reports";q=100;w=3600"#);
    /// # assert_eq!(headers["ratelimit"], r#""reports";r=99;t=3600"#);
    /// # }
    /// ```
    pub fn write_headers(&self, sets: HeaderSets, headers: &mut HeaderMap) {
        sets.write_x_rate_limit(self, headers);
        sets.write_rate_limit(self, headers);
    }
}

pub(super) fn write_retry_after(headers: &mut HeaderMap, wait: Duration) {
    headers.insert(RETRY_AFTER, header_value(retry_after_seconds(wait)));
}

/// `Retry-After` in seconds, at least 1, since 0 would make some clients come back at once.
pub(super) fn retry_after_seconds(wait: Duration) -> u64 {
    seconds_rounded_up(wait).max(1)
}

/// Numbers below this have a static text. That covers most limits, most remaining counts, and all
/// seconds up to two hours.
const STATIC_TEXTS: usize = 10_000;

/// The numbers below [`STATIC_TEXTS`], each with four digits.
static DIGITS: [u8; 4 * STATIC_TEXTS] = {
    let mut digits = [0; 4 * STATIC_TEXTS];
    let mut at = 0;
    while at < digits.len() {
        let power = [1_000, 100, 10, 1][at % 4];
        digits[at] = b'0' + (at / 4 / power % 10) as u8;
        at += 1;
    }
    digits
};

/// [`DIGITS`] as text, evaluated at compile time, so a panic would be a compile error.
static TEXT: &str = match str::from_utf8(&DIGITS) {
    Ok(text) => text,
    Err(_) => panic!("digits are ASCII"),
};

fn seconds_rounded_up(duration: Duration) -> u64 {
    // Saturates, since a store may return the longest duration for "never".
    duration
        .as_secs()
        .saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// Does the same as `HeaderValue::from`, which allocates twice. This function allocates once, or
/// not at all for a number with a static text.
#[inline]
fn header_value(number: u64) -> HeaderValue {
    static_text(number).map_or_else(|| long_header_value(number), HeaderValue::from_static)
}

fn long_header_value(number: u64) -> HeaderValue {
    HeaderValue::try_from(number.to_string()).unwrap_or_else(|_| HeaderValue::from(number))
}

fn static_text(number: u64) -> Option<&'static str> {
    let start = 4 * usize::try_from(number)
        .ok()
        .filter(|index| *index < STATIC_TEXTS)?;
    let zeros = [1_000, 100, 10]
        .into_iter()
        .filter(|power| number < *power)
        .count();
    Some(&TEXT[start + zeros..start + 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_rounded_up_and_a_wait_is_at_least_one() {
        let waits = [0, 1, 999_999, 1_000_000, 1_000_001]
            .map(|micros| retry_after_seconds(Duration::from_micros(micros)));
        assert_eq!(waits, [1, 1, 1, 1, 2]);
    }

    #[test]
    fn a_number_is_written_as_it_always_is() {
        let edges = [
            u64::from(u32::MAX),
            u64::MAX / 4,
            u64::MAX / 4 + 1,
            u64::MAX - 1,
            u64::MAX,
        ];
        let lengths = (0..20)
            .map(|digits| 10_u64.pow(digits))
            .flat_map(|power| [power - 1, power, power + 1]);
        for number in (0..=10_001).chain(edges).chain(lengths) {
            assert_eq!(header_value(number), HeaderValue::from(number));
        }
    }
}
