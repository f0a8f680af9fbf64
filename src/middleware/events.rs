//! The log lines of a layer: what an operator has to know, at most one line a second of each kind.
//!
//! Without the feature `tracing` there are none.

use std::time::Duration;

use super::{extract::KeyError, rejection::Rejection, shadow::ShadowRefusals};
#[cfg(feature = "tracing")]
use crate::logging::{Chain, Throttle};
use crate::{check::NeverFits, error::Error, limit::Limit, limiter::FailureMode};

/// The log lines of one layer, or of all handlers that answer with a rejection of their own.
#[derive(Debug, Default)]
pub(super) struct Events {
    #[cfg(feature = "tracing")]
    no_decision: Throttle,
    #[cfg(feature = "tracing")]
    no_choice: Throttle,
    #[cfg(feature = "tracing")]
    no_key: Throttle,
    #[cfg(feature = "tracing")]
    never_fits: Throttle,
    #[cfg(feature = "tracing")]
    shadow: Throttle,
    #[cfg(feature = "tracing")]
    not_settled: Throttle,
    #[cfg(feature = "tracing")]
    heeded_by_none: Throttle,
    #[cfg(feature = "tracing")]
    closes: Throttle,
    #[cfg(feature = "tracing")]
    not_closed: Throttle,
}

impl Events {
    /// What an operator has to know of a rejection: not those that a limit is there for.
    pub(super) fn rejected(&self, rejection: &Rejection) {
        match rejection {
            Rejection::NeverFits(error) => self.never_fits(error),
            Rejection::NoKey(error) => self.unusable_key(error),
            _ => {}
        }
    }

    /// A client's mistake is no news.
    pub(super) fn unusable_key(&self, error: &KeyError) {
        if error.status().is_server_error() {
            self.no_key(error);
        }
    }
}

#[cfg(feature = "tracing")]
impl Events {
    pub(super) fn no_decision(&self, limits: impl FnOnce() -> String, error: &Error, mode: FailureMode) {
        if let Some(suppressed) = self.no_decision.pass() {
            let (limits, error) = (limits(), Chain(error));
            tracing::warn!(%error, limits, ?mode, suppressed, "no rate-limit decision");
        }
    }

    /// What is done about it: by a failure mode, or by limits in the place of others.
    pub(super) fn no_choice(
        &self,
        limits: impl FnOnce() -> String,
        error: &Error,
        mode: Option<FailureMode>,
        fallbacks: &[Limit],
    ) {
        if let Some(suppressed) = self.no_choice.pass() {
            let (limits, error, mode) = (limits(), Chain(error), mode.map(tracing::field::debug));
            let names: Vec<_> = fallbacks.iter().map(Limit::name).collect();
            let fallbacks = (!names.is_empty()).then(|| names.join(", "));
            tracing::warn!(%error, limits, mode, fallbacks, suppressed, "a rate limit could not be chosen");
        }
    }

    fn no_key(&self, error: &KeyError) {
        if let Some(suppressed) = self.no_key.pass() {
            tracing::error!(%error, suppressed, "the server is not set up to find a rate-limit key");
        }
    }

    fn never_fits(&self, error: &NeverFits) {
        if let Some(suppressed) = self.never_fits.pass() {
            tracing::warn!(%error, suppressed, "request can never be admitted");
        }
    }

    pub(super) fn shadow(&self, refusals: &ShadowRefusals) {
        if let Some(suppressed) = self.shadow.pass() {
            let limits = refusals.listed(true);
            tracing::info!(limits, suppressed, "limits in the shadow would have refused a request");
        }
    }

    pub(super) fn not_settled(&self, error: &Error) {
        if let Some(suppressed) = self.not_settled.pass() {
            let error = Chain(error);
            tracing::warn!(%error, suppressed, "a request is not settled, and stays charged as it was");
        }
    }

    pub(super) fn heeded_by_none(&self) {
        if let Some(suppressed) = self.heeded_by_none.pass() {
            tracing::warn!(
                suppressed,
                "a layer is to heed its upstream, but none of its limits does: key one by `UpstreamHost`, or say \
                 `KeyedLimit::heed_upstream`"
            );
        }
    }

    pub(super) fn closes(&self, time: Duration) {
        if let Some(suppressed) = self.closes.pass() {
            tracing::info!(?time, suppressed, "an upstream says to stay away");
        }
    }

    pub(super) fn not_closed(&self, error: &Error) {
        if let Some(suppressed) = self.not_closed.pass() {
            let error = Chain(error);
            tracing::warn!(%error, suppressed, "an upstream says to stay away, but its limits stay open");
        }
    }
}

#[cfg(not(feature = "tracing"))]
#[allow(clippy::unused_self, reason = "the same calls with and without log lines")]
impl Events {
    pub(super) fn no_decision(&self, _: impl FnOnce() -> String, _: &Error, _: FailureMode) {}

    pub(super) fn no_choice(&self, _: impl FnOnce() -> String, _: &Error, _: Option<FailureMode>, _: &[Limit]) {}

    fn no_key(&self, _: &KeyError) {}

    fn never_fits(&self, _: &NeverFits) {}

    pub(super) fn shadow(&self, _: &ShadowRefusals) {}

    pub(super) fn not_settled(&self, _: &Error) {}

    pub(super) fn heeded_by_none(&self) {}

    pub(super) fn closes(&self, _: Duration) {}

    pub(super) fn not_closed(&self, _: &Error) {}
}
