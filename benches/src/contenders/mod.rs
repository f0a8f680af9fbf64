//! The contenders: each decides whether a key is admitted. The services differ only in their
//! layers.

mod asked;
mod bare_log;
mod floor;
mod log_by_time;
mod naive;
mod nothing;
mod ours;
mod tower_governor;
mod tower_rate_limit_redis;
#[cfg(tower_rate_limiter)]
mod tower_rate_limiter;

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use http::{HeaderValue, Request, Response, StatusCode};
use tower::Service;

#[cfg(tower_rate_limiter)]
pub(crate) use self::tower_rate_limiter::{TOWER_RATE_LIMITER, tower_rate_limiter};
pub(crate) use self::{
    asked::Asked,
    bare_log::{BARE_LOG, bare_log},
    floor::Floor,
    log_by_time::{LOG_BY_TIME, fill_log_by_time},
    naive::Naive,
    nothing::nothing,
    ours::{
        OURS, OURS_WITH_LONG_PREFETCH, OURS_WITH_PREFETCH, long_prefetches, our_layer,
        our_layer_on, ours, ours_in_process, ours_routed, ours_thrice, ours_with_prefetch, spent,
        wide, wide_in,
    },
    tower_governor::{
        TOWER_GOVERNOR, tower_governor, tower_governor_routed, tower_governor_without_headers,
    },
    tower_rate_limit_redis::{
        TOWER_RATE_LIMIT_REDIS, tower_rate_limit_redis, tower_rate_limit_redis_layer,
        tower_rate_limit_redis_spent, tower_rate_limit_redis_thrice,
    },
};

/// A contender that decides. Each task has its own clone.
pub(crate) trait Contender: Clone + Send + 'static {
    /// True if `key` is admitted.
    fn decide(&mut self, key: usize) -> impl Future<Output = bool> + Send;

    /// The same, for a load under which a limiter may fail: with the status of its response.
    fn try_decide(&mut self, key: usize) -> impl Future<Output = Result<bool, StatusCode>> + Send {
        async move { Ok(self.decide(key).await) }
    }
}

/// A limit in process. A rival without a window gives a unit back as often as the window allows on
/// average.
#[derive(Clone, Copy)]
pub(crate) struct Quota {
    pub(crate) units: u32,
    pub(crate) window: Duration,
}

/// The service behind every layer. Its bodies are axum's, because tower_governor cannot respond
/// with simpler ones.
#[derive(Clone)]
pub(crate) struct Inner;

impl Service<Request<()>> for Inner {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}

/// A request of a key.
fn request(key: usize) -> Request<()> {
    let mut request = Request::new(());
    request
        .headers_mut()
        .insert("x-key", HeaderValue::from(key));
    request
}

/// A tower service.
#[derive(Clone)]
pub(crate) struct Layered<S>(pub(crate) S);

impl<S> Contender for Layered<S>
where
    S: Service<Request<()>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    async fn decide(&mut self, key: usize) -> bool {
        // A limiter that fails is fast, which must not count.
        self.try_decide(key)
            .await
            .unwrap_or_else(|status| panic!("a limiter failed with {status}"))
    }

    async fn try_decide(&mut self, key: usize) -> Result<bool, StatusCode> {
        // Every layer here is ready when its inner service is, and the inner service always is.
        let Ok(response) = self.0.call(request(key)).await;
        is_admitted(&response)
    }
}

fn is_admitted(response: &Response<Body>) -> Result<bool, StatusCode> {
    match response.status() {
        StatusCode::OK => Ok(true),
        StatusCode::TOO_MANY_REQUESTS => Ok(false),
        status => Err(status),
    }
}

/// A route of axum behind a layer.
#[derive(Clone)]
pub(crate) struct Routed(Router);

impl Routed {
    pub(crate) fn new() -> Self {
        Self(Router::new().route("/", get(|| async {})))
    }
}

impl Contender for Routed {
    async fn decide(&mut self, key: usize) -> bool {
        let Ok(response) = self.0.call(request(key).map(|()| Body::empty())).await;
        is_admitted(&response).unwrap_or_else(|status| panic!("a limiter failed with {status}"))
    }
}
