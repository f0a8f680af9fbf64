//! The shared store: one atomic script on Redis decides.
//!
//! `builder.rs` and `access.rs` are the settings, `target.rs` where connections lead; `sentinel.rs` and `cluster.rs`
//! are two of the places.
//!
//! A check goes through these rooms, in this order: `runtimes.rs`, where it finds the dispatcher of its runtime; `across.rs`,
//! where it is taken apart if it lives in several slots of a cluster; `job.rs`, what it is on its way; `queue.rs`, where it
//! waits while earlier ones are on theirs; `dispatcher.rs`, which sends what waits; `batch/`, its form on the wire;
//! `connection.rs` and `script/mod.rs`, which carry it; and the Lua files beside that, of which `head.lua` is the first, which
//! decide it. `keys.rs` is the layout of the keys, and `shared.rs` what all runtimes have in common.
//!
//! 1. One sorted set a limit and identity; the script's header says what stands in it.
//! 2. The time is the server's, read once a script, so all processes decide by one clock.
//! 3. One script decides many checks, in the order of their arrival. A lone check does not wait for company, nor for a
//!    task: its own caller sends it.
//! 4. EVALSHA, and EVAL once when the server does not know the script.
//! 5. A batch that met a broken connection, or a server that has become a replica, is sent once more over a new
//!    connection. It carries its identities, so should the first try have run after all, it counts once.
//! 6. Nothing but digests leaves the process.
//! 7. What another caller needs, such as a slot or a connection, is held by tasks only, and by those of one runtime only
//!    what this runtime's callers need. So no future that is not polled, and no runtime that stands still, holds others up.

mod access;
#[cfg(feature = "cluster")]
mod across;
mod batch;
mod builder;
#[cfg(feature = "cluster")]
mod cluster;
mod connection;
mod dispatcher;
mod health;
mod invalid;
mod job;
mod keys;
mod queue;
mod runtimes;
mod script;
mod sentinel;
mod shared;
#[cfg(feature = "cluster")]
mod silence;
mod target;
mod time;
#[cfg(feature = "tls")]
mod tls;
mod url;

use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::{runtime::Id, sync::oneshot};

use self::{
    builder::Place,
    dispatcher::{Dispatcher, Sending, Submitted},
    job::Outcome,
    runtimes::Runtimes,
};
pub use self::{builder::RedisStoreBuilder, invalid::InvalidRedisConfig};
use super::{interface::Store, local_state::LocalState};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
};

/// Limits shared by every process that uses the same Redis. See the [crate docs](crate#stores).
///
/// Clones share the connections. Each tokio runtime that uses the store has connections of its own, which it closes when it
/// ends. So a runtime that stands still, such as one of a single thread between two calls of `block_on`, holds up no other. A
/// future of the store belongs to the runtime in which it is polled first.
#[derive(Clone)]
pub struct RedisStore {
    runtimes: Arc<Runtimes>,
}

impl RedisStore {
    /// A store on the server at `url`, such as `redis://127.0.0.1:6379/0`, that has been reached once, and can be written to.
    ///
    /// # Errors
    ///
    /// [`StoreError`] as of [`connect`](RedisStoreBuilder::connect) of the builder. A process that has to start while Redis
    /// is down uses [`builder`](Self::builder) and [`build`](RedisStoreBuilder::build).
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// A store with settings of its own.
    pub fn builder(url: &str) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Place::Node(url.to_owned()))
    }

    /// A store on the server of a client that the application has already: its address, TLS, user, password, database and
    /// protocol. The builder's settings override the client's. TLS needs this crate's feature `tls`.
    ///
    /// ```no_run
    /// # async fn store() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tower_sliding_window::RedisStore;
    /// let client = redis::Client::open("redis://shop:s3cret@127.0.0.1:6379/5")?;
    /// let store = RedisStore::from_client(&client).connect().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// It is a client of the crate `redis` in version 1. The connections are the store's own, with timeouts and keepalive of
    /// its own. The manager notices broken ones by the replies that pass through it, and sends a `PING` only over a new one.
    /// So a pool or a connection of another manager is not taken.
    pub fn from_client(client: &redis::Client) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Place::Client(Box::new(client.get_connection_info().clone())))
    }

    /// A store on the server that sentinels, at URLs such as `redis://10.0.0.1:26379`, name as the primary called so.
    /// Each connection asks them anew, so it survives a failover; what the old primary had not replicated is forgotten.
    ///
    /// A URL holds the user and password of the sentinel itself. Those of the server, and its database, are set on the
    /// builder. Where the first URL is a `rediss://` one, the server is reached over TLS, too.
    pub fn sentinel<U: Into<String>>(
        urls: impl IntoIterator<Item = U>,
        primary: impl Into<String>,
    ) -> RedisStoreBuilder {
        let urls = urls.into_iter().map(Into::into).collect();
        RedisStoreBuilder::new(Place::Sentinels { urls, primary: primary.into() })
    }

    /// A store on the Redis Cluster that has nodes at these URLs, of which one that is up is enough: they tell of the
    /// others. All have the user and password of the first, or of the builder.
    ///
    /// All limits of one key live in one slot and are decided as on one server. A check of several keys mostly lives in
    /// several, which no script reaches at once. They are then asked one after the other, and when one refuses, those
    /// before it are given back what they have counted. So nothing is admitted beyond a limit, and a refusal costs
    /// nothing in the end; but in between others may be refused for units that are about to come back. Of such a check,
    ///
    /// * the retry time can be too short: after it, a slot that had not been asked may refuse;
    /// * each admission is an entry of its own, by whatever algorithm its limits count;
    /// * an id of the caller's own keeps what was taken, for the next try with it;
    /// * if a node goes away in the middle, what cannot be given back to it counts until it leaves the window.
    #[cfg(feature = "cluster")]
    pub fn cluster<U: Into<String>>(urls: impl IntoIterator<Item = U>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Place::Cluster(urls.into_iter().map(Into::into).collect()))
    }
}

