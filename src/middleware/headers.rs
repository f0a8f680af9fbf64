//! Rate-limit headers.
//!
//! 1. `X-RateLimit-Limit`, `-Remaining` and `-Reset` are those of the decision's visible limit; without one there are none.
//!    Nothing standardizes them: `-Reset` is a number of seconds by default, as at Envoy and Kong, or a Unix time, as at
//!    GitHub.
//! 2. Times are rounded up to whole seconds, and `Retry-After` (RFC 9110, section 10.2.3) is at least 1: a client that
//!    does as it is told is never early. It is no figure but what a 429 or 503 means, so it is there without figures, too.
//! 3. Where layers are stacked, the response shows the figures of the visible limit with the least left. A rejection keeps
//!    those of the layer that has made it, or the absence of them. The reset is in one format: that of the outermost layer
//!    that sends figures.
//! 4. A layer that sends no figures leaves alone what is there.
//! 5. They are those of the decision, or of the settlement: what was spent while the service worked is not in them, and a
//!    `-Reset` in seconds is too long by that time.

use std::time::Duration;

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CACHE_CONTROL, RETRY_AFTER},
};

use super::{
    number::{header_value, lasting_header_value},
    reset::{RESET, Reset, ResetFormat, number, seconds_rounded_up},
};
use crate::decision::Decision;

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");

/// All headers that layers may send and a browser's script may only read if CORS exposes them: for
/// `CorsLayer::expose_headers`.
#[allow(clippy::declare_interior_mutable_const, reason = "a HeaderName of a static text has no interior to mutate")]
pub const EXPOSED_HEADERS: [HeaderName; 4] = [RETRY_AFTER, LIMIT, REMAINING, RESET];

/// Which sets of headers a layer sends: see [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct HeaderSets {
    x_rate_limit: bool,
}

impl HeaderSets {
    /// No set.
    pub const fn none() -> Self {
        Self { x_rate_limit: false }
    }

    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`. The default.
    pub const fn x_rate_limit() -> Self {
        Self { x_rate_limit: true }
    }

    pub(super) fn has_x_rate_limit(self) -> bool {
        self.x_rate_limit
    }
}

impl Default for HeaderSets {
    fn default() -> Self {
        Self::x_rate_limit()
    }
}

impl Decision {
    /// Writes `X-RateLimit-Limit`, `-Remaining` and `-Reset` as a layer does: for a handler that asks a limiter itself. They
    /// are those of the [visible](Self::visible) limit; without one, nothing is written. What is there already of a limit with
    /// no more left stays; so of the handler's and those of layers around it, the client sees those with the least left.
    ///
    /// The format should be that of the outermost layer around the handler: headers alone do not tell the layers which one
    /// it is, so they leave the reset as it is.
    ///
    /// ```
    /// use axum::extract::State;
    /// use http::HeaderMap;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore, Rejection, ResetFormat};
    ///
    /// async fn report(State(limiter): State<Limiter<MemoryStore>>) -> Result<(HeaderMap, &'static str), Rejection> {
    ///     let decision = limiter.check(&Limit::per_hour("reports", 100), "everybody", 1).await?;
    ///     if !decision.is_allowed() {
    ///         return Err(Rejection::Limited(decision));
    ///     }
    ///     let mut headers = HeaderMap::new();
    ///     decision.write_headers(ResetFormat::DeltaSeconds, &mut headers);
    ///     Ok((headers, "done"))
    /// }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// # let (headers, _) = report(State(Limiter::new(MemoryStore::new()))).await.unwrap();
    /// # assert_eq!(headers["x-ratelimit-remaining"], "99");
    /// # }
    /// ```
    pub fn write_headers(&self, format: ResetFormat, headers: &mut HeaderMap) {
        if let Some(figures) = Figures::of(self) {
            figures.write(format, headers);
        }
    }
}

/// What the headers say of a decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    limit: u64,
    remaining: u64,
    reset: Reset,
}

impl Figures {
    /// Those that a client may see, if there are any.
    pub(super) fn of(decision: &Decision) -> Option<Self> {
        let status = decision.visible()?;
        let reset = Reset::of(status, decision.at());
        Some(Self { limit: status.limit().units(), remaining: status.remaining(), reset })
    }

    pub(super) fn reset(self) -> Reset {
        self.reset
    }

    /// Writes them, unless the headers already have those of a limit with no more left; says whether it has.
    pub(super) fn write(self, format: ResetFormat, headers: &mut HeaderMap) -> bool {
        if number(headers, &REMAINING).is_some_and(|remaining| remaining <= self.remaining) {
            return false;
        }
        headers.insert(LIMIT, lasting_header_value(self.limit));
        headers.insert(REMAINING, header_value(self.remaining));
        self.reset.write(format, headers);
        true
    }
}

/// Tells when to come back.
pub(super) fn write_retry_after(headers: &mut HeaderMap, wait: Duration) {
    headers.insert(RETRY_AFTER, header_value(retry_after_seconds(wait)));
}

/// An answer to one client at one moment is nobody else's (RFC 6585, section 4, for 429).
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
