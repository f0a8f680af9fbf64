//! The shared store: one atomic script on Redis decides.
//!
//! `dispatch/` sends checks in batches, over the connections of `connect/`. The Lua files of
//! `script/` decide them: read `head.lua` first. `keys.rs` is the layout of the keys in Redis, and
//! `builder.rs` has the settings of a store.
//!
//! 1. Each limit has one sorted set for each key: `entries.lua` explains the entries of the set.
//! 2. The script reads the server's time once, so all processes decide by one clock.
//! 3. One script decides many checks, in the order of their arrival. While few checks are in
//!    flight, the caller of a check sends it at once, without waiting for other checks or for a
//!    task. Until the first reply, a task sends all checks. The task hears the first reply even if
//!    the reply is late, and learns the round trip from it.
//! 4. EVALSHA runs the script. If the server does not know the script, EVAL sends it once.
//! 5. A batch is sent once more, over a new connection, if its connection broke or the server has
//!    become a replica. The second try carries the same ids, so each check counts once even if the
//!    first try has run. Checks that the server could not recognize by their ids are not sent
//!    twice.
//! 6. Only digests of keys leave the process.
//! 7. Only tasks hold what other callers wait for, such as connections. Each runtime has tasks and
//!    connections of its own. So a future that nobody polls, or a runtime that nobody drives,
//!    delays no other caller.

mod builder;
mod connect;
mod dispatch;
mod keys;
mod script;

use std::{fmt, future::Future, sync::Arc, time::Duration};

use tokio::sync::watch;

pub use self::builder::RedisStoreBuilder;
use self::{
    connect::{Topology, source},
    dispatch::{Answer, Common, Job, Lone},
};
use super::{Store, StoreFuture};
use crate::{
    check::{Charge, Check},
    decision::{Decision, Settled, Settlement},
    error::StoreError,
    key::Key,
    limit::Limit,
    local::LocalState,
};

/// Limits shared by every process that uses the same Redis. See the [crate docs](crate#stores).
///
/// Clones share the connections. Each tokio runtime that uses the store has connections of its own,
/// which close when the runtime ends. So a runtime that is not driven, such as a single-threaded
/// runtime between two calls of `block_on`, delays no other runtime. A future of the store belongs
/// to the runtime that polls it first. If that runtime ends, the future ends with an error.
///
/// A check or a settlement is sent when its future is first polled. Dropping the future before the
/// check has been sent cancels the check. A settlement is made even if its future is dropped,
/// because spent units have to be settled.
#[derive(Clone)]
pub struct RedisStore {
    common: Arc<Common>,
    /// The dispatchers end when the last clone of the store drops this.
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

    /// A store on the server at `url`, such as `redis://127.0.0.1:6379/0`. When this returns, the
    /// server has been reached and can be written to, and the connections of this runtime are open.
    ///
    /// # Errors
    ///
    /// [`StoreError`], as for the builder's [`connect`](RedisStoreBuilder::connect). Print the
    /// error's [sources](std::error::Error::source) as well: they have the address and the cause. A
    /// process that has to start while Redis is down uses [`builder`](Self::builder) and
    /// [`build`](RedisStoreBuilder::build).
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// A store on the server at `url`, with settings of its own.
    pub fn builder(url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder::of_urls(Topology::Node, [url])
    }

    /// A store on the server of the application's Redis client. The store takes over the client's
    /// address, TLS, user, password, database and protocol. The builder's settings override the
    /// client's. The store opens its own connections: to share the application's connections, see
    /// [`from_pool`](Self::from_pool). A provider of credentials is no part of a client: give it to
    /// [`credentials`](RedisStoreBuilder::credentials).
    ///
    /// ```no_run
    /// # async fn store() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tower_sliding_window::RedisStore;
    /// let client = redis::Client::open("redis://shop:s3cret@127.0.0.1:6379/5")?;
    /// let store = RedisStore::from_client(&client).connect().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// The client is one of the crate `redis` in version 1.
    pub fn from_client(client: &redis::Client) -> RedisStoreBuilder {
        let node = client.get_connection_info().clone();
        RedisStoreBuilder::new(Topology::Node, Ok(vec![node]))
    }

