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
//! 6. A generation is also given up if one of its connections gave no reply to several requests in
//!    a row, or to one request for a second. Such a connection may be half open, which no error
//!    ever reports. Requests that were in flight together count as one. A request does not count if
//!    a later request got a reply. In a cluster, requests in flight together count one by one, but
//!    only if they had no reply within the reply timeout. Then only the connections of the client
//!    that sent them are given up. A request that was sent just as its connection ended may also
//!    get no error: tokio's channel keeps the message of this request as long as the channel has a
//!    sender ([issue 7714](https://github.com/tokio-rs/tokio/issues/7714)).
//! 7. If a connection has had no reply for half a second, the server or a proxy may have closed it
//!    in that time. So the connection is tested before the store sends a check over it that must
//!    not run twice. In a cluster, a connection leads to several nodes. So the time of the last
//!    reply is kept for each of several parts of the slots, since a part is mostly on one node.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    io, mem,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use bb8::{ManageConnection, PooledConnection};
use redis::{Cmd, Pipeline, RedisError, RedisFuture, RedisResult, Value, cmd};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::timeout,
};

#[cfg(feature = "cluster")]
use super::cluster;
use super::{
    errors::{self, needs_new_connection},
    server::Server,
    source::ServerConnection,
};
use crate::{
    clock,
    error::StoreError,
    local::{LONGEST_DEADLINE, lock},
    store::redis::keys::HASH_SLOTS,
};

/// A connection is given up after this many requests in a row without a reply. If the connection
/// leads to a single server, requests that wait together count once, and one request that has
/// waited for [`LONGEST_DEADLINE`] is enough.
const MAX_UNANSWERED: u32 = 3;

/// If a caller stops waiting sooner than this, for example because its client hung up, the missing
/// reply says nothing about the connection.
const TOO_SOON: Duration = Duration::from_millis(5);

/// After this time without a reply, a server or a proxy may have closed a connection.
const IDLE: Duration = Duration::from_millis(500);

/// The number of parts of a cluster's slots. The time of the last reply is known for each part.
const PARTS: usize = 16;

/// The connections of one runtime. Only that runtime may take them.
pub(crate) struct Pool {
    seats: bb8::Pool<Seats>,
    /// The connection that callers share. `None` until a connection has been opened.
    shared: watch::Sender<Option<Arc<Connection>>>,
    /// The tasks that open connections. They end with the pool.
    openings: Mutex<JoinSet<()>>,
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
        Self { seats, shared, openings, server: Arc::clone(server), generation: Arc::default(), distance }
    }

    /// Returns the shared connection, if that connection works. Unlike
    /// [`take`](Self::take), this method reads no clock.
    pub(crate) fn share(&self) -> Option<Arc<Connection>> {
        self.shared.borrow().clone().filter(|connection| connection.works())
    }

    /// Takes a connection. On a single server, the connection comes with its seat, and one batch
    /// has it alone until the seat is given back. In a cluster, the connection comes without a
    /// seat, and batches share it. While a new connection opens, or if it cannot be opened, this
    /// method returns another connection that works. Only a task may call this method.
    pub(crate) async fn take(&self) -> Result<Taken, StoreError> {
        let wait = self.server.settings.connect_timeout;
        let shared = async {
            let may_work = |shared: &Option<Arc<Connection>>| shared.as_ref().is_some_and(|shared| shared.may_work());
            self.shared.subscribe().wait_for(may_work).await.ok()?.clone()
        };
        let mut filled = pin!(timeout(wait, self.fill()));
        let mut shared = pin!(shared);
        poll_fn(|cx| {
            let filled = filled.as_mut().poll(cx).map(|filled| filled.unwrap_or_else(|_| Err(late(wait))));
            if let Poll::Ready(Ok((connection, seat))) = filled {
                // The seat of a cluster's connections returns to the pool at once: a slow node must
                // not keep other batches from the other nodes.
                let seat = (!connection.is_to_cluster).then_some(seat);
                return Poll::Ready(Ok((connection, seat)));
            }
            match (shared.as_mut().poll(cx), filled) {
                (Poll::Ready(Some(shared)), _) => Poll::Ready(Ok((shared, None))),
                (_, Poll::Ready(Err(cause))) => Poll::Ready(Err(errors::no_connection(&*self.server, &cause))),
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
            let Ok(seat) = self.seats.get_owned().await else { return };
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
        self.open(seat).await.map_err(|_| io::Error::other("opening it has panicked"))?
    }

    /// Opens a connection for an empty seat, in a task.
    fn open(&self, mut seat: Seat) -> oneshot::Receiver<RedisResult<(Arc<Connection>, Seat)>> {
        let server = Arc::clone(&self.server);
        let shared = self.shared.clone();
        let generation = Arc::clone(&self.generation);
        let distance = Arc::clone(&self.distance);
        let (opened, outcome) = oneshot::channel();
        let mut openings = lock(&self.openings);
        while openings.try_join_next().is_some() {}
        openings.spawn(async move {
            let outcome = Connection::open(&server, &generation, &distance).await.map(Arc::new);
            let new = outcome.as_ref().ok().cloned();
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
                server.learn_nodes(new.send(cmd("CLUSTER").arg("SLOTS"), true, Instant::now()).await);
                server.warn_of_nodes(new.send(&cmd("INFO"), false, Instant::now()).await);
            }
        });
        outcome
    }
}

fn late(wait: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::TimedOut, format!("not within {wait:?}")).into()
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
        connection.as_ref().is_some_and(|connection| !connection.works())
    }
}

