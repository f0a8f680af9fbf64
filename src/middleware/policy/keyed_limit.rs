//! A limit, the extractor of its keys, and its own options.

use std::{fmt, sync::Arc, time::Duration};

use http::{
    request::{self, Parts},
    response,
};

use super::super::extract::KeyExtractor;
use crate::{algorithm::Algorithm, error::ConfigError, limit::Limit, split::Split};

/// A closure that computes a setting from a request, such as the cost of the request.
pub(super) type ByRequest<T> = dyn Fn(&Parts) -> T + Send + Sync;

/// A closure that chooses a limit for a request, or no limit.
type ChooseLimit = Arc<ByRequest<Option<Limit>>>;

/// A closure that computes the units that a request has really cost, from the request and its
/// response.
pub(crate) type CostAfterwards = dyn Fn(&Exchange<'_>) -> u64 + Send + Sync;

/// A request and its response. A limit that [settles](crate::KeyedLimit::settle) computes the
/// actual cost from them.
#[non_exhaustive]
pub struct Exchange<'a> {
    /// The request as it came, without its body.
    pub request: &'a request::Parts,
    /// The service's response, without its body.
    pub response: &'a response::Parts,
    /// The units that the limit has charged. With
    /// [`count_afterwards`](KeyedLimit::count_afterwards), always 1, although nothing was charged.
    pub cost: u64,
}

#[derive(Clone)]
pub(crate) struct Ban {
    pub(crate) limit: Limit,
    pub(crate) time: Duration,
}

/// A limit and the extractor of its keys. [`Limit::by`], [`Split::by`] and [`KeyedLimit::chosen`]
/// make a `KeyedLimit`, and [`RateLimitLayer::limit`](crate::RateLimitLayer::limit) takes it.
#[derive(Clone)]
#[must_use]
pub struct KeyedLimit {
    /// The limit, or the closure that chooses a limit for each request.
    pub(crate) limit: Result<Limit, ChooseLimit>,
    pub(crate) extractor: Arc<dyn KeyExtractor>,
    pub(crate) cost: Option<Arc<ByRequest<u64>>>,
    pub(crate) settle: Option<Arc<CostAfterwards>>,
    /// The cost that counts when the response is there. Nothing is reserved before.
    pub(crate) count_afterwards: Option<Arc<CostAfterwards>>,
    pub(crate) lease: Option<Duration>,
    pub(crate) heeds_upstream: bool,
    pub(crate) is_shadow: bool,
    pub(crate) is_hidden: bool,
    /// The parts of a limit that is split. Then `limit` is the limit of one part.
    pub(crate) split: Option<Split>,
    pub(crate) ban: Option<Ban>,
}

impl Limit {
    /// Makes a limit that counts each request under the key that `extractor` finds in the request.
    pub fn by(self, extractor: impl KeyExtractor) -> KeyedLimit {
        KeyedLimit::new(Ok(self), extractor)
    }
}

impl Split {
    /// Makes a limit that charges each request to one part of the split limit, for the key that
    /// `extractor` finds in the request. See [`split`](crate::split).
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit};
    ///
    /// // 16 parts of 6,250 units, on all nodes of a cluster.
    /// let requests = Limit::per_second("requests", 100_000).split(16).by(Everyone);
    /// ```
    ///
    /// * Clients see the figures of the part that their request is charged to.
    /// * A [ban](KeyedLimit::ban) of a key holds in all parts.
    /// * An upstream could block only the part that its call was charged to. So no layer takes a
    ///   split limit that [heeds](KeyedLimit::heed_upstream) an upstream.
    pub fn by(self, extractor: impl KeyExtractor) -> KeyedLimit {
        let limit = Ok(self.part.clone());
        KeyedLimit {
            split: Some(self),
            ..KeyedLimit::new(limit, extractor)
        }
    }
}

impl KeyedLimit {
    fn new(limit: Result<Limit, ChooseLimit>, extractor: impl KeyExtractor) -> Self {
        Self {
            limit,
            extractor: Arc::new(extractor),
            cost: None,
            settle: None,
            count_afterwards: None,
            lease: None,
            heeds_upstream: false,
            is_shadow: false,
            is_hidden: false,
            split: None,
            ban: None,
        }
    }

