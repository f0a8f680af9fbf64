//! The rules that every store must keep, by the kit for authors of stores.

use std::{
    env,
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tower_sliding_window::{MemoryStore, RedisStore, Store, store::ManualClock};
use tower_sliding_window_conformance::Conformance;

use crate::support::redis_server::RedisServer;

/// A store on this server that shares nothing with earlier ones.
fn redis_apart(clock: &ManualClock, server: &RedisServer) -> RedisStore {
    static STORES: AtomicU64 = AtomicU64::new(0);
    let prefix = format!("store-{}", STORES.fetch_add(1, Ordering::Relaxed));
    server.store().clock(clock).prefix(prefix).build().unwrap()
}

/// `HISTORIES` and `SEED` set the number of the histories, and the seed of the first one.
fn suite() -> Conformance {
    let number = |name: &str| {
        env::var(name)
            .ok()
            .map(|number| number.parse::<u64>().expect("a number"))
    };
    let first = number("SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    let count = number("HISTORIES").unwrap_or(30);
    Conformance::new().seeds((0..count).map(|number| first.wrapping_add(number)))
}

#[tokio::test]
async fn memory_keeps_the_rules() {
    suite()
        .run(async |clock| MemoryStore::new().clock(&clock))
        .await;
}

#[tokio::test]
async fn redis_keeps_the_rules() {
    let server = RedisServer::start();
    suite()
        .run(async |clock| redis_apart(&clock, &server))
        .await;
}

/// As an application has it that chooses its store at run time.
#[tokio::test]
async fn a_store_behind_a_pointer_keeps_the_rules() {
    let make = async |clock| Arc::new(MemoryStore::new().clock(&clock)) as Arc<dyn Store>;
    suite().run(make).await;
}
