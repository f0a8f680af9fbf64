//! The options of a layer: all methods of its builder, except those for limits and the responder.

use std::{borrow::Cow, sync::Arc, time::Duration};

use http::request::Parts;

use super::{
    events::Events, extract::IsMatch, headers::HeaderSets, layer::RateLimitLayer, policy::list,
};
use crate::limiter::{FailureMode, Share};

impl<R> RateLimitLayer<R> {
    /// Names the layer. The name is the label `layer` of [metrics](mod@crate::metrics), and the
    /// field `layer` of log lines. Layers may share a name. Default: no name.
    ///
    /// ```
    /// # use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer};
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .named("api")
    ///     .limit(Limit::per_minute("requests", 60).by(PeerIp::new()));
    /// ```
    pub fn named(self, name: impl Into<Cow<'static, str>>) -> Self {
        let name = name.into();
        self.set(|policy| {
            policy.events = Arc::new(Events::of(name.clone()));
            policy.limiter = policy.limiter.clone().in_layer(name);
        })
    }

    /// Sets the cost of a request: the units that the request takes of each limit of the layer. A
    /// limit with a [cost](super::KeyedLimit::cost) of its own ignores the cost of the layer, and
    /// so does a limit that [counts afterwards](super::KeyedLimit::count_afterwards). Default: 1. A
    /// request with a cost of 0 is free, and is admitted even if nothing is left. But such a
    /// request still takes a place of a [concurrent](crate::Limit::concurrent) limit, and still
    /// needs one unit of a limit that [settles](super::KeyedLimit::settle) or [counts
    /// afterwards](super::KeyedLimit::count_afterwards).
    pub fn cost(self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.set(|policy| policy.cost = Some(Arc::new(cost)))
    }

