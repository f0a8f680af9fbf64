//! The connections of one runtime: bb8's pool, which notices broken connections without a PING.
//!
//! 1. Taking a connection sends nothing: the replies that pass through a connection tell whether it works.
//! 2. Only tasks take a connection or wait for one. A future that is not polled would keep the connection, or its turn in
//!    the pool, from all others. A check that is sent without a task shares the connection that a task took last.
//! 3. Batches share the connections to a cluster, which lead to all of its nodes.
//! 4. A connection that failed takes its whole generation with it: a server that restarts or is demoted has mostly cut
//!    all connections. Handing out the others one by one would fail one check each.
//! 5. A connection that left several requests in a row without a reply is given up too. It may be half open, which no
//!    error ever reports.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use bb8::{ManageConnection, PooledConnection};
use redis::{Cmd, ErrorKind, RedisError, RedisResult, Value, aio::MultiplexedConnection};
use tokio::sync::watch;

#[cfg(feature = "cluster")]
use super::cluster::ClusterConnections;
use super::{
    errors::{self, needs_new_connection},
    server::Server,
};
use crate::error::StoreError;

/// The kind of our own error about a connection that is not to be used again. Connecting never fails with it.
const GIVEN_UP: ErrorKind = ErrorKind::Client;

/// A connection that left this many requests in a row without a reply is given up.
const MAX_UNANSWERED: u32 = 3;

/// A caller that stops waiting sooner, for example because its client hung up, says nothing about the connection.
const TOO_SOON: Duration = Duration::from_millis(5);

/// The connections of one runtime. Only that runtime may take them.
pub(crate) struct Pool {
    pool: bb8::Pool<Connector>,
    last_taken: Mutex<Option<Connection>>,
    last_failure: watch::Sender<Option<RedisError>>,
    server: Arc<Server>,
}

impl Pool {
    /// Connects nowhere yet.
    pub(crate) fn new(server: &Arc<Server>) -> Self {
        let last_failure = watch::Sender::new(None);
        let pool = bb8::Pool::builder()
            .max_size(server.settings.connections)
            .connection_timeout(server.settings.connect_timeout)
            .idle_timeout(None)
            .max_lifetime(None)
            // The next check tries again, so no check waits for a pause between two tries.
            .retry_connection(false)
            .error_sink(Box::new(FailureSink(last_failure.clone())))
            .build_unchecked(Connector { server: Arc::clone(server), generation: Arc::default() });
        Self { pool, last_taken: Mutex::default(), last_failure, server: Arc::clone(server) }
    }

    /// A clone of the connection that was taken last, if it works. Unlike taking one, this reads no clock.
    pub(crate) fn share(&self) -> Option<Connection> {
        let mut last_taken = self.last_taken();
        drop(last_taken.take_if(|connection| connection.is_broken()));
        last_taken.clone()
    }

    fn last_taken(&self) -> MutexGuard<'_, Option<Connection>> {
        self.last_taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection, and the guard that returns it to the pool. If there is none and none can be made, the wait ends at once
    /// with the cause. To be called in a task.
    pub(crate) async fn take(&self) -> Result<(Connection, Option<PooledConnection<'_, Connector>>), StoreError> {
        let mut pooled = pin!(self.pool.get());
        let mut failures = self.last_failure.subscribe();
        loop {
            let mut failure = pin!(failures.changed());
            let outcome = poll_fn(|cx| match pooled.as_mut().poll(cx) {
                Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
                Poll::Pending => failure.as_mut().poll(cx).map(|_| None),
            });
            let within = match outcome.await {
                Some(Ok(pooled)) => {
                    let connection = pooled.clone();
                    *self.last_taken() = Some(connection.clone());
                    // Connections to a cluster return at once: a slow node must not keep other batches from the rest.
                    let is_exclusive = matches!(connection, Connection::Server(..));
                    return Ok((connection, is_exclusive.then_some(pooled)));
                }
                Some(Err(_)) => format!(" within {:?}", self.server.settings.connect_timeout),
                // The other connections are in use. One of them will come back.
                None if self.pool.state().connections > 0 => continue,
                None => String::new(),
            };
            let text = format!("no connection to Redis at {} could be opened{within}", self.server);
            return Err(errors::no_connection(text, self.last_failure.borrow().as_ref()));
        }
    }
}

/// Makes the connections of one pool, and tells it which are broken.
pub(crate) struct Connector {
    server: Arc<Server>,
    generation: Arc<AtomicU64>,
}

