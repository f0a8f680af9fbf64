//! The shared store: one atomic script on Redis decides.
//!
//! `dispatch/` sends checks in batches, over the connections from `connect/`. The Lua files in
//! `script/` decide them: read `head.lua` first. `keys.rs` has the key layout, `source.rs` has the
//! ways to reach Redis, and `builder.rs` has a store's settings.
//!
//! 1. Each limit has one sorted set per key: see `entries.lua`.
//! 2. The script reads the server's time once, so all processes decide by one clock.
//! 3. One script call decides many checks, in arrival order. While few checks are in flight, a
//!    check's caller sends it at once, without waiting for other checks or for a task. Until the
//!    first reply, a task sends all checks: a task receives even a late reply, and can sample the
//!    round trip from it.
//! 4. EVALSHA runs the script. If the server does not know it, EVAL sends it once.
//! 5. A batch is retried once, over a new connection, if its connection broke or the server has
//!    become a replica. The checks' ids make the retry idempotent: each check counts once even if
//!    the first try has run. A check that the server could not recognize by its id is not sent
//!    twice.
//! 6. Only key digests leave the process.
//! 7. Only tasks hold resources that other callers wait for, such as connections. Each runtime has
//!    its own tasks and connections. So a future that nobody polls, or a runtime that nobody
//!    drives, does not delay other callers.

mod builder;
mod connect;
mod dispatch;
mod keys;
mod script;
mod source;

use std::{fmt, sync::Arc, time::Duration};

use tokio::sync::watch;

use self::dispatch::{Answer, Common, Job, Lone};
pub use self::{builder::RedisStoreBuilder, source::RedisSource};
use super::{Store, StoreFuture};
use crate::{
    check::{Charge, Check},
    decision::{Decision, Settled, Settlement},
    error::StoreError,
    key::Key,
    limit::Limit,
    local::LocalState,
};

/// Limits that all processes on the same Redis share. See the [crate docs](crate#stores).
///
/// Clones share the connections. Each tokio runtime that uses the store has its own connections,
/// which close when the runtime ends. So a runtime that is not driven, such as a single-threaded
/// one between two calls of `block_on`, does not delay other runtimes. A future belongs to the
/// runtime that polls it first. If that runtime ends, the future ends with an error.
///
/// A check or settlement is sent when its future is first polled. If the future is dropped before
/// its check has been sent, the check is cancelled. A settlement is made even if its future is
/// dropped, because spent units have to be settled.
#[derive(Clone)]
pub struct RedisStore {
    common: Arc<Common>,
    /// Dispatchers end when the last clone of the store drops this sender.
    _alive: watch::Sender<()>,
}

impl RedisStore {
    /// Sends a job from the current runtime.
    async fn ask(&self, job: Box<Job>) -> Answer {
        let dispatcher = self.common.dispatcher().await?;
        if dispatcher.is_by_slot() {
            dispatcher.ask_slots(job).await
        } else {
            dispatcher.ask(job).await
        }
    }

    /// Connects to the server at `url`, such as `redis://127.0.0.1:6379/0`, or to the [cluster or
    /// sentinels](super::from_url) there. When this returns, the server has been reached and can be
    /// written to, and this runtime's connections are open.
    ///
    /// # Errors
    ///
    /// [`StoreError`], as for the builder's [`connect`](RedisStoreBuilder::connect). Print the
    /// error's [sources](std::error::Error::source) as well: they show the cause, and the address
    /// that could not be reached. A process that has to start while Redis is down uses
    /// [`builder`](Self::builder) and [`build`](RedisStoreBuilder::build).
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Returns a builder for a store with custom settings. The store may use the server of a URL or
    /// a `redis::Client`, a pool's connections, or any other [`RedisSource`].
    ///
    /// ```no_run
    /// # async fn store(pool: bb8::Pool<bb8_redis::RedisConnectionManager>) -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_sliding_window::RedisStore;
    ///
    /// let store = RedisStore::builder("redis://127.0.0.1:6379").prefix("shop").build()?;
    /// let shared = RedisStore::builder(pool).connect().await?;
    /// # let _ = (store, shared);
    /// # Ok(()) }
    /// ```
    pub fn builder(source: impl Into<RedisSource>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(source.into())
    }
}

impl Store for RedisStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.decide_within(Arc::new(check), Duration::MAX)
    }

    fn decide_within(&self, check: Arc<Check>, deadline: Duration) -> StoreFuture<Decision> {
        let store = self.clone();
        Box::pin(async move {
            let decision = match Lone::new(&store.common, &check, deadline) {
                Some(lone) => lone.decide(check, deadline).await,
                None => store
                    .ask(Job::decide(check, deadline))
                    .await
                    .map(|(decision, _)| decision),
            };
            decision.map_err(|error| error.when("deciding a check"))
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let store = self.clone();
        Box::pin(async move {
            let job = Job::settle(settlement, &store.common.local_state);
            let settled = store.ask(job).await.map(|(decision, was_applied)| Settled {
                decision,
                was_applied,
            });
            settled.map_err(|error| error.when("settling an admission"))
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        let store = self.clone();
        Box::pin(async move {
            if limit.is_concurrent() {
                return Ok(());
            }
            let reset = async { store.common.dispatcher().await?.reset(limit, &key).await };
            reset.await.map_err(|error| error.when("resetting a key"))
        })
    }

    fn part_of(&self, check: &Check) -> Option<Arc<str>> {
        let Common { server, keys, .. } = &*self.common;
        if !server.is_cluster() {
            return None;
        }
        let mut of: Vec<&Key> = check.charges().map(Charge::key).collect();
        of.dedup();
        let mut nodes: Vec<_> = of
            .into_iter()
            .filter_map(|key| server.node_of(keys.hash_slot(key)))
            .collect();
        nodes.sort_unstable();
        nodes.dedup();
        if nodes.len() > 1 {
            Some(nodes.join(" ").into())
        } else {
            nodes.pop()
        }
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.common.local_state)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.common.keys.prefix)
            .finish_non_exhaustive()
    }
}
