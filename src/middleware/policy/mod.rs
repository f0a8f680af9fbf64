//! The policy of a layer: its limits, lists of denied and exempt requests, and settings.
//! [`plan`](super::plan) applies it to each request.

mod cost;
mod keyed_limit;

use std::{fmt, sync::Arc, time::Duration};

use http::request::Parts;

use self::keyed_limit::ByRequest;
pub use self::keyed_limit::{Exchange, KeyedLimit};
use super::{
    events::Events,
    extract::{IsMatch, KeyError},
    headers::HeaderSets,
};
use crate::{error::ConfigError, limit::Limit, limiter::Limiter};

/// A layer's settings, shared by all its services.
#[derive(Clone)]
pub(super) struct Policy {
    pub(super) limiter: Limiter,
    /// The layer's limits. Their names differ, except for limits that are chosen for each request.
    pub(super) limits: Vec<KeyedLimit>,
    /// True if all limits are [plain](KeyedLimit::is_plain). A request then needs no
    /// [`CheckDetails`](super::plan::CheckDetails), unless it may wait for capacity.
    pub(super) is_plain: bool,
    pub(super) denied: Vec<Arc<List>>,
    pub(super) exempt: Vec<Arc<List>>,
    pub(super) cost: Option<Arc<ByRequest<u64>>>,
    pub(super) headers: HeaderSets,
    /// How long a request waits for capacity. With `None`, a request is refused at once if there is
    /// no capacity.
    pub(super) max_wait: Option<Duration>,
    /// True if a request's places are freed when its response begins.
    pub(super) frees_with_head: bool,
    pub(super) events: Arc<Events>,
}

/// A list of denied or exempt requests. Returns true if a request is on the list, or an error if
/// the request's key cannot be read.
type List = ByRequest<Result<bool, KeyError>>;

impl Policy {
    pub(super) fn new(limiter: Limiter) -> Self {
        Self {
            limiter,
            limits: Vec::new(),
            is_plain: true,
            denied: Vec::new(),
            exempt: Vec::new(),
            cost: None,
            headers: HeaderSets::X_RATE_LIMIT,
            max_wait: None,
            frees_with_head: false,
            events: Arc::default(),
        }
    }

    /// Adds a limit. Returns an error if one of its options would have no effect, or if another
    /// limit has the same name: clients and metrics could not tell the two apart.
    pub(super) fn push(&mut self, limit: KeyedLimit) -> Result<(), ConfigError> {
        let others = self.limits.iter().filter_map(KeyedLimit::limit);
        let mut names: Vec<_> = others.map(Limit::name).collect();
        let own = limit.limit().map(Limit::name);
        let repeated = own.filter(|own| names.contains(own));
        names.extend(own);
        // Several limits may share one ban, but a limit and a ban must not have the same name.
        let all = self.limits.iter().chain(Some(&limit));
        let mut bans = all.filter_map(KeyedLimit::ban_name);
        if let Some(name) = repeated.or_else(|| bans.find(|ban| names.contains(ban))) {
            let text = format!(
                "two limits of one layer are named {name:?}: give one of them another name"
            );
            return Err(ConfigError::new(text));
        }
        limit.has_effect_on(limit.limit())?;
        self.is_plain &= limit.is_plain();
        self.limits.push(limit);
        Ok(())
    }

    /// The names of all limits, for a log line.
    pub(super) fn names(&self) -> String {
        let names = self
            .limits
            .iter()
            .map(|limit| limit.limit().map_or("a chosen one", Limit::name));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Makes a list from an option's closure. A request without a key is not on the list.
pub(super) fn list<T: IsMatch>(
    requests: impl Fn(&Parts) -> T + Send + Sync + 'static,
) -> Arc<List> {
    Arc::new(move |parts| match requests(parts).into_result() {
        Err(error) if error.is_missing => Ok(false),
        found => found,
    })
}

// Shows only the number of lists, since keys may be personal data.
impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("limiter", &self.limiter)
            .field("limits", &self.limits)
            .field("denied", &self.denied.len())
            .field("exempt", &self.exempt.len())
            .field("headers", &self.headers)
            .finish_non_exhaustive()
    }
}
