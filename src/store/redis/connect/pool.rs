//! The connections of one runtime, in the seats of bb8's pool.
//!
//! 1. If a caller takes an empty seat, a task opens a connection for the seat. Meanwhile the caller
//!    uses any connection that works. So callers wait only while no connection works. If the
//!    opening then fails, these callers get its error at once.
//! 2. Taking a connection sends nothing: the replies that pass through a connection tell whether it
//!    works.
//! 3. Only tasks take a connection or wait for one. Otherwise, a caller's future that nobody polls
//!    could keep a connection, or a turn in the pool, from all other callers. A check that is sent
//!    without a task shares a connection that a task has opened.
//! 4. Each batch takes the connection that has been free for the longest time. So all connections
//!    are used in turn. A connection that is never used could be half open, and only a burst of
//!    checks would show it. In a cluster, a connection leads to all nodes, and batches share it.
//!    Turns help there as well: the Redis client behind a connection stands still while it connects
//!    to a node that hangs.
//! 5. When a connection fails, all connections that are open or being opened are given up with it.
//!    Together they are a generation. The reason is that a server that restarts or is demoted has
//!    mostly cut all of them. If the other connections were still handed out, each of them would
//!    fail one check.

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
    time::timeout,
};

#[cfg(feature = "cluster")]
use super::cluster;
use super::{
    connection::{Connection, late},
    errors,
    server::Server,
};
use crate::{error::StoreError, local::lock};

/// After a failed opening, no other connection is opened for this time, as long as one works. The
/// connections of the server may all be in use. Otherwise each batch would ask it for another one.
const PAUSE: Duration = Duration::from_millis(100);

/// The connections of one runtime. Only that runtime may take them.
pub(crate) struct Pool {
    seats: bb8::Pool<Seats>,
    /// The connection that callers share. `None` until a connection has been opened.
    shared: watch::Sender<Option<Arc<Connection>>>,
    /// The tasks that open connections. They end with the pool.
    openings: Mutex<JoinSet<()>>,
    /// The time of the last opening that has failed.
    failed_at: Arc<Mutex<Option<Instant>>>,
    server: Arc<Server>,
    generation: Arc<AtomicU64>,
    distance: Arc<AtomicU64>,
}

/// A seat in the pool. A seat that is dropped goes back to the pool.
type Seat = PooledConnection<'static, Seats>;

/// A connection, with its seat if no other batch uses the connection meanwhile.
pub(crate) type Taken = (Arc<Connection>, Option<Seat>);

impl Pool {
    /// A pool that has no connections yet.
    pub(crate) fn new(server: &Arc<Server>, distance: Arc<AtomicU64>) -> Self {
        let seats = bb8::Pool::builder()
            .max_size(server.settings.connections)
            // The wait for a seat needs no timeout of its own: it is a part of the wait for a
            // connection, and that wait has a timeout.
            .connection_timeout(Duration::MAX)
            .idle_timeout(None)
            .max_lifetime(None)
            .build_unchecked(Seats);
        let shared = watch::Sender::default();
        let openings = Mutex::default();
        let failed_at = Arc::default();
        Self {
            seats,
            shared,
            openings,
            failed_at,
            server: Arc::clone(server),
            generation: Arc::default(),
            distance,
        }
    }

    /// Returns the shared connection, if that connection works. Unlike
    /// [`take`](Self::take), this method reads no clock.
    pub(crate) fn share(&self) -> Option<Arc<Connection>> {
        self.shared
            .borrow()
            .clone()
            .filter(|connection| connection.works())
    }

    /// Takes a connection. On a single server, the connection comes with its seat, and one batch
    /// has it alone until the seat is given back. In a cluster, the connection comes without a
    /// seat, and batches share it. While a new connection opens, or if it cannot be opened, this
    /// method returns another connection that works. Only a task may call this method.
    pub(crate) async fn take(&self) -> Result<Taken, StoreError> {
        let wait = self.server.settings.connect_timeout;
        let shared = async {
            let may_work = |shared: &Option<Arc<Connection>>| {
                shared.as_ref().is_some_and(|shared| shared.may_work())
            };
            self.shared
                .subscribe()
                .wait_for(may_work)
                .await
                .ok()?
                .clone()
        };
        let mut filled = pin!(timeout(wait, self.fill()));
        let mut shared = pin!(shared);
        poll_fn(|cx| {
            let filled = filled
                .as_mut()
                .poll(cx)
                .map(|filled| filled.unwrap_or_else(|_| Err(late(wait))));
            if let Poll::Ready(Ok((connection, seat))) = filled {
                // The seat of a cluster's connections returns to the pool at once: a slow node must
                // not keep other batches from the other nodes.
                let seat = (!connection.is_to_cluster).then_some(seat);
                return Poll::Ready(Ok((connection, seat)));
            }
            match (shared.as_mut().poll(cx), filled) {
                (Poll::Ready(Some(shared)), _) => Poll::Ready(Ok((shared, None))),
                (_, Poll::Ready(Err(cause))) => {
                    Poll::Ready(Err(errors::no_connection(&*self.server, &cause)))
                }
                _ => Poll::Pending,
            }
        })
        .await
    }

