//! A limit with its key extractor and options.

use std::{fmt, sync::Arc, time::Duration};

use http::{
    request::{self, Parts},
    response,
};

use super::super::extract::KeyExtractor;
use crate::{algorithm::Algorithm, error::ConfigError, limit::Limit, split::Split};

/// Computes a setting from a request, such as its cost.
pub(super) type ByRequest<T> = dyn Fn(&Parts) -> T + Send + Sync;

/// Chooses a limit for a request, or none.
type ChooseLimit = Arc<ByRequest<Option<Limit>>>;

/// Computes the actual cost in units from a request and its response.
pub(crate) type CostAfterwards = dyn Fn(&Exchange<'_>) -> u64 + Send + Sync;

/// A request and its response, from which a limit that [settles](crate::KeyedLimit::settle)
/// computes the actual cost.
#[non_exhaustive]
pub struct Exchange<'a> {
    /// The request as it arrived, without its body.
    pub request: &'a request::Parts,
    /// The service's response, without its body.
    pub response: &'a response::Parts,
    /// The units charged at admission. Always 1 with
    /// [`count_afterwards`](KeyedLimit::count_afterwards), although nothing was charged.
    pub cost: u64,
}

#[derive(Clone)]
pub(crate) struct Ban {
    pub(crate) limit: Limit,
    pub(crate) time: Duration,
}

/// A limit with its key extractor, made by [`Limit::by`], [`Split::by`] or [`KeyedLimit::chosen`]
/// and added with [`RateLimitLayer::limit`](crate::RateLimitLayer::limit).
#[derive(Clone)]
#[must_use]
pub struct KeyedLimit {
    /// The limit, or the closure that chooses one for each request.
    pub(crate) limit: Result<Limit, ChooseLimit>,
    pub(crate) extractor: Arc<dyn KeyExtractor>,
    pub(crate) cost: Option<Arc<ByRequest<u64>>>,
    pub(crate) settle: Option<Arc<CostAfterwards>>,
    /// The cost to count once the response has arrived. Nothing is reserved up front.
    pub(crate) count_afterwards: Option<Arc<CostAfterwards>>,
    pub(crate) lease: Option<Duration>,
    pub(crate) heeds_upstream: bool,
    pub(crate) is_shadow: bool,
    pub(crate) is_hidden: bool,
    /// Set for a split limit. `limit` is then the limit for one part.
    pub(crate) split: Option<Split>,
    pub(crate) ban: Option<Ban>,
}

impl Limit {
    /// Counts each request under the key that `extractor` returns.
    pub fn by(self, extractor: impl KeyExtractor) -> KeyedLimit {
        KeyedLimit::new(Ok(self), extractor)
    }
}

