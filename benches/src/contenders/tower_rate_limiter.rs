//! The crate tower-rate-limiter: a fixed window, one script a decision, over one multiplexed connection.

use std::time::Duration;

use http::Request;
use tower::Layer;
use tower_rate_limiter::{KeyExtractor, RateLimitError, RateLimitLayer, RedisStore};

use super::{Contender, Inner, Layered};
use crate::server::Server;

/// Its name in tables and plots.
pub(crate) const TOWER_RATE_LIMITER: &str = "tower-rate-limiter";

pub(crate) async fn tower_rate_limiter(server: &Server, window: Duration) -> impl Contender {
    let layer = RateLimitLayer::builder(XKey)
        .limit(1_000_000_000)
        .window(window)
        .with_store(RedisStore::new(server.multiplexed().await))
        .build()
        .expect("a policy");
    Layered(layer.layer(Inner))
}

#[derive(Clone)]
struct XKey;

impl KeyExtractor for XKey {
    type Key = String;

    fn extract<T>(&self, request: &Request<T>) -> Result<String, RateLimitError> {
        Ok(request.headers()["x-key"].to_str().expect("digits").to_owned())
    }
}
