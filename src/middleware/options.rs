//! The layer's options: all builder methods except those for limits and the responder.

use std::{borrow::Cow, sync::Arc, time::Duration};

use http::request::Parts;

use super::{
    events::Events, extract::IsMatch, headers::HeaderSets, layer::RateLimitLayer, policy::list,
};
use crate::limiter::{FailureMode, Share};

impl<R> RateLimitLayer<R> {
    /// Names the layer. The name becomes the label `layer` in [metrics](mod@crate::metrics) and the
    /// field `layer` in log lines. Layers may share a name. Default: no name.
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

    /// Sets a request's cost: the units that it takes from each limit in the layer. Limits with
    /// their own [cost](super::KeyedLimit::cost), and limits that [count
    /// afterwards](super::KeyedLimit::count_afterwards), ignore this cost. Default: 1. A request
    /// with a cost of 0 is free, and is admitted even if nothing is left. It still takes a place
    /// from a [concurrent](crate::Limit::concurrent) limit, and still needs one unit from a limit
    /// that [settles](super::KeyedLimit::settle) or [counts
    /// afterwards](super::KeyedLimit::count_afterwards).
    pub fn cost(self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.set(|policy| policy.cost = Some(Arc::new(cost)))
    }

    /// Lets requests that match the closure pass uncounted. To match a list of keys, use
    /// [`one_of`](super::extract::KeyExtractor::one_of); for address ranges,
    /// [`within`](super::extract::ClientIp::within). If `exempt` is called several times, a request
    /// is exempt if any closure matches. A request whose key is absent or cannot be read is never
    /// on a list.
    ///
    /// CORS preflights count like other requests, unless a `CorsLayer` outside the limits answers
    /// them. Exempting `OPTIONS` leaves preflights uncounted, but then any client can send
    /// `OPTIONS` requests uncounted.
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

    /// Responds with 403 to requests that match the closure, before anything else happens. The
    /// closure works as in [`exempt`](Self::exempt). If `deny` is called several times, a request
    /// is denied if any closure matches.
    ///
    /// * A request without a key is not on any list, so `deny` does not replace authentication.
    /// * A key that is present but unreadable, such as an `Authorization` sent twice, may be a
    ///   denied key. Such a request is rejected with the status of the
    ///   [`KeyError`](super::extract::KeyError): 401 for an [`ApiKey`](super::extract::ApiKey).
    /// * A list sees only the key that the extractor finds. If your authentication also accepts a
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
    /// deadline follows the store's round trip, from 50 ms next to the store up to 1 s: see
    /// [`Limiter::deadline`](crate::Limiter::deadline).
    ///
    /// Time already spent waiting in outer layers is subtracted, but at least 5 ms remain. So a
    /// request waits at most the longest deadline among its layers, plus 5 ms for each layer whose
    /// deadline was already used up.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.set(|policy| policy.limiter = policy.limiter.clone().deadline(deadline))
    }

    /// Lets requests pass without rate-limit headers while the store cannot decide (fail-open).
    /// This is the default. To fail differently for some requests, such as fail-closed for
    /// expensive ones, give their routes a separate layer.
    pub fn fail_open(self) -> Self {
        self.failure_mode(FailureMode::Open)
    }

    /// Responds with 503 while the store cannot decide. A request still passes if no limit can
    /// refuse it. This is the case if it costs 0, or if only [shadow](crate::KeyedLimit::in_shadow)
    /// limits charge it.
    pub fn fail_closed(self) -> Self {
        self.failure_mode(FailureMode::Closed)
    }

    /// While the store cannot decide, the process decides locally, under a share of each limit. A
    /// request that costs more than the whole share gets a 503: see [`Share`].
    pub fn fail_local(self, share: Share) -> Self {
        self.failure_mode(FailureMode::Local(share))
    }

    /// Chooses the rate-limit headers to send. Default: `X-RateLimit-*`.
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
    /// * `Retry-After` is not part of any set and is sent in any case: with a refusal if waiting
    ///   helps, and with a 503 because the store cannot decide. A 429 for a cost above the limit
    ///   does not have it. A [responder](Self::respond_with) can remove it.
    /// * The headers show only limits that are not [hidden](super::KeyedLimit::hidden). The default
    ///   rejection body names the limit that refuses, even if the layer sends no headers. It never
    ///   names a hidden limit.
    /// * If the layer does not send a set, the headers in that set stay as the service or inner
    ///   layers wrote them.
    pub fn headers(self, sets: HeaderSets) -> Self {
        self.set(|policy| policy.headers = sets)
    }

    /// Lets a request wait for capacity for up to `max_wait` instead of being refused at once. Use
    /// it in a layer around a client, whose calls may be late but should not fail. Default: a
    /// request is refused at once. If the first request in line would have to wait longer than
    /// `max_wait`, a new request is refused at once. If there is no line, the new request is itself
    /// the first. In all other cases, it waits in line, and is refused if its turn does not come
    /// within `max_wait`.
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
    /// * Requests for the same limits and keys wait in one line, shared by all clones of the layer
    ///   on one runtime: see [`Limiter::acquire`](crate::Limiter::acquire).
    /// * The inner service waits along with the request, so a waiting request keeps its permit from
    ///   a `ConcurrencyLimit` inside the layer.
    /// * The layer does not bound the number of waiters. To bound it, put a `ConcurrencyLimit`
    ///   outside the layer.
    /// * The deadline bounds each store reply, not the wait. While the store fails or is too slow,
    ///   the first request in line retries every 100 ms, and fail-open or fail-closed decides only
    ///   after `max_wait`. So keep `max_wait` short on a server. Under fail-local, the share
    ///   decides in the meantime.
    pub fn wait_up_to(self, max_wait: Duration) -> Self {
        self.set(|policy| policy.max_wait = Some(max_wait))
    }

    /// Frees the places of [concurrent](crate::Limit::concurrent) limits when the response begins.
    /// Default: they are freed when its body ends, or is dropped because the client has left.
    ///
    /// Use this if the layer cannot tie the places to the service's body: see
    /// [bodies](crate::guide::at_most_n_at_once#bodies). A custom body or a task can still hold
    /// them by keeping the [`Decision`](crate::Decision) from the request's extensions.
    pub fn free_with_head(self) -> Self {
        self.set(|policy| policy.frees_with_head = true)
    }

    fn failure_mode(self, mode: FailureMode) -> Self {
        self.set(|policy| policy.limiter.failure_mode = mode)
    }
}
