//! The connections of one runtime: bb8's pool, which notices broken connections without a PING.
//!
//! 1. Taking a connection sends nothing: the replies that pass through a connection tell whether it works.
//! 2. Only tasks take a connection or wait for one. A future that is not polled would keep the connection, or its turn in
//!    the pool, from all others. A check that is sent without a task shares the connection that a task took last.
//! 3. Batches share the connections to a cluster, which lead to all of its nodes.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    task::Poll,
};

use bb8::{ManageConnection, PooledConnection};
use redis::{ErrorKind, RedisError, RedisResult};
use tokio::sync::watch;

use super::{
    connection::{Connection, ConnectionHealth},
    errors,
    server::Server,
};
use crate::error::StoreError;

/// The kind of our own error about a connection that is not to be used again. Connecting never fails with it.
const GIVEN_UP: ErrorKind = ErrorKind::Client;

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

impl ManageConnection for Connector {
    type Connection = Connection;
    type Error = RedisError;

    async fn connect(&self) -> RedisResult<Connection> {
        let connect = || self.server.connect(ConnectionHealth::new(&self.generation));
        match connect().await {
            // The server cut it in the middle of signing in, for example with `CLIENT KILL`. That says nothing about the next one.
            Err(error) if error.is_connection_dropped() => connect().await,
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