    /// A store on the connections of the application's pool, such as one of
    /// `bb8_redis::RedisConnectionManager`. Call this function in the runtime of the pool. In other
    /// runtimes, the store opens connections that the pool does not count.
    /// [`guide::existing_connections`](crate::guide::existing_connections) has an example, and says
    /// what the pool's settings mean for limits.
    ///
    /// The store takes a connection out of the pool, clones it, and gives it back at once. So the
    /// application finds as many connections in the pool as before. The builder's
    /// [`connections`](RedisStoreBuilder::connections) is the most connections that the store
    /// shares with the application. When a shared connection fails, the store asks the pool for
    /// another one. If the pool hands out no working connection within a third of the [connect
    /// timeout](RedisStoreBuilder::connect_timeout), the store opens a connection that the pool
    /// does not count.
    pub fn from_pool<M>(pool: bb8::Pool<M>) -> RedisStoreBuilder
    where
        M: bb8::ManageConnection<Error = redis::RedisError>,
        M::Connection: redis::aio::ConnectionLike + Clone + Sync,
    {
        RedisStoreBuilder::new(Topology::Given(source::of_pool(pool)), Ok(Vec::new()))
    }

    /// A store on the connections that this closure opens, such as clones of a `ConnectionManager`,
    /// or connections through a tunnel. The store calls the closure once for each of its
    /// [connections](RedisStoreBuilder::connections), and again when a connection has failed. A
    /// call may take up to the [connect timeout](RedisStoreBuilder::connect_timeout).
    ///
    /// The closure chooses the login, database and TLS of the connections. All connections must
    /// lead to one server, and none may be subscribed or in a transaction.
    ///
    /// ```no_run
    /// # async fn store() -> Result<(), Box<dyn std::error::Error>> {
    /// # async fn token() -> Result<String, redis::RedisError> { unimplemented!() }
    /// # use tower_sliding_window::RedisStore;
    /// use redis::{Client, IntoConnectionInfo};
    ///
    /// let store = RedisStore::from_connections(|| async {
    ///     let server = "redis://limits@10.0.0.1:6379".into_connection_info()?;
    ///     let login = server.redis_settings().clone().set_password(token().await?);
    ///     Client::open(server.set_redis_settings(login))?.get_multiplexed_async_connection().await
    /// });
    /// let store = store.connect().await?;
    /// # Ok(()) }
    /// ```
    pub fn from_connections<F, C>(open: impl Fn() -> F + Send + Sync + 'static) -> RedisStoreBuilder
    where
        F: Future<Output = redis::RedisResult<C>> + Send + 'static,
        C: redis::aio::ConnectionLike + Clone + Send + Sync + 'static,
    {
        let source = source::of_closure(move |_| open());
        RedisStoreBuilder::new(Topology::Given(source), Ok(Vec::new()))
    }

    /// A store on the primary that sentinels know by this name. The sentinels are at URLs such as
    /// `redis://10.0.0.1:26379`. For each new connection, the store asks the sentinels again, so it
    /// survives a failover. Units that the old primary had not replicated are lost.
    ///
    /// The user and password in a URL are for the sentinel itself. The user, password and database
    /// of the primary are settings of the builder. If the first URL begins with `rediss://`, the
    /// store reaches the primary by TLS, too.
    pub fn sentinel<U: Into<String>>(
        urls: impl IntoIterator<Item = U>,
        primary: impl Into<String>,
    ) -> RedisStoreBuilder {
        RedisStoreBuilder::of_urls(Topology::Sentinels(primary.into()), urls)
    }

    /// A store on the Redis Cluster with nodes at these URLs. The store finds all nodes if one of
    /// these nodes is up. The user and password of the first URL, or of the builder, are for all
    /// nodes. Building fails if another URL has other ones.
    ///
    /// All limits of one key are in one slot, and are decided as on one server. A check with
    /// several keys mostly has keys in several slots, which no script reaches at once. For such a
    /// check, the store asks all slots at the same time, so a decision takes one round trip. If a
    /// slot refuses, the caller has the refusal, and the store gives back what the other slots have
    /// counted. So no limit ever admits too much, and a refusal costs nothing in the end. Such a
    /// check differs in four ways from a check on one server:
    ///
    /// * Until the units of a refused check are given back, which takes another round trip, other
    ///   checks may be refused because of them. The [refusal
    ///   cache](crate::Limiter::refusal_cache) keeps this rare: a client over its own limit asks no
    ///   slot, but for one check a second.
    /// * If a node fails in the middle of the check, units that it has counted without an id stay
    ///   counted until they leave the window. Units of an exact log, places and reservations have
    ///   ids, and are given back.
    /// * If a key is [reset](crate::Limiter::reset) before the units of a refused check are given
    ///   back, units that were counted after the reset may be given back in their place. An exact
    ///   log is not affected.
    /// * If a check with an id from its caller is refused, what slots have counted is not given
    ///   back: the next try with the same id uses it.
    #[cfg(feature = "cluster")]
    pub fn cluster<U: Into<String>>(urls: impl IntoIterator<Item = U>) -> RedisStoreBuilder {
        RedisStoreBuilder::of_urls(Topology::Cluster, urls)
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
