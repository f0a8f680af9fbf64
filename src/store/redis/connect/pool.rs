//! One runtime's connections. Each takes a seat in a bb8 pool.
//!
//! 1. If a caller takes an empty seat, a task opens a connection for it. Meanwhile, the caller uses
//!    any connection that works. So callers wait only while no connection works. If the task cannot
//!    open a connection, these callers get its error at once.
//! 2. Taking a connection does not send anything: the replies to later requests tell whether it
//!    works.
//! 3. Only tasks take a connection or wait for one. Otherwise, a future that nobody polls could
//!    keep a connection, or a turn in the pool, from all other callers. A check that is sent
//!    without a task shares a connection that a task has opened.
//! 4. Each batch takes the connection that has been free for the longest time, so all are used in
//!    turn. One that is never used could be half-open, and only a burst of checks would show it. In
//!    a cluster, a connection leads to all nodes, and batches share it. Using all in turn helps
//!    there as well: the Redis client behind a connection stands still while it connects to a node
//!    that hangs.
//! 5. When a connection fails, all others that are open or being opened are given up with it:
//!    together, they are a generation. The reason is that a server that restarts or is demoted has
//!    usually cut all of them. If the others were still handed out, each would fail one check.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    io,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use bb8::{ManageConnection, PooledConnection};
use redis::{RedisResult, cmd};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
};

#[cfg(feature = "cluster")]
use super::cluster;
use super::{
    connection::{Connection, within},
    errors,
    server::Server,
};
use crate::{error::StoreError, local::lock};

/// If a connection could not be opened, the pool waits this long before it opens another one, as
/// long as any connection works. All connections that the server allows may be in use, and without
/// this pause, each batch would try to open another one.
const PAUSE: Duration = Duration::from_millis(100);

/// One runtime's connections. Only that runtime may take them.
pub(crate) struct Pool {
    seats: bb8::Pool<Seats>,
    /// The tasks that open connections. They end when the pool is dropped.
    openings: Mutex<JoinSet<()>>,
    opener: Arc<Opener>,
}

/// The state that the pool shares with its opening tasks.
struct Opener {
    server: Arc<Server>,
    /// The connection that callers share. `None` until one has been opened.
    shared: watch::Sender<Option<Arc<Connection>>>,
    /// When an opening last failed.
    failed_at: Mutex<Option<Instant>>,
    generation: Arc<AtomicU64>,
    distance: Arc<AtomicU64>,
}

/// A seat in the pool. Dropping it returns it to the pool.
type Seat = PooledConnection<'static, Seats>;

/// A connection, with its seat unless other batches share it.
pub(crate) type Taken = (Arc<Connection>, Option<Seat>);

impl Pool {
    /// A pool without connections.
    pub(crate) fn new(server: &Arc<Server>, distance: Arc<AtomicU64>) -> Self {
        let seats = bb8::Pool::builder()
            .max_size(server.settings.connections)
            // Waiting for a seat is part of waiting for a connection, which already has a timeout.
            .connection_timeout(Duration::MAX)
            .idle_timeout(None)
            .max_lifetime(None)
            .build_unchecked(Seats);
        let opener = Opener {
            server: Arc::clone(server),
            shared: watch::Sender::default(),
            failed_at: Mutex::default(),
            generation: Arc::default(),
            distance,
        };
        Self {
            seats,
            openings: Mutex::default(),
            opener: Arc::new(opener),
        }
    }

    /// Returns the shared connection, if it works. Unlike [`take`](Self::take), this does not read
    /// the clock.
    pub(crate) fn share(&self) -> Option<Arc<Connection>> {
        let shared = self.opener.shared.borrow().clone();
        shared.filter(|connection| connection.works())
    }

    /// Takes a connection. On a single server, the connection comes with its seat, and only one
    /// batch uses it until the seat is given back. In a cluster, it comes without a seat, and
    /// batches share it. While a new connection is being opened, or if it cannot be opened, returns
    /// another one that works. Only a task may call this method.
    pub(crate) async fn take(&self) -> Result<Taken, StoreError> {
        let server = &self.opener.server;
        let mut shared = self.opener.shared.subscribe();
        let mut shared = pin!(async {
            let may_work = shared.wait_for(|it| it.as_deref().is_some_and(Connection::may_work));
            may_work.await.ok()?.clone()
        });
        let mut filled = pin!(within(server.settings.connect_timeout, self.fill()));
        poll_fn(|cx| {
            let filled = filled.as_mut().poll(cx);
            if let Poll::Ready(Ok((connection, seat))) = filled {
                // A cluster's seat returns to the pool at once: a slow node must not keep other
                // batches from the other nodes.
                let seat = (!connection.is_to_cluster).then_some(seat);
                return Poll::Ready(Ok((connection, seat)));
            }
            match (shared.as_mut().poll(cx), filled) {
                (Poll::Ready(Some(shared)), _) => Poll::Ready(Ok((shared, None))),
                (_, Poll::Ready(Err(cause))) => {
                    Poll::Ready(Err(errors::no_connection(server, &cause)))
                }
                _ => Poll::Pending,
            }
        })
        .await
    }

