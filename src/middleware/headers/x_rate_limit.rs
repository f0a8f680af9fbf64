//! `X-RateLimit-Limit`, `-Remaining` and `-Reset`.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName};

use super::{
    HeaderSets,
    number::{header_value, seconds_rounded_up},
};
use crate::decision::{Decision, LimitStatus};

pub(super) const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
pub(super) const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
pub(super) const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The figures of the limit that clients see.
#[derive(Clone, Copy, Debug)]
pub(super) struct XRateLimit {
    limit: u64,
    remaining: u64,
    reset: u64,
}

impl XRateLimit {
    /// `None` if the layer does not send them, or no limit is visible.
    pub(super) fn of(sets: HeaderSets, decision: &Decision) -> Option<Self> {
        let status = decision.visible().filter(|_| sets.x_rate_limit)?;
        let mut reset = reset_after(status);
        if sets.reset_is_unix_time {
            reset = reset.saturating_add(decision.at().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        }
        let (limit, remaining) = (status.limit().units(), status.remaining());
        Some(Self { limit, remaining, reset: seconds_rounded_up(reset) })
    }

    pub(super) fn write(self, headers: &mut HeaderMap) {
        let shown = headers.get(REMAINING).and_then(|remaining| remaining.to_str().ok()?.parse().ok());
        if shown.is_some_and(|shown: u64| shown <= self.remaining) {
            return;
        }
        headers.insert(LIMIT, header_value(self.limit));
        headers.insert(REMAINING, header_value(self.remaining));
        headers.insert(RESET, header_value(self.reset));
    }
}

/// The time until more can be spent. Reserved units may be given back before they leave the window.
fn reset_after(status: &LimitStatus) -> Duration {
    match status.retry_after() {
        Some(retry) if status.is_refused_by_reservations() => retry.min(status.reset_after()),
        _ => status.reset_after(),
    }
}
