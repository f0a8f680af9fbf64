//! This crate without HTTP.

use std::time::Duration;

use tower_sliding_window::{Limit, Limiter, RedisStore};

use super::Contender;
use crate::server::Server;

/// A limiter and its limit.
#[derive(Clone)]
pub(crate) struct Asked {
    limiter: Limiter,
    limit: Limit,
}

impl Asked {
    pub(crate) async fn new(server: &Server, limit: Limit) -> Self {
        let store = RedisStore::connect(&server.url())
            .await
            .expect("the server is up");
        Self {
            limiter: Limiter::new(store).deadline(Duration::from_secs(10)),
            limit,
        }
    }
}

impl Contender for Asked {
    async fn decide(&mut self, key: usize) -> bool {
        let decision = self.limiter.check(&self.limit, key.to_string(), 1).await;
        decision.expect("an answer").is_allowed()
    }
}
