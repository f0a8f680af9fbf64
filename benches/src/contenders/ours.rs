//! This crate.

use std::time::Duration;

use http::request::Parts;
use tower::Layer;
use tower_sliding_window::{
    Header, Key, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore,
    extract::KeyError,
    limit::prefetch::{DEFAULT_LIFE, MAX_LIFE},
    middleware::RateLimit,
};

use super::{Inner, Layered, Quota, Routed};
use crate::{load::HOUR, server::Server};

/// Our name in tables and plots.
pub(crate) const OURS: &str = "tower-sliding-window";

/// Our name for a limit with prefetch.
pub(crate) const OURS_WITH_PREFETCH: &str = "tower-sliding-window, prefetches";

/// Our name for a limit with prefetch that live as long as they may: for a second.
pub(crate) const OURS_WITH_LONG_PREFETCH: &str = "tower-sliding-window, prefetches of 1 s";

/// A limit that is never reached.
pub(crate) fn wide() -> Limit {
    wide_in(HOUR)
}

/// A limit that is never reached, with its own window.
pub(crate) fn wide_in(window: Duration) -> Limit {
    Limit::per("wide", 1_000_000_000, window)
}

/// A limit that is reached at once, and stays so for the whole measurement.
pub(crate) fn spent() -> Limit {
    Limit::per_hour("spent", 1)
}

/// The longest default deadline. A longer one is beyond the reply timeout, and takes timers that
/// most requests do not need.
const DEADLINE: Duration = Duration::from_secs(1);

/// Fail-closed, so that only decisions are counted.
pub(crate) async fn our_layer(server: &Server, limit: Limit) -> RateLimitLayer {
    let store = RedisStore::connect(&server.url())
        .await
        .expect("the server is up");
    our_layer_on(Limiter::new(store), limit)
}

pub(crate) fn our_layer_on(limiter: Limiter, limit: Limit) -> RateLimitLayer {
    let layer = RateLimitLayer::new(limiter).limit(limit.by(Header::new("x-key")));
    layer.fail_closed().deadline(DEADLINE)
}

pub(crate) async fn ours(server: &Server, limit: Limit) -> Layered<RateLimit<Inner>> {
    Layered(our_layer(server, limit).await.layer(Inner))
}

/// With prefetches as they are by default.
pub(crate) async fn ours_with_prefetch(server: &Server, limit: Limit) -> Layered<RateLimit<Inner>> {
    ours(server, limit.prefetch(DEFAULT_LIFE)).await
}

pub(crate) fn long_prefetches() -> Duration {
    MAX_LIFE
}

/// With three limits, which are decided together.
pub(crate) async fn ours_thrice(server: &Server) -> Layered<RateLimit<Inner>> {
    let limit = |name, window| Limit::per(name, 1_000_000_000, window).by(Header::new("x-key"));
    let layer = our_layer(server, wide()).await;
    let layer = layer
        .limit(limit("second", Duration::from_secs(1)))
        .limit(limit("minute", Duration::from_secs(60)));
    Layered(layer.layer(Inner))
}

/// In this process alone. All admissions are stored.
pub(crate) fn ours_in_process(quota: Quota, capacity: usize) -> Layered<RateLimit<Inner>> {
    Layered(layer_in_process(quota, capacity).layer(Inner))
}

/// The same in front of a route of axum.
pub(crate) fn ours_routed(quota: Quota, capacity: usize) -> Routed {
    Routed(Routed::new().0.layer(layer_in_process(quota, capacity)))
}

fn layer_in_process(quota: Quota, capacity: usize) -> RateLimitLayer {
    let key = |parts: &Parts| Ok::<_, KeyError>(Key::new("x", &parts.headers["x-key"]));
    let store = MemoryStore::new().capacity(capacity);
    let limit = Limit::per("wide", quota.units.into(), quota.window);
    RateLimitLayer::new(store)
        .limit(limit.by(key))
        .fail_closed()
}