    /// Makes a limit that the closure `choose` chooses for each request: by the path or a header of
    /// the request, or by a value that changes while the program runs. The closure returns a limit,
    /// or an `Option` of a limit. `None` leaves the request without this limit.
    ///
    /// ```
    /// use axum::extract::MatchedPath;
    /// use http::{Method, request::Parts};
    /// use tower_sliding_window::{KeyedLimit, Limit, PeerIp};
    ///
    /// // By method and path. `MatchedPath` is there for all layers of the router, but not outside of it.
    /// let calls = KeyedLimit::chosen(PeerIp::new(), |request: &Parts| {
    ///     match (&request.method, request.extensions.get::<MatchedPath>()?.as_str()) {
    ///         (&Method::POST, "/login") => Some(Limit::per_minute("login", 5)),
    ///         (_, "/files/{id}") => Some(Limit::per_minute("files", 60)),
    ///         _ => None,
    ///     }
    /// });
    /// ```
    ///
    /// For a limit that changes, the closure reads a shared value. For a limit from a database, an
    /// earlier layer looks the limit up, and puts the limit into the extensions of the request.
    /// [`guide::limits_by_plan`](crate::guide::limits_by_plan) has examples of both cases.
    ///
    /// 1. The key is extracted first: a request without a key is rejected before a limit is chosen.
    ///    The closure runs for each request that has a key, and must not wait. If the closure
    ///    panics, nothing is charged, and only the request ends, as when a handler panics.
    /// 2. A limit of 0 units refuses the request. With `None`, only the layer's other limits charge
    ///    the request. If no limit charges the request, the request goes through without a decision
    ///    and without figures. A request whose key is [banned](Self::ban) is still refused.
    /// 3. Limits of one name, window and [`Algorithm`](crate::Algorithm) share the units of a key.
    ///    So if a tenant moves to another plan, the units that the tenant has used still count. If
    ///    the limit of the other plan has another window or algorithm, the tenant starts with no
    ///    used units.
    /// 4. If an option has [no effect](crate::RateLimitLayer::limits) on the chosen limit, the
    ///    request is rejected with a 500, and the log says what to change.
    /// 5. If two limits of a request have the same name, window, algorithm and key, the request is
    ///    rejected with a 500, and the log says what to change. For example,
    ///    [`PeerIp`](crate::PeerIp) and [`ClientIp`](crate::ClientIp) find the same key without a
    ///    proxy. If one or both of the two limits are in the shadow, the layer leaves a limit in
    ///    the shadow out of the check instead.
    pub fn chosen<E, C, L>(extractor: E, choose: C) -> Self
    where
        E: KeyExtractor,
        C: Fn(&Parts) -> L + Send + Sync + 'static,
        L: Into<Option<Limit>>,
    {
        Self::new(Err(Arc::new(move |parts| choose(parts).into())), extractor)
    }

