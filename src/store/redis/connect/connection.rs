//! A connection, whose replies tell whether it works.
//!
//! 1. A connection is given up, with its [generation](super::pool), after several requests in a row
//!    have had no reply, or a single one has had none for a second. Such a connection may be
//!    half-open, which no error ever reports. Requests in flight together count as one. A request
//!    does not count if a later one got a reply. In a cluster, requests in flight together count
//!    one by one, but only if they had no reply within the reply timeout. There, only the client
//!    that sent them gives up its connections. If a request was sent just as its connection ended,
//!    it may not get an error either: tokio's channel keeps the request as long as the channel has
//!    a sender ([issue 7714](https://github.com/tokio-rs/tokio/issues/7714)).
//! 2. After half a second without a reply, the server or a proxy may have closed a connection. So
//!    the store tests the connection before it sends a check that must not run twice. A cluster's
//!    connection leads to several nodes. So the last reply's time is kept for each of several slot
//!    ranges, since most ranges are on one node.

use std::{
    io, mem,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, Pipeline, RedisError, RedisFuture,
    RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use tokio::time::timeout;

use super::errors::needs_new_connection;
use crate::{clock, local::LONGEST_DEADLINE, store::redis::keys::HASH_SLOTS};

/// A connection is given up after this many requests in a row without a reply. With a single
/// server, requests that wait together count as one, and a single request that has waited for
/// [`LONGEST_DEADLINE`] is enough.
const MAX_UNANSWERED: u32 = 3;

/// If a caller stops waiting sooner than this, for example because its client hung up, the missing
/// reply does not say anything about the connection.
const TOO_SOON: Duration = Duration::from_millis(5);

/// After this long without a reply, a server or proxy may have closed a connection.
const IDLE: Duration = Duration::from_millis(500);

/// The number of slot ranges in a cluster that have their own time for the last reply.
const PARTS: usize = 16;

/// Clones one connection that the store or the application has opened. All clones share it.
pub(crate) type ServerConnection = Arc<dyn Fn() -> Box<dyn ConnectionLike + Send> + Send + Sync>;

pub(super) fn shared(
    connection: impl ConnectionLike + Clone + Send + Sync + 'static,
) -> ServerConnection {
    Arc::new(move || Box::new(connection.clone()))
}

pub(super) async fn open(
    node: ConnectionInfo,
    config: &AsyncConnectionConfig,
) -> RedisResult<MultiplexedConnection> {
    Client::open(node)?
        .get_multiplexed_async_connection_with_config(config)
        .await
}

/// Returns the future's result, or an error if there is none within `wait`.
pub(super) async fn within<T>(
    wait: Duration,
    future: impl Future<Output = RedisResult<T>>,
) -> RedisResult<T> {
    let result = timeout(wait, future).await;
    result.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("not within {wait:?}")))?
}

/// A connection to a single server, or to all nodes in a cluster. All senders share it.
pub(crate) struct Connection {
    clones: ServerConnection,
    /// The cluster's second client, which retries commands.
    again: Option<Box<Self>>,
    pub(super) is_to_cluster: bool,
    reply_timeout: Duration,
    /// The connection's generation. `current` is the current generation in its pool.
    generation: u64,
    current: Arc<AtomicU64>,
    unanswered: AtomicU32,
    opened: Instant,
    /// In microseconds since the connection was opened. A request sent before this time does not
    /// count as unanswered: either a later request got a reply, or one that was in flight at the
    /// same time has already been counted.
    told_until: AtomicU64,
    /// For each of [`PARTS`] equal slot ranges, when the last request with a reply was sent, in
    /// microseconds since the connection was opened. Batches without a slot use the first range.
    last_replies: [AtomicU64; PARTS],
}

impl Connection {
    /// Makes a connection from a cluster's two clients.
    #[cfg(feature = "cluster")]
    pub(super) fn to_cluster(clients: [ServerConnection; 2], reply_timeout: Duration) -> Self {
        let [mut first, again] = clients.map(|clones| {
            // Each client is its own generation: it reconnects to nodes by itself.
            let mut client = Self::new(clones, reply_timeout, 0, &Arc::default());
            client.is_to_cluster = true;
            client
        });
        first.again = Some(Box::new(again));
        first
    }

    /// Makes a connection to one server, with this `generation`, in a pool whose current generation
    /// is in `current`.
    pub(super) fn new(
        clones: ServerConnection,
        timeout: Duration,
        generation: u64,
        current: &Arc<AtomicU64>,
    ) -> Self {
        Self {
            clones,
            again: None,
            is_to_cluster: false,
            reply_timeout: timeout,
            generation,
            current: Arc::clone(current),
            unanswered: AtomicU32::new(0),
            opened: Instant::now(),
            told_until: AtomicU64::new(0),
            last_replies: [const { AtomicU64::new(0) }; PARTS],
        }
    }

    /// Sends a command. `since` is the present time, and `again` means that it was sent before.
    pub(crate) async fn send(
        &self,
        command: &Cmd,
        again: bool,
        since: Instant,
    ) -> RedisResult<Value> {
        let client = self.client(again);
        let mut connection = (client.clones)();
        let reply = client.in_time(connection.req_packed_command(command));
        client.hear(since, reply, Value::extract_error).await
    }

    /// Sends a command now, at `since`, for a caller that drops this future within the reply
    /// timeout. So this future does not need its own timer.
    pub(crate) async fn send_briefly(&self, command: &Cmd, since: Instant) -> RedisResult<Value> {
        let mut connection = (self.clones)();
        let reply = connection.req_packed_command(command);
        self.hear(since, reply, Value::extract_error).await
    }

