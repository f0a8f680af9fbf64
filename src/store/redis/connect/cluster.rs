//! A Redis Cluster, reached by two clients.
//!
//! 1. The first client repeats no command, so a command that this client sends counts at most once.
//! 2. The second client sends commands again. It follows slots that move, and waits a little for a
//!    node that is replaced. Redis recognizes the commands of this client by their ids, or they
//!    have certainly not run before. So they count once, too. There is one exception: a check on a
//!    limit that is no exact log counts twice if its caller gave it no id, and if its slot moves
//!    just when a connection breaks. No check counts too little.
//! 3. Both clients know which node has which slot, and connect again to a node when the connection
//!    to it is lost.
//! 4. The connections of a client are replaced if no node has replied on them for the reply
//!    timeout. The reason is that the client of `redis` 1.8.1 can deadlock. If tokio's budget for a
//!    task ends while a request locks the table of nodes, the request keeps the lock until it is
//!    polled again. But the client does not poll the request while it looks up the slots, and the
//!    look-up waits for the same lock. Some dozens of requests at the moment when slots move can
//!    stop the client for ever.

use std::{
    mem,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{
    Cmd, ConnectionInfo, ErrorKind, Pipeline, RedisError, RedisResult, Value,
    aio::ConnectionLike,
    cluster::{ClusterClient, ClusterClientBuilder},
    cluster_async::ClusterConnection,
};
use tokio::{task::JoinSet, time::timeout};

use super::settings::{ConnectionSettings, tcp_settings};
use crate::local::lock;

/// The longest time for connecting to all nodes and asking one of them for the slots. Each of these
/// steps also has a timeout of its own.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the second client repeats a command that a node refused. [`RETRY_WAIT`] is the
/// shortest and the longest wait between two tries, in milliseconds.
const RETRIES: u32 = 6;
const RETRY_WAIT: (u64, u64) = (5, 100);

/// The connections of both clients.
pub(crate) struct ClusterConnections {
    first: Nodes,
    again: Nodes,
}

/// The connections of one client to all nodes.
struct Nodes {
    connection: ClusterConnection,
    reply_timeout: Duration,
    /// The number of requests that are in flight or got no reply within the timeout. A reply of any
    /// node sets this number to zero. `since` is the time at which the first of these requests was
    /// sent.
    unanswered: AtomicU32,
    since: Mutex<Instant>,
}

/// Makes a client that repeats a failed command up to `retries` times.
pub(super) fn client(
    nodes: &[ConnectionInfo],
    settings: &ConnectionSettings,
    retries: u32,
) -> RedisResult<ClusterClient> {
    let builder = ClusterClientBuilder::new(nodes.to_vec())
        .tcp_settings(tcp_settings())
        .response_timeout(settings.reply_timeout)
        // This timeout covers all repetitions, and new connections as well.
        .overall_response_timeout(Some(settings.reply_timeout.saturating_mul(2)))
        .min_retry_wait(RETRY_WAIT.0)
        .max_retry_wait(RETRY_WAIT.1)
        .retries(retries);
    #[cfg(feature = "tls")]
    let builder = if settings.has_certificates() { builder.certs(settings.certificates.clone()) } else { builder };
    #[cfg(feature = "credentials")]
    let builder = if let Some(give) = &settings.credentials { give(builder) } else { builder };
    builder.build()
}

/// Connects both clients.
pub(super) async fn connect(
    nodes: &[ConnectionInfo],
    settings: &ConnectionSettings,
) -> RedisResult<ClusterConnections> {
    let first = client(nodes, settings, 0)?;
    let again = client(nodes, settings, RETRIES)?;
    // Both clients connect at the same time, since a node that hangs delays each of them.
    let mut connecting = JoinSet::new();
    let wait = settings.reply_timeout;
    connecting.spawn(async move { Nodes::connect(&again, wait).await });
    let first = Nodes::connect(&first, wait).await?;
    let again = connecting.join_all().await.pop().ok_or_else(silent)??;
    Ok(ClusterConnections { first, again })
}

fn silent() -> RedisError {
    RedisError::from((ErrorKind::Io, "the cluster's nodes do not answer"))
}

impl ClusterConnections {
    /// Sends a command, for the first time or `again`.
    pub(super) async fn send(&self, command: &Cmd, again: bool) -> RedisResult<Value> {
        let send = async |mut nodes: ClusterConnection| nodes.req_packed_command(command).await?.extract_error();
        if again { &self.again } else { &self.first }.hear(send).await
    }

    /// Sends commands for one slot. The first try sends all commands at once. With `again`, they
    /// are sent one by one: if several commands are redirected at once to the node to which a slot
    /// moves, that node accepts only the first of them.
    pub(super) async fn send_all(&self, commands: &Pipeline, again: bool) -> RedisResult<Vec<Value>> {
        if !again {
            let send =
                async |mut nodes: ClusterConnection| nodes.req_packed_commands(commands, 0, commands.len()).await;
            return self.first.hear(send).await;
        }
        let mut replies = Vec::with_capacity(commands.len());
        for command in commands.cmd_iter() {
            let send = async |mut nodes: ClusterConnection| nodes.req_packed_command(command).await;
            replies.push(self.again.hear(send).await?);
        }
        Ok(replies)
    }

    /// Whether at least this number of requests of one client have no reply. The first of these
    /// requests must have waited for the reply timeout or longer.
    pub(super) fn are_silent(&self, requests: u32) -> bool {
        [&self.first, &self.again].iter().any(|nodes| nodes.is_silent(requests))
    }
}

impl Nodes {
    /// Connects to the nodes, with the settings of the client.
    async fn connect(client: &ClusterClient, reply_timeout: Duration) -> RedisResult<Self> {
        let connection = timeout(CONNECT_TIMEOUT, client.get_async_connection()).await;
        let connection = connection.map_err(|_| silent())??;
        Ok(Self { connection, reply_timeout, unanswered: AtomicU32::new(0), since: Mutex::new(Instant::now()) })
    }

    async fn hear<T>(&self, send: impl AsyncFnOnce(ClusterConnection) -> RedisResult<T>) -> RedisResult<T> {
        let wait = ReplyWait { nodes: self, sent: Instant::now() };
        if self.unanswered.fetch_add(1, Ordering::Relaxed) == 0 {
            *lock(&self.since) = wait.sent;
        }
        let result = send(self.connection.clone()).await;
        if !result.as_ref().is_err_and(RedisError::is_timeout) {
            mem::forget(wait);
            self.unanswered.store(0, Ordering::Relaxed);
        }
        result
    }

    fn is_silent(&self, requests: u32) -> bool {
        self.unanswered.load(Ordering::Relaxed) >= requests && lock(&self.since).elapsed() >= self.reply_timeout
    }
}

/// A wait for a reply. If the caller leaves before the timeout, its request no longer counts as
/// unanswered, since such a request says nothing about the connections.
struct ReplyWait<'a> {
    nodes: &'a Nodes,
    sent: Instant,
}

impl Drop for ReplyWait<'_> {
    fn drop(&mut self) {
        if self.sent.elapsed() < self.nodes.reply_timeout {
            let less = |unanswered: u32| unanswered.checked_sub(1);
            let _ = self.nodes.unanswered.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }
}