    /// For a layer around a client: obeys an upstream that asks the client to stay away. An
    /// upstream asks by a 429, by a 503 with `Retry-After`, or by `RateLimit` or `X-RateLimit-*`
    /// headers with nothing remaining. The limit is then [blocked](crate::Limiter::block) for the
    /// key of the call, for at most one window, in all processes on the store. Default: the
    /// upstream is ignored.
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer, extract::UpstreamHost};
    ///
    /// // A crawler of many hosts. A host blocks only calls to itself.
    /// let limits = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_hour("host", 7_200).by(UpstreamHost).heed_upstream())
    ///     .limit(Limit::per_second("total", 100).by(Everyone));
    /// ```
    ///
    /// * An upstream blocks the limit for all calls of the key. So set this option only if all
    ///   calls of a key go to one upstream, as with [`UpstreamHost`](crate::extract::UpstreamHost).
    /// * The client inside of the layer must not follow redirects: a refusal of the second host
    ///   would block the first. With reqwest, write `redirect(Policy::none())`, and follow a
    ///   redirect by another call through the layer.
    /// * Nothing remains by `X-RateLimit-Remaining: 0` or `RateLimit-Remaining: 0` with a `-Reset`,
    ///   and by a member of `RateLimit` such as `"hourly";r=0;t=97`. Other forms of `RateLimit` are
    ///   not read. A 429 without a valid time asks for one second.
    /// * A limit of a short window is blocked only briefly. If the upstream may ask for a longer
    ///   time, add a limit of a longer window that heeds the upstream, too. A limit in the
    ///   [shadow](Self::in_shadow) is not blocked.
    /// * A 429, a 503 with `Retry-After`, and a 403 with nothing remaining are refusals. A refusal
    ///   blocks the limit, however many units the limit has left. Any other response blocks the
    ///   limit only if the limit had units left, both at the admission and at the response.
    /// * The response goes out once the units are settled and the limits are blocked. Each of these
    ///   steps takes at most the deadline. The layer leaves the response unchanged, with the
    ///   upstream's figures, and shows no figures of its own.
    /// * A call counts as of its response, since the upstream may count the call that late. If the
    ///   response takes longer than a tenth of the window, the call counts as of a tenth of the
    ///   window after its admission. Until the response, the units of the call are reserved. The
    ///   delay costs up to a tenth of the throughput, and the settlement is one more call of the
    ///   store for each request.
    pub fn heed_upstream(mut self) -> Self {
        self.heeds_upstream = true;
        self
    }

    /// Puts the limit into the shadow: the limit counts requests, and reports the requests that it
    /// would have refused, but refuses none. So a limit can be tried on real traffic. Default: the
    /// limit refuses.
    ///
    /// * The refusals of a limit in the shadow are in the [`Decision`](crate::Decision) in the
    ///   request's extensions, in the [`ShadowRefusals`](crate::middleware::ShadowRefusals) in the
    ///   response's extensions, in a log line at most once a second, and in the
    ///   [metrics](mod@crate::metrics).
    /// * If a request has no key for the limit, or costs more units than the limit has, the limit
    ///   is left out of the check. The layer reports the limit in that case, too.
    /// * Clients see the figures of the layer's other limits. If the layer has no other limits,
    ///   clients see the figures of the limit in the shadow. So put a limit in the shadow into the
    ///   same layer as the limits that refuse.
    /// * If only limits in the shadow charge a request, it is let through while the store cannot
    ///   decide, even under [`fail_closed`](crate::RateLimitLayer::fail_closed).
    pub fn in_shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Hides the limit from clients: the limit counts and refuses, but no header and no default
    /// body of a rejection shows the limit. So a limit on the load of a whole service does not show
    /// the load to everybody. Default: clients see the limit.
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit, MemoryStore, PeerIp, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_second("service", 20_000).by(Everyone).hidden())
    ///     .limit(Limit::per_minute("requests", 60).by(PeerIp::new()));
    /// ```
    ///
    /// * Clients see the figures of the layer's other limits, however little is left of the hidden
    ///   limit.
    /// * If only hidden limits refuse, the 429 has a `Retry-After`, but no figures, and its default
    ///   body names no limit. If a visible limit refuses as well, the client sees the visible
    ///   limit.
    /// * The server sees the limit: in the [`Decision`](crate::Decision), the extensions, metrics,
    ///   log lines, and the text of a [`Rejection`](crate::Rejection). A responder of your own
    ///   should show clients none of these.
    ///
    /// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers) can hide the figures of all
    /// limits.
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// Bans a key that has used up the limit: all processes refuse all requests of the key for
    /// `time`, which may be longer than the window of the limit. Default: a key is refused until
    /// enough units have left the window.
    ///
    /// `ban` is a limit of one unit that counts the bans. No ban is longer than the window of
    /// `ban`, so choose a window as long as the longest ban that you want. You can also ban a key
    /// by hand, by [`Limiter::block`](crate::Limiter::block). If the time of such a block is longer
    /// than the window of `ban`, the ban ends after the window.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::StatusCode;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer};
    ///
    /// const BAN: Limit = Limit::per_day("login.ban", 1);
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Five failed logins in a minute are a ban of a quarter of an hour.
    /// let store = MemoryStore::new();
    /// let failures = Limit::per_minute("login", 5)
    ///     .by(PeerIp::new())
    ///     .settle(|exchange| u64::from(exchange.response.status == StatusCode::UNAUTHORIZED))
    ///     .ban(BAN, Duration::from_secs(15 * 60));
    /// let layer = RateLimitLayer::new(store.clone()).limit(failures);
    ///
    /// // By hand, and lifted.
    /// let (limiter, key) = (Limiter::new(store), PeerIp::new().key("203.0.113.7".parse()?));
    /// limiter.block(&BAN, key.clone(), Duration::from_secs(24 * 60 * 60)).await?;
    /// limiter.reset(&BAN, key).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// * A refusal by the limit begins the ban. A refusal begins no ban if only
    ///   [reserved](crate::Charge::reserve) units, or requests that
    ///   [wait](crate::RateLimitLayer::wait_up_to) in line, are in the way. A refused place of a
    ///   [concurrent](Limit::concurrent) limit begins no ban either, so no layer takes a concurrent
    ///   limit with a ban. A limit that [settles](Self::settle) or [counts
    ///   afterwards](Self::count_afterwards) also begins the ban when the cost of a response uses
    ///   up the limit. That response keeps its status, and already shows the figures of the ban.
    /// * With a time of zero, the limit begins no ban, and only bans by hand hold. A limit of 0
    ///   units begins no ban, either: it refuses each request anyway.
    /// * A ban lasts for exactly `time`: requests that the ban refuses do not prolong the ban.
    ///   Redis keeps the key of a ban for the window of the ban's limit, which is at most 365 days.
    /// * A request that a ban refuses gets [`Rejection::Banned`](crate::Rejection::Banned), and so
    ///   does a request whose refusal begins a ban. The status of this rejection is 429, which a
    ///   [responder](crate::RateLimitLayer::respond_with) can change. The rejection shows the
    ///   figures of the ban's limit, such as `login.ban`. If the limit that has begun the ban
    ///   refuses for longer than the ban, the rejection shows the figures of that limit. Before a
    ///   ban begins, clients do not see the ban's limit.
    /// * After a ban is lifted, a limit that is still used up begins another ban at the next
    ///   refusal. So reset the limit as well as the ban. If you change the window of the ban's
    ///   limit, all bans are lifted.
    /// * A ban of a key holds in all parts of a [split](Split::by) limit. A ban holds even for
    ///   requests for which no limit is [chosen](Self::chosen).
    /// * Limits of a layer may share one ban if their extractors find the same key. If several
    ///   limits begin the ban at once, the longest time holds. The shared ban is hidden if any
    ///   limit with this ban is hidden. If a limit in the shadow shares the ban, the refusals of
    ///   that limit begin no ban that refuses requests.
    /// * The ban of a limit in the [shadow](Self::in_shadow) is in the shadow, and the ban of a
    ///   [hidden](Self::hidden) limit is hidden.
    /// * Each check also asks the store whether the key is banned. So a
    ///   [prefetch](crate::limit::prefetch) saves no call of the store. If the store cannot begin a
    ///   ban, a log line says so, and the next refusal tries again to begin the ban. A
    ///   [full](crate::MemoryStore#when-it-is-full) `MemoryStore` takes no bans.
    /// * While Redis is gone, the processes that [know](crate::Limiter::refusal_cache) a ban
    ///   enforce the ban until its end, in every failure mode. A process knows a ban if the process
    ///   has begun the ban, or has refused a request by the ban. In all other processes the failure
    ///   mode decides. A process that decides in the store's place begins bans of its own. A Redis
    ///   that restarts empty has forgotten the bans.
    /// * If this method is called twice, the last ban holds.
    ///
    /// # Panics
    ///
    /// If `ban` does not have exactly one unit, or counts by another algorithm than the
    /// [log](crate::Algorithm::SLIDING_LOG), or if `time` is longer than the window of `ban`.
    #[track_caller]
    pub fn ban(mut self, ban: Limit, time: Duration) -> Self {
        let is_ban = ban.units() == 1 && ban.algorithm() == Algorithm::SLIDING_LOG;
        assert!(
            is_ban,
            "the limit of bans has one unit, and counts by the exact log"
        );
        let window = ban.window();
        assert!(
            time <= window,
            "no ban is longer than the window of its limit, {window:?}: give it a longer one"
        );
        self.ban = Some(Ban { limit: ban, time });
        self
    }

    pub(super) fn ban_name(&self) -> Option<&str> {
        self.ban.as_ref().map(|ban| ban.limit.name())
    }

    /// The limit. `None` if the limit is [chosen](Self::chosen) for each request.
    pub(crate) fn limit(&self) -> Option<&Limit> {
        self.limit.as_ref().ok()
    }

    /// The closure that computes the cost from the response.
    pub(crate) fn cost_afterwards(&self) -> Option<&Arc<CostAfterwards>> {
        self.settle.as_ref().or(self.count_afterwards.as_ref())
    }

    /// Returns an error if an option of this `KeyedLimit` would have no effect on `limit`, which is
    /// fixed or was chosen for a request.
    pub(crate) fn has_effect_on(&self, limit: Option<&Limit>) -> Result<(), ConfigError> {
        const NOT_OF_PLACES: &str = "a request takes one place, which costs nothing and is never reserved, banned or blocked: put \
            `cost`, `settle`, `count_afterwards`, `lease`, `ban` and `heed_upstream` on a limit of a window beside it. \
            `Limit::freed_after` sets how long a place lasts";
        const TWO_COSTS: &str = "`settle` and `count_afterwards` exclude each other: leave one out";
        const IDLE_LEASE: &str =
            "a `lease` is for units that are reserved: add `settle`, or leave it out";
        const IDLE_COST: &str = "`count_afterwards` computes the cost from the response: leave `cost` out, or use `settle`";
        const ONE_PART: &str = "an upstream would block one part alone: put `heed_upstream` on a limit that is not split, beside it";
        let counts = self.count_afterwards.is_some();
        let costs = self.cost.is_some();
        let has_lease = self.lease.is_some();
        let is_for_windows = costs
            || has_lease
            || self.heeds_upstream
            || self.cost_afterwards().is_some()
            || self.ban.is_some();
        let mistakes = [
            (
                is_for_windows && limit.is_some_and(Limit::is_concurrent),
                NOT_OF_PLACES,
            ),
            (counts && self.settle.is_some(), TWO_COSTS),
            (has_lease && self.settle.is_none(), IDLE_LEASE),
            (counts && costs, IDLE_COST),
            (self.heeds_upstream && self.split.is_some(), ONE_PART),
        ];
        let Some((_, problem)) = mistakes.into_iter().find(|(is_made, _)| *is_made) else {
            return Ok(());
        };
        let name = limit.map_or("a chosen one", Limit::name);
        Err(ConfigError::of_limit(name, problem))
    }

    /// True if the limit is plain: it has a window, is the same for all requests, and has no option
    /// that changes the charge or needs details.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.limit().is_some_and(|limit| !limit.is_concurrent())
            && self.cost.is_none()
            && self.cost_afterwards().is_none()
            && !self.heeds_upstream
            && !self.is_shadow
            && !self.is_hidden
            && self.split.is_none()
            && self.ban.is_none()
    }
}

impl fmt::Debug for KeyedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedLimit")
            .field("limit", &self.limit())
            .field("settles", &self.settle.is_some())
            .field("counts_afterwards", &self.count_afterwards.is_some())
            .field("heeds_upstream", &self.heeds_upstream)
            .field("is_shadow", &self.is_shadow)
            .field("is_hidden", &self.is_hidden)
            .field("is_split", &self.split.is_some())
            .field("ban", &self.ban_name())
            .finish_non_exhaustive()
    }
}
