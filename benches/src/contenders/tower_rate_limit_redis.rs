//! The crate tower-rate-limit-redis: GCRA, one script a decision, over one multiplexed connection.

use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::Layer;
use tower_rate_limit_redis::{KeyResolver, RateLimitLayer};

use super::{Contender, Inner, Layered};
use crate::server::Server;

/// Its name in tables and plots.
pub(crate) const TOWER_RATE_LIMIT_REDIS: &str = "tower-rate-limit-redis";

/// With its largest bucket: 65,535 at once, and one more every second, so that its keys live as long as they are used.
pub(crate) async fn tower_rate_limit_redis_layer(server: &Server) -> RateLimitLayer<XKey> {
    layer(server, u16::MAX, Duration::from_secs(1)).await
}

pub(crate) async fn tower_rate_limit_redis(server: &Server) -> impl Contender {
    Layered(tower_rate_limit_redis_layer(server).await.layer(Inner))
}

/// With a bucket of one, filled again after an hour.
pub(crate) async fn tower_rate_limit_redis_spent(server: &Server) -> impl Contender {
    Layered(layer(server, 1, Duration::from_secs(3600)).await.layer(Inner))
}

async fn layer(server: &Server, capacity: u16, interval: Duration) -> RateLimitLayer<XKey> {
    let client = redis_0_32::Client::open(server.url()).expect("a URL");
    let connection = client.get_multiplexed_async_connection().await.expect("the server is up");
    RateLimitLayer::builder().conn(connection).key_resolver(XKey).capacity(capacity).emission_interval(interval).build()
}

#[derive(Clone)]
pub(crate) struct XKey;

impl KeyResolver for XKey {
    type Key = Vec<u8>;
    type ErrorBody = Body;

    fn key<T>(&self, request: &Request<T>) -> Result<Self::Key, Response<Body>> {
        Ok(request.headers()["x-key"].as_bytes().to_vec())
    }
}
