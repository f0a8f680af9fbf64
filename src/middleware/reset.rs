//! `X-RateLimit-Reset`, and how stacked layers come to write it in one format.
//!
//! 1. The format is that of the outermost layer which sends the figures, since it may refuse a request that no other layer
//!    sees.
//! 2. Where it is Unix times, the request tells the layers further in, and they write the same.
//! 3. Where it is seconds, the request tells nothing. A layer further in that has written a Unix time leaves both in the
//!    response, and so does every rejection, with its decision. The outer layer replaces the one by the other.
//! 4. So where all layers write seconds, neither request nor response has to tell anything.

use std::time::{Duration, SystemTime};

use http::{Extensions, HeaderMap, HeaderName};

use super::number::header_value;
use crate::decision::LimitStatus;

pub(super) const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

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

/// When there is more to spend, in either format. In a response's extensions, that of the figures in its headers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reset {
    delta: u64,
    epoch: u64,
}

/// In a request's extensions: a layer further out writes Unix times.
#[derive(Clone, Copy)]
struct EpochOutside;

impl ResetFormat {
    /// The format for a request that has come to a layer of this format.
    pub(super) fn within(self, request: &Extensions) -> Self {
        request.get().map_or(self, |EpochOutside| Self::EpochSeconds)
    }

    /// Tells the layers further in.
    pub(super) fn tell(self, request: &mut Extensions) {
        if self == Self::EpochSeconds {
            request.insert(EpochOutside);
        }
    }
}

impl Reset {
    pub(super) fn of(status: &LimitStatus, at: SystemTime) -> Self {
        let at = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // What is reserved may be given back before.
        let after = match status.retry_after() {
            Some(retry) if status.is_refused_by_reservations() => retry.min(status.reset_after()),
            _ => status.reset_after(),
        };
        Self { delta: seconds_rounded_up(after), epoch: seconds_rounded_up(at.saturating_add(after)) }
    }

    pub(super) fn write(self, format: ResetFormat, headers: &mut HeaderMap) {
        headers.insert(RESET, header_value(self.seconds(format)));
    }

    /// Writes it in this format where it stands in the other one.
    pub(super) fn rewrite(self, format: ResetFormat, headers: &mut HeaderMap) {
        let other = match format {
            ResetFormat::DeltaSeconds => ResetFormat::EpochSeconds,
            ResetFormat::EpochSeconds => ResetFormat::DeltaSeconds,
        };
        // What a responder has made of it is left alone.
        if number(headers, &RESET) == Some(self.seconds(other)) {
            self.write(format, headers);
        }
    }

    /// Leaves it in the response for layers further out that write another format.
    pub(super) fn leave(self, format: ResetFormat, response: &mut Extensions) {
        if format == ResetFormat::EpochSeconds {
            response.insert(self);
        }
    }

    fn seconds(self, format: ResetFormat) -> u64 {
        match format {
            ResetFormat::DeltaSeconds => self.delta,
            ResetFormat::EpochSeconds => self.epoch,
        }
    }
}

/// The number in a header.
pub(super) fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

pub(super) fn seconds_rounded_up(duration: Duration) -> u64 {
    // A store may say that it will never be.
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}
