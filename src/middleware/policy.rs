//! The policy of a layer: its limiter, its limits, and its settings.

use std::{collections::HashSet, fmt, sync::Arc, time::Duration};

use http::request::Parts;

use super::{
    events::Events,
    extract::{KeyError, KeyExtractor},
    headers::{HeaderSets, PartitionKeys},
    request::keyed_limit::{Cost, KeyedLimit},
};
use crate::{
    error::{ConfigError, ConfigErrorKind},
    key::Key,
    limit::Limit,
    limiter::{FailureMode, Limiter},
};

/// Shared by all services of a layer.
#[derive(Clone)]
pub(super) struct Policy {
    pub(super) limiter: Limiter,
    /// No two that are not chosen for each request have one name.
    pub(super) limits: Vec<KeyedLimit>,
    pub(super) denied: Vec<Arc<KeyList>>,
    pub(super) exempt: Vec<Arc<KeyList>>,
    pub(super) skipped: Vec<Arc<Skip>>,
    pub(super) counts_preflights: bool,
    pub(super) cost: Option<Arc<Cost>>,
    pub(super) failure_mode: FailureMode,
    /// Goes before `failure_mode`.
    pub(super) failure_mode_by: Option<Arc<FailureModeBy>>,
    pub(super) headers: HeaderSets,
    pub(super) partition_keys: Option<PartitionKeys>,
    /// How long a request waits for capacity. `None` refuses it at once.
    pub(super) max_wait: Option<Duration>,
    pub(super) events: Arc<Events>,
}

type Skip = dyn Fn(&Parts) -> bool + Send + Sync;

/// Whether a request has a key of a list. An error if it has a key that cannot be read.
type KeyList = dyn Fn(&Parts) -> Result<bool, KeyError> + Send + Sync;

/// The failure mode of a request of a cost.
type FailureModeBy = dyn Fn(&Parts, u64) -> FailureMode + Send + Sync;

impl Policy {
    pub(super) fn new(limiter: Limiter) -> Self {
        Self {
            failure_mode: limiter.share().map(FailureMode::Local).unwrap_or_default(),
            limiter,
            limits: Vec::new(),
            denied: Vec::new(),
            exempt: Vec::new(),
            skipped: Vec::new(),
            counts_preflights: false,
            cost: None,
            failure_mode_by: None,
            headers: HeaderSets::default(),
            partition_keys: None,
            max_wait: None,
            events: Arc::default(),
        }
    }

    /// Adds a limit, unless another has its name.
    pub(super) fn push(&mut self, limit: KeyedLimit) -> Result<(), ConfigError> {
        if let Some(name) = limit.limit().map(Limit::name)
            && self.any(|other| other.limit().is_some_and(|other| other.name() == name))
        {
            let text = format!("two limits of one layer are named {name:?}");
            return Err(ConfigError::new(ConfigErrorKind::SameLimit, text));
        }
        self.limits.push(limit);
        Ok(())
    }

    /// Whether a limit is of this kind.
    #[inline]
    pub(super) fn any(&self, is_of_kind: impl Fn(&KeyedLimit) -> bool) -> bool {
        self.limits.iter().any(is_of_kind)
    }

    /// For a log line.
    pub(super) fn names(&self) -> String {
        let names = self.limits.iter().map(|limit| limit.limit().map_or("a chosen one", Limit::name));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// A list of denied or exempt keys. A request without a key is not on it.
pub(super) fn key_list(extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Arc<KeyList> {
    let keys: HashSet<Key> = keys.into_iter().collect();
    Arc::new(move |parts| match extractor.extract(parts) {
        Ok(key) => Ok(keys.contains(&key)),
        Err(error) if error.is_missing() => Ok(false),
        Err(error) => Err(error),
    })
}

// Of lists the numbers only, since keys may be personal.
impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failure_mode: &dyn fmt::Debug =
            if self.failure_mode_by.is_some() { &"by request" } else { &self.failure_mode };
        f.debug_struct("Policy")
            .field("limiter", &self.limiter)
            .field("limits", &self.limits)
            .field("denied", &self.denied.len())
            .field("exempt", &self.exempt.len())
            .field("skipped", &self.skipped.len())
            .field("counts_preflights", &self.counts_preflights)
            .field("failure_mode", failure_mode)
            .field("headers", &self.headers)
            .finish_non_exhaustive()
    }
}