    /// Opens all connections. Call this before any connection is in use, since it waits for every
    /// seat. A connection that cannot be opened now is opened when needed.
    pub(crate) async fn open_all(&self) {
        let mut opening = Vec::new();
        let mut open = Vec::new();
        for _ in 0..self.opener.server.settings.connections {
            let Ok(seat) = self.seats.get_owned().await else {
                return;
            };
            if seat.is_some() {
                open.push(seat);
            } else {
                opening.push(self.open(seat));
            }
        }
        for opened in opening {
            let _ = opened.await;
        }
    }

    /// Waits for a seat, and opens a connection if it is empty.
    async fn fill(&self) -> RedisResult<(Arc<Connection>, Seat)> {
        let seat = self.seats.get_owned().await.map_err(io::Error::other)?;
        if let Some(connection) = &*seat {
            if self.share().is_none() {
                let shared = &self.opener.shared;
                shared.send_replace(Some(connection.clone()));
            }
            return Ok((connection.clone(), seat));
        }
        let is_paused = lock(&self.opener.failed_at).is_some_and(|at| at.elapsed() < PAUSE);
        if is_paused && let Some(shared) = self.share() {
            return Ok((shared, seat));
        }
        self.open(seat)
            .await
            .map_err(|_| io::Error::other("opening it has panicked"))?
    }

    /// Opens a connection for an empty seat, in a task.
    fn open(&self, mut seat: Seat) -> oneshot::Receiver<RedisResult<(Arc<Connection>, Seat)>> {
        let opener = Arc::clone(&self.opener);
        let (opened, outcome) = oneshot::channel();
        let mut openings = lock(&self.openings);
        while openings.try_join_next().is_some() {}
        openings.spawn(async move {
            let outcome = opener.open().await.map(Arc::new);
            let new = outcome.as_ref().ok().cloned();
            if new.is_none() {
                *lock(&opener.failed_at) = Some(Instant::now());
            }
            // If the caller has stopped waiting, later callers get the connection.
            let _ = opened.send(outcome.map(|connection| {
                *seat = Some(connection.clone());
                opener.shared.send_replace(Some(connection.clone()));
                (connection, seat)
            }));
            // These two commands are sent only after the new connection has been handed out, so a
            // node that hangs does not delay callers.
            if opener.server.is_cluster()
                && let Some(new) = new
            {
                let mut slots = cmd("CLUSTER");
                let slots = new.send(slots.arg("SLOTS"), true, Instant::now()).await;
                opener.server.learn_nodes(slots);
                let info = new.send(&cmd("INFO"), false, Instant::now()).await;
                opener.server.warn_of_nodes(info);
            }
        });
        outcome
    }
}

/// Makes empty seats.
pub(crate) struct Seats;

impl ManageConnection for Seats {
    type Connection = Option<Arc<Connection>>;
    type Error = Infallible;

    async fn connect(&self) -> Result<Option<Arc<Connection>>, Infallible> {
        Ok(None)
    }

    /// Empties a seat if its connection does not work.
    async fn is_valid(&self, connection: &mut Option<Arc<Connection>>) -> Result<(), Infallible> {
        drop(connection.take_if(|connection| !connection.works()));
        Ok(())
    }

    fn has_broken(&self, connection: &mut Option<Arc<Connection>>) -> bool {
        connection.as_ref().is_some_and(|open| !open.works())
    }
}

impl Opener {
    /// Opens a connection in the current generation. If the generation ends meanwhile, the new
    /// connection is given up as well, since it may lead to the old server.
    async fn open(&self) -> RedisResult<Connection> {
        let settings = &self.server.settings;
        let reply_timeout = settings.reply_timeout;
        #[cfg(feature = "cluster")]
        if self.server.is_cluster() {
            let clients = cluster::connect(&self.server.nodes, settings).await?;
            return Ok(Connection::to_cluster(clients, reply_timeout));
        }
        let current = &self.generation;
        let generation = current.load(Ordering::Relaxed);
        let clones = within(settings.connect_timeout, async {
            match self.server.connect(&self.distance).await {
                // The connection was cut while signing in, for example with `CLIENT KILL`. A retry
                // may succeed.
                Err(error) if error.is_connection_dropped() && !error.is_connection_refusal() => {
                    self.server.connect(&self.distance).await
                }
                outcome => outcome,
            }
        });
        Ok(Connection::new(
            clones.await?,
            reply_timeout,
            generation,
            current,
        ))
    }
}
