//! The rules that every store must keep, by the crate's own test kit: one test for each rule and store.

use std::sync::Arc;

use tower_sliding_window::{ManualClock, MemoryStore, Store, conformance_tests};

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

    conformance_tests!(async |clock| Arc::new(memory_by(&clock)) as Arc<dyn Store>);
}

mod on_any_redis {
    use super::*;

    conformance_tests!({
        let server = RedisServer::start();
        async move |clock| Arc::new(redis_by(&clock, &server)) as Arc<dyn Store>
    });
}
