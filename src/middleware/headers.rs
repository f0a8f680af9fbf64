//! Rate-limit headers.
//!
//! 1. `X-RateLimit-Limit`, `-Remaining` and `-Reset` are those of the decision's binding limit. Nothing standardizes
//!    them: `-Reset` is a number of seconds by default, as at Envoy and Kong, or a Unix time, as at GitHub.
//! 2. Times are rounded up to whole seconds, and `Retry-After` (RFC 9110, section 10.2.3) is at least 1: a client that
//!    does as it is told is never early.
//! 3. Where layers are stacked, the response shows the figures of whichever has the least left. A rejection keeps those
//!    of the layer that has made it.
//! 4. They are those of the decision, or of the settlement: what was spent while the service worked is not in them, and a
//!    `-Reset` in seconds is too long by that time.

use std::time::{Duration, SystemTime};

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CACHE_CONTROL, RETRY_AFTER},
};

use super::number::{header_value, lasting_header_value};
use crate::decision::Decision;

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The headers a browser's script may only read if CORS exposes them: for `CorsLayer::expose_headers`.
#[allow(clippy::declare_interior_mutable_const, reason = "a HeaderName of a static text has no interior to mutate")]
pub const EXPOSED_HEADERS: [HeaderName; 4] = [RETRY_AFTER, LIMIT, REMAINING, RESET];

/// How `X-RateLimit-Reset` is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResetFormat {
    /// Seconds from now, rounded up. No clock can be wrong about it.
    #[default]
    DeltaSeconds,
    /// A Unix time in seconds, rounded up, by the store's clock.
    EpochSeconds,
}

impl Decision {
    /// Writes `X-RateLimit-Limit`, `-Remaining` and `-Reset` as a layer does: for a handler that asks a limiter itself. What is
    /// there already of a limit with no more left stays; so of the handler's and those of layers around it, the client sees
    /// those with the least left.
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
        Figures::of(self, format).write(headers);
    }
}

/// What the headers say of a decision.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    limit: u64,
    remaining: u64,
    reset: u64,
}

impl Figures {
    pub(super) fn of(decision: &Decision, format: ResetFormat) -> Self {
        let binding = decision.binding();
        let reset = match format {
            ResetFormat::DeltaSeconds => binding.reset_after(),
            ResetFormat::EpochSeconds => {
                let at = decision.at().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                at.saturating_add(binding.reset_after())
            }
        };
        Self { limit: binding.limit().units(), remaining: binding.remaining(), reset: seconds_rounded_up(reset) }
    }

    /// Writes them, unless the headers already have those of a limit with no more left.
    pub(super) fn write(self, headers: &mut HeaderMap) {
        let shown = headers.get(&REMAINING).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        if shown.is_some_and(|remaining| remaining <= self.remaining) {
            return;
        }
        headers.insert(LIMIT, lasting_header_value(self.limit));
        headers.insert(REMAINING, header_value(self.remaining));
        headers.insert(RESET, header_value(self.reset));
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

fn seconds_rounded_up(duration: Duration) -> u64 {
    // A store may say that it will never be.
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
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
