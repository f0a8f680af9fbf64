//! Requests that the store has not decided, or not under all of their limits.

use super::super::{
    events::{Event, Events},
    request::UnchosenLimit,
};
use crate::{error::Error, limit::Limit, limiter::FailureMode, metrics};

/// A request that the store has not decided, or for which a limit could not be [chosen](crate::KeyedLimit::chosen): in the
/// extensions of its response, whether the request was let through, got a 503, or was decided in this process. In stacked
/// layers, that of the outermost.
#[derive(Clone, Debug)]
pub struct Degraded {
    error: Error,
    mode: Option<FailureMode>,
    fallbacks: Vec<Limit>,
}

impl Degraded {
    /// A request that the store has not decided. Logs and counts it.
    pub(super) fn undecided(error: &Error, mode: FailureMode, events: &Events, limits: &dyn Fn() -> String) -> Self {
        metrics::degraded(mode.label(), events.layer());
        events.log(Event::NoDecision { limits, error, mode });
        Self { error: error.clone(), mode: Some(mode), fallbacks: Vec::new() }
    }

    /// A request whose limits could not all be chosen, and that may be `undecided` as well. Logs and counts it.
    pub(super) fn unchosen(
        unchosen: &[UnchosenLimit],
        undecided: Option<&Error>,
        mode: FailureMode,
        events: &Events,
        limits: &dyn Fn() -> String,
    ) -> Option<Self> {
        // A limit without a fallback is the more serious case.
        let UnchosenLimit { error, fallback } = unchosen.iter().min_by_key(|unchosen| unchosen.fallback.is_some())?;
        let by_mode = fallback.is_none().then_some(mode);
        let fallbacks: Vec<_> = unchosen.iter().filter_map(|unchosen| unchosen.fallback.clone()).collect();
        metrics::failed(error, events.layer());
        events.log(Event::LimitNotChosen { limits, error, mode: by_mode, fallbacks: &fallbacks });
        if let Some(error) = undecided {
            return Some(Self { fallbacks, ..Self::undecided(error, mode, events, limits) });
        }
        metrics::degraded(by_mode.map_or("fallback", FailureMode::label), events.layer());
        Some(Self { error: error.clone(), mode: by_mode, fallbacks })
    }

    /// Why the store has not decided. If it has decided, why a limit could not be chosen; a limit without a
    /// [fallback](crate::KeyedLimit::fallback) comes before others.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The failure mode that has decided the request, or has left out a limit that could not be chosen. `None` if there are
    /// [fallbacks](Self::fallbacks) for all such limits and the store has decided.
    #[must_use]
    pub fn mode(&self) -> Option<FailureMode> {
        self.mode
    }

    /// The [fallbacks](crate::KeyedLimit::fallback) of limits that could not be chosen, whole even if they are
    /// [split](crate::KeyedLimit::split). If the store has decided, they were among the limits of its decision.
    pub fn fallbacks(&self) -> impl Iterator<Item = &Limit> {
        self.fallbacks.iter()
    }
}
