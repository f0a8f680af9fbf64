//! The sliding log as it is usually written.

use std::{sync::Arc, time::Duration};

use bb8_redis::RedisConnectionManager;
use redis::Script;

use super::Contender;
use crate::server::Server;

/// One script per decision, on bb8 with its defaults.
#[derive(Clone)]
pub(crate) struct Naive {
    pool: bb8::Pool<RedisConnectionManager>,
    script: Arc<Script>,
    window: Duration,
}

impl Naive {
    pub(crate) const LABEL: &str = "naive log on bb8";

    pub(crate) async fn new(server: &Server, window: Duration) -> Self {
        let manager = RedisConnectionManager::new(server.url()).expect("a URL");
        let pool = bb8::Pool::builder()
            .max_size(16)
            .build(manager)
            .await
            .expect("the server is up");
        let script = Script::new(
            "local time = redis.call('TIME')
             local now = time[1] * 1000000 + time[2]
             redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - ARGV[2] * 1000)
             if redis.call('ZCARD', KEYS[1]) >= 1000000000 then return 0 end
             redis.call('ZADD', KEYS[1], now, ARGV[1])
             redis.call('PEXPIRE', KEYS[1], ARGV[2])
             return 1",
        );
        Self {
            pool,
            script: Arc::new(script),
            window,
        }
    }
}

impl Contender for Naive {
    async fn decide(&mut self, key: usize) -> bool {
        let member = tower_sliding_window::check::AdmissionId::fresh()
            .0
            .to_be_bytes();
        let mut connection = self.pool.get().await.expect("a connection");
        let mut script = self.script.key(format!("naive:{key}"));
        script.arg(&member[..]).arg(self.window.as_millis() as u64);
        let allowed: u64 = script
            .invoke_async(&mut *connection)
            .await
            .expect("an answer");
        allowed == 1
    }
}