impl Store for RedisStore {
    type Decide = RedisDecide;
    type Settle = RedisSettle;
    type Reset = RedisReset;

    fn decide(&self, check: Check) -> RedisDecide {
        RedisDecide { asking: Asking::Unsent { runtimes: Arc::clone(&self.runtimes), asked: check } }
    }

    fn settle(&self, settlement: Settlement) -> RedisSettle {
        RedisSettle { asking: Asking::Unsent { runtimes: Arc::clone(&self.runtimes), asked: settlement } }
    }

    fn reset(&self, limit: Limit, key: Key) -> RedisReset {
        let runtimes = Arc::clone(&self.runtimes);
        RedisReset(Box::pin(async move { runtimes.dispatcher("resetting a key")?.reset(limit, &key).await }))
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.runtimes.shared().local_state)
    }
}

/// The future of a [`RedisStore`]'s decision: it sends the check when it is first polled, by itself or in a task of the
/// runtime that polls it. Dropped before the check has left, it takes it back.
#[must_use = "futures do nothing unless polled"]
pub struct RedisDecide {
    asking: Asking<Check, Decision>,
}

/// The future of a [`RedisStore`]'s settlement: it is sent by a task of the runtime that first polls it. Dropped after that,
/// it does not take it back: what was spent has to be settled.
#[must_use = "futures do nothing unless polled"]
pub struct RedisSettle {
    asking: Asking<Settlement, Settled>,
}

impl Future for RedisDecide {
    type Output = Outcome<Decision>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        #[cfg(feature = "cluster")]
        let send = across::decide;
        #[cfg(not(feature = "cluster"))]
        let send = Dispatcher::decide;
        self.asking.poll(cx, "deciding a check", send)
    }
}

impl Future for RedisSettle {
    type Output = Outcome<Settled>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        #[cfg(feature = "cluster")]
        let send = across::settle;
        #[cfg(not(feature = "cluster"))]
        let send = Dispatcher::settle;
        self.asking.poll(cx, "settling an admission", send)
    }
}

/// What is asked, and later what has been heard of it.
enum Asking<Q, A> {
    Unsent { runtimes: Arc<Runtimes>, asked: Q },
    Sent(Sent<A>),
    Done,
}

struct Sent<A> {
    outcome: oneshot::Receiver<Outcome<A>>,
    sending: Option<Sending>,
    /// Where it was asked.
    runtimes: Arc<Runtimes>,
    runtime: Id,
}

impl<A> Drop for Sent<A> {
    fn drop(&mut self) {
        if self.sending.is_none() && !self.outcome.is_terminated() {
            self.outcome.close();
            self.runtimes.note_given_up(self.runtime);
        }
    }
}

impl<Q, A> Asking<Q, A> {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        doing: &'static str,
        submit: impl FnOnce(&Arc<Dispatcher>, Q) -> Result<Submitted<A>, StoreError>,
    ) -> Poll<Outcome<A>> {
        if let Self::Unsent { .. } = self
            && let Self::Unsent { runtimes, asked } = mem::replace(self, Self::Done)
        {
            let submit = |dispatcher: Arc<Dispatcher>| Ok((dispatcher.runtime().id(), submit(&dispatcher, asked)?));
            match runtimes.dispatcher(doing).and_then(submit) {
                Ok((runtime, (outcome, sending))) => {
                    *self = Self::Sent(Sent { outcome, sending, runtimes, runtime });
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        let Self::Sent(Sent { outcome, sending, .. }) = self else {
            panic!("a store's future polled after completion")
        };
        if let Some(its_own) = sending {
            // The outcome is not asked for before it is there: it would wake the very task that brings it.
            ready!(its_own.as_mut().poll(cx));
            *sending = None;
        }
        let outcome = ready!(Pin::new(outcome).poll(cx));
        *self = Self::Done;
        // Only a runtime that shuts down lets go of a job without an outcome.
        Poll::Ready(outcome.unwrap_or_else(|gone| Err(StoreError::new("asking Redis", gone).of_one_check())))
    }
}

/// The future of a [`RedisStore`]'s reset.
#[must_use = "futures do nothing unless polled"]
pub struct RedisReset(Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>);

impl Future for RedisReset {
    type Output = Result<(), StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("prefix", &self.runtimes.shared().keys.prefix()).finish_non_exhaustive()
    }
}

impl fmt::Debug for RedisDecide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisDecide").finish_non_exhaustive()
    }
}

impl fmt::Debug for RedisSettle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSettle").finish_non_exhaustive()
    }
}

impl fmt::Debug for RedisReset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisReset").finish_non_exhaustive()
    }
}