    /// Sends commands that remove entries, all at once. Returns how many entries each has removed,
    /// or 0 for a key with another type.
    ///
    /// In a cluster, retries are sent one by one: if several commands are redirected at once to the
    /// node to which a slot moves, it accepts only the first.
    pub(crate) async fn send_all(
        &self,
        removals: &Pipeline,
        again: bool,
        since: Instant,
    ) -> RedisResult<Value> {
        let client = self.client(again);
        let mut connection = (client.clones)();
        if !again || !self.is_to_cluster {
            let replies = connection.req_packed_commands(removals, 0, removals.len());
            return client.hear(since, client.in_time(replies), numbers).await;
        }
        let mut replies = Vec::with_capacity(removals.len());
        for removal in removals.cmd_iter() {
            let reply = client.in_time(connection.req_packed_command(removal));
            replies.push(client.hear(Instant::now(), reply, Ok).await?);
        }
        numbers(replies)
    }

    /// Returns the reply, or an error after the reply timeout. In a cluster, the timeout covers all
    /// retries and new connections as well.
    fn in_time<T>(&self, reply: RedisFuture<'_, T>) -> impl Future<Output = RedisResult<T>> {
        let tries = if self.is_to_cluster { 2 } else { 1 };
        within(self.reply_timeout.saturating_mul(tries), reply)
    }

    fn client(&self, again: bool) -> &Self {
        match &self.again {
            Some(client) if again => client,
            _ => self,
        }
    }

    /// True if this connection may be used while another one is being opened. A cluster's
    /// connection always may: it can be silent just because a single node hangs.
    pub(super) fn may_work(&self) -> bool {
        self.is_to_cluster || self.works()
    }

    pub(super) fn works(&self) -> bool {
        let is_current = self.generation == self.current.load(Ordering::Relaxed);
        is_current && self.again.as_ref().is_none_or(|again| again.works())
    }

    /// Waits for the reply to a request that is sent now, at `since`. The reply, or its absence,
    /// shows whether the connection works.
    async fn hear<T>(
        &self,
        since: Instant,
        reply: impl Future<Output = RedisResult<T>>,
        read: impl FnOnce(T) -> RedisResult<Value>,
    ) -> RedisResult<Value> {
        let wait = ReplyWait {
            connection: self,
            since,
        };
        let result = reply.await.and_then(read);
        if !result.as_ref().is_err_and(RedisError::is_timeout) {
            mem::forget(wait);
            match &result {
                // A cluster's client replaces broken connections by itself.
                Err(error) if !self.is_to_cluster && needs_new_connection(error) => {
                    self.end_generation();
                }
                _ => {
                    self.unanswered.store(0, Ordering::Relaxed);
                    self.told_until
                        .fetch_max(self.micros_at(since), Ordering::Relaxed);
                }
            }
        }
        result
    }

    /// True if this slot range has had no reply for so long that the connection may be closed.
    pub(crate) fn is_idle(&self, slot: u16, now: Instant) -> bool {
        let last_reply = self.last_reply(slot).load(Ordering::Relaxed);
        self.micros_at(now) >= last_reply.saturating_add(clock::micros(IDLE))
    }

    /// Marks a request that was sent at this time as answered.
    pub(crate) fn note_reply(&self, slot: u16, sent: Instant) {
        self.last_reply(slot)
            .store(self.micros_at(sent), Ordering::Relaxed);
    }

    fn last_reply(&self, slot: u16) -> &AtomicU64 {
        &self.last_replies[usize::from(slot) * PARTS / usize::from(HASH_SLOTS)]
    }

    fn micros_at(&self, time: Instant) -> u64 {
        clock::micros(time.saturating_duration_since(self.opened))
    }

    /// Gives up every connection in this generation. If several connections in a generation fail,
    /// only this generation ends, and not the next one.
    fn end_generation(&self) {
        self.current
            .fetch_max(self.generation + 1, Ordering::Relaxed);
    }
}

/// A wait for a reply. If it is dropped, its request usually counts as unanswered: either the reply
/// took too long, or the caller's future was dropped at a deadline.
struct ReplyWait<'a> {
    connection: &'a Connection,
    since: Instant,
}

impl Drop for ReplyWait<'_> {
    fn drop(&mut self) {
        let connection = self.connection;
        let now = Instant::now();
        let waited = now.saturating_duration_since(self.since);
        let too_soon = if connection.is_to_cluster {
            connection.reply_timeout
        } else {
            TOO_SOON
        };
        let tells_nothing =
            connection.micros_at(self.since) < connection.told_until.load(Ordering::Relaxed);
        if waited < too_soon || tells_nothing {
            return;
        }
        // In a cluster, each request counts separately, since a single unanswered one may only mean
        // that its node hangs.
        if !connection.is_to_cluster {
            connection
                .told_until
                .fetch_max(connection.micros_at(now), Ordering::Relaxed);
        }
        // A single request that has waited for the longest deadline ends the generation. It may be
        // a breaker's probe. If it counted only once, the breaker would need several probes to end
        // the generation.
        let counts = if waited < LONGEST_DEADLINE || connection.is_to_cluster {
            1
        } else {
            MAX_UNANSWERED
        };
        if connection.unanswered.fetch_add(counts, Ordering::Relaxed) + counts >= MAX_UNANSWERED {
            connection.end_generation();
        }
    }
}

/// Converts the replies of several `ZREM` commands into numbers.
fn numbers(mut replies: Vec<Value>) -> RedisResult<Value> {
    for reply in &mut replies {
        if matches!(reply, Value::ServerError(error) if error.code() == "WRONGTYPE") {
            *reply = Value::Int(0);
        }
    }
    Value::Array(replies).extract_error()
}
