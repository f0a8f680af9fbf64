//! The least that any script on Redis costs.

use std::sync::Arc;

use redis::{Script, aio::MultiplexedConnection};

use super::Contender;
use crate::server::Server;

/// EVALSHA of an empty script, over one multiplexed connection.
#[derive(Clone)]
pub(crate) struct Floor {
    connection: MultiplexedConnection,
    script: Arc<Script>,
}

impl Floor {
    pub(crate) const LABEL: &str = "floor: EVALSHA of nothing";

    pub(crate) async fn new(server: &Server) -> Self {
        Self {
            connection: server.multiplexed().await,
            script: Arc::new(Script::new("return 1")),
        }
    }
}

impl Contender for Floor {
    async fn decide(&mut self, key: usize) -> bool {
        let allowed: u64 = self
            .script
            .key(key)
            .invoke_async(&mut self.connection)
            .await
            .expect("an answer");
        allowed == 1
    }
}
