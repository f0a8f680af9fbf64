//! A connection, and whether it still works.
//!
//! 1. A connection that failed takes its whole generation with it: a server that restarts or is demoted has mostly cut
//!    all connections. Handing out the others one by one would fail one check each.
//! 2. A connection that left several requests in a row without a reply is given up too. It may be half open, which no
//!    error ever reports.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, aio::MultiplexedConnection};

#[cfg(feature = "cluster")]
use super::cluster::ClusterConnections;

/// A connection that left this many requests in a row without a reply is given up.
const MAX_UNANSWERED: u32 = 3;

/// A caller that stops waiting sooner, for example because its client hung up, says nothing about the connection.
const TOO_SOON: Duration = Duration::from_millis(5);

/// A connection to one server, or connections to all nodes of a cluster. Clones share them.
#[derive(Clone)]
pub(crate) enum Connection {
    Server(MultiplexedConnection, Arc<ConnectionHealth>),
    #[cfg(feature = "cluster")]
    Cluster(Arc<ClusterConnections>),
}

impl Connection {
    pub(super) fn to_server(connection: MultiplexedConnection, health: ConnectionHealth) -> Self {
        Self::Server(connection, Arc::new(health))
    }

    #[cfg(feature = "cluster")]
    pub(super) fn to_cluster(connections: ClusterConnections) -> Self {
        Self::Cluster(Arc::new(connections))
    }

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

    pub(super) fn is_broken(&self) -> bool {
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
    pub(super) fn new(current: &Arc<AtomicU64>) -> Self {
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

/// Whether the next request needs a new connection: the peer is gone, or it has become a replica and a new connection may
/// reach the new primary.
pub(crate) fn needs_new_connection(error: &RedisError) -> bool {
    // Before Redis 7.0, READONLY for a command of a script is in the text of the script's error.
    let is_read_only = error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error.detail().is_some_and(|text| text.contains("-READONLY "));
    error.is_unrecoverable_error() || is_read_only
}

/// Whether the error says that a node has not run the command, and that another may.
pub(crate) fn was_not_run(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    matches!(
        error.kind(),
        ErrorKind::ClusterConnectionNotFound
            | ErrorKind::Server(Moved | Ask | TryAgain | ClusterDown | MasterDown | BusyLoading | ReadOnly)
    )
}
