//! The crate tower-rate-limiter: a fixed window, with one script per decision over one multiplexed
//! connection.

use http::Request;
use tower::Layer;
use tower_rate_limiter::{KeyExtractor, RateLimitError, RateLimitLayer, RedisStore};

use super::{Contender, Inner, Layered};
use crate::{load::HOUR, server::Server};

/// Its name in tables and plots.
pub(crate) const TOWER_RATE_LIMITER: &str = "tower-rate-limiter";

/// With a window of an hour, even where ours is a second: it does the same work, and at the end of
/// its windows it failed now and then.
pub(crate) async fn tower_rate_limiter(server: &Server) -> impl Contender {
    let layer = RateLimitLayer::builder(XKey)
        .limit(1_000_000_000)
        .window(HOUR)
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
        Ok(request.headers()["x-key"]
            .to_str()
            .expect("digits")
            .to_owned())
    }
}
