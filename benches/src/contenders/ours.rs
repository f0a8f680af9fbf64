//! This crate.

use std::time::Duration;

use http::request::Parts;
use tower::Layer;
use tower_sliding_window::{Header, Key, KeyError, Limit, MemoryStore, RateLimit, RateLimitLayer, RedisStore};

use super::{Inner, Layered};
use crate::{load::HOUR, server::Server};

/// Our name in tables and plots.
pub(crate) const OURS: &str = "tower-sliding-window";

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

/// Fail-closed, with a deadline that a loaded machine does not reach, so that only decisions are counted.
pub(crate) async fn our_layer(server: &Server, limit: Limit) -> RateLimitLayer<RedisStore> {
    let store = RedisStore::connect(&server.url()).await.expect("the server is up");
    let layer = RateLimitLayer::new(store).limit(limit.by(Header::new("x-key")));
    layer.fail_closed().deadline(Duration::from_secs(10))
}

pub(crate) async fn ours(server: &Server, limit: Limit) -> Layered<RateLimit<Inner, RedisStore>> {
    Layered(our_layer(server, limit).await.layer(Inner))
}

/// With three limits, which are decided together.
pub(crate) async fn ours_thrice(server: &Server) -> Layered<RateLimit<Inner, RedisStore>> {
    let limit = |name, window| Limit::per(name, 1_000_000_000, window).by(Header::new("x-key"));
    let layer = our_layer(server, wide()).await;
    let layer = layer.limit(limit("second", Duration::from_secs(1))).limit(limit("minute", Duration::from_secs(60)));
    Layered(layer.layer(Inner))
}

/// In this process alone: a million a second per key. All admissions are stored, and units leave as fast as they
/// arrive.
pub(crate) fn ours_in_process() -> Layered<RateLimit<Inner, MemoryStore>> {
    let key = |parts: &Parts| Ok::<_, KeyError>(Key::new("x", &parts.headers["x-key"]));
    let store = MemoryStore::builder().capacity(50_000_000).build();
    let layer = RateLimitLayer::new(store).limit(Limit::per_second("wide", 1_000_000).by(key));
    Layered(layer.fail_closed().layer(Inner))
}
