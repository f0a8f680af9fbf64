//! Rate-limit headers.
//!
//! 1. `X-RateLimit-Limit`, `-Remaining` and `-Reset`, the default, show the visible limit of the
//!    decision; without one they are not sent. No standard defines them. `-Reset` is a number of
//!    seconds by default, as for Envoy and Kong, or a [Unix time](HeaderSets::reset_as_unix_time),
//!    as for GitHub.
//! 2. `RateLimit-Policy` and `RateLimit`, on request, show every visible limit: see
//!    [`HeaderSets::RATE_LIMIT`].
//! 3. Times are rounded up to whole seconds, and `Retry-After` (RFC 9110, section 10.2.3) is at
//!    least 1, so that a client that obeys is never early. A refusal for which waiting helps, and a
//!    503, have it even if the layer sends no figures. A cost above the limit has none.
//! 4. If layers are stacked, `X-RateLimit-*` shows the visible limit with the least left, as its
//!    layer writes it. So give all of them one format of the reset: a log line warns of two.
//!    `RateLimit` lists the limits of all layers that have decided, the outermost first.
//! 5. A rejection keeps the figures of the layer that has made it, or has none. A layer that sends
//!    no figures leaves those of the others alone.
//! 6. A [concurrent](crate::Limit::concurrent) limit has no reset. A layer shows its figures only
//!    if it has no other limit, or if it refuses.
//! 7. The figures are as of the decision, or of the settlement. A `-Reset` in seconds is too long
//!    by the time that the service has worked since.
//! 8. They are those of one client. A response that others may get from a shared cache, as by
//!    `Cache-Control: public`, needs a layer with [`HeaderSets::NONE`].
//!
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

/// Unix times are no smaller since 2001. Seconds from now are, since no window is longer than a
/// year.
const UNIX_TIMES: u64 = 1_000_000_000;

/// All headers of a layer that a browser's script can read only if CORS exposes them: for
/// `CorsLayer::expose_headers`.
#[must_use]
pub fn exposed_headers() -> Vec<HeaderName> {
    vec![RETRY_AFTER, LIMIT, REMAINING, RESET, POLICY, RATE_LIMIT]
}

/// The sets of headers that a layer sends: see
/// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct HeaderSets {
    x_rate_limit: bool,
    reset_is_unix_time: bool,
    pub(super) rate_limit: bool,
}

impl HeaderSets {
    /// No set.
    pub const NONE: Self = Self { x_rate_limit: false, reset_is_unix_time: false, rate_limit: false };

    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`. The default.
    pub const X_RATE_LIMIT: Self = Self { x_rate_limit: true, ..Self::NONE };

    /// `RateLimit-Policy` and `RateLimit`, as an Internet-Draft of the IETF defines them:
    /// [draft-ietf-httpapi-ratelimit-headers-11](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-11).
    /// A draft may change, and a later version of this crate follows it.
    ///
    /// ```text
    /// RateLimit-Policy: "burst";q=10;w=1, "hourly";q=1000;w=3600
    /// RateLimit: "burst";r=9;t=1, "hourly";r=412;t=97
    /// ```
    ///
    /// * Both are Structured Fields (RFC 9651) with one item for each limit that clients see, in
    ///   the layer's order. A limit in the [shadow](crate::KeyedLimit::in_shadow) is shown only if
    ///   the layer has no other.
    /// * `q` is the limit's units, and `w` its window in seconds, rounded up. `w` is left out below
    ///   one second. `qu` is `concurrent-requests` for a [concurrent](crate::Limit::concurrent)
    ///   limit; otherwise it is left out, which means requests.
    /// * `r` is the units left, and `t` the seconds until more units are left, rounded up. `t` is
    ///   left out while all units are left. For a limit that refuses, `t` is at most `Retry-After`.
    /// * After a settlement above the limit, `t` is the time until the oldest unit leaves, which is
    ///   too early. The refusal that follows has the right time.
    /// * Lines of the service that are not lists of strings, each with integers, strings or byte
    ///   sequences as parameters, are left out, since clients would ignore the whole field.
    /// * Numbers end at 999,999,999,999,999, the largest Integer of a Structured Field.
    pub const RATE_LIMIT: Self = Self { rate_limit: true, ..Self::NONE };

    /// Both sets.
    pub const BOTH: Self = Self { x_rate_limit: true, ..Self::RATE_LIMIT };

    /// Writes `X-RateLimit-Reset` as a Unix time in seconds, rounded up, by the store's clock.
    /// Default: seconds from now, which no wrong clock can falsify.
    ///
    /// Set it on all stacked layers, since each writes its own figures: a client that reads the
    /// seconds of one as a Unix time retries at once. A log line warns of two formats in one
    /// response. With axum, a [`Rejection`](crate::Rejection) of a handler always has seconds from
    /// now.
    pub const fn reset_as_unix_time(self) -> Self {
        Self { reset_is_unix_time: true, ..self }
    }

