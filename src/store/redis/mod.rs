//! The shared store: one atomic script on Redis decides.
//!
//! `dispatch/` sends checks in batches, over the connections of `connect/`. The Lua files of `script/` decide them: read
//! `head.lua` first. `keys.rs` is the layout of the keys in Redis, and `builder.rs` has the settings of a store.
//!
//! 1. Each limit and key has one sorted set: the head of the script explains its entries.
//! 2. The script reads the server's time once, so all processes decide by one clock.
//! 3. One script decides many checks, in the order of their arrival. A lone check waits neither for others nor for a task:
//!    its own caller sends it.
//! 4. EVALSHA sends the script, and EVAL once if the server does not know it.
//! 5. A batch is sent once more, over a new connection, if its connection broke or the server has become a replica. It
//!    carries its ids, so it counts once even if the first try has run. Checks that the server could not know again by
//!    their ids are not sent twice.
//! 6. Only digests of keys leave the process.
//! 7. Only tasks hold connections and other things that callers wait for, and each runtime has its own. So neither a future
//!    that is not polled nor a runtime that is not driven delays other callers.

mod builder;
mod connect;
mod dispatch;
mod keys;
mod script;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::runtime::Id;

pub use self::{builder::RedisStoreBuilder, connect::InvalidRedisConfig};
use self::{
    connect::ServerAddress,
    dispatch::{Dispatcher, Dispatchers, Pending, cross_slot},
};
use super::interface::{Store, StoreFuture};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    local::LocalState,
    settlement::{Settled, Settlement},
};

/// Limits shared by every process that uses the same Redis. See the [crate docs](crate#stores).
///
/// Clones share the connections. Each tokio runtime that uses the store has connections of its own, which close when the
/// runtime ends. So a runtime that is not driven, such as a single-threaded one between two calls of `block_on`, delays no
/// other. A future of the store belongs to the runtime that polls it first.
#[derive(Clone)]
pub struct RedisStore {
    dispatchers: Arc<Dispatchers>,
}

impl RedisStore {
    /// A store on the server at `url`, such as `redis://127.0.0.1:6379/0`. The server has been reached and can be written to.
    ///
    /// # Errors
    ///
    /// [`StoreError`], as for the builder's [`connect`](RedisStoreBuilder::connect). Print its
    /// [sources](std::error::Error::source) as well: they have the address and the cause. A process that has to start while
    /// Redis is down uses [`builder`](Self::builder) and [`build`](RedisStoreBuilder::build).
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// A store on the server at `url`, with settings of its own.
    pub fn builder(url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder::new(ServerAddress::Url(url.to_owned()))
    }

    /// A store on the server of the application's Redis client. It takes over the client's address, TLS, user, password,
    /// database and protocol, and the builder's settings override them. TLS needs this crate's feature `tls`.
    ///
    /// ```no_run
    /// # async fn store() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tower_sliding_window::RedisStore;
    /// let client = redis::Client::open("redis://shop:s3cret@127.0.0.1:6379/5")?;
    /// let store = RedisStore::from_client(&client).connect().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// The client is one of the crate `redis` in version 1. The store opens its own connections, with its own timeouts and
    /// keepalive, because it finds broken connections by the replies that pass through them. So it cannot use a pool or a
    /// connection of the application.
    pub fn from_client(client: &redis::Client) -> RedisStoreBuilder {
        RedisStoreBuilder::new(ServerAddress::Client(Box::new(client.get_connection_info().clone())))
    }

    /// A store on the primary that sentinels know by this name. The sentinels are at URLs such as `redis://10.0.0.1:26379`.
    /// Each new connection asks them again, so the store survives a failover. It forgets what the old primary had not
    /// replicated.
    ///
    /// A URL has the user and password of the sentinel itself. Those of the primary, and its database, are settings of the
    /// builder. If the first URL is a `rediss://` one, the primary is reached over TLS, too.
    pub fn sentinel<U: Into<String>>(
        urls: impl IntoIterator<Item = U>,
        primary: impl Into<String>,
    ) -> RedisStoreBuilder {
        let urls = urls.into_iter().map(Into::into).collect();
        RedisStoreBuilder::new(ServerAddress::Sentinels { urls, primary: primary.into() })
    }

    /// A store on the Redis Cluster with nodes at these URLs. One node that is up is enough to find the others. All
    /// have the user and password of the first URL, or of the builder.
    ///
    /// All limits of one key are in one slot, and are decided as on one server. The keys of a check with several keys are
    /// mostly in several slots, which no script reaches at once. The store then asks the slots one after the other. If one
    /// refuses, those before it get back the units that they have counted. So no limit ever admits too much, and a refusal
    /// costs nothing in the end. Meanwhile other checks may be refused for units that are about to come back. For a check
    /// with several slots:
    ///
    /// * The retry time can be too short: a slot that was not asked may refuse after it.
    /// * Each admission is an entry of its own, whatever the algorithm of its limits.
    /// * If the check has an id from its caller, the units that were taken are not given back: the next try with that
    ///   id uses them.
    /// * If a node goes away in the middle, units that it cannot get back count until they leave the window.
    #[cfg(feature = "cluster")]
    pub fn cluster<U: Into<String>>(urls: impl IntoIterator<Item = U>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(ServerAddress::Cluster(urls.into_iter().map(Into::into).collect()))
    }
}

