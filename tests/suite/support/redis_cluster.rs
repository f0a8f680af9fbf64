//! A Redis Cluster for one test.

use std::time::Duration;

use tokio::task::spawn_blocking;
use tower_sliding_window::{
    Limiter, RedisStore,
    store::{RedisSource, RedisStoreBuilder},
};

use super::{TEST_TIMEOUT, proxy::Proxy, redis_server::RedisServer, until};

const OPTIONS: [&str; 4] = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"];

const PRIMARIES: usize = 3;
const SLOTS: usize = 16_384;

/// Three primaries. With six nodes, each primary has a replica.
pub(crate) struct RedisCluster(pub(crate) Vec<RedisServer>);

impl RedisCluster {
    pub(crate) async fn start(nodes: usize) -> Self {
        let start = move || {
            Self(
                (0..nodes)
                    .map(|_| RedisServer::start_with(&OPTIONS))
                    .collect(),
            )
        };
        let cluster = spawn_blocking(start).await.unwrap();
        cluster.introduce_nodes().await;
        until("the cluster does not come up", || {
            cluster.0.iter().all(is_settled)
        })
        .await;
        cluster
    }

    /// Does as `redis-cli --cluster create` does: gives the slots to the first nodes, and replicas
    /// to those.
    async fn introduce_nodes(&self) {
        let (primaries, replicas) = self.0.split_at(PRIMARIES.min(self.0.len()));
        for (number, primary) in primaries.iter().enumerate() {
            let slots = number * SLOTS / primaries.len()..(number + 1) * SLOTS / primaries.len();
            let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
            primary.run::<()>(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")));
            // Without an epoch of its own, each primary would have to settle that with the others
            // first.
            primary.run::<()>(&format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1));
        }
        for node in &self.0[1..] {
            self.0[0].run::<()>(&format!("CLUSTER MEET 127.0.0.1 {}", node.port()));
        }
        for (replica, primary) in replicas.iter().zip(primaries) {
            let id = primary.run::<String>("CLUSTER MYID");
            until("the nodes do not meet", || {
                replica.run::<String>("CLUSTER NODES").contains(&id)
            })
            .await;
            replica.run::<()>(&format!("CLUSTER REPLICATE {id}"));
        }
    }

    /// With time for a busy machine.
    pub(crate) fn builder(&self) -> RedisStoreBuilder {
        let urls = self.0.iter().map(RedisServer::url);
        RedisStore::builder(RedisSource::cluster(urls))
            .connect_timeout(TEST_TIMEOUT)
            .reply_timeout(TEST_TIMEOUT)
    }

    /// Without a refusal cache.
    pub(crate) fn limiter(&self, builder: RedisStoreBuilder) -> Limiter {
        Limiter::new(builder.build().unwrap())
            .refusal_cache(Duration::ZERO)
            .deadline(Duration::from_secs(5))
    }

    pub(crate) fn primaries(&self) -> impl Iterator<Item = &RedisServer> {
        self.0.iter().filter(|node| node.is_primary())
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.0.iter().flat_map(RedisServer::keys).collect()
    }
}

/// True if a node knows all slots. A replica must also have all data.
fn is_settled(node: &RedisServer) -> bool {
    node.run::<String>("CLUSTER INFO")
        .contains("cluster_state:ok")
        && (node.is_primary()
            || node
                .run::<String>("INFO replication")
                .contains("master_link_status:up"))
}

/// A proxy in front of each node. The nodes announce the proxies, so each client goes through them.
pub(crate) struct Proxies(pub(crate) Vec<Proxy>);

impl Proxies {
    pub(crate) async fn start(cluster: &RedisCluster) -> Self {
        let mut proxies = Vec::new();
        let mut ports = Vec::new();
        for node in &cluster.0 {
            let proxy = Proxy::start(node).await;
            let port = proxy.port();
            node.run::<()>(&format!(
                "CONFIG SET cluster-announce-bus-port {}",
                node.port() + 10_000
            ));
            node.run::<()>(&format!("CONFIG SET cluster-announce-port {port}"));
            ports.push(format!(":{port}@"));
            proxies.push(proxy);
        }
        until("the nodes do not hear of the proxies", || {
            cluster.0.iter().all(|node| {
                let nodes = node.run::<String>("CLUSTER NODES");
                ports.iter().all(|port| nodes.contains(port))
            })
        })
        .await;
        Self(proxies)
    }

    pub(crate) fn delay_replies(&self, by: Duration) {
        for proxy in &self.0 {
            proxy.delay_replies(by);
        }
    }

    pub(crate) fn builder(&self) -> RedisStoreBuilder {
        RedisStore::builder(RedisSource::cluster(self.0.iter().map(Proxy::url)))
            .connect_timeout(TEST_TIMEOUT)
            .reply_timeout(TEST_TIMEOUT)
    }
}