    /// Lets requests through uncounted. The closure tells which. There are closures for a list of
    /// keys, [`one_of`](super::extract::KeyExtractor::one_of), and of address ranges,
    /// [`within`](super::extract::ClientIp::within). After several calls of `exempt`, a request is
    /// exempt if any of the closures says so. A request without a key, or with a key that cannot be
    /// read, is on no list.
    ///
    /// CORS preflights count like all other requests, except if a `CorsLayer` outside of the limits
    /// answers them. If `exempt` lets `OPTIONS` through, preflights do not count either, but then
    /// any client can send `OPTIONS` requests uncounted.
    ///
    /// ```
    /// # use tower_sliding_window::{ApiKey, KeyExtractor, Limit, MemoryStore, PeerIp, RateLimitLayer, Secret};
    /// # fn layer() -> Result<(), Box<dyn std::error::Error>> {
    /// let (peer, api_key) = (PeerIp::new(), ApiKey::bearer(&Secret::new(std::env::var("RATE_LIMIT_SECRET")?)?));
    /// let (office, leaked) = (peer.key("203.0.113.7".parse()?), api_key.key("t0ken"));
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("requests", 60).by(peer.clone()))
    ///     .exempt(|request| request.uri.path() == "/health")
    ///     .exempt(peer.one_of([office]))
    ///     .deny(api_key.one_of([leaked]));
    /// # Ok(()) }
    /// ```
    pub fn exempt<T: IsMatch>(
        self,
        requests: impl Fn(&Parts) -> T + Send + Sync + 'static,
    ) -> Self {
        self.set(|policy| policy.exempt.push(list(requests)))
    }

    /// Responds with 403 to requests, before anything else. The closure tells which, as for
    /// [`exempt`](Self::exempt). After several calls of `deny`, a request is denied if any of the
    /// closures says so.
    ///
    /// * A request without a key is on no list, so `deny` is no authentication.
    /// * A key that is present but cannot be read, such as an `Authorization` sent twice, may be a
    ///   denied key. A request with such a key is rejected with the status of the
    ///   [`KeyError`](super::extract::KeyError): 401 for an [`ApiKey`](super::extract::ApiKey).
    /// * A list knows only the key that the extractor finds. If your authentication also accepts a
    ///   token from the query or a cookie, a client can still use a denied token there.
    ///
    /// ```
    /// # use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer};
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("requests", 60).by(PeerIp::new()))
    ///     .deny(|request| request.uri.path().ends_with(".php"));
    /// ```
    pub fn deny<T: IsMatch>(self, requests: impl Fn(&Parts) -> T + Send + Sync + 'static) -> Self {
        self.set(|policy| policy.denied.push(list(requests)))
    }

    /// Sets how long a request waits for a decision before the failure mode decides. Default: the
    /// deadline follows the round trip of the store, from 50 ms next to the store up to 1 s: see
    /// [`Limiter::deadline`](crate::Limiter::deadline).
    ///
    /// The time that a request has already waited in layers further out is subtracted from the
    /// deadline. At least 5 ms of the deadline remain. So a request waits for at most the longest
    /// deadline of its layers, plus 5 ms for each layer whose deadline was already used up.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.set(|policy| policy.limiter = policy.limiter.clone().deadline(deadline))
    }

    /// Lets requests through while the store cannot decide, without rate-limit headers. Fail-open
    /// is the default. To have another mode for some requests, such as fail-closed for expensive
    /// requests, give the routes of these requests a layer of their own.
    pub fn fail_open(self) -> Self {
        self.failure_mode(FailureMode::Open)
    }

    /// Responds with 503 while the store cannot decide. A request that no limit can refuse is let
    /// through: it has a cost of 0, or only limits in the [shadow](crate::KeyedLimit::in_shadow)
    /// charge it.
    pub fn fail_closed(self) -> Self {
        self.failure_mode(FailureMode::Closed)
    }

    /// Decides in this process while the store cannot decide, under a share of each limit. A
    /// request that costs more than the whole share gets a 503: see [`Share`].
    pub fn fail_local(self, share: Share) -> Self {
        self.failure_mode(FailureMode::Local(share))
    }

    /// Chooses the sets of headers that the layer sends. Default: `X-RateLimit-*`.
    ///
    /// ```
    /// # use tower_sliding_window::{Everyone, HeaderSets, Limit, MemoryStore, RateLimitLayer};
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_second("service", 20_000).by(Everyone))
    ///     .headers(HeaderSets::NONE);
    /// ```
    ///
    /// * `HeaderSets::BOTH` sends `RateLimit` and `RateLimit-Policy` as well: see
    ///   [`HeaderSets::RATE_LIMIT`].
    /// * `X-RateLimit-Reset` can be a [Unix time](HeaderSets::X_RATE_LIMIT_UNIX), as GitHub sends
    ///   it.
    /// * `Retry-After` belongs to no set: the layer sends it whatever sets you choose. A refusal
    ///   has a `Retry-After` if waiting helps. A 503 because the store cannot decide has a
    ///   `Retry-After`, too. A 429 for a cost above the limit has no `Retry-After`. A
    ///   [responder](Self::respond_with) can remove the header.
    /// * The headers show only limits that are not [hidden](super::KeyedLimit::hidden). The default
    ///   body of a rejection names the limit that refuses, even if the layer sends no headers. The
    ///   default body never names a hidden limit.
    /// * If the layer does not send a set, the headers of that set stay as the service or layers
    ///   further in have written them.
    pub fn headers(self, sets: HeaderSets) -> Self {
        self.set(|policy| policy.headers = sets)
    }

    /// Lets a request wait for capacity for up to `max_wait`, instead of refusing the request at
    /// once. This option is for a layer around a client, whose calls may be late, but should not
    /// fail. Default: a request is refused at once. If the first request in line has to wait for
    /// longer than `max_wait`, a new request is refused at once. Without a line, the new request
    /// itself is the first. Any other request waits in line, and is refused if its turn does not
    /// come within `max_wait`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use axum::body::Body;
    /// use hyper_util::{client::legacy::Client, rt::TokioExecutor};
    /// use tower::{ServiceBuilder, ServiceExt};
    /// use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer};
    ///
    /// // The upstream allows 600 calls a minute. A call may wait for five seconds.
    /// let limits = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("upstream", 600).by(Everyone).heed_upstream())
    ///     .wait_up_to(Duration::from_secs(5));
    ///
    /// let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    /// // A refusal is a 429 with a text, so the response needs a body that can be made of a text.
    /// let client = client.map_response(|response| response.map(Body::new));
    /// let client = ServiceBuilder::new().layer(limits).service(client);
    /// ```
    ///
    /// * Requests for the same limits and keys wait in one line, which all clones of the layer on
    ///   one runtime share: see [`Limiter::acquire`](crate::Limiter::acquire).
    /// * The inner service waits together with the request. So a waiting request holds the permit
    ///   of a `ConcurrencyLimit` inside of the layer.
    /// * The layer does not bound the number of waiting requests. A `ConcurrencyLimit` outside of
    ///   the layer bounds this number.
    /// * The deadline bounds the time of each reply of the store, not the wait. While the store
    ///   fails or does not answer in time, the first request in line asks again every 100 ms.
    ///   Fail-open or fail-closed decides only when `max_wait` is over. So keep `max_wait` short on
    ///   a server. Under fail-local, the share decides while the store cannot decide.
    pub fn wait_up_to(self, max_wait: Duration) -> Self {
        self.set(|policy| policy.max_wait = Some(max_wait))
    }

    /// Frees the places of [concurrent](crate::Limit::concurrent) limits when the response begins.
    /// Default: the places are freed when the body of the response has ended, or is dropped because
    /// the client has left.
    ///
    /// Use this option if the layer cannot make the body of the service hold places: see
    /// [bodies](crate::guide::at_most_n_at_once#bodies). A body of your own, or a task, can still
    /// hold the places: the body or the task keeps the [`Decision`](crate::Decision) from the
    /// extensions of the request.
    pub fn free_with_head(self) -> Self {
        self.set(|policy| policy.frees_with_head = true)
    }

    fn failure_mode(self, mode: FailureMode) -> Self {
        self.set(|policy| policy.limiter.failure_mode = mode)
    }
}
