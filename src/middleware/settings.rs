//! What a layer is told, and has a default for.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderName, request::Parts};

use super::{events::Events, gate::Gate, headers::HeaderSets, keyed_limit::Cost, reset::ResetFormat};
use crate::limiter::FailureMode;

/// What has a default.
#[derive(Clone, Default)]
pub(super) struct Settings {
    pub(super) gate: Gate,
    pub(super) cost: Option<Arc<Cost>>,
    pub(super) failing: Failing,
    pub(super) headers: HeaderSets,
    pub(super) reset_format: ResetFormat,
    pub(super) shadow_header: Option<HeaderName>,
    /// How long to wait for room, if it is waited for.
    pub(super) patience: Option<Duration>,
    pub(super) heeds_upstream: bool,
    pub(super) events: Arc<Events>,
}

/// What to do with a request of such a cost.
type ModeBy = dyn Fn(&Parts, u64) -> FailureMode + Send + Sync;

/// What to do with a request while the store cannot decide.
#[derive(Clone)]
pub(super) enum Failing {
    Always(FailureMode),
    By(Arc<ModeBy>),
}

impl Failing {
    /// With a request of such a cost.
    pub(super) fn mode(&self, request: &Parts, cost: u64) -> FailureMode {
        match self {
            Self::Always(mode) => *mode,
            Self::By(mode) => mode(request, cost),
        }
    }
}

impl Default for Failing {
    fn default() -> Self {
        Self::Always(FailureMode::default())
    }
}

impl fmt::Debug for Failing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Always(mode) => mode.fmt(f),
            Self::By(_) => f.write_str("by request"),
        }
    }
}
