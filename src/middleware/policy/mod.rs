//! The policy of a layer, and from a request to its decision: whether the request is counted, under
//! which limits, by which keys and costs.
//!
//! 1. A request whose key or address is on a list of denied ones gets 403. Otherwise, one that is
//!    on a list of allowed ones, a skipped request, and a CORS preflight go to the service
//!    uncounted. All other requests are counted.
//! 2. A request without a key is on no list. A key that is present but cannot be read may be a
//!    denied key, so a list of denied keys rejects it with the status of its
//!    [`KeyError`](super::extract::KeyError). No list of allowed keys has it.
//! 3. Each layer waits for at most its own deadline, less what the request has waited in layers
//!    further out. If nothing is left, the layer still waits for 5 ms, so that a store that hangs
//!    does not turn off the limits on another store. So a request waits for at most the longest
//!    deadline of its layers, plus 5 ms for each layer that found nothing left.

mod ban;
mod check;
mod cost;
mod keyed_limit;
mod preflight;
mod usage;

use std::{collections::HashSet, fmt, pin::Pin, sync::Arc, time::Duration};

use http::{Method, request::Parts};

pub(super) use self::check::CheckDetails;
use self::keyed_limit::ByRequest;
pub use self::keyed_limit::{Exchange, KeyedLimit};
use super::{
    events::Events,
    extract::{AddressList, ClientIp, KeyError, KeyExtractor},
    headers::HeaderSets,
    rejection::Rejection,
};
use crate::{
    check::Check,
    decision::Decision,
    error::{ConfigError, ConfigErrorKind, Error},
    key::Key,
    limit::Limit,
    limiter::{Asking, DecideNow, FailureMode, Limiter},
    metrics,
};

/// Shared by all services of a layer.
#[derive(Clone)]
pub(super) struct Policy {
    pub(super) limiter: Limiter,
    /// No two that are not chosen for each request have one name.
    pub(super) limits: Vec<KeyedLimit>,
    /// Whether none of them has options, so that a request needs no details.
    pub(super) is_plain: bool,
    pub(super) denied: Vec<Arc<KeyList>>,
    /// Those whose requests are not counted, each with its kind in metrics.
    pub(super) uncounted: Vec<(&'static str, Arc<KeyList>)>,
    pub(super) counts_preflights: bool,
    pub(super) cost: Option<Arc<ByRequest<u64>>>,
    pub(super) failure_mode: FailureMode,
    /// Goes before `failure_mode`.
    pub(super) failure_mode_by: Option<Arc<FailureModeBy>>,
    pub(super) headers: HeaderSets,
    /// How long a request waits for capacity. `None` refuses it at once.
    pub(super) max_wait: Option<Duration>,
    /// Whether the places of a request are freed when its response begins.
    pub(super) frees_with_head: bool,
    pub(super) events: Arc<Events>,
}

/// Whether a request has a key of a list. An error if it has a key that cannot be read.
type KeyList = ByRequest<Result<bool, KeyError>>;

/// The failure mode of a request of a cost.
type FailureModeBy = dyn Fn(&Parts, u64) -> FailureMode + Send + Sync;

/// How a request is decided.
pub(super) enum Plan {
    /// Without waiting, or there is nothing to decide.
    Decided(Decided),
    /// The store is asked about its check.
    Ask { asking: Asking, details: Option<Box<CheckDetails>> },
    /// After a wait for capacity, or with a ban. In a box, since few requests need it.
    Wait(Pin<Box<dyn Future<Output = Decided> + Send>>),
}

/// The outcome of a request's check.
pub(super) struct Decided {
    /// No decision if there was nothing to decide.
    pub(super) outcome: Result<Option<Decision>, Error>,
    pub(super) mode: FailureMode,
    pub(super) details: Option<Box<CheckDetails>>,
    /// How long the request has waited for decisions, in all layers so far, if it has waited for
    /// this one.
    pub(super) waited: Duration,
}

impl Policy {
    pub(super) fn new(limiter: Limiter) -> Self {
        Self {
            failure_mode: limiter.failure_mode,
            limiter,
            limits: Vec::new(),
            is_plain: true,
            denied: Vec::new(),
            uncounted: Vec::new(),
            counts_preflights: false,
            cost: None,
            failure_mode_by: None,
            headers: HeaderSets::default(),
            max_wait: None,
            frees_with_head: false,
            events: Arc::default(),
        }
    }