impl RedisStoreBuilder {
    /// The store. It connects when the first check arrives, so Redis may be down, and no runtime is needed yet.
    ///
    /// # Errors
    ///
    /// [`InvalidRedisConfig`], which names the wrong value: there is no URL, or one that is not a Redis URL; a certificate is
    /// not in PEM; the prefix or a name has other characters or is not possible; or the number of connections or the timeout
    /// is zero.
    pub fn build(self) -> Result<RedisStore, InvalidRedisConfig> {
        Ok(RedisStore { dispatchers: self.dispatchers()? })
    }

    /// The store, after it has reached the server, run the script, and deleted a key that does not exist. Whether the server
    /// has memory left shows at the first check.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if a setting is wrong, as for [`build`](Self::build), if the server cannot be reached, if it is a
    /// replica, or if this user may not write keys with the prefix. Print its [sources](std::error::Error::source) as well:
    /// they have the address and the cause.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let store = self.build().map_err(|error| StoreError::new("setting up Redis", error))?;
        store.try_out().await?;
        Ok(store)
    }
}

impl RedisStore {
    /// Reaches the server, runs the script, and deletes a key that does not exist.
    pub(super) async fn try_out(&self) -> Result<(), StoreError> {
        self.dispatchers.current("connecting to Redis")?.try_out().await
    }
}

impl Store for RedisStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        Box::pin(RedisCall::new(&self.dispatchers, check))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        Box::pin(RedisCall::new(&self.dispatchers, settlement))
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        let dispatchers = Arc::clone(&self.dispatchers);
        Box::pin(async move { dispatchers.current("resetting a key")?.reset(limit, &key).await })
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.dispatchers.config().local_state)
    }
}

/// The future of a [`RedisStore`]'s decision.
///
/// The check is sent when the future is first polled, by the future itself or by a task of that runtime. A future that is
/// dropped before the check has left cancels it.
type RedisDecide = RedisCall<Check, Decision>;

/// The future of a [`RedisStore`]'s settlement.
///
/// A task of the runtime that first polls the future sends the settlement. Dropping the future after that does not cancel
/// it, because spent units have to be settled.
type RedisSettle = RedisCall<Settlement, Settled>;

/// The future of a check or a settlement, which is sent when this is first polled.
#[must_use = "futures do nothing unless polled"]
struct RedisCall<Q, A> {
    dispatchers: Arc<Dispatchers>,
    unsent: Option<Q>,
    /// The result, and the runtime that has sent for it.
    pending: Option<(Id, Pending<A>)>,
}

impl Future for RedisDecide {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_with(cx, "deciding a check", |dispatcher, check| {
            if dispatcher.is_cluster() { cross_slot::decide(dispatcher, check) } else { dispatcher.decide(check) }
        })
    }
}

impl Future for RedisSettle {
    type Output = Result<Settled, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_with(cx, "settling an admission", |dispatcher, settlement| {
            if dispatcher.is_cluster() {
                cross_slot::settle(dispatcher, settlement)
            } else {
                dispatcher.settle(settlement)
            }
        })
    }
}

impl<Q, A> RedisCall<Q, A> {
    fn new(dispatchers: &Arc<Dispatchers>, unsent: Q) -> Self {
        Self { dispatchers: Arc::clone(dispatchers), unsent: Some(unsent), pending: None }
    }

    fn poll_with(
        &mut self,
        cx: &mut Context<'_>,
        doing: &'static str,
        send: impl FnOnce(&Arc<Dispatcher>, Q) -> Result<Pending<A>, StoreError>,
    ) -> Poll<Result<A, StoreError>> {
        if let Some(unsent) = self.unsent.take() {
            let dispatcher = self.dispatchers.current(doing)?;
            self.pending = Some((dispatcher.runtime().id(), send(&dispatcher, unsent)?));
        }
        let Some((_, pending)) = &mut self.pending else { panic!("a store's future polled after completion") };
        let result = ready!(Pin::new(pending).poll(cx));
        self.pending = None;
        Poll::Ready(result)
    }
}

impl<Q, A> Drop for RedisCall<Q, A> {
    fn drop(&mut self) {
        if let Some((runtime, pending)) = &mut self.pending
            && pending.cancel()
        {
            self.dispatchers.note_cancelled(*runtime);
        }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = self.dispatchers.config().keys.prefix();
        f.debug_struct("RedisStore").field("prefix", &prefix).finish_non_exhaustive()
    }
}

impl<Q, A> fmt::Debug for RedisCall<Q, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisCall").finish_non_exhaustive()
    }
}
