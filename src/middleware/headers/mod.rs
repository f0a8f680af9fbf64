//! Rate-limit headers.
//!
//! 1. `X-RateLimit-Limit`, `-Remaining` and `-Reset`, the default, show the visible limit of the
//!    decision. If no limit is visible, these headers are not sent. No standard defines these
//!    headers. `-Reset` is a number of seconds by default, as for Envoy and Kong, or a [Unix
//!    time](HeaderSets::X_RATE_LIMIT_UNIX), as for GitHub.
//! 2. `RateLimit-Policy` and `RateLimit`, which a layer sends only if you choose them, show every
//!    limit that is not hidden: see [`HeaderSets::RATE_LIMIT`].
//! 3. Times are rounded up to whole seconds, and `Retry-After` (RFC 9110, section 10.2.3) is at
//!    least 1, so that a client that obeys is never early. A refusal has `Retry-After` if waiting
//!    helps, even if the layer sends no figures. A 503 because the store cannot decide has a
//!    `Retry-After`, too. A 429 for a cost above the limit has no `Retry-After`.
//! 4. If layers are stacked, `X-RateLimit-*` shows the visible limit with the least left, in the
//!    format of that limit's layer. So give all layers the same format of `-Reset`. If the layers
//!    have both formats, a log line warns of this. `RateLimit` lists the limits of all layers that
//!    have decided, the outermost first.
//! 5. A rejection keeps the `X-RateLimit-*` of the layer that has made the rejection: layers
//!    further out neither replace nor add such headers. A layer that sends no figures leaves the
//!    figures of other layers as they are.
//! 6. A [concurrent](crate::Limit::concurrent) limit has no reset time. A layer shows the figures
//!    of a concurrent limit only if the concurrent limit refuses, or if the layer has no other
//!    limit.
//! 7. The figures are those at the time of the decision, or of the settlement if there is one. The
//!    service runs after the decision. So without a settlement, a `-Reset` in seconds is too long
//!    by the running time of the service.
//! 8. The figures are those of one client. If other clients may get the response from a shared
//!    cache, as by `Cache-Control: public`, use a layer with [`HeaderSets::NONE`].

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

/// A `-Reset` of at least this number is taken for a Unix time. Every Unix time since September
/// 2001 is at least this number. A number of seconds from now is always below this number, since no
/// window is longer than a year.
const UNIX_TIMES: u64 = 1_000_000_000;

/// Returns the names of the rate-limit headers and `Retry-After`. A browser's script can read these
/// headers only if CORS exposes them. `CorsLayer::expose_headers` takes this list.
#[must_use]
pub fn exposed_headers() -> Vec<HeaderName> {
    vec![RETRY_AFTER, LIMIT, REMAINING, RESET, POLICY, RATE_LIMIT]
}

/// The sets of headers that a layer sends: see
/// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct HeaderSets {
    x_rate_limit: Option<Reset>,
    rate_limit: bool,
}

/// The format of `X-RateLimit-Reset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reset {
    /// The seconds from now.
    Seconds,
    /// The Unix time in seconds.
    UnixTime,
}

impl HeaderSets {
    /// No set.
    pub const NONE: Self = Self::of(None, false);

    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`. The default.
    pub const X_RATE_LIMIT: Self = Self::of(Some(Reset::Seconds), false);

    /// `RateLimit-Policy` and `RateLimit`, as an Internet-Draft of the IETF defines them:
    /// [draft-ietf-httpapi-ratelimit-headers-11](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-11).
    /// The draft may change. A later version of this crate then follows the new draft.
    ///
    /// ```text
    /// RateLimit-Policy: "burst";q=10;w=1, "hourly";q=1000;w=3600
    /// RateLimit: "burst";r=9;t=1, "hourly";r=412;t=97
    /// ```
    ///
    /// * Both headers are Structured Fields (RFC 9651) with one item for each limit that clients
    ///   see, in the layer's order. A limit in the [shadow](crate::KeyedLimit::in_shadow) is shown
    ///   only if all limits of the layer are in the shadow.
    /// * `q` is the number of the limit's units. `w` is the limit's window in seconds, rounded up.
    ///   `w` is left out for a window below one second, for a limit by the calendar, and for a
    ///   [concurrent](crate::Limit::concurrent) limit. `qu` is `concurrent-requests` for a
    ///   concurrent limit. For any other limit, `qu` is left out. A missing `qu` means that the
    ///   units are requests.
    /// * `r` is the number of units left. `t` is the seconds until more units are left, rounded up.
    ///   `t` is left out while all units are left, and for a concurrent limit that does not refuse.
    ///   For a limit that refuses, `t` is at most `Retry-After`.
    /// * After a settlement above the limit, `t` is too short: `t` is the time until the oldest
    ///   unit leaves the window, and even then no unit may be left. The next refusal has the right
    ///   `t`.
    /// * If the service has written a line of these headers that is no list of RFC 8941, the layer
    ///   removes that line. With that line, clients would ignore the whole field.
    /// * A number above 999,999,999,999,999, the largest Integer of a Structured Field, is shown as
    ///   this Integer.
    pub const RATE_LIMIT: Self = Self::of(None, true);

