//! A Redis Cluster, reached by two clients.
//!
//! 1. The first client never retries, so its commands count at most once.
//! 2. The second client retries commands. It follows slots that move, and waits a little while a
//!    node is being replaced. It only sends commands that Redis recognizes by their ids, and
//!    commands that have certainly not run before. So its commands count once, too. There is one
//!    exception: a check without an id from its caller, under anything but an exact log, counts
//!    twice if its slot moves just when a connection breaks. No check counts too little.
//! 3. Both clients know which node has which slot, and reconnect to a node after a lost connection.
//! 4. A client's connections are replaced if several requests had no reply within the reply
//!    timeout, and no node has replied to a later request. The reason is that the cluster client in
//!    `redis` 1.8.1 can deadlock. If tokio's task budget ends while a request locks the table of
//!    nodes, the request keeps the lock until it is polled again. But while the client looks up the
//!    slots, it does not poll the request, and the look-up waits for the same lock. If slots move
//!    while a few dozen requests are in flight, this can stop the client for ever.

use std::time::Duration;

use redis::{
    ConnectionInfo, ErrorKind, RedisError, RedisResult,
    cluster::{ClusterClient, ClusterClientBuilder},
};
use tokio::{task::JoinSet, time::timeout};

use super::{
    connection::{ServerConnection, shared},
    settings::{ConnectionSettings, tcp_settings},
};

/// The longest time for connecting to all nodes and asking one for the slots, unless the connect
/// timeout is longer. Each step also has its own timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the second client retries a command that a node refused. [`RETRY_WAIT`] is the
/// shortest and the longest wait between two tries, in milliseconds.
const RETRIES: u32 = 6;
const RETRY_WAIT: (u64, u64) = (5, 100);

/// Makes a client that retries a failed command at most `retries` times.
pub(super) fn client(
    nodes: &[ConnectionInfo],
    settings: &ConnectionSettings,
    retries: u32,
) -> RedisResult<ClusterClient> {
    let builder = ClusterClientBuilder::new(nodes.to_vec())
        .tcp_settings(tcp_settings())
        .connection_timeout(settings.connect_timeout)
        .response_timeout(settings.reply_timeout)
        // `Connection` has the timeout for all retries together, since it learns from a missing
        // reply.
        .overall_response_timeout(None)
        .min_retry_wait(RETRY_WAIT.0)
        .max_retry_wait(RETRY_WAIT.1)
        .retries(retries);
    #[cfg(feature = "tls")]
    let builder = if settings.has_certificates() {
        builder.certs(settings.certificates.clone())
    } else {
        builder
    };
    #[cfg(feature = "credentials")]
    let builder = if let Some(give) = &settings.credentials {
        give(builder)
    } else {
        builder
    };
    builder.build()
}

/// Connects both clients, and returns the connections of the first, followed by those of the
/// second.
pub(super) async fn connect(
    nodes: &[ConnectionInfo],
    settings: &ConnectionSettings,
) -> RedisResult<[ServerConnection; 2]> {
    let most = settings.connect_timeout.max(CONNECT_TIMEOUT);
    let first = client(nodes, settings, 0)?;
    let again = client(nodes, settings, RETRIES)?;
    // Both clients connect at the same time, since a node that hangs delays each of them.
    let mut connecting = JoinSet::new();
    connecting.spawn(async move { connect_to_all(&again, most).await });
    let first = connect_to_all(&first, most).await?;
    let again = connecting.join_all().await.pop().ok_or_else(silent)??;
    Ok([first, again])
}

async fn connect_to_all(client: &ClusterClient, most: Duration) -> RedisResult<ServerConnection> {
    let connection = timeout(most, client.get_async_connection()).await;
    Ok(shared(connection.map_err(|_| silent())??))
}

fn silent() -> RedisError {
    RedisError::from((ErrorKind::Io, "the cluster's nodes do not answer"))
}
