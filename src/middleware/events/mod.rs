//! The log lines of the layer: what an operator has to know, at most one line a second of each kind.
//!
//! Without the feature `tracing` there are none.

#[cfg(feature = "tracing")]
mod throttle;

use super::extract::KeyError;
use crate::{check::NeverFits, error::Error, limiter::FailureMode};

/// The log lines of one layer.
#[derive(Debug, Default)]
pub(super) struct Events {
    #[cfg(feature = "tracing")]
    no_decision: throttle::Throttle,
    #[cfg(feature = "tracing")]
    no_key: throttle::Throttle,
    #[cfg(feature = "tracing")]
    never_fits: throttle::Throttle,
}

#[cfg(feature = "tracing")]
impl Events {
    pub(super) fn no_decision(&self, error: &Error, mode: FailureMode) {
        if let Some(suppressed) = self.no_decision.pass() {
            let error = Chain(error);
            tracing::warn!(%error, ?mode, suppressed, "no rate-limit decision");
        }
    }

    pub(super) fn no_key(&self, error: &KeyError) {
        if let Some(suppressed) = self.no_key.pass() {
            tracing::error!(%error, suppressed, "the server is not set up to find a rate-limit key");
        }
    }

    pub(super) fn never_fits(&self, error: &NeverFits) {
        if let Some(suppressed) = self.never_fits.pass() {
            tracing::warn!(%error, suppressed, "request can never be admitted");
        }
    }
}

#[cfg(not(feature = "tracing"))]
#[allow(clippy::unused_self, reason = "the same calls with and without log lines")]
impl Events {
    pub(super) fn no_decision(&self, _: &Error, _: FailureMode) {}

    pub(super) fn no_key(&self, _: &KeyError) {}

    pub(super) fn never_fits(&self, _: &NeverFits) {}
}

/// An error and its causes in one line.
#[cfg(feature = "tracing")]
struct Chain<'a>(&'a dyn std::error::Error);

#[cfg(feature = "tracing")]
impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = self.0.to_string();
        f.write_str(&shown)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            // Some errors say what their cause says.
            let text = error.to_string();
            if text != shown {
                write!(f, ": {text}")?;
            }
            (shown, cause) = (text, error.source());
        }
        Ok(())
    }
}
