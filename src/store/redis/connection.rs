//! Connections of one runtime: bb8's pool over a manager like bb8-redis's, taught to notice broken connections without a PING.
//!
//! 1. A connection that failed takes its whole generation with it: when one is cut, a restarted or demoted server has
//!    mostly cut them all, and handing out the rest one by one would cost one failed check each.
//! 2. A connection that has left several requests in a row unanswered is dropped too: it may be half open, which no
//!    error ever reports.
//! 3. Both are looked up in this process. Nothing is asked of the server when a connection is taken.
//! 4. A connection is taken out of the pool, and waited for, by tasks only: a future that is not polled would keep it, or the
//!    turn, from all others. What is sent without a task shares a connection that has gone back to the pool.
//! 5. A connection to a cluster leads to all of its nodes, and mends itself: batches share it. It is dropped when none of
//!    them has said anything for half a second.

use std::{
    error, fmt,
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bb8::{ManageConnection, Pool, PooledConnection, RunError};
use redis::{
    Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::sync::Notify;

#[cfg(feature = "cluster")]
use super::{
    cluster::{ClusterLink, Nodes},
    health::MAX_UNANSWERED,
};
use super::{health::Health, shared::Shared, target::Link};

/// The kind of our own error about a connection that is not to be used again. Connecting never fails with it.
const GIVEN_UP: ErrorKind = ErrorKind::Client;

/// The connections of one runtime, which alone may ask for them.
pub(super) struct Connections {
    pool: Pool<Manager>,
    connect_timeout: Duration,
    failures: Arc<Failures>,
    address: Arc<str>,
}

/// A connection to send over.
pub(super) struct Connection<'a> {
    line: Line,
    /// What has been taken out of the pool goes back when this is dropped.
    _taken: Option<PooledConnection<'a, Manager>>,
}

/// Clones send over one connection.
#[derive(Clone)]
enum Line {
    Node(MultiplexedConnection, Arc<Health>),
    #[cfg(feature = "cluster")]
    Cluster(Nodes),
}

impl Connections {
    /// Sets the pool up. Connects nowhere yet.
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        let failures = Arc::new(Failures::default());
        let pool = Pool::builder()
            .max_size(shared.connections)
            .connection_timeout(shared.connect_timeout)
            .idle_timeout(None)
            .max_lifetime(None)
            // The next check tries again, so that nobody waits out a pause between two tries.
            .retry_connection(false)
            .error_sink(Box::new(Sink(Arc::clone(&failures))))
            .build_unchecked(Manager { shared: Arc::clone(shared), generation: Arc::default() });
        Self { pool, failures, address: shared.target.to_string().into(), connect_timeout: shared.connect_timeout }
    }

    /// A connection that is there and idle, if there is one, for what is sent for the first time. It has gone back to the
    /// pool already.
    pub(super) fn share_idle(&self) -> Option<Connection<'static>> {
        match pin!(self.pool.get()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(pooled)) => Some(Connection { line: pooled.line(false), _taken: None }),
            _ => None,
        }
    }

    /// A connection, new or idle, for what is sent for the first time, or again. Where none is left and none can be
    /// made, the wait ends at once, with the cause. To be called in a task.
    pub(super) async fn take(&self, again: bool) -> Result<Connection<'_>, NoConnection> {
        let mut pooled = pin!(self.pool.get());
        loop {
            let mut failure = pin!(self.failures.happened.notified());
            failure.as_mut().enable();
            let outcome = poll_fn(|cx| match pooled.as_mut().poll(cx) {
                Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
                Poll::Pending => failure.as_mut().poll(cx).map(|()| None),
            });
            let (after, cause) = match outcome.await {
                Some(Ok(pooled)) => return Ok(Connection::taken(pooled, again)),
                Some(Err(RunError::User(error))) => (None, Some(error)),
                Some(Err(RunError::TimedOut)) => (Some(self.connect_timeout), self.failures.last()),
                // Others are in use: one of them will do.
                None if self.pool.state().connections > 0 => continue,
                None => (None, self.failures.last()),
            };
            return Err(NoConnection { address: Arc::clone(&self.address), after, cause });
        }
    }
}

impl<'a> Connection<'a> {
    fn taken(pooled: PooledConnection<'a, Manager>, again: bool) -> Self {
        match pooled.line(again) {
            line @ Line::Node(..) => Self { line, _taken: Some(pooled) },
            // It goes back at once: a node that is slow must not keep others from the rest.
            #[cfg(feature = "cluster")]
            line @ Line::Cluster(_) => Self { line, _taken: None },
        }
    }

    pub(super) async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        match &mut self.line {
            Line::Node(connection, health) => health.watch(connection.req_packed_command(command)).await,
            // It mends itself.
            #[cfg(feature = "cluster")]
            Line::Cluster(nodes) => nodes.send(command).await,
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
enum Managed {
    Node(MultiplexedConnection, Arc<Health>),
    #[cfg(feature = "cluster")]
    Cluster(Box<ClusterLink>),
}

impl Managed {
    /// To send over it for the first time, or again.
    #[cfg_attr(not(feature = "cluster"), expect(unused_variables))]
    fn line(&self, again: bool) -> Line {
        match self {
            Self::Node(connection, health) => Line::Node(connection.clone(), Arc::clone(health)),
            #[cfg(feature = "cluster")]
            Self::Cluster(link) => Line::Cluster(link.nodes(again)),
        }
    }
}

struct Manager {
    shared: Arc<Shared>,
    generation: Arc<AtomicU64>,
}

impl ManageConnection for Manager {
    type Connection = Managed;
    type Error = RedisError;

    async fn connect(&self) -> RedisResult<Managed> {
        let health = Health::of_next(&self.generation);
        Ok(match self.shared.target.connect(self.shared.client_name.as_deref()).await? {
            Link::Node(connection) => Managed::Node(connection, Arc::new(health)),
            #[cfg(feature = "cluster")]
            Link::Cluster(link) => Managed::Cluster(link),
        })
    }

    async fn is_valid(&self, connection: &mut Managed) -> RedisResult<()> {
        if self.has_broken(connection) {
            return Err(RedisError::from((GIVEN_UP, "the connection has been given up")));
        }
        Ok(())
    }

    fn has_broken(&self, connection: &mut Managed) -> bool {
        match connection {
            Managed::Node(_, health) => health.has_broken(),
            #[cfg(feature = "cluster")]
            Managed::Cluster(link) => link.is_silent(MAX_UNANSWERED),
        }
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
