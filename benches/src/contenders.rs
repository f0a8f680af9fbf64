//! What is measured: each decides whether a key may go on.

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bb8_redis::RedisConnectionManager;
use http::{HeaderValue, Request, Response, StatusCode};
use redis::{Script, aio::MultiplexedConnection};
use tower::{Layer, Service};
use tower_rate_limit_redis::KeyResolver;
use tower_sliding_window::{Header, Limit, RateLimit, RateLimitLayer, RedisStore};

use crate::server::Server;

/// Something that decides. Each task has its own clone.
pub(crate) trait Contender: Clone + Send + 'static {
    /// Whether `key` may go on.
    fn decide(&mut self, key: usize) -> impl Future<Output = bool> + Send;
}

/// The service behind every layer.
#[derive(Clone)]
pub(crate) struct Inner;

impl Service<Request<()>> for Inner {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(String::new())))
    }
}

/// A request in the name of a key.
fn request(key: usize) -> Request<()> {
    let mut request = Request::new(());
    request.headers_mut().insert("x-key", HeaderValue::from(key));
    request
}

/// A tower service. Ours and the rivals' differ only in their layers.
#[derive(Clone)]
pub(crate) struct Layered<S>(S);

impl<S> Contender for Layered<S>
where
    S: Service<Request<()>, Response = Response<String>> + Clone + Send + 'static,
    S::Future: Send,
{
    async fn decide(&mut self, key: usize) -> bool {
        // Every layer here is ready whenever its inner service is, and ours always is.
        let response = self.0.call(request(key)).await;
        response.is_ok_and(|response| response.status() == StatusCode::OK)
    }
}

pub(crate) async fn ours(server: &Server, limit: Limit) -> Layered<RateLimit<Inner, RedisStore>> {
    let store = RedisStore::connect(&server.url()).await.expect("the server is up");
    let layer = RateLimitLayer::new(store).limit(limit.by(Header::new("x-key"))).fail_closed();
    Layered(layer.deadline(Duration::from_secs(10)).layer(Inner))
}

/// GCRA over one multiplexed connection.
pub(crate) async fn tower_rate_limit_redis(server: &Server) -> impl Contender {
    let client = redis_0_32::Client::open(server.url()).expect("a URL");
    let connection = client.get_multiplexed_async_connection().await.expect("the server is up");
    let layer = tower_rate_limit_redis::RateLimitLayer::builder()
        .conn(connection)
        .key_resolver(XKey)
        .capacity(u16::MAX)
        .emission_interval(Duration::from_millis(1))
        .build();
    Layered(layer.layer(Inner))
}

#[derive(Clone)]
pub(crate) struct XKey;

impl KeyResolver for XKey {
    type Key = Vec<u8>;
    type ErrorBody = String;

    fn key<T>(&self, request: &Request<T>) -> Result<Self::Key, Response<String>> {
        Ok(request.headers()["x-key"].as_bytes().to_vec())
    }
}

/// What any script on Redis costs at least: EVALSHA of nothing, over one multiplexed connection.
#[derive(Clone)]
pub(crate) struct Floor {
    connection: MultiplexedConnection,
    script: Arc<Script>,
}

impl Floor {
    pub(crate) async fn new(server: &Server) -> Self {
        Self { connection: server.multiplexed().await, script: Arc::new(Script::new("return 1")) }
    }
}

impl Contender for Floor {
    async fn decide(&mut self, key: usize) -> bool {
        let allowed: u64 = self.script.key(key).invoke_async(&mut self.connection).await.expect("an answer");
        allowed == 1
    }
}

/// The sliding log as it is mostly written, on bb8 as it comes.
#[derive(Clone)]
pub(crate) struct Naive {
    pool: bb8::Pool<RedisConnectionManager>,
    script: Arc<Script>,
}

impl Naive {
    pub(crate) async fn new(server: &Server) -> Self {
        let manager = RedisConnectionManager::new(server.url()).expect("a URL");
        let pool = bb8::Pool::builder().max_size(16).build(manager).await.expect("the server is up");
        let script = Script::new(
            "local time = redis.call('TIME')
             local now = time[1] * 1000000 + time[2]
             redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - 3600000000)
             if redis.call('ZCARD', KEYS[1]) >= 1000000000 then return 0 end
             redis.call('ZADD', KEYS[1], now, ARGV[1])
             redis.call('EXPIRE', KEYS[1], 3600)
             return 1",
        );
        Self { pool, script: Arc::new(script) }
    }
}

impl Contender for Naive {
    async fn decide(&mut self, key: usize) -> bool {
        let member = tower_sliding_window::AdmissionId::fresh().to_bytes();
        let mut connection = self.pool.get().await.expect("a connection");
        let mut script = self.script.key(format!("naive:{key}"));
        let allowed: u64 = script.arg(&member[..]).invoke_async(&mut *connection).await.expect("an answer");
        allowed == 1
    }
}
