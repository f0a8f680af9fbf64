//! The reports of a layer: metrics, log lines, at most one a second of each kind, and [`Degraded`] for outer layers. Without the
//! feature `tracing` there are no lines.

use std::{borrow::Cow, time::Duration};

use super::rejection::Rejection;
use crate::{
    error::Error,
    limit::Limit,
    limiter::FailureMode,
    logging::{Chain, Throttle, debug, error, info, warn},
    metrics,
};

/// The reports of one layer, or of all handlers that return a rejection.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// The name of the layer, also for metrics. Empty without one.
    pub(crate) layer: Cow<'static, str>,
    /// Each kind of line has its own.
    throttles: [Throttle; 9],
}

impl Events {
    /// The reports of a layer of this name.
    pub(crate) fn of(layer: Cow<'static, str>) -> Self {
        Self { layer, ..Self::default() }
    }

    /// A request that the store has not decided, and the mode that decides instead.
    pub(crate) fn undecided(&self, error: &Error, mode: FailureMode, limits: impl FnOnce() -> String) {
        metrics::degraded(mode.label(), &self.layer);
        let Some((layer, suppressed)) = self.pass(0) else { return };
        let (error, limits) = (Chain(error), limits());
        warn!(%error, limits, ?mode, layer, suppressed, "no rate-limit decision");
    }

    /// A limit that could not be chosen, with the mode that decides instead, or the fallbacks that are charged.
    pub(crate) fn not_chosen(
        &self,
        error: &Error,
        mode: Option<FailureMode>,
        fallbacks: &[Limit],
        limits: impl FnOnce() -> String,
    ) {
        let Some((layer, suppressed)) = self.pass(1) else { return };
        let (error, limits, mode) = (Chain(error), limits(), mode.map(debug));
        let names: Vec<_> = fallbacks.iter().map(Limit::name).collect();
        let fallbacks = (!names.is_empty()).then(|| names.join(", "));
        warn!(%error, limits, mode, fallbacks, layer, suppressed, "a rate limit could not be chosen");
    }

    /// A response in the service's place.
    pub(crate) fn rejected(&self, rejection: &Rejection) {
        metrics::rejected(rejection.label(), &self.layer);
        self.mistake(rejection);
    }

    /// A rejection, if it shows a mistake in the set-up of limits or server. A client's mistake is not logged.
    pub(crate) fn mistake(&self, rejection: &Rejection) {
        match rejection {
            Rejection::NoKey(error) if error.status().is_server_error() => {
                if let Some((layer, suppressed)) = self.pass(2) {
                    error!(%error, layer, suppressed, "the server is not set up to find a rate-limit key");
                }
            }
            Rejection::NeverFits(error) => {
                if let Some((layer, suppressed)) = self.pass(3) {
                    warn!(%error, layer, suppressed, "request can never be admitted");
                }
            }
            _ => {}
        }
    }

    pub(crate) fn shadow_refused(&self, limits: impl FnOnce() -> String) {
        let Some((layer, suppressed)) = self.pass(4) else { return };
        let limits = limits();
        info!(limits, layer, suppressed, "limits in the shadow would have refused a request");
    }

    pub(crate) fn not_settled(&self, error: &Error) {
        let Some((layer, suppressed)) = self.pass(5) else { return };
        let error = Chain(error);
        warn!(%error, layer, suppressed, "a request is not settled, and stays charged as it was");
    }

    pub(crate) fn upstream_blocks(&self, time: Duration) {
        let Some((layer, suppressed)) = self.pass(6) else { return };
        info!(?time, layer, suppressed, "an upstream says to stay away");
    }

    pub(crate) fn not_blocked(&self, error: &Error) {
        let Some((layer, suppressed)) = self.pass(7) else { return };
        let error = Chain(error);
        warn!(%error, layer, suppressed, "an upstream says to stay away, but its limits stay open");
    }

    pub(crate) fn not_banned(&self, error: &Error) {
        let (Some((layer, suppressed)), error) = (self.pass(8), Chain(error)) else { return };
        warn!(%error, layer, suppressed, "a ban could not begin");
    }

    /// The name of the layer, if it has one, and the number of suppressed lines; `None` if the line is suppressed.
    fn pass(&self, kind: usize) -> Option<(Option<&str>, u64)> {
        let suppressed = self.throttles.get(kind)?.pass()?;
        Some(((!self.layer.is_empty()).then_some(&*self.layer), suppressed))
    }
}

/// A request that the store has not decided, or for which a limit could not be [chosen](crate::KeyedLimit::chosen): in the
/// extensions of its response, whether the request was let through, got a 503, or was decided in this process. In stacked
/// layers, that of the outermost.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Degraded {
    /// Why the store has not decided. If it has decided, why a limit could not be chosen; a limit without a
    /// [fallback](crate::KeyedLimit::fallback) comes before others.
    pub error: Error,
    /// The failure mode that has decided the request, or has left out a limit that could not be chosen. `None` if there are
    /// [fallbacks](Self::fallbacks) for all such limits and the store has decided.
    pub mode: Option<FailureMode>,
    /// The [fallbacks](crate::KeyedLimit::fallback) of limits that could not be chosen, whole even if they are
    /// [split](crate::KeyedLimit::split). If the store has decided, they were among the limits of its decision.
    pub fallbacks: Vec<Limit>,
}

impl Degraded {
    /// Adds a limit that could not be chosen, with its fallback. Without one, `mode` decides.
    pub(crate) fn add_unchosen(degraded: &mut Option<Self>, error: Error, fallback: Option<&Limit>, mode: FailureMode) {
        let degraded = degraded.get_or_insert_with(|| Self { error: error.clone(), mode: None, fallbacks: Vec::new() });
        match fallback {
            Some(fallback) => degraded.fallbacks.push(fallback.clone()),
            // A limit without a fallback is the more serious case.
            None if degraded.mode.is_none() => (degraded.error, degraded.mode) = (error, Some(mode)),
            None => {}
        }
    }
}
