//! Connections: bb8's pool over a manager like bb8-redis's, taught to notice broken connections without a PING.
//!
//! 1. A connection that failed takes its whole generation with it: when one is cut, a restarted or demoted server has
//!    mostly cut them all, and handing out the rest one by one would cost one failed check each.
//! 2. A connection that has left several requests in a row unanswered is dropped too: it may be half open, which no
//!    error ever reports.
//! 3. Both are looked up in this process. Nothing is asked of the server when a connection is taken.
//! 4. A connection to a cluster leads to all of its nodes, and mends itself: batches share it. It is dropped when none of
//!    them has said anything for half a second.
//! 5. A pool counts on each connection that it has begun to make. With a runtime that ends meanwhile, that one ends
//!    unmade: then there is a new pool, for whoever asks from another runtime.

use std::{
    error, fmt,
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bb8::{ManageConnection, Pool, RunError};
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, aio::ConnectionLike};
use tokio::sync::Notify;

#[cfg(feature = "cluster")]
use super::cluster::Nodes;
use super::target::{Link, Target};

/// A connection that left this many requests in a row unanswered is dropped.
const MAX_UNANSWERED: u32 = 3;

/// The kind of our own error about a connection that is not to be used again. Connecting never fails with it.
const GIVEN_UP: ErrorKind = ErrorKind::Client;

/// A pool of connections to one target.
pub(super) struct Connections {
    pool: RwLock<Pool<Manager>>,
    manager: Manager,
    connections: u32,
    failures: Arc<Failures>,
    address: Arc<str>,
    connect_timeout: Duration,
}

/// A connection taken from the pool.
pub(super) struct Connection<'a> {
    held: Held,
    generation: &'a AtomicU64,
}

enum Held {
    /// It goes back when it is dropped.
    Alone(bb8::PooledConnection<'static, Manager>),
    /// One to a whole cluster has gone back already: a node that is slow must not keep others from the rest.
    #[cfg(feature = "cluster")]
    Shared(Nodes),
}

impl Connections {
    /// Sets the pool up. Connects nowhere yet, and needs no runtime. Each connection gets the name, if there is one.
    pub(super) fn new(target: Target, name: Option<String>, connections: u32, connect_timeout: Duration) -> Self {
        let address = target.to_string().into();
        let manager =
            Manager { target: Arc::new(target), name, generation: Arc::default(), is_abandoned: Arc::default() };
        let failures = Arc::new(Failures::default());
        let pool = RwLock::new(new_pool(&manager, connections, connect_timeout, &failures));
        Self { pool, manager, connections, failures, address, connect_timeout }
    }

    fn pool(&self) -> Pool<Manager> {
        if self.manager.is_abandoned.load(Ordering::Relaxed) {
            let mut pool = self.pool.write().unwrap_or_else(PoisonError::into_inner);
            if self.manager.is_abandoned.swap(false, Ordering::Relaxed) {
                *pool = new_pool(&self.manager, self.connections, self.connect_timeout, &self.failures);
            }
        }
        self.pool.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A connection, new or idle, for what is sent for the first time, or again. Where none is left and none can be
    /// made, the wait ends at once, with the cause.
    pub(super) async fn get(&self, again: bool) -> Result<Connection<'_>, NoConnection> {
        let pool = self.pool();
        let mut pooled = pin!(pool.get_owned());
        loop {
            let mut failure = pin!(self.failures.happened.notified());
            failure.as_mut().enable();
            let outcome = poll_fn(|cx| match pooled.as_mut().poll(cx) {
                Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
                Poll::Pending => failure.as_mut().poll(cx).map(|()| None),
            });
            let (after, cause) = match outcome.await {
                Some(Ok(pooled)) => {
                    return Ok(Connection { held: Held::of(pooled, again), generation: &self.manager.generation });
                }
                Some(Err(RunError::User(error))) => (None, Some(error)),
                Some(Err(RunError::TimedOut)) => (Some(self.connect_timeout), self.failures.last()),
                // Others are in use: one of them will do.
                None if pool.state().connections > 0 => continue,
                None => (None, self.failures.last()),
            };
            return Err(NoConnection { address: Arc::clone(&self.address), after, cause });
        }
    }
}

fn new_pool(manager: &Manager, connections: u32, connect_timeout: Duration, failures: &Arc<Failures>) -> Pool<Manager> {
    Pool::builder()
        .max_size(connections)
        .connection_timeout(connect_timeout)
        .idle_timeout(None)
        .max_lifetime(None)
        // The next check tries again, so that nobody waits out a pause between two tries.
        .retry_connection(false)
        .error_sink(Box::new(Sink(Arc::clone(failures))))
        .build_unchecked(manager.clone())
}

impl Held {
    #[cfg_attr(not(feature = "cluster"), expect(unused_variables))]
    fn of(pooled: bb8::PooledConnection<'static, Manager>, again: bool) -> Self {
        match &pooled.link {
            Link::Node(_) => Self::Alone(pooled),
            #[cfg(feature = "cluster")]
            Link::Cluster(link) => Self::Shared(link.nodes(again)),
        }
    }
}

impl Connection<'_> {
    pub(super) async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        match &mut self.held {
            Held::Alone(pooled) => pooled.send(command, self.generation).await,
            // It mends itself.
            #[cfg(feature = "cluster")]
            Held::Shared(nodes) => nodes.send(command).await,
        }
    }
}

