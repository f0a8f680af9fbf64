//! What is told of a request that the store has not decided.

use super::events::Events;
use crate::{error::Error, limiter::FailureMode, metrics};

/// In the extensions of every response to a request that the store has not decided, whether it was let through, answered
/// 503, or decided in this process. Of stacked layers, the outermost is told.
#[derive(Clone, Debug)]
pub struct Degraded {
    error: Error,
    mode: FailureMode,
}

impl Degraded {
    /// Of a request that the store has not decided. Tells operators as well.
    pub(super) fn told(error: &Error, mode: FailureMode, events: &Events, limits: impl FnOnce() -> String) -> Self {
        metrics::degraded(mode.label());
        events.no_decision(limits, error, mode);
        Self { error: error.clone(), mode }
    }

    /// Of a request that the store has not decided, or for which limits could not be chosen, if it is one.
    #[inline]
    pub(super) fn of(
        undecided: Option<&Error>,
        unchosen: &[Error],
        mode: FailureMode,
        events: &Events,
        limits: impl Fn() -> String,
    ) -> Option<Self> {
        let first = unchosen.first().inspect(|error| {
            metrics::failed(error);
            events.no_choice(&limits, error, mode);
        });
        if let Some(error) = undecided {
            return Some(Self::told(error, mode, events, limits));
        }
        metrics::degraded(first.map(|_| mode.label())?);
        first.map(|error| Self { error: error.clone(), mode })
    }

    /// Why the store has not decided.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// What was done about it.
    #[must_use]
    pub fn mode(&self) -> FailureMode {
        self.mode
    }
}
