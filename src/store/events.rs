//! The log lines of a breaker: what an operator has to know, at most one line a second of each kind.
//!
//! Without the feature `tracing` there are none.

use crate::error::Error;
#[cfg(feature = "tracing")]
use crate::logging::{Chain, Throttle};

#[derive(Debug, Default)]
pub(super) struct Events {
    #[cfg(feature = "tracing")]
    opened: Throttle,
    #[cfg(feature = "tracing")]
    opened_for_more: Throttle,
    #[cfg(feature = "tracing")]
    closed: Throttle,
}

#[cfg(feature = "tracing")]
impl Events {
    pub(super) fn opened(&self, error: &Error) {
        if let Some(suppressed) = self.opened.pass() {
            let error = Chain(error);
            tracing::warn!(%error, suppressed, "the rate-limit store has failed repeatedly: the breaker opens");
        }
    }

    pub(super) fn opened_for_more(&self, error: &Error) {
        if let Some(suppressed) = self.opened_for_more.pass() {
            let error = Chain(error);
            tracing::warn!(%error, suppressed, "the rate-limit store fails questions with longer deadlines as well");
        }
    }

    pub(super) fn closed(&self) {
        if let Some(suppressed) = self.closed.pass() {
            tracing::info!(suppressed, "the rate-limit store answers again: the breaker closes");
        }
    }
}

#[cfg(not(feature = "tracing"))]
#[allow(clippy::unused_self, reason = "the same calls with and without log lines")]
impl Events {
    pub(super) fn opened(&self, _: &Error) {}

    pub(super) fn opened_for_more(&self, _: &Error) {}

    pub(super) fn closed(&self) {}
}
