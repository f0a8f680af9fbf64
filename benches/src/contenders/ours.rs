//! This crate.

use std::time::Duration;

use tower::Layer;
use tower_sliding_window::{Header, Limit, RateLimit, RateLimitLayer, RedisStore};

use super::{Inner, Layered};
use crate::server::Server;

/// Our name in tables and plots.
pub(crate) const OURS: &str = "tower-sliding-window";

/// Never reached.
pub(crate) fn wide() -> Limit {
    Limit::per_hour("wide", 1_000_000_000)
}

/// With a deadline that a loaded machine does not reach, and closed: what is not decided is not to be counted.
async fn layer(server: &Server, limit: Limit) -> RateLimitLayer<RedisStore> {
    let store = RedisStore::connect(&server.url()).await.expect("the server is up");
    let layer = RateLimitLayer::new(store).limit(limit.by(Header::new("x-key")));
    layer.fail_closed().deadline(Duration::from_secs(10))
}

pub(crate) async fn ours(server: &Server, limit: Limit) -> Layered<RateLimit<Inner, RedisStore>> {
    Layered(layer(server, limit).await.layer(Inner))
}
