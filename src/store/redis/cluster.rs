//! A Redis Cluster: its nodes, and the two clients that reach them.
//!
//! 1. What is sent for the first time goes over a client that repeats nothing, so that it counts once.
//! 2. What is sent again goes over one that follows slots which move, and waits a little for a node that is replaced.
//!    It carries its identities, or certainly has not run before. So a check that keeps no identity, on a limit that
//!    does not count by an exact log, is counted twice if its slot moves and a connection breaks at once: never too
//!    little.
//! 3. Both know by themselves which node has which slot, and connect anew to a node that is lost.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use redis::{
    RedisResult,
    cluster::{ClusterClient, ClusterClientBuilder, ClusterConfig},
    cluster_async::ClusterConnection,
};

use super::{
    access::{Access, tcp_settings},
    invalid::InvalidRedisConfig,
};

/// How long a node may take to answer: as long as a server that is no cluster.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a client may be at one request, with all that it repeats and connects to.
const OVERALL_TIMEOUT: Duration = Duration::from_secs(1);

/// How often the second client repeats what a node has refused, and how long it waits in between, in milliseconds.
const RETRIES: u32 = 6;
const RETRY_WAIT: (u64, u64) = (5, 100);

pub(super) struct Cluster {
    first: ClusterClient,
    again: ClusterClient,
    nodes: String,
}

/// Connections to all nodes. Clones share them.
#[derive(Clone)]
pub(super) struct ClusterLink {
    first: ClusterConnection,
    again: Arc<Again>,
}

/// The second client, and its connection, made when it is needed.
struct Again {
    client: ClusterClient,
    connection: OnceLock<ClusterConnection>,
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
        let first = self.first.get_async_connection().await?;
        let again = Arc::new(Again { client: self.again.clone(), connection: OnceLock::new() });
        Ok(ClusterLink { first, again })
    }
}

impl ClusterLink {
    /// The connections for what is sent for the first time, or again.
    pub(super) fn connection(&self, again: bool) -> ClusterConnection {
        let Again { client, connection } = &*self.again;
        let connect = || client.get_pending_async_connection_with_config(ClusterConfig::new());
        if again { connection.get_or_init(connect).clone() } else { self.first.clone() }
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the cluster of {}", self.nodes)
    }
}
