//! Rate-limit headers.
//!
//! 1. `X-RateLimit-Limit`, `-Remaining` and `-Reset` show the visible limit of the decision; without one they are not sent.
//!    No standard defines them. `-Reset` is a number of seconds by default, as for Envoy and Kong, or a Unix time, as for
//!    GitHub.
//! 2. Times are rounded up to whole seconds, and `Retry-After` (RFC 9110, section 10.2.3) is at least 1, so that a client
//!    that obeys is never early. A 429 or 503 has a `Retry-After` even if the layer sends no figures.
//! 3. If layers are stacked, the response shows the visible limit with the least left. A rejection keeps the figures of the
//!    layer that has made it, or has none. A layer that sends no figures leaves those of the others alone.
//! 4. The figures are as of the decision, or of the settlement. A `-Reset` in seconds is too long by the time that the service
//!    has worked since.
//!
//! All stacked layers write the reset in one format: that of the outermost layer that sends figures. Inner layers never
//! see the requests that it refuses. If the format is Unix times, an extension of the request tells the inner layers.
//! If it is seconds, an inner layer that writes Unix times also puts its figures into the response's extensions, and
//! the outer layer writes the header again. A rejection has its figures in its decision.

mod number;

use std::time::{Duration, SystemTime};

use http::{
    Extensions, HeaderMap, HeaderName, HeaderValue,
    header::{CACHE_CONTROL, RETRY_AFTER},
};

use self::number::{header_value, lasting_header_value};
use crate::decision::{Decision, LimitStatus};

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// All headers of a layer that a browser's script can read only if CORS exposes them: for `CorsLayer::expose_headers`.
#[allow(clippy::declare_interior_mutable_const, reason = "a HeaderName of a static text has no interior to mutate")]
pub const EXPOSED_HEADERS: [HeaderName; 4] = [RETRY_AFTER, LIMIT, REMAINING, RESET];

/// The sets of headers that a layer sends: see [`RateLimitLayer::headers`](crate::RateLimitLayer::headers).
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

/// How `X-RateLimit-Reset` is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResetFormat {
    /// Seconds from now, rounded up. No wrong clock can falsify it.
    #[default]
    DeltaSeconds,
    /// A Unix time in seconds, rounded up, by the store's clock.
    EpochSeconds,
}

/// In a request's extensions: a layer further out writes Unix times.
#[derive(Clone, Copy)]
struct OuterWritesEpoch;

impl ResetFormat {
    /// The format for a request that layers further out may have seen.
    pub(super) fn for_request(self, request: &Extensions) -> Self {
        request.get().map_or(self, |OuterWritesEpoch| Self::EpochSeconds)
    }

    pub(super) fn tell_inner_layers(self, request: &mut Extensions) {
        if self == Self::EpochSeconds {
            request.insert(OuterWritesEpoch);
        }
    }
}

impl Decision {
    /// Writes `X-RateLimit-Limit`, `-Remaining` and `-Reset` as a layer does: for a handler that calls a limiter itself.
    /// They show the [visible](Self::visible) limit; without one, nothing is written. Headers of a limit with no more left
    /// stay, so the client sees the limit with the least left of the handler's and the layers'.
    ///
    /// Use the format of the outermost layer around the handler: the layers cannot recognize the handler's format, and leave
    /// its reset as it is.
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

/// The figures of a decision that clients see. In a response's extensions, those in its headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    limit: u64,
    remaining: u64,
    reset_delta: u64,
    reset_epoch: u64,
}

impl Figures {
    /// `None` if no limit is visible.
    pub(super) fn of(decision: &Decision) -> Option<Self> {
        let status = decision.visible()?;
        let now = decision.at().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let reset = reset_after(status);
        Some(Self {
            limit: status.limit().units(),
            remaining: status.remaining(),
            reset_delta: seconds_rounded_up(reset),
            reset_epoch: seconds_rounded_up(now.saturating_add(reset)),
        })
    }

    /// Writes them, unless the headers already show a limit with no more left. Returns whether they were written.
    pub(super) fn write(self, format: ResetFormat, headers: &mut HeaderMap) -> bool {
        if number(headers, &REMAINING).is_some_and(|remaining| remaining <= self.remaining) {
            return false;
        }
        headers.insert(LIMIT, lasting_header_value(self.limit));
        headers.insert(REMAINING, header_value(self.remaining));
        headers.insert(RESET, header_value(self.reset(format)));
        true
    }

    /// Writes the reset in this format if the headers have it in the other.
    pub(super) fn rewrite_reset(self, format: ResetFormat, headers: &mut HeaderMap) {
        let other = match format {
            ResetFormat::DeltaSeconds => ResetFormat::EpochSeconds,
            ResetFormat::EpochSeconds => ResetFormat::DeltaSeconds,
        };
        // A responder may have changed the header. Then it is left alone.
        if number(headers, &RESET) == Some(self.reset(other)) {
            headers.insert(RESET, header_value(self.reset(format)));
        }
    }

    /// Keeps figures with Unix times in the response's extensions, so that an outer layer can write them as seconds.
    pub(super) fn tell_outer_layers(self, format: ResetFormat, response: &mut Extensions) {
        if format == ResetFormat::EpochSeconds {
            response.insert(self);
        }
    }

    fn reset(self, format: ResetFormat) -> u64 {
        match format {
            ResetFormat::DeltaSeconds => self.reset_delta,
            ResetFormat::EpochSeconds => self.reset_epoch,
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

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

fn seconds_rounded_up(duration: Duration) -> u64 {
    // Saturating, since a store may return the longest duration for "never".
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
