//! The layer, which is its own builder.

use std::{fmt, sync::Arc};

use http::Response;
use tower_layer::Layer;

use super::{
    keyed_limit::KeyedLimit,
    limits::{InvalidLimits, Limits},
    policy::Policy,
    rejection::{JsonResponse, Rejection},
    service::RateLimit,
    settings::{Failing, Settings},
};
use crate::{
    limiter::{FailureMode, Limiter},
    store::Store,
};

/// Guards services with limits. See the [module docs](crate::middleware).
///
/// It becomes a [`Layer`] with its first [`limit`](Self::limit): a layer without limits does not compile.
/// What is counted lives in the store, so all services made by one layer, and all layers on one store, share it.
#[must_use = "a layer guards nothing until it is applied to a service"]
pub struct RateLimitLayer<S, R = JsonResponse, L = Limits> {
    policy: Arc<Policy<S, R, L>>,
}

impl<S: Store> RateLimitLayer<S, JsonResponse, ()> {
    /// A layer that decides by `store`: fail-open, with a deadline of 50 ms, and a cost of 1 for every request.
    pub fn new(store: S) -> Self {
        Self::on(Limiter::new(store))
    }

    /// A layer that decides by `limiter`, with its deadline, and shares with it and with other layers on it what clones
    /// of a limiter share. It is fail-local if the limiter [is](Limiter::fail_local), else fail-open. A setting of the
    /// layer's is not the limiter's.
    pub fn on(limiter: Limiter<S>) -> Self {
        let failing = limiter.share().map(|share| Failing::Always(FailureMode::Local(share))).unwrap_or_default();
        let settings = Settings { failing, ..Settings::default() };
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
    /// Makes the responses to rejected requests, out of the reason and a head with status and headers: see
    /// [`rejection`](super::rejection).
    pub fn on_rejection<F, B>(self, responder: F) -> RateLimitLayer<S, F, L>
    where
        F: Fn(&Rejection, Response<()>) -> Response<B>,
    {
        let Policy { limiter, limits, responder: _, settings } = Arc::unwrap_or_clone(self.policy);
        RateLimitLayer { policy: Arc::new(Policy { limiter, limits, responder, settings }) }
    }

    pub(super) fn set(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(&mut Arc::make_mut(&mut self.policy).settings);
        self
    }

    pub(super) fn set_limiter(mut self, change: impl FnOnce(Limiter<S>) -> Limiter<S>) -> Self {
        let policy = Arc::make_mut(&mut self.policy);
        policy.limiter = change(policy.limiter.clone());
        self
    }
}

impl<I, S, R> Layer<I> for RateLimitLayer<S, R> {
    type Service = RateLimit<I, S, R>;

    fn layer(&self, inner: I) -> Self::Service {
        let Policy { settings, limits, .. } = &*self.policy;
        if settings.heeds_upstream && !limits.traits().heeds_upstream {
            settings.events.heeded_by_none();
        }
        RateLimit::new(inner, Arc::clone(&self.policy))
    }
}

// Not derived: a responder is shared, so it need not be `Clone`, and a closure is not `Debug`.
impl<S, R, L> Clone for RateLimitLayer<S, R, L> {
    fn clone(&self) -> Self {
        Self { policy: Arc::clone(&self.policy) }
    }
}

impl<S: fmt::Debug, R, L: fmt::Debug> fmt::Debug for RateLimitLayer<S, R, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer").field("policy", &self.policy).finish()
    }
}
