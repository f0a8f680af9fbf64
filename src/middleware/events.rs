//! A layer's reports: metrics, [`Degraded`] for outer layers, and log lines. Each kind of log line
//! is written at most once per second. Without the feature `tracing`, there are no log lines.

use std::{borrow::Cow, error, time::Duration};

use http::Response;

use super::rejection::Rejection;
use crate::{
    error::Error,
    limiter::FailureMode,
    logging::{Chain, Throttle, error, info, warn},
    metrics,
};

/// The reports from one layer, or from all handlers that return a rejection.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// The layer's name, for log lines and metrics. Empty if unnamed.
    pub(crate) layer: Cow<'static, str>,
    /// One throttle per kind of log line.
    throttles: [Throttle; 10],
}

impl Events {
    /// The reports from a layer with this name.
    pub(crate) fn of(layer: Cow<'static, str>) -> Self {
        Self {
            layer,
            ..Self::default()
        }
    }

    /// Reports a request on which the store has not decided, and the failure mode that decides
    /// instead.
    pub(crate) fn undecided(
        &self,
        error: &Error,
        mode: FailureMode,
        limits: impl FnOnce() -> String,
    ) {
        metrics::degraded(mode.label(), &self.layer);
        if let Some((layer, suppressed)) = self.pass(0) {
            let error = Chain(error);
            let limits = limits();
            warn!(%error, limits, ?mode, layer, suppressed, "no rate-limit decision");
        }
    }

    /// Reports a response made without calling the service.
    pub(crate) fn rejected(&self, rejection: &Rejection) {
        metrics::rejected(rejection.label(), &self.layer);
        self.mistake(rejection);
    }

    /// Logs a rejection that shows a setup mistake in the limits or the server. Client mistakes are
    /// not logged.
    pub(crate) fn mistake(&self, rejection: &Rejection) {
        let (kind, error, problem): (_, &dyn error::Error, _) = match rejection {
            // Limits of 0 units are intentional, so their rejections are not logged.
            Rejection::NeverFits(error) if error.limit.units() > 0 => {
                return self.warn(3, error, "request can never be admitted");
            }
            Rejection::NoKey(error) if error.status().is_server_error() => (
                2,
                error,
                "the server is not set up to find a rate-limit key",
            ),
            Rejection::NotSetUp(error) => (1, error, "the server is not set up for its limits"),
            _ => return,
        };
        if let Some((layer, suppressed)) = self.pass(kind) {
            error!(%error, layer, suppressed, "{problem}");
        }
    }

    /// Warns that a request has passed through this layer twice.
    pub(crate) fn counts_twice(&self, limits: impl FnOnce() -> String) {
        let Some((layer, suppressed)) = self.pass(9) else {
            return;
        };
        let limits = limits();
        warn!(
            limits,
            layer,
            suppressed,
            "a layer counts each request twice: remove it from the outer router or the inner one"
        );
    }

    pub(crate) fn shadow_refused(&self, limits: impl FnOnce() -> String) {
        let Some((layer, suppressed)) = self.pass(4) else {
            return;
        };
        let limits = limits();
        info!(
            limits,
            layer, suppressed, "limits in the shadow would have refused a request"
        );
    }

    pub(crate) fn not_settled(&self, error: &Error) {
        self.warn(
            5,
            error,
            "a request may not be settled or counted: reserved units stay until their lease ends",
        );
    }

    pub(crate) fn upstream_blocks(&self, time: Duration) {
        if let Some((layer, suppressed)) = self.pass(6) {
            info!(?time, layer, suppressed, "an upstream says to stay away");
        }
    }

    pub(crate) fn not_blocked(&self, error: &Error) {
        self.warn(
            7,
            error,
            "an upstream says to stay away, but its limits stay open",
        );
    }

    pub(crate) fn not_banned(&self, error: &Error) {
        self.warn(8, error, "a ban could not begin");
    }

    /// Writes a log line of this kind, unless it is suppressed.
    fn warn(&self, kind: usize, error: &dyn error::Error, problem: &'static str) {
        if let Some((layer, suppressed)) = self.pass(kind) {
            let error = Chain(error);
            warn!(%error, layer, suppressed, "{problem}");
        }
    }

    /// Returns the layer's name, if any, and the number of lines suppressed before this one. `None`
    /// if this one is suppressed.
    fn pass(&self, kind: usize) -> Option<(Option<&str>, u64)> {
        let suppressed = self.throttles.get(kind)?.pass()?;
        Some(((!self.layer.is_empty()).then_some(&*self.layer), suppressed))
    }
}

/// Reports, in a response's extensions, that the store has not decided the request.
/// [`mode`](Self::mode) tells what happened instead: the request passed, got a 503, or was decided
/// locally. With stacked layers, this is the report from the outermost layer whose store has not
/// decided. [`inner`](Self::inner) is the report from the next such layer further in.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Degraded {
    /// Why the store has not decided.
    pub error: Error,
    /// The failure mode that decided the request.
    pub mode: FailureMode,
    /// The report from an inner layer, if its store has not decided either.
    pub inner: Option<Box<Self>>,
}

impl Degraded {
    /// Adds this report to the response's extensions.
    pub(crate) fn add_to<B>(self, response: &mut Response<B>) {
        let inner = response.extensions_mut().remove().map(Box::new);
        response.extensions_mut().insert(Self { inner, ..self });
    }
}