/// A connection to one server, or the connections to all nodes of a cluster. All senders share it.
pub(crate) struct Connection {
    clones: ServerConnection,
    /// The connections of a cluster's second client, which sends commands again.
    again: Option<Box<Self>>,
    is_to_cluster: bool,
    reply_timeout: Duration,
    /// The generation of the connection, and the current generation of its pool.
    generation: u64,
    current: Arc<AtomicU64>,
    unanswered: AtomicU32,
    opened: Instant,
    /// A time, in microseconds since the connection was opened. A request that was sent before this
    /// time does not count as unanswered. Either a later request got a reply, or another request
    /// that was in flight at the same time has already been counted.
    told_until: AtomicU64,
    /// For each of [`PARTS`] equal parts of the slots, the time at which the last request with a
    /// reply was sent, in microseconds since the connection was opened. The replies to batches
    /// without a slot are noted in the first part.
    last_replies: [AtomicU64; PARTS],
}

impl Connection {
    /// Opens a connection of the current generation. If the generation ends meanwhile, the
    /// connection ends with the generation, since the connection may lead to the old server.
    async fn open(server: &Server, current: &Arc<AtomicU64>, distance: &AtomicU64) -> RedisResult<Self> {
        #[cfg(feature = "cluster")]
        if server.is_cluster() {
            let clients = cluster::connect(&server.nodes, &server.settings).await?;
            // Each client is a generation of its own: it connects again to nodes by itself.
            let [first, again] = clients.map(|clones| Self::new(clones, server, 0, &Arc::default()));
            return Ok(Self { again: Some(Box::new(again)), ..first });
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
        Ok(Self::new(clones, server, generation, current))
    }

    fn new(clones: ServerConnection, server: &Server, generation: u64, current: &Arc<AtomicU64>) -> Self {
        Self {
            clones,
            again: None,
            is_to_cluster: server.is_cluster(),
            reply_timeout: server.settings.reply_timeout,
            generation,
            current: Arc::clone(current),
            unanswered: AtomicU32::new(0),
            opened: Instant::now(),
            told_until: AtomicU64::new(0),
            last_replies: [const { AtomicU64::new(0) }; PARTS],
        }
    }

    /// Sends a command. `since` is the present time, and `again` says that the command was sent
    /// before.
    pub(crate) async fn send(&self, command: &Cmd, again: bool, since: Instant) -> RedisResult<Value> {
        let client = self.client(again);
        client.hear(since, (client.clones)().req_packed_command(command), Value::extract_error).await
    }

    /// Sends commands that remove entries, all at once. Returns the number of entries that each
    /// command has removed. For a key of another type, the number is 0.
    ///
    /// In a cluster, commands that are sent again are sent one by one: if several commands are
    /// redirected at once to the node to which a slot moves, that node accepts only the first of
    /// them.
    pub(crate) async fn send_all(&self, removals: &Pipeline, again: bool, since: Instant) -> RedisResult<Value> {
        let client = self.client(again);
        let mut connection = (client.clones)();
        if !again || !self.is_to_cluster {
            return client.hear(since, connection.req_packed_commands(removals, 0, removals.len()), numbers).await;
        }
        let mut replies = Vec::with_capacity(removals.len());
        for removal in removals.cmd_iter() {
            replies.push(client.hear(Instant::now(), connection.req_packed_command(removal), Ok).await?);
        }
        numbers(replies)
    }

    fn client(&self, again: bool) -> &Self {
        self.again.as_deref().filter(|_| again).unwrap_or(self)
    }

    /// Whether this connection may be used while another one is being opened. Connections to a
    /// cluster always may be used: they can be silent just because a single node hangs.
    fn may_work(&self) -> bool {
        self.is_to_cluster || self.works()
    }

    fn works(&self) -> bool {
        let is_current = self.generation == self.current.load(Ordering::Relaxed);
        is_current && self.again.as_ref().is_none_or(|again| again.works())
    }

    /// Waits for the reply to a request that is sent now, at `since`. Learns from the reply, or
    /// from its absence, whether the connection works.
    async fn hear<T>(
        &self,
        since: Instant,
        reply: RedisFuture<'_, T>,
        read: impl FnOnce(T) -> RedisResult<Value>,
    ) -> RedisResult<Value> {
        let wait = ReplyWait { connection: self, since };
        // In a cluster, this timeout covers all repetitions, and new connections as well.
        let most = if self.is_to_cluster { self.reply_timeout.saturating_mul(2) } else { self.reply_timeout };
        let result = timeout(most, reply).await.unwrap_or_else(|_| Err(late(most))).and_then(read);
        if !result.as_ref().is_err_and(RedisError::is_timeout) {
            mem::forget(wait);
            match &result {
                // The client of a cluster replaces broken connections by itself.
                Err(error) if !self.is_to_cluster && needs_new_connection(error) => self.end_generation(),
                _ => {
                    self.unanswered.store(0, Ordering::Relaxed);
                    self.told_until.fetch_max(self.micros_at(since), Ordering::Relaxed);
                }
            }
        }
        result
    }

    /// Whether this part of the slots has had no reply for so long that the connection may be
    /// closed.
    pub(crate) fn is_idle(&self, slot: u16, now: Instant) -> bool {
        self.micros_at(now) >= self.last_reply(slot).load(Ordering::Relaxed).saturating_add(clock::micros(IDLE))
    }

    /// Notes that a request that was sent at this time has its reply.
    pub(crate) fn note_reply(&self, slot: u16, sent: Instant) {
        self.last_reply(slot).store(self.micros_at(sent), Ordering::Relaxed);
    }

    fn last_reply(&self, slot: u16) -> &AtomicU64 {
        &self.last_replies[usize::from(slot) * PARTS / usize::from(HASH_SLOTS)]
    }

    fn micros_at(&self, time: Instant) -> u64 {
        clock::micros(time.saturating_duration_since(self.opened))
    }

    /// Gives up every connection of this generation. Several failures in one generation end only
    /// this generation, and not the next one.
    fn end_generation(&self) {
        self.current.fetch_max(self.generation + 1, Ordering::Relaxed);
    }
}

/// A wait for a reply. If the wait is dropped, the request mostly counts as unanswered: the reply
/// took too long, or a deadline dropped the future of the caller.
struct ReplyWait<'a> {
    connection: &'a Connection,
    since: Instant,
}

