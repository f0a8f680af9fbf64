//! What is told of a request that was not decided by the store, or not under all of its limits.

use super::{draft::Unchosen, events::Events};
use crate::{error::Error, limit::Limit, limiter::FailureMode, metrics};

/// In the extensions of every response to a request that the store has not decided, whether it was let through, answered
/// 503, or decided in this process. Also where a limit could not be [chosen](crate::KeyedLimit::chosen) for the request,
/// whatever the other limits have decided. Of stacked layers, the outermost is told.
#[derive(Clone, Debug)]
pub struct Degraded {
    error: Error,
    mode: Option<FailureMode>,
    fallbacks: Vec<Limit>,
}

impl Degraded {
    /// Of a request that the store has not decided. Tells operators as well.
    pub(super) fn told(error: &Error, mode: FailureMode, events: &Events, limits: impl FnOnce() -> String) -> Self {
        metrics::degraded(mode.label());
        events.no_decision(limits, error, mode);
        Self { error: error.clone(), mode: Some(mode), fallbacks: Vec::new() }
    }

    /// Of a request for which limits could not be chosen, and which may be undecided as well. Tells operators, too.
    pub(super) fn of_choices(
        undecided: Option<&Error>,
        unchosen: &[Unchosen],
        mode: FailureMode,
        events: &Events,
        limits: impl Fn() -> String,
    ) -> Option<Self> {
        // One without a fallback is the worse.
        let Unchosen { error, fallback } = unchosen.iter().min_by_key(|unchosen| unchosen.fallback.is_some())?;
        let by_mode = fallback.is_none().then_some(mode);
        let fallbacks: Vec<_> = unchosen.iter().filter_map(|unchosen| unchosen.fallback.clone()).collect();
        metrics::failed(error);
        events.no_choice(&limits, error, by_mode, &fallbacks);
        if let Some(error) = undecided {
            return Some(Self { fallbacks, ..Self::told(error, mode, events, limits) });
        }
        metrics::degraded(by_mode.map_or("fallback", FailureMode::label));
        Some(Self { error: error.clone(), mode: by_mode, fallbacks })
    }

    /// Why the store has not decided. If it has, why a limit could not be chosen: of several, one without a
    /// [fallback](crate::KeyedLimit::fallback) before others.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The failure mode by which the request was answered, or by which a limit that could not be chosen was left out. `None`
    /// if no mode had a say: the store has not failed, and there are [fallbacks](Self::fallbacks) for all limits that could
    /// not be chosen.
    #[must_use]
    pub fn mode(&self) -> Option<FailureMode> {
        self.mode
    }

    /// The [fallbacks](crate::KeyedLimit::fallback) of limits that could not be chosen, whole also where they are
    /// [split](crate::KeyedLimit::split). If the store has decided, they were among the limits of its decision.
    pub fn fallbacks(&self) -> impl Iterator<Item = &Limit> {
        self.fallbacks.iter()
    }
}
