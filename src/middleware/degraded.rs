//! Requests that the store has not decided, or not under all of their limits.

use crate::{error::Error, limit::Limit, limiter::FailureMode};

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
    pub(crate) fn undecided(error: Error, mode: FailureMode) -> Self {
        Self { error, mode: Some(mode), fallbacks: Vec::new() }
    }

    /// Adds a limit that could not be chosen, with its fallback. Without one, `mode` decides.
    pub(crate) fn add_unchosen(degraded: &mut Option<Self>, error: Error, fallback: Option<&Limit>, mode: FailureMode) {
        let fallbacks = fallback.cloned();
        match degraded {
            Some(degraded) if fallback.is_some() || degraded.mode.is_some() => degraded.fallbacks.extend(fallbacks),
            // A limit without a fallback is the more serious case.
            Some(degraded) => (degraded.error, degraded.mode) = (error, Some(mode)),
            None => {
                let mode = fallback.is_none().then_some(mode);
                *degraded = Some(Self { error, mode, fallbacks: fallbacks.into_iter().collect() });
            }
        }
    }
}
