//! The refusal cache: which refusals are repeated without asking Redis, and for how long.
//!
//! The random histories in `decision/properties` show that cached refusals are correct.

mod invalidation;
mod refusals;
mod standing;

use tower_sliding_window::{
    Limit, Limiter, RedisStore,
    store::{ManualClock, RedisStoreBuilder},
};

use crate::support::{TEST_TIMEOUT, redis_server::RedisServer};

const CALLS: Limit = Limit::per_minute("calls", 2);

struct Test {
    server: RedisServer,
    clock: ManualClock,
    store: RedisStore,
}

impl Test {
    fn start() -> Self {
        let (server, clock) = (RedisServer::start(), ManualClock::new());
        let store = build_with_clock(&clock, server.store());
        Self {
            server,
            clock,
            store,
        }
    }

    fn limiter(&self) -> Limiter {
        Limiter::new(self.store.clone()).deadline(TEST_TIMEOUT)
    }

    /// A limiter that was refused a check of cost 1.
    async fn refused(&self) -> Limiter {
        let limiter = self.limiter();
        for admitted in [true, true, false] {
            assert_eq!(
                limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed(),
                admitted
            );
        }
        limiter
    }

    /// The scripts that ran since the last call of this function.
    fn scripts(&self) -> u64 {
        let calls = self.server.script_calls();
        self.server.run::<()>("CONFIG RESETSTAT");
        calls
    }
}

fn build_with_clock(clock: &ManualClock, builder: RedisStoreBuilder) -> RedisStore {
    builder.clock(clock).build().unwrap()
}