impl Split {
    /// Charges each request to one part, for the key that `extractor` returns. See
    /// [`split`](crate::split).
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit};
    ///
    /// // 16 parts of 6,250 units, on all nodes of a cluster.
    /// let requests = Limit::per_second("requests", 100_000).split(16).by(Everyone);
    /// ```
    ///
    /// * Clients see the figures for the part that their request is charged to.
    /// * A [banned](KeyedLimit::ban) key is banned in all parts.
    /// * An upstream could block only the part that a call was charged to, so layers do not accept
    ///   a split limit that [heeds](KeyedLimit::heed_upstream) an upstream.
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

    /// Makes a limit that `choose` picks for each request: by path, by header, or by a value that
    /// changes at run time. The closure returns a `Limit` or an `Option<Limit>`. With `None`, this
    /// limit does not apply.
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
    /// For a limit that changes, read a shared value in the closure. For a limit from a database,
    /// let an earlier layer look it up and put it into the request's extensions.
    /// [`guide::limits_by_plan`](crate::guide::limits_by_plan) shows both.
    ///
    /// 1. The key is extracted first: a request without a key is rejected before a limit is chosen.
    ///    The closure runs for each request that has a key, and must not block. If it panics,
    ///    nothing is charged and only that request ends, as when a handler panics.
    /// 2. A limit of 0 units refuses the request. With `None`, only the layer's other limits charge
    ///    it. If no limit does, the request passes without a decision and without figures. A
    ///    [banned](Self::ban) key is still refused.
    /// 3. Limits with the same name, window and [`Algorithm`](crate::Algorithm) share a key's
    ///    units. If a tenant moves to another plan, its used units still count, unless the new
    ///    limit has a different window or algorithm. In that case, the tenant starts with no used
    ///    units.
    /// 4. If an option has [no effect](crate::RateLimitLayer::limits) on the chosen limit, the
    ///    request gets a 500, and the log says what to change.
    /// 5. If two limits agree in name, window, algorithm and key, the request gets a 500, and the
    ///    log says what to change. This happens, for example, with [`PeerIp`](crate::PeerIp) and
    ///    [`ClientIp`](crate::ClientIp) when there is no proxy. If one or both are shadow limits,
    ///    the layer drops one shadow limit from the check instead.
    pub fn chosen<E, C, L>(extractor: E, choose: C) -> Self
    where
        E: KeyExtractor,
        C: Fn(&Parts) -> L + Send + Sync + 'static,
        L: Into<Option<Limit>>,
    {
        Self::new(Err(Arc::new(move |parts| choose(parts).into())), extractor)
    }

    /// For a layer around a client: backs off when the upstream asks for it. An upstream asks with
    /// a 429, with a 503 that has `Retry-After`, or with `RateLimit` or `X-RateLimit-*` headers
    /// that show nothing remaining. The limit is then [blocked](crate::Limiter::block) for the
    /// call's key, for at most one window, in all processes on the store. Default: the upstream is
    /// ignored.
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
    /// * The block covers all calls with the same key, so all of them should go to one upstream, as
    ///   with [`UpstreamHost`](crate::extract::UpstreamHost).
    /// * The client inside the layer must not follow redirects: a refusal by the second host would
    ///   block the first. With reqwest, set `redirect(Policy::none())`, and follow a redirect with
    ///   another call through the layer.
    /// * "Nothing remaining" means `X-RateLimit-Remaining: 0` or `RateLimit-Remaining: 0` with a
    ///   `-Reset`, or a `RateLimit` member such as `"hourly";r=0;t=97`. Other forms of `RateLimit`
    ///   are not read. A 429 without a valid time asks for one second.
    /// * A limit with a short window is blocked only briefly. If the upstream may ask for longer,
    ///   add a limit with a longer window that heeds it too. A [shadow](Self::in_shadow) limit is
    ///   not blocked.
    /// * A 429, a 503 with `Retry-After`, and a 403 with nothing remaining are refusals. They
    ///   always block the limit. Any other response blocks the limit only if the limit had units
    ///   left, both at the admission and at the response.
    /// * The response is returned once units are settled and limits are blocked. Each step takes at
    ///   most the deadline. The layer leaves the response unchanged, with the upstream's figures,
    ///   and adds none.
    /// * A call counts from its response, since the upstream may count it that late. The delay is
    ///   at most a tenth of the window, and costs up to a tenth of the throughput. Until the
    ///   response, the call's units are reserved. The settlement is one more store call per
    ///   request.
    pub fn heed_upstream(mut self) -> Self {
        self.heeds_upstream = true;
        self
    }

    /// Puts the limit into shadow mode: it counts requests and reports those it would have refused,
    /// but does not refuse any. Use it to try a limit on real traffic. Default: the limit refuses.
    ///
    /// * Shadow refusals appear in the [`Decision`](crate::Decision) in the request's extensions,
    ///   in the [`ShadowRefusals`](crate::middleware::ShadowRefusals) in the response's extensions,
    ///   in a log line at most once a second, and in the [metrics](mod@crate::metrics).
    /// * If a request has no key for a shadow limit, or costs more units than the limit has, the
    ///   limit is left out of the check. The layer reports that too.
    /// * Clients see the figures for the layer's other limits, or the shadow limit's if there are
    ///   no others. So put a shadow limit into the same layer as the limits that refuse.
    /// * If only shadow limits charge a request, it passes while the store cannot decide, even
    ///   under [`fail_closed`](crate::RateLimitLayer::fail_closed).
    pub fn in_shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Hides the limit from clients: it counts and refuses, but does not appear in headers or in
    /// the default rejection body. Use it for a limit on total load that clients should not see.
    /// Default: clients see the limit.
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit, MemoryStore, PeerIp, RateLimitLayer};
    ///
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_second("service", 20_000).by(Everyone).hidden())
    ///     .limit(Limit::per_minute("requests", 60).by(PeerIp::new()));
    /// ```
    ///
    /// * Clients see the figures for the layer's other limits, however little the hidden limit has
    ///   left.
    /// * If only hidden limits refuse, the 429 has a `Retry-After` but no figures, and its default
    ///   body does not name a limit. If a visible limit refuses as well, the client sees that one.
    /// * The server sees the limit: in the [`Decision`](crate::Decision), extensions, metrics, log
    ///   lines, and the [`Rejection`](crate::Rejection) text. A custom responder should not show
    ///   these to clients.
    ///
    /// [`RateLimitLayer::headers`](crate::RateLimitLayer::headers) can hide the figures for all
    /// limits.
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// Bans a key that has used up the limit: all processes refuse all requests with this key for
    /// `time`, which may be longer than the limit's window. Default: a key is refused until enough
    /// units have left the window.
    ///
    /// `ban` is a one-unit limit that counts the bans. A ban lasts at most the window of `ban`, so
    /// make that window as long as your longest ban. You can also ban a key by hand with
    /// [`Limiter::block`](crate::Limiter::block), for at most the same window.
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
    /// * A ban begins when the limit refuses, but not if only [reserved](crate::Charge::reserve)
    ///   units, or requests that [wait](crate::RateLimitLayer::wait_up_to) in line, are in the way.
    ///   A [concurrent](Limit::concurrent) limit never begins a ban, so layers do not accept the
    ///   combination. A limit that [settles](Self::settle) or [counts
    ///   afterwards](Self::count_afterwards) also begins a ban when a response's cost uses it up.
    ///   That response keeps its status, and already shows the ban's figures.
    /// * With a time of zero, only bans by hand apply. A limit of 0 units does not begin bans
    ///   either: it refuses each request anyway.
    /// * A ban lasts exactly `time`: requests that it refuses do not prolong it. Redis keeps the
    ///   ban's key for the window of `ban`, at most 365 days.
    /// * A request that a ban refuses gets [`Rejection::Banned`](crate::Rejection::Banned), and so
    ///   does the request whose refusal begins the ban. The status is 429, which a
    ///   [responder](crate::RateLimitLayer::respond_with) can change. The figures are those of the
    ///   ban's limit, such as `login.ban`, or of the limit that began the ban if that one refuses
    ///   for longer. Clients do not see the ban's limit before a ban begins.
    /// * If the limit is still used up after a ban is lifted, the next refusal begins another ban.
    ///   So reset the limit as well as the ban. Changing the ban's window lifts all bans.
    /// * A ban covers all parts of a [split](Split::by) limit, and requests for which no limit is
    ///   [chosen](Self::chosen).
    /// * Limits in one layer may share a ban if their extractors find the same key. If several
    ///   begin it at once, the longest time applies. The shared ban is hidden if any limit that
    ///   shares it is hidden. A shadow limit that shares the ban never begins a ban that refuses
    ///   requests.
    /// * A [shadow](Self::in_shadow) limit's ban is in shadow mode, and a [hidden](Self::hidden)
    ///   limit's ban is hidden.
    /// * Each check also asks the store about the ban, so a [prefetch](crate::limit::prefetch) does
    ///   not save a store call. If the store cannot begin a ban, a log line says so, and the next
    ///   refusal tries again. A [full](crate::MemoryStore#when-it-is-full) `MemoryStore` does not
    ///   accept bans.
    /// * While Redis is down, the processes that [know](crate::Limiter::refusal_cache) a ban
    ///   enforce it until it ends, in every failure mode. A process knows a ban if it has begun the
    ///   ban, or has refused a request under it. In all other processes the failure mode decides,
    ///   and a process that decides locally begins its own bans. A Redis that restarts empty has
    ///   forgotten the bans.
    /// * If this method is called twice, the last ban applies.
    ///
    /// # Panics
    ///
    /// If `ban` does not have exactly one unit, or uses an algorithm other than the [exact
    /// log](crate::Algorithm::SLIDING_LOG), or if `time` is longer than the window of `ban`.
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

    /// The limit. `None` if it is [chosen](Self::chosen) for each request.
    pub(crate) fn limit(&self) -> Option<&Limit> {
        self.limit.as_ref().ok()
    }

    /// Computes the cost from the response.
    pub(crate) fn cost_afterwards(&self) -> Option<&Arc<CostAfterwards>> {
        self.settle.as_ref().or(self.count_afterwards.as_ref())
    }

    /// Returns an error if one of the options would have no effect on `limit`, which is fixed or
    /// was chosen for a request.
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

    /// True if the limit has a window, is the same for all requests, and has no option that changes
    /// the charge or needs details.
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
