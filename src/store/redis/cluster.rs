//! A Redis Cluster: its nodes, and the two clients that reach them.
//!
//! 1. What is sent for the first time goes over a client that repeats nothing, so that it counts once.
//! 2. What is sent again goes over one that follows slots which move, and waits a little for a node that is replaced.
//!    It carries its identities, or certainly has not run before. So a check that keeps no identity, on a limit that
//!    does not count by an exact log, is counted twice if its slot moves and a connection breaks at once: never too
//!    little.
//! 3. Both know by themselves which node has which slot, and connect anew to a node that is lost.
//! 4. A client of which nothing is heard any more, of no node, is replaced, for in version 1.8.1 it may be caught in a lock
//!    of its own. Where tokio's budget for one turn of its task ends as a request takes the table of nodes, the request
//!    keeps the table until it is polled again; and it is not, while the slots are looked up anew, which waits for the
//!    table. So some dozens of requests at the moment at which slots move can stop it for ever.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use redis::{
    Cmd, ErrorKind, RedisError, RedisResult, Value,
    aio::ConnectionLike,
    cluster::{ClusterClient, ClusterClientBuilder, ClusterConfig},
    cluster_async::ClusterConnection,
};
use tokio::time::timeout;

use super::{
    access::{Access, tcp_settings},
    invalid::InvalidRedisConfig,
    silence::Silence,
};

/// How long a node may take to answer: as long as a server that is no cluster.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a client may be at one request, with all that it repeats and connects to.
const OVERALL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long it may take to connect to all nodes and to ask one for the slots, each of which has a limit of its own.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the second client repeats what a node has refused, and how long it waits in between, in milliseconds.
const RETRIES: u32 = 6;
const RETRY_WAIT: (u64, u64) = (5, 100);

pub(super) struct Cluster {
    first: ClusterClient,
    again: ClusterClient,
    nodes: String,
}

/// Connections of both clients.
pub(super) struct ClusterLink {
    first: Nodes,
    /// Made when it is needed.
    again: OnceLock<Nodes>,
    client: ClusterClient,
}

/// Connections to all nodes. Clones share them.
#[derive(Clone)]
pub(super) struct Nodes {
    connection: ClusterConnection,
    silence: Arc<Silence>,
}

impl Cluster {
    pub(super) fn new(urls: &[String], access: &Access) -> Result<Self, InvalidRedisConfig> {
        let Some(url) = urls.first() else {
            return Err(InvalidRedisConfig::new("there must be 1 node of the cluster or more, not 0"));
        };
        let infos = urls.iter().map(|url| access.server(url)).collect::<Result<Vec<_>, _>>()?;
        let nodes: Vec<_> = infos.iter().map(|info| info.addr().to_string()).collect();
        let build = |retries| {
            let builder = ClusterClientBuilder::new(infos.clone())
                .tcp_settings(tcp_settings())
                .response_timeout(RESPONSE_TIMEOUT)
                .overall_response_timeout(Some(OVERALL_TIMEOUT))
                .min_retry_wait(RETRY_WAIT.0)
                .max_retry_wait(RETRY_WAIT.1)
                .retries(retries);
            #[cfg(feature = "tls")]
            let builder = if access.trust.is_given() { builder.certs(access.trust.certificates()) } else { builder };
            builder.build().map_err(|cause| InvalidRedisConfig::url(url, cause))
        };
        Ok(Self { first: build(0)?, again: build(RETRIES)?, nodes: nodes.join(" ") })
    }

    pub(super) async fn connect(&self) -> RedisResult<ClusterLink> {
        let first = timeout(CONNECT_TIMEOUT, self.first.get_async_connection()).await;
        let first = first.map_err(|_| RedisError::from((ErrorKind::Io, "the cluster's nodes do not answer")))??;
        Ok(ClusterLink { first: Nodes::new(first), again: OnceLock::new(), client: self.again.clone() })
    }
}

impl ClusterLink {
    /// The connections for what is sent for the first time, or again.
    pub(super) fn nodes(&self, again: bool) -> Nodes {
        let connect = || Nodes::new(self.client.get_pending_async_connection_with_config(ClusterConfig::new()));
        if again { self.again.get_or_init(connect).clone() } else { self.first.clone() }
    }

    /// Whether it has left so many requests unanswered, the first of them for longer than an answer may take.
    pub(super) fn is_silent(&self, requests: u32) -> bool {
        let is_silent = |nodes: &Nodes| nodes.silence.has_lasted(requests, RESPONSE_TIMEOUT);
        is_silent(&self.first) || self.again.get().is_some_and(is_silent)
    }
}

impl Nodes {
    fn new(connection: ClusterConnection) -> Self {
        Self { connection, silence: Arc::new(Silence::new()) }
    }

    pub(super) async fn send(&mut self, command: &Cmd) -> RedisResult<Value> {
        self.silence.asks();
        let outcome = self.connection.req_packed_command(command).await.and_then(Value::extract_error);
        if !outcome.as_ref().is_err_and(RedisError::is_timeout) {
            self.silence.hears();
        }
        outcome
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the cluster of {}", self.nodes)
    }
}
