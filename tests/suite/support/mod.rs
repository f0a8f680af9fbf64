//! What the tests share.

pub(crate) mod example;
pub(crate) mod http_client;
pub(crate) mod http_server;
pub(crate) mod load;
pub(crate) mod log;
pub(crate) mod model;
pub(crate) mod outage;
pub(crate) mod proxy;
#[cfg(feature = "cluster")]
pub(crate) mod redis_cluster;
pub(crate) mod redis_server;
pub(crate) mod requests;
pub(crate) mod stores;
pub(crate) mod switched;

use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_sliding_window::{DenyCache, Limiter, ManualClock, MemoryStore, RedisStore, Store};

use self::redis_server::RedisServer;

/// Long enough that no test fails because the machine is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for something to be so.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let asked = Instant::now();
    while !is_so() {
        assert!(asked.elapsed() < PATIENCE, "{what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// A limiter on one of the stores, with the time in the test's hands.
pub(crate) struct Fixture<S> {
    pub(crate) limiter: Limiter<S>,
    pub(crate) clock: ManualClock,
    /// Ends with the test.
    _server: Option<RedisServer>,
}

impl<S: Store> Fixture<S> {
    fn new(store: S, clock: ManualClock, server: Option<RedisServer>) -> Self {
        Self { limiter: Limiter::new(store).deadline(PATIENCE), clock, _server: server }
    }

    /// Asks the store itself, every time.
    pub(crate) fn asking_every_time(self) -> Self {
        Self { limiter: self.limiter.deny_cache(DenyCache::off()), ..self }
    }
}

pub(crate) fn memory() -> Fixture<MemoryStore> {
    let clock = ManualClock::new();
    Fixture::new(MemoryStore::builder().clock(&clock).build(), clock, None)
}

pub(crate) fn redis() -> Fixture<RedisStore> {
    let (clock, server) = (ManualClock::new(), RedisServer::start());
    let store = RedisStore::builder(&server.url()).clock(&clock).connect_timeout(PATIENCE).build().unwrap();
    Fixture::new(store, clock, Some(server))
}

/// Runs tests that take a fixture once a store.
macro_rules! for_every_store {
    ($($test:ident)*) => {
        mod on_memory {
            $(#[tokio::test] async fn $test() { super::$test(crate::support::memory()).await; })*
        }
        mod on_redis {
            $(#[tokio::test] async fn $test() { super::$test(crate::support::redis()).await; })*
        }
    };
}
pub(crate) use for_every_store;
