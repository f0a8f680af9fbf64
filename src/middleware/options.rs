//! What a layer can be told: the methods of its builder beside those for limits.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, request::Parts};

use super::{
    extract::{KeyExtractor, header_name},
    headers::HeaderSets,
    layer::RateLimitLayer,
    reset::ResetFormat,
    settings::Failing,
};
use crate::{
    key::Key,
    limiter::{FailureMode, Share},
    store::{Breaker, DenyCache, Store},
};

impl<S: Store, R: Clone, L: Clone> RateLimitLayer<S, R, L> {
    /// How many units a request takes of every limit of the layer that has no [cost](super::KeyedLimit::cost) of its
    /// own. Default: 1. With a cost of 0 a request is free, and is let through however much is used.
    pub fn cost(self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.set(|settings| settings.cost = Some(Arc::new(cost)))
    }

    /// Lets requests through uncounted, such as those to a health check. Called several times, any of them will do.
    ///
    /// ```
    /// # use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer};
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("requests", 60).by(PeerIp::new()))
    ///     .skip(|request| request.uri.path() == "/health");
    /// ```
    pub fn skip(self, skip: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.set(|settings| settings.gate.skip(Arc::new(skip)))
    }

    /// Counts CORS preflights, too. Default: they are let through uncounted, since a browser sends them of itself, and the
    /// request proper is counted.
    ///
    /// A preflight is an `OPTIONS` with exactly one `Origin` that is an origin, exactly one
    /// `Access-Control-Request-Method` that is a method, and no body: no `Transfer-Encoding`, and no `Content-Length`
    /// other than 0. Over HTTP/2 a body may come without any length, which its head does not tell. Anybody can send such
    /// requests: where `OPTIONS` does work of its own, count them.
    pub fn count_preflights(self) -> Self {
        self.set(|settings| settings.gate.count_preflights())
    }

    /// Lets requests through uncounted whose key is one of these, such as those of a monitor or of your own office. A
    /// request without a key, or with one that cannot be read, is not on the list.
    ///
    /// ```
    /// # use tower_sliding_window::{ApiKey, Limit, MemoryStore, PeerIp, RateLimitLayer, Secret};
    /// # fn layer() -> Result<(), Box<dyn std::error::Error>> {
    /// let (peer, api_key) = (PeerIp::new(), ApiKey::bearer(&Secret::new("32 random bytes out of the vault")?));
    /// let (office, leaked) = (peer.key("203.0.113.7".parse()?), api_key.key("t0ken"));
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("requests", 60).by(peer.clone()))
    ///     .allow(peer, [office])
    ///     .deny(api_key, [leaked]);
    /// # Ok(()) }
    /// ```
    pub fn allow(self, extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Self {
        self.set(|settings| settings.gate.allow(extractor, keys))
    }

    /// Answers requests with 403 whose key is one of these, before anything else: see [`allow`](Self::allow).
    ///
    /// 1. A request without a key is not on the list, so this is no authentication.
    /// 2. A key that is there but cannot be read, such as an `Authorization` sent twice, may be one of these. It is answered
    ///    as a limit by the same extractor answers it, with the status of its [`KeyError`](super::extract::KeyError):
    ///    401 for an [`ApiKey`](super::extract::ApiKey).
    /// 3. Only what the extractor reads is compared. If your authentication takes a token out of the query or a cookie as
    ///    well, this does not see it there.
    pub fn deny(self, extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Self {
        self.set(|settings| settings.gate.deny(extractor, keys))
    }

    /// How long a request may wait for a decision before the failure mode decides. Default: 50 ms.
    ///
    /// It may have waited for layers further out already, and for limits that are
    /// [chosen](super::KeyedLimit::chosen): that is taken off, but for 5 ms. So a request waits for at most the longest
    /// deadline of its layers, and 5 ms for each layer that found nothing left.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.set_limiter(|limiter| limiter.deadline(deadline))
    }

    /// When a client is to come back that only [reserved](super::KeyedLimit::settle) units refuse: see
    /// [`Limiter::retry_reserved_after`](crate::Limiter::retry_reserved_after). Default: one second, or that of the limiter
    /// the layer is made [on](RateLimitLayer::on).
    pub fn retry_reserved_after(self, wait: Duration) -> Self {
        self.set_limiter(|limiter| limiter.retry_reserved_after(wait))
    }

    /// Gives the layer a deny cache of its own: for how long, and of how many, refusals are remembered. Default: the store's,
    /// or that of the limiter it is made [on](RateLimitLayer::on).
    pub fn deny_cache(self, deny_cache: DenyCache) -> Self {
        self.set_limiter(|limiter| limiter.deny_cache(deny_cache))
    }

    /// Gives the layer a breaker of its own: after how many failures the store is not asked for a while. Default: the
    /// store's, or that of the limiter it is made [on](RateLimitLayer::on).
    pub fn breaker(self, breaker: Breaker) -> Self {
        self.set_limiter(|limiter| limiter.breaker(breaker))
    }

    /// Lets requests through while the store cannot decide, without rate-limit headers. The default.
    pub fn fail_open(self) -> Self {
        self.failure_mode(FailureMode::Open)
    }

    /// Answers requests with 503 while the store cannot decide.
    pub fn fail_closed(self) -> Self {
        self.failure_mode(FailureMode::Closed)
    }

    /// Decides in this process, under a share of each limit, while the store cannot. What is more than the share holds at
    /// any time is answered 503: see [`Share`].
    pub fn fail_local(self, share: Share) -> Self {
        self.failure_mode(FailureMode::Local(share))
    }

    /// What to do while the store cannot decide, where that is not known before run time.
    pub fn failure_mode(self, mode: FailureMode) -> Self {
        self.set(|settings| settings.failing = Failing::Always(mode))
    }

    /// What to do while the store cannot decide, by the request and by what it takes after the layer's
    /// [`cost`](Self::cost): cheap requests go on, say, and dear ones do not.
    ///
    /// ```
    /// # use tower_sliding_window::{Everyone, FailureMode, Limit, MemoryStore, RateLimitLayer};
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_day("quota", 9_500).by(Everyone))
    ///     .cost(|request| if request.uri.path() == "/search" { 100 } else { 1 })
    ///     .failure_mode_by(|_, cost| if cost < 100 { FailureMode::Open } else { FailureMode::Closed });
    /// ```
    pub fn failure_mode_by(self, mode: impl Fn(&Parts, u64) -> FailureMode + Send + Sync + 'static) -> Self {
        self.set(|settings| settings.failing = Failing::By(Arc::new(mode)))
    }

    /// Which sets of headers the layer sends. Default: `X-RateLimit-*`.
    ///
    /// ```
    /// # use tower_sliding_window::{Everyone, HeaderSets, Limit, MemoryStore, RateLimitLayer};
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_second("service", 20_000).by(Everyone))
    ///     .headers(HeaderSets::none());
    /// ```
    ///
    /// 1. `Retry-After` on a 429 or 503 belongs to no set, since it is what the answer means: it is always sent.
    ///    [`on_rejection`](Self::on_rejection) can take it out.
    /// 2. A set has the figures of the layer's limits that are not [hidden](super::KeyedLimit::hidden). The default body of a
    ///    rejection names its limit whatever is sent, unless that is hidden.
    /// 3. What layers further in, or the service, have sent of a set stays, whether this layer sends it or not.
    pub fn headers(self, sets: HeaderSets) -> Self {
        self.set(|settings| settings.headers = sets)
    }

    /// How `X-RateLimit-Reset` is written. Default: seconds from now.
    ///
    /// Where layers are stacked, the format of the outermost one that sends the figures is that of all of them, also where
    /// another one refuses.
    pub fn reset_format(self, format: ResetFormat) -> Self {
        self.set(|settings| settings.reset_format = format)
    }

    /// Names the limits in the [shadow](super::KeyedLimit::in_shadow) that would have refused a request in this header
    /// of the response, such as `X-RateLimit-Shadow`, separated by commas, but for [hidden](super::KeyedLimit::hidden) ones.
    /// Default: no header tells of them.
    ///
    /// # Panics
    ///
    /// If `name` is a text that is not a header name. A [`HeaderName`] never panics.
    #[track_caller]
    pub fn shadow_header(self, name: impl TryInto<HeaderName>) -> Self {
        let name = header_name(name);
        self.set(|settings| settings.shadow_header = Some(name))
    }

    /// Waits for room, so long at most, where a limit refuses: for calls to others, which had better be late than not
    /// at all. Default: it is refused at once. What would take longer than that is still refused at once.
    ///
    /// 1. Those who wait for the same limits and keys, through any clone of the layer in this process, stand in line as
    ///    [`Limiter::acquire`](crate::Limiter::acquire) says. Only after that does the service get the request.
    /// 2. The instance of the service that was polled ready waits with the request, and with it what its readiness
    ///    holds, such as a place in a `ConcurrencyLimit`.
    /// 3. The deadline is that of each question to the store, not of the wait.
    /// 4. How many wait is not bounded here: a `ConcurrencyLimit` outside of the layer does that.
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::body::Body;
    /// use hyper_util::{client::legacy::Client, rt::TokioExecutor};
    /// use tower::{ServiceBuilder, ServiceExt};
    /// use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer};
    ///
    /// // The upstream allows 10 calls a second; a caller may wait for five seconds.
    /// let limits = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_second("upstream", 10).by(Everyone).heed_upstream(true))
    ///     .wait_up_to(Duration::from_secs(5))
    ///     .heed_upstream();
    ///
    /// let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    /// // A refusal is a 429 in the upstream's place, so the body has to be one that can be made of a text.
    /// let client = client.map_response(|response| response.map(Body::new));
    /// let client = ServiceBuilder::new().layer(limits).service(client);
    /// ```
    pub fn wait_up_to(self, patience: Duration) -> Self {
        self.set(|settings| settings.patience = Some(patience))
    }

    /// Believes an upstream that says to stay away: by a 429 or a 503 with `Retry-After`, or by `RateLimit` or
    /// `X-RateLimit` headers with nothing remaining. Then each limit that heeds it, and that the request was charged by,
    /// is [closed](crate::Limiter::pause) for its key for so long, its window at most, for all who share the store.
    ///
    /// 1. A limit by the called host, [`UpstreamHost`](super::extract::UpstreamHost), heeds it: a host closes itself alone.
    ///    Any other limit heeds it only if [`KeyedLimit::heed_upstream`](super::KeyedLimit::heed_upstream) says so: for a
    ///    client that calls a single upstream. If no limit heeds it, a log line says so where the layer is applied.
    ///    A limit of ten a second is closed for a second at most. Where the upstream may say more, give the layer a limit of a
    ///    longer window that heeds it, too.
    /// 2. A refusal, which is a 429, a 503 with `Retry-After`, or a 403 with nothing remaining, closes a limit whatever it has
    ///    left: the upstream counts more. Any other answer closes it only if it had something left here, both when the call
    ///    was admitted and when it is answered. Otherwise it says no more than is counted here, and with times that are
    ///    rounded up to seconds.
    /// 3. The response goes out unchanged, after the limits are closed, or after the deadline, which begins when what is to
    ///    be [settled](super::KeyedLimit::settle) is settled. Figures in it are the upstream's, never ours.
    /// 4. Limits in the [shadow](super::KeyedLimit::in_shadow) are not closed.
    /// 5. Calls arrive closer together than they left, by as much as their times on the way differ. So that an upstream with
    ///    the same limit does not refuse what is then too many, a call counts as of its answer: the upstream has counted it by
    ///    then. It counts later than it left by a tenth of the window at most, which is the throughput that this can cost. Until
    ///    then its units are reserved, and settling them is one more question to the store for each call.
    ///
    /// Default: the upstream is not listened to.
    ///
    /// ```
    /// use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer, UpstreamHost};
    ///
    /// // A crawler of many hosts, none of which closes the others.
    /// let limits = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_second("host", 2).by(UpstreamHost))
    ///     .limit(Limit::per_second("total", 100).by(Everyone))
    ///     .heed_upstream();
    /// ```
    pub fn heed_upstream(self) -> Self {
        self.set(|settings| settings.heeds_upstream = true)
    }
}
