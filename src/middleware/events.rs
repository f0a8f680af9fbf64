//! The log lines of a layer, at most one a second of each kind. Without the feature `tracing` there are none.

use std::{fmt, time::Duration};

#[cfg(feature = "tracing")]
use crate::logging::{Chain, Throttle};
use crate::{error::Error, limit::Limit, limiter::FailureMode};

/// The log lines of one layer, or of all handlers that return a rejection.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// The name of the layer. Empty without one.
    layer: &'static str,
    #[cfg(feature = "tracing")]
    throttles: [Throttle; 8],
}

#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "tracing"), allow(dead_code, reason = "only log lines read the fields"))]
pub(crate) enum Event<'a> {
    NoDecision {
        limits: &'a dyn Fn() -> String,
        error: &'a Error,
        mode: FailureMode,
    },
    /// With the mode that decides instead, or the fallbacks that are charged.
    LimitNotChosen {
        limits: &'a dyn Fn() -> String,
        error: &'a Error,
        mode: Option<FailureMode>,
        fallbacks: &'a [Limit],
    },
    /// Of the server's doing, not the client's.
    NoKey(&'a dyn fmt::Display),
    NeverFits(&'a dyn fmt::Display),
    ShadowRefusals {
        limits: &'a dyn Fn() -> String,
    },
    NotSettled(&'a Error),
    UpstreamBlocks(Duration),
    NotBlocked(&'a Error),
}

impl Events {
    /// The log lines of a layer of this name.
    pub(crate) fn of(layer: &'static str) -> Self {
        Self {
            layer,
            #[cfg(feature = "tracing")]
            throttles: Default::default(),
        }
    }

    /// The name of the layer, also for metrics.
    #[inline]
    pub(crate) fn layer(&self) -> &'static str {
        self.layer
    }

    #[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "no log lines"))]
    pub(crate) fn log(&self, event: Event<'_>) {
        #[cfg(feature = "tracing")]
        if let Some(suppressed) = self.throttles[event.kind()].pass() {
            event.write(self.layer, suppressed);
        }
    }
}

#[cfg(feature = "tracing")]
impl Event<'_> {
    /// Each kind has a throttle of its own.
    fn kind(&self) -> usize {
        match self {
            Self::NoDecision { .. } => 0,
            Self::LimitNotChosen { .. } => 1,
            Self::NoKey(_) => 2,
            Self::NeverFits(_) => 3,
            Self::ShadowRefusals { .. } => 4,
            Self::NotSettled(_) => 5,
            Self::UpstreamBlocks(_) => 6,
            Self::NotBlocked(_) => 7,
        }
    }

    fn write(self, layer: &'static str, suppressed: u64) {
        let layer = (!layer.is_empty()).then_some(layer);
        match self {
            Self::NoDecision { limits, error, mode } => {
                tracing::warn!(error = %Chain(error), limits = limits(), ?mode, layer, suppressed, "no rate-limit decision");
            }
            Self::LimitNotChosen { limits, error, mode, fallbacks } => {
                let names: Vec<_> = fallbacks.iter().map(Limit::name).collect();
                let (mode, fallbacks) =
                    (mode.map(tracing::field::debug), (!names.is_empty()).then(|| names.join(", ")));
                tracing::warn!(error = %Chain(error), limits = limits(), mode, fallbacks, layer, suppressed, "a rate limit could not be chosen");
            }
            Self::NoKey(error) => {
                tracing::error!(%error, layer, suppressed, "the server is not set up to find a rate-limit key");
            }
            Self::NeverFits(error) => tracing::warn!(%error, layer, suppressed, "request can never be admitted"),
            Self::ShadowRefusals { limits } => {
                tracing::info!(
                    limits = limits(),
                    layer,
                    suppressed,
                    "limits in the shadow would have refused a request"
                );
            }
            Self::NotSettled(error) => {
                tracing::warn!(error = %Chain(error), layer, suppressed, "a request is not settled, and stays charged as it was");
            }
            Self::UpstreamBlocks(time) => tracing::info!(?time, layer, suppressed, "an upstream says to stay away"),
            Self::NotBlocked(error) => tracing::warn!(
                error = %Chain(error),
                layer,
                suppressed,
                "an upstream says to stay away, but its limits stay open"
            ),
        }
    }
}
