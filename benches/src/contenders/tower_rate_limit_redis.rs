//! The crate tower-rate-limit-redis: GCRA, with one script per decision over one multiplexed
//! connection.

use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::Layer;
use tower_rate_limit_redis::{KeyResolver, RateLimitLayer};

use super::{Contender, Inner, Layered};
use crate::server::Server;

/// Its name in tables and plots.
pub(crate) const TOWER_RATE_LIMIT_REDIS: &str = "tower-rate-limit-redis";

/// With its largest bucket: 65,535 at once and one more every second, so that its keys live as long
/// as they are used.
pub(crate) async fn tower_rate_limit_redis_layer(server: &Server) -> RateLimitLayer<XKey> {
    layer(server, LARGEST, "").await
}

pub(crate) async fn tower_rate_limit_redis(server: &Server) -> impl Contender {
    Layered(tower_rate_limit_redis_layer(server).await.layer(Inner))
}

/// Three layers, one around the other: each request is decided three times in a row.
pub(crate) async fn tower_rate_limit_redis_thrice(server: &Server) -> impl Contender {
    let [first, second, third] = [
        layer(server, LARGEST, "1").await,
        layer(server, LARGEST, "2").await,
        layer(server, LARGEST, "3").await,
    ];
    Layered(first.layer(second.layer(third.layer(Inner))))
}

/// With a bucket of one, which is refilled after an hour.
pub(crate) async fn tower_rate_limit_redis_spent(server: &Server) -> impl Contender {
    Layered(
        layer(server, (1, Duration::from_secs(3600)), "")
            .await
            .layer(Inner),
    )
}

/// The largest bucket, and the time in which one request is refilled.
const LARGEST: (u16, Duration) = (u16::MAX, Duration::from_secs(1));

async fn layer(
    server: &Server,
    (capacity, interval): (u16, Duration),
    prefix: &'static str,
) -> RateLimitLayer<XKey> {
    let client = redis_0_32::Client::open(server.url()).expect("a URL");
    let connection = client
        .get_multiplexed_async_connection()
        .await
        .expect("the server is up");
    RateLimitLayer::builder()
        .conn(connection)
        .key_resolver(XKey(prefix))
        .capacity(capacity)
        .emission_interval(interval)
        .build()
}

#[derive(Clone)]
pub(crate) struct XKey(&'static str);

impl KeyResolver for XKey {
    type Key = Vec<u8>;
    type ErrorBody = Body;

    fn key<T>(&self, request: &Request<T>) -> Result<Self::Key, Response<Body>> {
        Ok([self.0.as_bytes(), request.headers()["x-key"].as_bytes()].concat())
    }
}
