//! Rate-limit headers.
//!
//! 1. `X-RateLimit-Limit`, `-Remaining` and `-Reset`, the default, show the visible limit of the decision; without one they are
//!    not sent. No standard defines them. `-Reset` is a number of seconds by default, as for Envoy and Kong, or a
//!    [Unix time](HeaderSets::reset_as_unix_time), as for GitHub.
//! 2. `RateLimit-Policy` and `RateLimit`, on request, show every visible limit: see [`HeaderSets::rate_limit`].
//! 3. Times are rounded up to whole seconds, and `Retry-After` (RFC 9110, section 10.2.3) is at least 1, so that a client
//!    that obeys is never early. A refusal for which waiting helps, and a 503, have it even if the layer sends no figures. A cost
//!    above the limit has none.
//! 4. If layers are stacked, `X-RateLimit-*` shows the visible limit with the least left, as its layer writes it: so give all
//!    of them one format of the reset. A rejection keeps the figures of the layer that has made it, or has none. `RateLimit` lists the limits of all layers that have decided, the outermost first. A
//!    layer that sends no figures leaves those of the others alone.
//! 5. The figures are as of the decision, or of the settlement. A `-Reset` in seconds is too long by the time that the service
//!    has worked since.
//!
mod number;
mod rate_limit;

use std::time::{Duration, SystemTime};

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CACHE_CONTROL, RETRY_AFTER},
};

pub(super) use self::rate_limit::{PartitionKeys, split};
use self::{
    number::{header_value, seconds_rounded_up},
    rate_limit::{POLICY, RATE_LIMIT},
};
use crate::decision::{Decision, LimitStatus};

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// All headers of a layer that a browser's script can read only if CORS exposes them: for `CorsLayer::expose_headers`.
#[must_use]
pub fn exposed_headers() -> Vec<HeaderName> {
    vec![RETRY_AFTER, LIMIT, REMAINING, RESET, POLICY, RATE_LIMIT]
}

/// The sets of headers that a layer sends: see [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct HeaderSets {
    x_rate_limit: bool,
    reset_is_unix_time: bool,
    rate_limit: bool,
}

impl HeaderSets {
    /// No set.
    pub const fn none() -> Self {
        Self { x_rate_limit: false, reset_is_unix_time: false, rate_limit: false }
    }

    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`. The default.
    pub const fn x_rate_limit() -> Self {
        Self { x_rate_limit: true, ..Self::none() }
    }

    /// `RateLimit-Policy` and `RateLimit`, as an Internet-Draft of the IETF defines them:
    /// [draft-ietf-httpapi-ratelimit-headers-11](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-ratelimit-headers-11).
    /// A draft may change, and a later version of this crate follows it.
    ///
    /// ```text
    /// RateLimit-Policy: "burst";q=10;w=1, "hourly";q=1000;w=3600
    /// RateLimit: "burst";r=9;t=1, "hourly";r=412;t=97
    /// ```
    ///
    /// * Both are Structured Fields (RFC 9651) with one item for each limit that clients see, in the layer's order. A limit in the
    ///   [shadow](crate::KeyedLimit::in_shadow) is shown only if the layer has no other.
    /// * `q` is the limit's units, and `w` its window in seconds, rounded up. `w` is left out below one second. `qu` is the
    ///   [unit](crate::Limit::counted_in), if it is not requests.
    /// * `r` is the units left, and `t` the seconds until more units are left, rounded up. `t` is left out while all units are
    ///   left. For a limit that refuses, `t` is at most `Retry-After`.
    /// * `pk` tells the partitions of a limit apart, if the layer has a [partition key](crate::RateLimitLayer::partition_key).
    /// * After a settlement above the limit, `t` is the time until the oldest unit leaves, which is too early. The refusal that
    ///   follows has the right time.
    /// * Lines of the service that are not lists of strings, each with integers, strings or byte sequences as parameters, are left
    ///   out, since clients would ignore the whole field.
    /// * Numbers end at 999,999,999,999,999, the largest Integer of a Structured Field.
    pub const fn rate_limit() -> Self {
        Self { rate_limit: true, ..Self::none() }
    }

    /// Both sets.
    pub const fn both() -> Self {
        Self { x_rate_limit: true, ..Self::rate_limit() }
    }

    /// Writes `X-RateLimit-Reset` as a Unix time in seconds, rounded up, by the store's clock. Default: seconds from now, which no
    /// wrong clock can falsify.
    ///
    /// Give all stacked layers one format. With axum, a [`Rejection`](crate::Rejection) of a handler always has seconds from now.
    pub const fn reset_as_unix_time(self) -> Self {
        Self { reset_is_unix_time: true, ..self }
    }

    pub(super) fn has_rate_limit(self) -> bool {
        self.rate_limit
    }

    /// Writes `X-RateLimit-*` of the visible limit, unless the headers already show a limit with no more left.
    #[inline]
    pub(super) fn write_x_rate_limit(self, decision: &Decision, headers: &mut HeaderMap) {
        if !self.x_rate_limit {
            return;
        }
        let Some(status) = decision.visible() else { return };
        let remaining = status.remaining();
        let shown = headers.get(REMAINING).and_then(|shown| shown.to_str().ok()?.parse().ok());
        if shown.is_some_and(|shown: u64| shown <= remaining) {
            return;
        }
        let mut reset = reset_after(status);
        if self.reset_is_unix_time {
            reset = reset.saturating_add(decision.at().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        }
        headers.insert(LIMIT, header_value(status.limit().units()));
        headers.insert(REMAINING, header_value(remaining));
        headers.insert(RESET, header_value(seconds_rounded_up(reset)));
    }

    /// Writes the items of the visible limits in front of those that the headers have. There is one partition key for each
    /// status, or none.
    #[inline]
    pub(super) fn write_rate_limit(self, decision: &Decision, partition_keys: &[String], headers: &mut HeaderMap) {
        if self.rate_limit {
            rate_limit::write(decision, partition_keys, headers);
        }
    }
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
        Self::x_rate_limit()
    }
}

impl Decision {
    /// Writes the sets of headers as a layer does: for a handler that calls a limiter itself. They show the
    /// [visible](Self::visible) limits; without one, nothing is written.
    ///
    /// Write the sets of the layers around the handler, in their format. `X-RateLimit-*` of a limit with no more left stay, and
    /// the layers around the handler do the same, so the client sees the limit with the least left of all. To `RateLimit`, the
    /// layers add their limits.
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
    ///     decision.write_headers(HeaderSets::both(), &mut headers);
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
        sets.write_rate_limit(self, &[], headers);
    }
}

pub(super) fn write_retry_after(headers: &mut HeaderMap, wait: Duration) {
    headers.insert(RETRY_AFTER, header_value(retry_after_seconds(wait)));
}

/// A rejection is for one client at one moment, so no cache may store it (RFC 6585, section 4, for 429).
pub(super) fn forbid_storing(headers: &mut HeaderMap) {
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
}

/// `Retry-After: 0` would make some clients come back at once.
pub(super) fn retry_after_seconds(wait: Duration) -> u64 {
    seconds_rounded_up(wait).max(1)
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
}
