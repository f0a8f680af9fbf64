//! The layer, which is its own builder. This file sets its store, its limits and its responder;
//! `options.rs` sets everything else.

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

/// Guards services with limits. See the [module docs](crate::middleware).
///
/// A layer needs at least one [`limit`](Self::limit) before it is applied. The store counts the
/// units, so all services of one layer share them. Layers on one store also share the units of
/// limits that have the same name, window and algorithm.
///
/// The guarded service has to be `Clone`, as services of axum, hyper and tonic are. A request that
/// waits for its decision takes the service along, and leaves a clone for the next request. Put a
/// `tower::buffer::BufferLayer` between the layer and a service that is not `Clone`.
#[must_use = "a layer guards nothing until it is applied to a service"]
pub struct RateLimitLayer<R = JsonResponse> {
    pub(super) policy: Arc<Policy>,
    responder: Arc<R>,
}

impl RateLimitLayer {
    /// Makes a layer on a store, or on a limiter. By default, every request costs 1. A layer on a
    /// store fails open, and its [deadline](Self::deadline) follows the round trip.
    ///
    /// A layer on a limiter has the limiter's deadline, [refusal cache](Limiter::refusal_cache),
    /// [breaker](Limiter::breaker) and [retry time](Limiter::retry_reserved_after). The limiter and
    /// all layers on it share everything that clones of a limiter share. The layer fails local if
    /// the limiter [does](Limiter::fail_local). Otherwise the layer fails open. Settings of the
    /// layer do not change the limiter.
    pub fn new(limiter: impl Into<Limiter>) -> Self {
        Self {
            policy: Arc::new(Policy::new(limiter.into())),
            responder: Arc::new(JsonResponse),
        }
    }
}

impl<R> RateLimitLayer<R> {
    /// Adds a limit, made by [`Limit::by`](crate::Limit::by). A request is admitted by all limits
    /// of the layer, or charged by none.
    ///
    /// # Panics
    ///
    /// If the layer already has a limit of this name, or if an option of the limit would have no
    /// effect. For names from a configuration, use [`limits`](Self::limits).
    #[track_caller]
    pub fn limit(self, limit: KeyedLimit) -> Self {
        built(self.limits([limit]))
    }

    /// Adds limits from a configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if, after the call, the layer has no limit, or two limits of one name, or an
    /// option without effect. These options have no effect:
    ///
    /// * on a [concurrent](crate::Limit::concurrent) limit,
    ///   [`heed_upstream`](KeyedLimit::heed_upstream), [`settle`](KeyedLimit::settle),
    ///   [`count_afterwards`](KeyedLimit::count_afterwards), [`lease`](KeyedLimit::lease),
    ///   [`ban`](KeyedLimit::ban), and a [`cost`](KeyedLimit::cost) of its own;
    /// * `settle` beside `count_afterwards`;
    /// * `lease` without `settle`;
    /// * a `cost` of its own beside `count_afterwards`;
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
    /// requests. A responder is a closure, a responder of this crate, or a type of your own. A
    /// closure gets the [`Rejection`](super::Rejection), and a head with the status and the
    /// headers. Write the types of the closure's arguments. A type of your own also gets the
    /// request: [a page for browsers](crate::guide::recipes#a-page-for-browsers) is an example.
    /// Default: [`JsonResponse`].
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
    /// If the body of the service cannot be made of a `String`, a closure makes the body from the
    /// text of [`Rejection::problem`](super::Rejection::problem):
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
    /// If the layer has no limit. Where limits come from a configuration,
    /// [`RateLimitLayer::limits`] returns an error instead.
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

// `Clone` and `Debug` are not derived, since a derive would require `R: Clone` and `R: Debug`. A
// responder is shared, and a closure is not `Debug`.
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
