//! The layer, which is its own builder.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, Response, request::Parts};
use tower_layer::Layer;

use super::{
    extract::{KeyExtractor, header_name},
    headers::ResetFormat,
    keyed_limit::KeyedLimit,
    limits::{InvalidLimits, Limits},
    policy::{Policy, Settings},
    rejection::{JsonResponse, Rejection},
    service::RateLimit,
};
use crate::{
    key::Key,
    limiter::{DenyCache, FailureMode, Limiter},
    store::Store,
};

/// Guards services with limits. See the [module docs](crate::middleware).
///
/// It becomes a [`Layer`] with its first [`limit`](Self::limit): a layer without limits does not compile.
/// What is counted lives in the store, so all services made by one layer, and all layers on one store, share it.
#[derive(Clone, Debug)]
#[must_use = "a layer guards nothing until it is applied to a service"]
pub struct RateLimitLayer<S, R = JsonResponse, L = Limits> {
    policy: Arc<Policy<S, R, L>>,
}

impl<S: Store> RateLimitLayer<S, JsonResponse, ()> {
    /// A layer that decides by `store`: fail-open, with a deadline of 50 ms, and a cost of 1 for every request.
    pub fn new(store: S) -> Self {
        let (limiter, settings) = (Limiter::new(store), Settings::default());
        Self { policy: Arc::new(Policy { limiter, limits: (), responder: JsonResponse, settings }) }
    }
}

impl<S: Store, R: Clone> RateLimitLayer<S, R, ()> {
    /// Sets limits that come from a configuration.
    ///
    /// # Errors
    ///
    /// [`InvalidLimits`] if there are none, or two of one name.
    pub fn limits(
        self,
        limits: impl IntoIterator<Item = KeyedLimit>,
    ) -> Result<RateLimitLayer<S, R, Limits>, InvalidLimits> {
        let mut limits = limits.into_iter();
        let first = limits.next().ok_or(InvalidLimits::None)?;
        limits.try_fold(self.limit(first), RateLimitLayer::try_limit)
    }

    /// Sets the first limit.
    pub fn limit(self, limit: KeyedLimit) -> RateLimitLayer<S, R, Limits> {
        let Policy { limiter, limits: (), responder, settings } = Arc::unwrap_or_clone(self.policy);
        RateLimitLayer { policy: Arc::new(Policy { limiter, limits: Limits::new(limit), responder, settings }) }
    }
}

impl<S: Store, R: Clone> RateLimitLayer<S, R, Limits> {
    /// Adds a limit. A request is admitted by all limits of the layer or charged to none.
    ///
    /// # Panics
    ///
    /// If the layer has a limit of this name already. Where names come from a configuration there is
    /// [`try_limit`](Self::try_limit).
    #[track_caller]
    pub fn limit(self, limit: KeyedLimit) -> Self {
        match self.try_limit(limit) {
            Ok(layer) => layer,
            Err(error) => panic!("{error}"),
        }
    }

    /// Adds a limit, as [`limit`](Self::limit) does.
    ///
    /// # Errors
    ///
    /// [`InvalidLimits`] if the layer has a limit of this name already.
    pub fn try_limit(mut self, limit: KeyedLimit) -> Result<Self, InvalidLimits> {
        Arc::make_mut(&mut self.policy).limits.push(limit)?;
        Ok(self)
    }
}

impl<S: Store, R: Clone, L: Clone> RateLimitLayer<S, R, L> {
    /// How many units a request takes of every limit of the layer that has no [cost](KeyedLimit::cost) of its own.
    /// Default: 1. With a cost of 0 a request is free, and is let through however much is used.
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

    /// Counts CORS preflights, too: `OPTIONS` with `Origin` and `Access-Control-Request-Method`. Default: they are let
    /// through uncounted, since a browser sends them of itself, and the request proper is counted. Where `OPTIONS` does
    /// work of its own, anybody can send it so.
    pub fn count_preflights(self) -> Self {
        self.set(|settings| settings.gate.count_preflights())
    }

    /// Lets requests through uncounted whose key is one of these, such as those of a monitor or of your own office. A
    /// request that the extractor finds no key in is not on the list.
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

    /// Answers requests with 403 whose key is one of these, before anything else: see [`allow`](Self::allow). A request
    /// that the extractor finds no key in is not on the list, so this is no authentication.
    pub fn deny(self, extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Self {
        self.set(|settings| settings.gate.deny(extractor, keys))
    }

    /// How long a decision may take before the failure mode decides. Default: 50 ms.
    pub fn deadline(self, deadline: Duration) -> Self {
        self.set_limiter(|limiter| limiter.deadline(deadline))
    }

    /// For how long, and how many, refusals may be repeated without asking the store. Default: [`DenyCache::new`].
    pub fn deny_cache(self, deny_cache: DenyCache) -> Self {
        self.set_limiter(|limiter| limiter.deny_cache(deny_cache))
    }

    /// Lets requests through while the store cannot decide, without rate-limit headers. The default.
    pub fn fail_open(self) -> Self {
        self.failure_mode(FailureMode::Open)
    }

    /// Answers requests with 503 while the store cannot decide.
    pub fn fail_closed(self) -> Self {
        self.failure_mode(FailureMode::Closed)
    }

    /// What to do while the store cannot decide, where that is not known before run time.
    pub fn failure_mode(self, mode: FailureMode) -> Self {
        self.set(|settings| settings.failure_mode = mode)
    }

    /// How `X-RateLimit-Reset` is written. Default: seconds from now.
    pub fn reset_format(self, format: ResetFormat) -> Self {
        self.set(|settings| settings.reset_format = format)
    }

    /// Names the limits in the [shadow](KeyedLimit::in_shadow) that would have refused a request in this header of the
    /// response, such as `X-RateLimit-Shadow`, separated by commas. Default: no header tells of them.
    ///
    /// # Panics
    ///
    /// If `name` is a text that is not a header name. A [`HeaderName`] never panics.
    #[track_caller]
    pub fn shadow_header(self, name: impl TryInto<HeaderName>) -> Self {
        let name = header_name(name);
        self.set(|settings| settings.shadow_header = Some(name))
    }

    /// Makes the responses to rejected requests, out of the reason and a head with status and headers: see
    /// [`rejection`](super::rejection).
    pub fn on_rejection<F, B>(self, responder: F) -> RateLimitLayer<S, F, L>
    where
        F: Fn(&Rejection, Response<()>) -> Response<B>,
    {
        let Policy { limiter, limits, responder: _, settings } = Arc::unwrap_or_clone(self.policy);
        RateLimitLayer { policy: Arc::new(Policy { limiter, limits, responder, settings }) }
    }

    fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut Arc::make_mut(&mut self.policy).settings);
        self
    }

    fn set_limiter(mut self, change: impl FnOnce(Limiter<S>) -> Limiter<S>) -> Self {
        let policy = Arc::make_mut(&mut self.policy);
        policy.limiter = change(policy.limiter.clone());
        self
    }
}

impl<I, S, R> Layer<I> for RateLimitLayer<S, R> {
    type Service = RateLimit<I, S, R>;

    fn layer(&self, inner: I) -> Self::Service {
        RateLimit::new(inner, Arc::clone(&self.policy))
    }
}
