//! The rules that every store must keep, by the crate's own test kit: one test for each rule and store.

use tower_sliding_window::{AnyStore, ManualClock, MemoryStore, conformance_tests};

use crate::support::{redis_by, redis_server::RedisServer};

fn memory_by(clock: &ManualClock) -> MemoryStore {
    MemoryStore::builder().clock(clock).build()
}

mod on_memory {
    use super::*;

    conformance_tests!(async |clock| memory_by(&clock));
}

mod on_redis {
    use super::*;

    conformance_tests!({
        let server = RedisServer::start();
        async move |clock| redis_by(&clock, &server)
    });
}

mod on_any_memory {
    use super::*;

    conformance_tests!(async |clock| AnyStore::from(memory_by(&clock)));
}

mod on_any_redis {
    use super::*;

    conformance_tests!({
        let server = RedisServer::start();
        async move |clock| AnyStore::from(redis_by(&clock, &server))
    });
}
