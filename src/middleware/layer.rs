//! The layer, which is its own builder. The methods in this file set the store, the limits and the
//! responder. The methods in `options.rs` set everything else.

use std::{fmt, sync::Arc};

use tower_layer::Layer;

use super::{
    extract::built,
    policy::{KeyedLimit, Policy},
    rejection::JsonResponse,
    service::RateLimit,
};
use crate::{error::ConfigError, limiter::Limiter};

const NO_LIMITS: &str = "a layer needs at least one limit: add `.limit(..)`";

/// A rate-limiting [`Layer`]. See the [module docs](crate::middleware).
///
/// It needs at least one [`limit`](Self::limit) before it is applied. Units are counted in the
/// store, so all services under one layer share them. Layers on one store also share the units of
/// limits with the same name, window and algorithm.
///
/// The guarded service must be `Clone`, as services in axum, hyper and tonic are. A request that
/// waits for its decision takes the service with it, and leaves a clone for the next request. For a
/// service that is not `Clone`, put a `tower::buffer::BufferLayer` between it and the layer.
#[must_use = "a layer guards nothing until it is applied to a service"]
pub struct RateLimitLayer<R = JsonResponse> {
    pub(super) policy: Arc<Policy>,
    responder: Arc<R>,
}

impl RateLimitLayer {
    /// Makes a layer on a store or a limiter. By default, every request costs 1. A layer on a store
    /// fails open, and its [deadline](Self::deadline) follows the round trip.
    ///
    /// A layer on a limiter has the limiter's deadline, [refusal cache](Limiter::refusal_cache),
    /// [breaker](Limiter::breaker) and [retry time](Limiter::retry_reserved_after), and shares with
    /// the limiter everything that its clones share. The layer fails local if the limiter
    /// [does](Limiter::fail_local). Otherwise it fails open. Settings on the layer do not change
    /// the limiter.
    pub fn new(limiter: impl Into<Limiter>) -> Self {
        Self {
            policy: Arc::new(Policy::new(limiter.into())),
            responder: Arc::new(JsonResponse),
        }
    }
}

impl<R> RateLimitLayer<R> {
    /// Adds a limit, made by [`Limit::by`](crate::Limit::by). A request is either admitted by all
    /// limits in the layer, or not charged by any.
    ///
    /// # Panics
    ///
    /// If the layer already has a limit with this name, or if one of its options would have no
    /// effect. For names from a configuration, use [`limits`](Self::limits).
    #[track_caller]
    pub fn limit(self, limit: KeyedLimit) -> Self {
        built(self.limits([limit]))
    }

    /// Adds limits from a configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the layer would have no limits, two limits with the same name, or an
    /// option that has no effect. These options have no effect:
    ///
    /// * on a [concurrent](crate::Limit::concurrent) limit,
    ///   [`heed_upstream`](KeyedLimit::heed_upstream), [`settle`](KeyedLimit::settle),
    ///   [`count_afterwards`](KeyedLimit::count_afterwards), [`lease`](KeyedLimit::lease),
    ///   [`ban`](KeyedLimit::ban), and its own [`cost`](KeyedLimit::cost);
    /// * `settle` together with `count_afterwards`;
    /// * `lease` without `settle`;
    /// * a limit's own `cost` together with `count_afterwards`;
    /// * `heed_upstream` on a [split](crate::split::Split::by) limit.
    pub fn limits(
        mut self,
        limits: impl IntoIterator<Item = KeyedLimit>,
    ) -> Result<Self, ConfigError> {
        let policy = Arc::make_mut(&mut self.policy);
        limits
            .into_iter()
            .try_for_each(|limit| policy.push(limit))?;
        if policy.limits.is_empty() {
            return Err(ConfigError::new(NO_LIMITS));
        }
        Ok(self)
    }

    /// Sets the [responder](super::RejectionResponse), which makes the responses to rejected
    /// requests: a closure, one from this crate, or your own type. A closure gets the
    /// [`Rejection`](super::Rejection), and a response head with status and headers. Write out the
    /// closure's argument types. Your own type also gets the request, as in [a page for
    /// browsers](crate::guide::recipes#a-page-for-browsers). Default: [`JsonResponse`].
    ///
    /// ```
    /// use axum::body::Body;
    /// use http::Response;
    /// use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, Rejection};
    ///
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("login", 5).by(PeerIp::new()))
    ///     .respond_with(|_: &Rejection, head: Response<()>| head.map(|()| Body::from("Slow down, please.")));
    /// ```
    ///
    /// If the service's body cannot be made from a `String`, convert the text from
    /// [`Rejection::problem`](super::Rejection::problem):
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use http_body_util::{Full, combinators::BoxBody};
    /// use hyper::body::Bytes;
    /// # use http::Response;
    /// # use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, Rejection};
    ///
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("login", 5).by(PeerIp::new()))
    ///     .respond_with(|rejection: &Rejection, head: Response<()>| {
    ///         rejection.problem(head).map(|text| BoxBody::<Bytes, Infallible>::new(Full::from(text)))
    ///     });
    /// ```
    pub fn respond_with<T>(self, responder: T) -> RateLimitLayer<T> {
        RateLimitLayer {
            policy: self.policy,
            responder: Arc::new(responder),
        }
    }

    pub(super) fn set(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(Arc::make_mut(&mut self.policy));
        self
    }
}

impl<I, R> Layer<I> for RateLimitLayer<R> {
    type Service = RateLimit<I, R>;

    /// # Panics
    ///
    /// If the layer has no limit. For limits from a configuration, [`RateLimitLayer::limits`]
    /// returns an error instead.
    #[track_caller]
    fn layer(&self, inner: I) -> Self::Service {
        assert!(!self.policy.limits.is_empty(), "{NO_LIMITS}");
        RateLimit {
            inner,
            policy: Arc::clone(&self.policy),
            responder: Arc::clone(&self.responder),
        }
    }
}

// `Clone` and `Debug` are not derived, since that would require `R: Clone` and `R: Debug`.
// Responders are shared, and closures are not `Debug`.
impl<R> Clone for RateLimitLayer<R> {
    fn clone(&self) -> Self {
        Self {
            policy: Arc::clone(&self.policy),
            responder: Arc::clone(&self.responder),
        }
    }
}

impl<R> fmt::Debug for RateLimitLayer<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer")
            .field("policy", &self.policy)
            .finish()
    }
}