    /// Opens all connections. Call this method before any connection is in use, since it waits for
    /// each seat. If a connection cannot be opened now, it is opened when it is needed.
    pub(crate) async fn open_all(&self) {
        let mut opening = Vec::new();
        let mut open = Vec::new();
        for _ in 0..self.server.settings.connections {
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

    /// Waits for a seat, and opens a connection if the seat is empty.
    async fn fill(&self) -> RedisResult<(Arc<Connection>, Seat)> {
        let seat = self.seats.get_owned().await.map_err(io::Error::other)?;
        if let Some(connection) = &*seat {
            if self.share().is_none() {
                self.shared.send_replace(Some(connection.clone()));
            }
            return Ok((connection.clone(), seat));
        }
        let is_paused = lock(&self.failed_at).is_some_and(|at| at.elapsed() < PAUSE);
        if let Some(shared) = self.share().filter(|_| is_paused) {
            return Ok((shared, seat));
        }
        self.open(seat)
            .await
            .map_err(|_| io::Error::other("opening it has panicked"))?
    }

    /// Opens a connection for an empty seat, in a task.
    fn open(&self, mut seat: Seat) -> oneshot::Receiver<RedisResult<(Arc<Connection>, Seat)>> {
        let server = Arc::clone(&self.server);
        let shared = self.shared.clone();
        let generation = Arc::clone(&self.generation);
        let distance = Arc::clone(&self.distance);
        let failed_at = Arc::clone(&self.failed_at);
        let (opened, outcome) = oneshot::channel();
        let mut openings = lock(&self.openings);
        while openings.try_join_next().is_some() {}
        openings.spawn(async move {
            let outcome = open(&server, &generation, &distance).await.map(Arc::new);
            let new = outcome.as_ref().ok().cloned();
            if new.is_none() {
                *lock(&failed_at) = Some(Instant::now());
            }
            // If the caller has stopped waiting, the connection is for later callers.
            let _ = opened.send(outcome.map(|connection| {
                *seat = Some(connection.clone());
                shared.send_replace(Some(connection.clone()));
                (connection, seat)
            }));
            // The new connections were handed out before these two commands, so a node that hangs
            // delays no caller.
            if server.is_cluster()
                && let Some(new) = new
            {
                server.learn_nodes(
                    new.send(cmd("CLUSTER").arg("SLOTS"), true, Instant::now())
                        .await,
                );
                server.warn_of_nodes(new.send(&cmd("INFO"), false, Instant::now()).await);
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

    /// Empties a seat whose connection does not work.
    async fn is_valid(&self, connection: &mut Option<Arc<Connection>>) -> Result<(), Infallible> {
        drop(connection.take_if(|connection| !connection.works()));
        Ok(())
    }

    fn has_broken(&self, connection: &mut Option<Arc<Connection>>) -> bool {
        connection
            .as_ref()
            .is_some_and(|connection| !connection.works())
    }
}

/// Opens a connection of the current generation. If the generation ends meanwhile, the
/// connection ends with the generation, since the connection may lead to the old server.
async fn open(
    server: &Server,
    current: &Arc<AtomicU64>,
    distance: &AtomicU64,
) -> RedisResult<Connection> {
    #[cfg(feature = "cluster")]
    if server.is_cluster() {
        let clients = cluster::connect(&server.nodes, &server.settings).await?;
        return Ok(Connection::to_cluster(
            clients,
            server.settings.reply_timeout,
        ));
    }
    let generation = current.load(Ordering::Relaxed);
    let connect = async {
        match server.connect(distance).await {
            // The connection was cut in the middle of signing in, for example with `CLIENT
            // KILL`. A second try may succeed.
            Err(error) if error.is_connection_dropped() => server.connect(distance).await,
            outcome => outcome,
        }
    };
    let wait = server.settings.connect_timeout;
    let clones = timeout(wait, connect).await.map_err(|_| late(wait))??;
    Ok(Connection::new(
        clones,
        server.settings.reply_timeout,
        generation,
        current,
    ))
}