    /// Both sets.
    pub const BOTH: Self = Self::of(Some(Reset::Seconds), true);

    /// `X-RateLimit-*`, with a Unix time in seconds as `-Reset`, rounded up, by the store's clock.
    /// In [`X_RATE_LIMIT`](Self::X_RATE_LIMIT) and [`BOTH`](Self::BOTH), `-Reset` is the seconds
    /// from now, which are right even for a client whose clock is wrong.
    ///
    /// Send this set by all stacked layers or by none: the response shows the figures of one layer,
    /// in the format of that layer. A client that takes seconds for a Unix time retries at once. If
    /// stacked layers have both formats, a log line warns of this. With axum, a
    /// [`Rejection`](crate::Rejection) that a handler returns always has seconds from now.
    pub const X_RATE_LIMIT_UNIX: Self = Self::of(Some(Reset::UnixTime), false);

    /// [`X_RATE_LIMIT_UNIX`](Self::X_RATE_LIMIT_UNIX) and [`RATE_LIMIT`](Self::RATE_LIMIT).
    pub const BOTH_UNIX: Self = Self::of(Some(Reset::UnixTime), true);

    const fn of(x_rate_limit: Option<Reset>, rate_limit: bool) -> Self {
        Self {
            x_rate_limit,
            rate_limit,
        }
    }

    /// Writes `X-RateLimit-*` of the visible limit. If the headers already show the limit of
    /// another layer, the limit with the least left is shown. A concurrent limit never replaces
    /// another limit.
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

    /// Writes the items of all limits that clients may see, in front of the items that the headers
    /// already have.
    #[inline]
    pub(super) fn write_rate_limit(self, decision: &Decision, headers: &mut HeaderMap) {
        if self.rate_limit {
            rate_limit::write(decision, headers);
        }
    }
}

impl Reset {
    /// Warns the operator if a layer further in has written its reset in the other format. The
    /// builder of a layer cannot warn, since layers do not know each other while they are built.
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

/// The time until more units are left. After a settlement above the limit, or in a block, more
/// units are used than the limit has. Then no unit is left even when the oldest unit has left the
/// window. A refusal then shows its retry time, after which units are left again. An admission has
/// no retry time, so it shows the time until the oldest unit leaves. If only reserved units refuse,
/// the time is at most the retry time, since reserved units may be given back before they leave the
/// window.
fn more_after(status: &LimitStatus) -> Duration {
    match status.retry_after() {
        Some(retry) if status.used > status.limit.units() => retry,
        Some(retry) => retry.min(status.reset_after()),
        None => status.reset_after(),
    }
}

impl Decision {
    /// Writes the sets of headers as a layer does. This method is for a handler that calls a
    /// limiter itself. The headers show the limits that clients [may see](Self::visible). If
    /// clients may see no limit, nothing is written.
    ///
    /// Choose the same sets and the same format of `-Reset` as in the layers around the handler. If
    /// `headers` already have `X-RateLimit-*`, the limit with the least left is shown. The layers
    /// around the handler choose in the same way, so the client sees the limit that has the least
    /// left of all. The layers add their limits to `RateLimit`.
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

/// The seconds of `Retry-After`, at least 1, since `Retry-After: 0` would make some clients come
/// back at once.
pub(super) fn retry_after_seconds(wait: Duration) -> u64 {
    seconds_rounded_up(wait).max(1)
}

/// Every number below this one has a static text. Most limits, most numbers of remaining units, and
/// all seconds up to two hours are below this number.
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

/// [`DIGITS`] as a text. The compiler evaluates this text, so a panic would be an error at compile
/// time.
static TEXT: &str = match str::from_utf8(&DIGITS) {
    Ok(text) => text,
    Err(_) => panic!("digits are ASCII"),
};

fn seconds_rounded_up(duration: Duration) -> u64 {
    // The addition saturates, since a store may return the longest duration for "never".
    duration
        .as_secs()
        .saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// Makes the same header value as `HeaderValue::from`, which needs two allocations. This function
/// needs none for a number with a static text, and one for any other number.
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