impl Connector {
    async fn open(&self) -> RedisResult<Connection> {
        #[cfg(feature = "cluster")]
        if self.server.is_cluster() {
            return Ok(Connection::Cluster(Arc::new(self.server.connect_to_cluster().await?)));
        }
        let health = ConnectionHealth::new(&self.generation);
        Ok(Connection::Server(self.server.connect().await?, Arc::new(health)))
    }
}

impl ManageConnection for Connector {
    type Connection = Connection;
    type Error = RedisError;

    async fn connect(&self) -> RedisResult<Connection> {
        match self.open().await {
            // The server cut it in the middle of signing in, for example with `CLIENT KILL`. That says nothing about the next one.
            Err(error) if error.is_connection_dropped() => self.open().await,
            outcome => outcome,
        }
    }

    async fn is_valid(&self, connection: &mut Connection) -> RedisResult<()> {
        if connection.is_broken() {
            return Err(RedisError::from((GIVEN_UP, "the connection has been given up")));
        }
        Ok(())
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        connection.is_broken()
    }
}

/// Publishes that connecting failed: bb8 does not report it to the callers that wait.
#[derive(Clone, Debug)]
struct FailureSink(watch::Sender<Option<RedisError>>);

impl bb8::ErrorSink<RedisError> for FailureSink {
    fn sink(&self, error: RedisError) {
        // A connection that was given up says nothing about making a new one.
        if error.kind() != GIVEN_UP {
            self.0.send_replace(Some(error));
        }
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<RedisError>> {
        Box::new(self.clone())
    }
}

/// A connection to one server, or connections to all nodes of a cluster. Clones share them.
#[derive(Clone)]
pub(crate) enum Connection {
    Server(MultiplexedConnection, Arc<ConnectionHealth>),
    #[cfg(feature = "cluster")]
    Cluster(Arc<ClusterConnections>),
}

impl Connection {
    /// Sends a command. `again` says that it has been sent before.
    #[cfg_attr(not(feature = "cluster"), expect(unused_variables))]
    pub(crate) async fn send(&mut self, command: &Cmd, again: bool) -> RedisResult<Value> {
        match self {
            Self::Server(connection, health) => {
                let wait = health.wait();
                wait.end(connection.send_packed_command(command).await)
            }
            // It replaces broken connections by itself.
            #[cfg(feature = "cluster")]
            Self::Cluster(connections) => connections.send(command, again).await,
        }
    }

    fn is_broken(&self) -> bool {
        match self {
            Self::Server(_, health) => health.is_broken(),
            #[cfg(feature = "cluster")]
            Self::Cluster(connections) => connections.are_silent(MAX_UNANSWERED),
        }
    }
}

/// The health of a connection to one server, shared by all that send over it.
#[derive(Debug)]
pub(crate) struct ConnectionHealth {
    /// The generation of the connection, and the current one of its pool.
    generation: u64,
    current: Arc<AtomicU64>,
    unanswered: AtomicU32,
}

impl ConnectionHealth {
    /// To be called before connecting: if the generation ends while a connection is being made, that connection may
    /// lead to the old server.
    fn new(current: &Arc<AtomicU64>) -> Self {
        let generation = current.load(Ordering::Relaxed);
        Self { generation, current: Arc::clone(current), unanswered: AtomicU32::new(0) }
    }

    fn is_broken(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) >= MAX_UNANSWERED
            || self.generation != self.current.load(Ordering::Relaxed)
    }

    /// To be called before a request is sent.
    fn wait(&self) -> ReplyWait<'_> {
        ReplyWait { health: self, since: Instant::now() }
    }

    /// Gives up every connection of this generation. Only the first of several failures does it.
    fn end_generation(&self) {
        let next = self.generation + 1;
        let _ = self.current.compare_exchange(self.generation, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// A wait for a reply. Dropping it counts the request as unanswered: the reply took too long for the Redis client, or a
/// deadline dropped the future of the caller.
struct ReplyWait<'a> {
    health: &'a ConnectionHealth,
    since: Instant,
}

impl ReplyWait<'_> {
    /// Learns from the reply whether the connection works.
    fn end(self, reply: RedisResult<Value>) -> RedisResult<Value> {
        let result = reply.and_then(Value::extract_error);
        if result.as_ref().is_err_and(RedisError::is_timeout) {
            return result;
        }
        let health = self.health;
        mem::forget(self);
        match &result {
            Err(error) if needs_new_connection(error) => health.end_generation(),
            _ => health.unanswered.store(0, Ordering::Relaxed),
        }
        result
    }
}

impl Drop for ReplyWait<'_> {
    fn drop(&mut self) {
        if self.since.elapsed() >= TOO_SOON {
            self.health.unanswered.fetch_add(1, Ordering::Relaxed);
        }
    }
}
