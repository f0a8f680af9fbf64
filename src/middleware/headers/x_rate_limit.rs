//! `X-RateLimit-Limit`, `-Remaining` and `-Reset`, or the same under other names.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{Extensions, HeaderMap, HeaderName};

use super::number::{header_value, lasting_header_value, seconds_rounded_up};
use crate::decision::{Decision, LimitStatus};

pub(super) const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
pub(super) const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
pub(super) const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

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
    pub(in crate::middleware) fn for_request(self, request: &Extensions) -> Self {
        request.get().map_or(self, |OuterWritesEpoch| Self::EpochSeconds)
    }

    pub(in crate::middleware) fn tell_inner_layers(self, request: &mut Extensions) {
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
    /// async fn report(State(limiter): State<Limiter>) -> Result<(HeaderMap, &'static str), Rejection> {
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
            figures.write(&XRateLimit { reset: format, ..XRateLimit::default() }, headers);
        }
    }
}

/// How a layer writes its figures.
#[derive(Clone, Debug, Default)]
pub(crate) struct XRateLimit {
    pub(crate) reset: ResetFormat,
    /// `None` for the usual names.
    pub(crate) names: Option<Arc<XRateLimitNames>>,
}

/// The names of the three headers.
#[derive(Debug)]
pub(crate) struct XRateLimitNames {
    pub(crate) limit: HeaderName,
    pub(crate) remaining: HeaderName,
    pub(crate) reset: HeaderName,
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
    pub(crate) fn of(decision: &Decision) -> Option<Self> {
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
    pub(crate) fn write(self, format: &XRateLimit, headers: &mut HeaderMap) -> bool {
        match &format.names {
            None => self.write_as(format.reset, headers, LIMIT, REMAINING, RESET),
            Some(names) => self.write_renamed(format.reset, headers, names),
        }
    }

    #[cold]
    fn write_renamed(self, format: ResetFormat, headers: &mut HeaderMap, names: &XRateLimitNames) -> bool {
        let XRateLimitNames { limit, remaining, reset } = names;
        self.write_as(format, headers, limit.clone(), remaining.clone(), reset.clone())
    }

    #[inline]
    fn write_as(
        self,
        format: ResetFormat,
        headers: &mut HeaderMap,
        limit: HeaderName,
        remaining: HeaderName,
        reset: HeaderName,
    ) -> bool {
        if number(headers, &remaining).is_some_and(|remaining| remaining <= self.remaining) {
            return false;
        }
        headers.insert(limit, lasting_header_value(self.limit));
        headers.insert(remaining, header_value(self.remaining));
        headers.insert(reset, header_value(self.reset(format)));
        true
    }

    /// Writes the reset in this format if the headers have it in the other.
    pub(crate) fn rewrite_reset(self, format: &XRateLimit, headers: &mut HeaderMap) {
        let other = match format.reset {
            ResetFormat::DeltaSeconds => ResetFormat::EpochSeconds,
            ResetFormat::EpochSeconds => ResetFormat::DeltaSeconds,
        };
        // A responder may have changed the header. Then it is left alone.
        let name = format.names.as_ref().map_or(RESET, |names| names.reset.clone());
        if number(headers, &name) == Some(self.reset(other)) {
            headers.insert(name, header_value(self.reset(format.reset)));
        }
    }

    /// Keeps figures with Unix times in the response's extensions, so that an outer layer can write them as seconds.
    pub(crate) fn tell_outer_layers(self, format: ResetFormat, response: &mut Extensions) {
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

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

/// The time until more can be spent. Reserved units may be given back before they leave the window.
fn reset_after(status: &LimitStatus) -> Duration {
    match status.retry_after() {
        Some(retry) if status.is_refused_by_reservations() => retry.min(status.reset_after()),
        _ => status.reset_after(),
    }
}
