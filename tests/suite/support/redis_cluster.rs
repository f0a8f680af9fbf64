//! A Redis Cluster for one test.

use std::{process::Command, time::Duration};

use tokio::task::spawn_blocking;
use tower_sliding_window::{DenyCache, Limiter, RedisStore, store::RedisStoreBuilder};

use super::{TEST_TIMEOUT, redis_server::RedisServer, until};

const OPTIONS: [&str; 4] = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"];

/// Three primaries. With six nodes, each primary has a replica.
pub(crate) struct RedisCluster(pub(crate) Vec<RedisServer>);

impl RedisCluster {
    pub(crate) async fn start(nodes: usize) -> Self {
        let start = move || {
            let nodes: Vec<_> = (0..nodes).map(|_| RedisServer::start_with(&OPTIONS)).collect();
            let output = Command::new("redis-cli")
                .args(["--cluster", "create"])
                .args(nodes.iter().map(RedisServer::address))
                .args(["--cluster-replicas", if nodes.len() == 6 { "1" } else { "0" }, "--cluster-yes"])
                .output()
                .expect("redis-cli is not installed: install the package redis-tools");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            Self(nodes)
        };
        let cluster = spawn_blocking(start).await.unwrap();
        until("the cluster does not come up", || cluster.0.iter().all(is_settled)).await;
        cluster
    }

    pub(crate) fn builder(&self) -> RedisStoreBuilder {
        RedisStore::cluster(self.0.iter().map(RedisServer::url)).connect_timeout(TEST_TIMEOUT)
    }

    /// Without a deny cache.
    pub(crate) fn limiter(&self, builder: RedisStoreBuilder) -> Limiter<RedisStore> {
        Limiter::new(builder.build().unwrap()).deny_cache(DenyCache::off()).deadline(Duration::from_secs(5))
    }

    pub(crate) fn primaries(&self) -> impl Iterator<Item = &RedisServer> {
        self.0.iter().filter(|node| node.is_primary())
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.0.iter().flat_map(RedisServer::keys).collect()
    }
}

/// Whether a node knows all slots. A replica must also have all data.
fn is_settled(node: &RedisServer) -> bool {
    node.run::<String>("CLUSTER INFO").contains("cluster_state:ok")
        && (node.is_primary() || node.run::<String>("INFO replication").contains("master_link_status:up"))
}