    /// Writes `X-RateLimit-*` of the visible limit, unless the headers already show a limit with no
    /// more left.
    #[inline]
    pub(super) fn write_x_rate_limit(self, decision: &Decision, headers: &mut HeaderMap) {
        if !self.x_rate_limit {
            return;
        }
        let Some(status) = decision.visible() else { return };
        let remaining = status.remaining();
        let is_concurrent = status.limit().is_concurrent();
        let value = header_value(remaining);
        match headers.entry(REMAINING) {
            Entry::Vacant(entry) => drop(entry.insert(value)),
            Entry::Occupied(mut entry) => {
                let stays = number(entry.get()).is_some_and(|shown| shown <= remaining || is_concurrent);
                if !stays {
                    entry.insert(value);
                }
                if !is_concurrent {
                    self.warn_of_two_formats(headers);
                }
                if stays {
                    return;
                }
            }
        }
        let mut reset = reset_after(status);
        if self.reset_is_unix_time {
            reset = reset.saturating_add(decision.at().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        }
        headers.insert(LIMIT, header_value(status.limit().units()));
        if is_concurrent {
            headers.remove(RESET);
        } else {
            headers.insert(RESET, header_value(seconds_rounded_up(reset)));
        }
    }

    /// Tells the operator of a reset further in that is in the other format. Layers do not know
    /// each other when they are built.
    fn warn_of_two_formats(self, headers: &HeaderMap) {
        static LINE: LazyLock<Throttle> = LazyLock::new(Throttle::default);
        let shown = headers.get(RESET).and_then(number);
        if shown.is_some_and(|reset| (reset >= UNIX_TIMES) != self.reset_is_unix_time)
            && let Some(suppressed) = LINE.pass()
        {
            warn!(
                suppressed,
                "X-RateLimit-Reset has two formats: set `reset_as_unix_time` on all stacked layers, or on none"
            );
        }
    }

    /// Writes the items of the visible limits in front of those that the headers have.
    #[inline]
    pub(super) fn write_rate_limit(self, decision: &Decision, headers: &mut HeaderMap) {
        if self.rate_limit {
            rate_limit::write(decision, headers);
        }
    }
}

fn number(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.parse().ok()
}

/// The time until more can be spent. Reserved units may be given back before they leave the window.
fn reset_after(status: &LimitStatus) -> Duration {
    match status.retry_after() {
        Some(retry) if status.is_refused_by_reservations() => retry.min(status.reset_after()),
        _ => status.reset_after(),
    }
}

impl Default for HeaderSets {
    fn default() -> Self {
        Self::X_RATE_LIMIT
    }
}

impl Decision {
    /// Writes the sets of headers as a layer does: for a handler that calls a limiter itself. They
    /// show the [visible](Self::visible) limits; without one, nothing is written.
    ///
    /// Write the sets of the layers around the handler, in their format. `X-RateLimit-*` of a limit
    /// with no more left stay, and the layers around the handler do the same, so the client sees
    /// the limit with the least left of all. To `RateLimit`, the layers add their limits.
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

/// `Retry-After: 0` would make some clients come back at once.
pub(super) fn retry_after_seconds(wait: Duration) -> u64 {
    seconds_rounded_up(wait).max(1)
}

/// Smaller numbers have a static text: most limits, remaining units, and seconds up to two hours.
const STATIC_TEXTS: usize = 10_000;

/// All smaller numbers, each with four digits.
static DIGITS: [[u8; 4]; STATIC_TEXTS] = {
    let mut digits = [[0; 4]; STATIC_TEXTS];
    let mut number = 0;
    while number < STATIC_TEXTS {
        let mut place = 4;
        let mut rest = number;
        while place > 0 {
            place -= 1;
            digits[number][place] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        number += 1;
    }
    digits
};

/// Evaluated by the compiler, so that the panic is an error at compile time.
static TEXT: &str = match str::from_utf8(DIGITS.as_flattened()) {
    Ok(text) => text,
    Err(_) => panic!("digits are ASCII"),
};

fn seconds_rounded_up(duration: Duration) -> u64 {
    // Saturating, since a store may return the longest duration for "never".
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// As `HeaderValue::from`, which needs two allocations. A number with a static text needs none, any
/// other number one.
#[inline]
fn header_value(number: u64) -> HeaderValue {
    static_text(number).map_or_else(|| long_header_value(number), HeaderValue::from_static)
}

fn long_header_value(number: u64) -> HeaderValue {
    let mut digits = [b'0'; 20];
    let mut begin = 20;
    let mut rest = number;
    while rest > 0 {
        begin -= 4;
        digits[begin..begin + 4].copy_from_slice(&DIGITS[(rest % STATIC_TEXTS as u64) as usize]);
        rest /= STATIC_TEXTS as u64;
    }
    let zeros = digits[begin..].iter().take_while(|digit| **digit == b'0').count();
    HeaderValue::from_bytes(&digits[begin + zeros..]).unwrap_or_else(|_| HeaderValue::from(number))
}

fn static_text(number: u64) -> Option<&'static str> {
    let start = 4 * usize::try_from(number).ok().filter(|index| *index < STATIC_TEXTS)?;
    let zeros = [1_000, 100, 10].into_iter().filter(|power| number < *power).count();
    Some(&TEXT[start + zeros..start + 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_rounded_up_and_a_wait_is_at_least_one() {
        let waits =
            [0, 1, 999_999, 1_000_000, 1_000_001].map(|micros| retry_after_seconds(Duration::from_micros(micros)));
        assert_eq!(waits, [1, 1, 1, 1, 2]);
    }

    #[test]
    fn a_number_is_written_as_it_always_is() {
        let edges = [u64::from(u32::MAX), u64::MAX / 4, u64::MAX / 4 + 1, u64::MAX - 1, u64::MAX];
        let lengths = (0..20).map(|digits| 10_u64.pow(digits)).flat_map(|power| [power - 1, power, power + 1]);
        for number in (0..=10_001).chain(edges).chain(lengths) {
            assert_eq!(header_value(number), HeaderValue::from(number));
        }
    }
}