    /// Adds a limit, unless an option would have no effect, or another has its name: clients and
    /// metrics could not tell them apart.
    pub(super) fn push(&mut self, limit: KeyedLimit) -> Result<(), ConfigError> {
        let all = || self.limits.iter().chain([&limit]);
        let names = || all().filter_map(KeyedLimit::limit).map(Limit::name);
        let own = limit.limit().map(Limit::name).filter(|own| names().filter(|name| name == own).count() > 1);
        // Several limits may have one ban.
        let mistaken = || all().filter_map(KeyedLimit::ban_name).find(|ban| names().any(|name| name == *ban));
        if let Some(name) = own.or_else(mistaken) {
            let text = format!("two limits of one layer are named {name:?}: give one of them another name");
            return Err(ConfigError::new(ConfigErrorKind::SameLimit, text));
        }
        limit.has_effect_on(limit.limit())?;
        self.is_plain &= limit.is_plain();
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

    /// An error if the request is denied, has no key, or costs too much.
    #[inline]
    pub(super) fn plan(self: &Arc<Self>, request: &Parts) -> Result<Plan, Rejection> {
        let at_once =
            |outcome, mode, details| Plan::Decided(Decided { outcome, mode, details, waited: Duration::ZERO });
        if !self.counts(request)? {
            return Ok(at_once(Ok(None), FailureMode::default(), None));
        }
        let cost = self.cost.as_ref().map_or(1, |cost| cost(request));
        let mode = self.failure_mode(request, cost);
        let (check, details) = if self.is_plain && self.max_wait.is_none() {
            (self.plain_check(request, cost)?, None)
        } else {
            let mut details = Box::new(CheckDetails::of(&self.limits, |limit| limit.draft(request, cost))?);
            let keeps_check = self.any(|limit| limit.cost_afterwards.is_some() || limit.heeds_upstream);
            let check = if keeps_check { details.check.clone() } else { details.check.take() };
            let begins_ban = !details.bans.is_empty();
            if let Some(check) = check.clone().filter(|_| self.max_wait.is_some() || begins_ban) {
                return Ok(self.decide_later(check, details, mode, time_waited(request)));
            }
            (check, Some(details))
        };
        let Some(check) = check else { return Ok(at_once(Ok(None), mode, details)) };
        Ok(match self.limiter.decide_now(check, mode, || time_waited(request)) {
            DecideNow::Decided(outcome) => at_once(outcome.map(Some), mode, details),
            DecideNow::Ask(asking) => Plan::Ask { asking, details },
        })
    }

    /// Waits in line for capacity, if the layer does, and begins bans, for a request that has
    /// `waited` for other decisions.
    fn decide_later(
        self: &Arc<Self>,
        check: Check,
        details: Box<CheckDetails>,
        mode: FailureMode,
        mut waited: Duration,
    ) -> Plan {
        let policy = Arc::clone(self);
        Plan::Wait(Box::pin(async move {
            let limiter = policy.limiter.clone().with_failure_mode(mode);
            let decided = match policy.max_wait {
                Some(max_wait) => limiter.acquire_after(check, max_wait, &mut waited).await,
                None => limiter.decide(check, &mut waited).await,
            };
            let outcome = match decided {
                Ok(decision) => {
                    let is_local = decision.local_cause().is_some();
                    Ok(Some(policy.ban(&limiter, decision, &details.bans, is_local).await))
                }
                Err(error) => Err(error),
            };
            Decided { outcome, mode, details: Some(details), waited }
        }))
    }

    /// Whether the request is counted, unless it is denied.
    #[inline]
    fn counts(&self, request: &Parts) -> Result<bool, Rejection> {
        for list in &self.denied {
            if list(request).map_err(Rejection::NoKey)? {
                return Err(Rejection::Denied);
            }
        }
        let is_preflight = || request.method == Method::OPTIONS && preflight::is_preflight(&request.headers);
        let mistake = |error| {
            self.events.mistake(&Rejection::NoKey(error));
            false
        };
        let kind = if !self.counts_preflights && is_preflight() {
            Some("preflight")
        } else {
            let mut lists = self.uncounted.iter();
            lists.find_map(|(kind, list)| list(request).unwrap_or_else(mistake).then_some(*kind))
        };
        let Some(kind) = kind else { return Ok(true) };
        metrics::uncounted(kind, &self.events.layer);
        Ok(false)
    }

    /// Limits in the shadow refuse nothing, even without a decision.
    #[inline]
    fn failure_mode(&self, request: &Parts, cost: u64) -> FailureMode {
        match &self.failure_mode_by {
            _ if self.limits.iter().all(|limit| limit.is_shadow) => FailureMode::Open,
            Some(mode_by) => mode_by(request, cost),
            None => self.failure_mode,
        }
    }

    /// The check of limits without options, which most layers have: its response needs no details.
    #[inline]
    fn plain_check(&self, request: &Parts, cost: u64) -> Result<Option<Check>, Rejection> {
        let mut check = None::<Check>;
        for limit in &self.limits {
            let Some(charge) = limit.plain_charge(request, cost)? else { continue };
            Check::push(&mut check, charge);
        }
        Ok(check)
    }
}

/// A list of denied or exempt keys. A request without a key is not on it.
pub(super) fn key_list(extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Arc<KeyList> {
    let keys: HashSet<Key> = keys.into_iter().collect();
    list(move |parts| extractor.extract(parts).map(|key| keys.contains(&key)))
}

/// A list of denied or exempt addresses.
pub(super) fn address_list(client_ip: ClientIp, addresses: AddressList) -> Arc<KeyList> {
    list(move |parts| client_ip.address(parts).map(|address| addresses.contains(address)))
}

fn list(find: impl Fn(&Parts) -> Result<bool, KeyError> + Send + Sync + 'static) -> Arc<KeyList> {
    Arc::new(move |parts| match find(parts) {
        Err(error) if error.is_missing => Ok(false),
        found => found,
    })
}

/// How long a request has waited for decisions in all layers so far: in its extensions, for the
/// layers further in.
#[derive(Clone, Copy)]
pub(super) struct TimeWaited(pub(super) Duration);

fn time_waited(request: &Parts) -> Duration {
    request.extensions.get().map(|TimeWaited(time)| *time).unwrap_or_default()
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
            .field("uncounted", &self.uncounted.len())
            .field("counts_preflights", &self.counts_preflights)
            .field("failure_mode", failure_mode)
            .field("headers", &self.headers)
            .finish_non_exhaustive()
    }
}