impl Drop for ReplyWait<'_> {
    fn drop(&mut self) {
        let connection = self.connection;
        let now = Instant::now();
        let waited = now.saturating_duration_since(self.since);
        let too_soon = if connection.is_to_cluster { connection.reply_timeout } else { TOO_SOON };
        let tells_nothing = connection.micros_at(self.since) < connection.told_until.load(Ordering::Relaxed);
        if waited < too_soon || tells_nothing {
            return;
        }
        // In a cluster, each request counts for itself: a single request may only mean that its
        // node hangs.
        if !connection.is_to_cluster {
            connection.told_until.fetch_max(connection.micros_at(now), Ordering::Relaxed);
        }
        // A single request that has waited for the longest deadline ends the generation. Such a
        // request may be the probe of a breaker. If it counted as only one request, the breaker
        // would need several probes to end the generation.
        let counts = if waited < LONGEST_DEADLINE || connection.is_to_cluster { 1 } else { MAX_UNANSWERED };
        if connection.unanswered.fetch_add(counts, Ordering::Relaxed) + counts >= MAX_UNANSWERED {
            connection.end_generation();
        }
    }
}

/// Turns the replies to removals into numbers.
fn numbers(mut replies: Vec<Value>) -> RedisResult<Value> {
    let is_of_another_type =
        |reply: &&mut Value| matches!(reply, Value::ServerError(error) if error.code() == "WRONGTYPE");
    replies.iter_mut().filter(is_of_another_type).for_each(|reply| *reply = Value::Int(0));
    Value::Array(replies).extract_error()
}