/// Whether an error says that the next request should go over a new connection: the peer is gone, or it has become a
/// replica and a new connection may reach the new primary.
pub(super) fn ends_the_connection(error: &RedisError) -> bool {
    // Before Redis 7.0 what a script's command is refused with stands in the text of an error of the script.
    let is_read_only = error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
        || error.detail().is_some_and(|text| text.contains("-READONLY "));
    error.is_unrecoverable_error() || is_read_only
}

/// Whether an error says that a node of a cluster has not run what it was sent, and another may.
#[cfg(feature = "cluster")]
pub(super) fn is_elsewhere(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
    matches!(
        error.kind(),
        ErrorKind::ClusterConnectionNotFound
            | ErrorKind::Server(Moved | Ask | TryAgain | ClusterDown | MasterDown | BusyLoading | ReadOnly)
    )
}

/// What bb8 manages: a connection and what is known of its health.
struct Managed {
    link: Link,
    generation: u64,
    unanswered: u32,
}

impl Managed {
    /// Sends a command, and notes whether the connection is of any more use.
    async fn send(&mut self, command: &Cmd, generation: &AtomicU64) -> RedisResult<Value> {
        // Counted before the wait: a caller whose deadline passes drops this future in the middle of it.
        self.unanswered += 1;
        let outcome = match &mut self.link {
            Link::Node(connection) => connection.req_packed_command(command).await.and_then(Value::extract_error),
            // It is never held alone.
            #[cfg(feature = "cluster")]
            Link::Cluster(link) => link.nodes(false).send(command).await,
        };
        match &outcome {
            Err(error) if error.is_timeout() => {}
            Err(error) if ends_the_connection(error) => {
                // Every connection of this generation is replaced, once however many of them fail.
                let ended = self.generation;
                let _ = generation.compare_exchange(ended, ended + 1, Ordering::Relaxed, Ordering::Relaxed);
            }
            _ => self.unanswered = 0,
        }
        outcome
    }
}

#[derive(Clone)]
struct Manager {
    target: Arc<Target>,
    name: Option<String>,
    generation: Arc<AtomicU64>,
    /// Whether a runtime has ended while it connected.
    is_abandoned: Arc<AtomicBool>,
}

/// A connection that is being made. Dropped before that is over, it is abandoned.
struct Attempt<'a> {
    is_abandoned: &'a AtomicBool,
    is_over: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.is_abandoned.store(true, Ordering::Relaxed);
        }
    }
}

impl ManageConnection for Manager {
    type Connection = Managed;
    type Error = RedisError;

    async fn connect(&self) -> RedisResult<Managed> {
        // Read before connecting: if the generation ends meanwhile, this connection may have reached the old server.
        let generation = self.generation.load(Ordering::Relaxed);
        let mut attempt = Attempt { is_abandoned: &self.is_abandoned, is_over: false };
        let link = self.target.connect(self.name.as_deref()).await;
        attempt.is_over = true;
        Ok(Managed { link: link?, generation, unanswered: 0 })
    }

    async fn is_valid(&self, connection: &mut Managed) -> RedisResult<()> {
        if self.has_broken(connection) {
            return Err(RedisError::from((GIVEN_UP, "the connection has been given up")));
        }
        Ok(())
    }

    fn has_broken(&self, connection: &mut Managed) -> bool {
        #[cfg(feature = "cluster")]
        if let Link::Cluster(link) = &connection.link
            && link.is_silent(MAX_UNANSWERED)
        {
            return true;
        }
        connection.unanswered >= MAX_UNANSWERED || connection.generation != self.generation.load(Ordering::Relaxed)
    }
}

/// Where bb8 reports that connecting failed, which it tells nobody who waits.
#[derive(Debug, Default)]
struct Failures {
    last: Mutex<Option<RedisError>>,
    happened: Notify,
}

impl Failures {
    fn last(&self) -> Option<RedisError> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[derive(Debug)]
struct Sink(Arc<Failures>);

impl bb8::ErrorSink<RedisError> for Sink {
    fn sink(&self, error: RedisError) {
        if error.kind() == GIVEN_UP {
            // An old connection was not taken. That says nothing about making a new one.
            return;
        }
        *self.0.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        self.0.happened.notify_waiters();
    }

    fn boxed_clone(&self) -> Box<dyn bb8::ErrorSink<RedisError>> {
        Box::new(Self(Arc::clone(&self.0)))
    }
}

/// No connection could be had.
#[derive(Debug)]
pub(super) struct NoConnection {
    address: Arc<str>,
    after: Option<Duration>,
    cause: Option<RedisError>,
}

impl fmt::Display for NoConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.after {
            Some(after) => write!(f, "no connection to Redis at {} could be opened within {after:?}", self.address),
            None => write!(f, "no connection to Redis at {} could be opened", self.address),
        }
    }
}

impl error::Error for NoConnection {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.cause.as_ref().map(|cause| cause as _)
    }
}
