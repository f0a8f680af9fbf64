//! The stores of a group of rows, which share their servers, and what happens to them.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};

use bb8_redis::{RedisConnectionManager, bb8::Pool};
use tokio::{
    task::{spawn_blocking, yield_now},
    time::sleep,
};
use tower_sliding_window::{
    Check, Decision, Key, Limit, Limiter, MemoryStore, RedisStore, Store,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::{RedisSource, RedisStoreBuilder, StoreFuture},
};

#[cfg(feature = "cluster")]
use crate::support::redis_cluster::RedisCluster;
#[cfg(feature = "cluster")]
use crate::support::until;
use crate::support::{ms, redis_server::RedisServer, with_causes};

use super::{
    covering::Row,
    table::{Apply, DEADLINE},
};

const FINE: u8 = 0;
const PAUSED: u8 = 1;
const LOST: u8 = 2;

/// A store as an application writes one around a `MemoryStore`: its futures yield before they are
/// ready.
#[derive(Clone)]
struct Wrapper {
    store: MemoryStore,
    state: Arc<AtomicU8>,
    decides_at_once: bool,
}

impl Wrapper {
    /// Yields while the store is paused, and once more.
    fn when_ready<T: Send + 'static>(
        &self,
        reply: impl FnOnce(MemoryStore) -> StoreFuture<T> + Send + 'static,
    ) -> StoreFuture<T> {
        let Self { store, state, .. } = self.clone();
        Box::pin(async move {
            yield_now().await;
            while state.load(Ordering::Relaxed) == PAUSED {
                sleep(ms(5)).await;
            }
            if state.load(Ordering::Relaxed) == LOST {
                return Err(StoreError::new(
                    "asking",
                    StoreErrorKind::Other,
                    "the store is lost",
                ));
            }
            reply(store).await
        })
    }
}

impl Store for Wrapper {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.when_ready(|store| store.decide(check))
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        let is_fine = self.state.load(Ordering::Relaxed) == FINE;
        if is_fine && self.decides_at_once {
            self.store.decide_now(check)
        } else {
            None
        }
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.when_ready(|store| store.settle(settlement))
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.when_ready(|store| store.reset(limit, key))
    }
}

async fn connected(builder: RedisStoreBuilder) -> Result<Limiter, String> {
    Ok(Limiter::new(
        builder
            .connect()
            .await
            .map_err(|error| with_causes(&error))?,
    ))
}

pub(super) struct Stores {
    wrapper: Wrapper,
    redis: RedisServer,
    #[cfg(feature = "cluster")]
    cluster: RedisCluster,
}

impl Stores {
    pub(super) async fn start() -> Self {
        Self {
            wrapper: Wrapper {
                store: MemoryStore::new(),
                state: Arc::default(),
                decides_at_once: false,
            },
            redis: spawn_blocking(RedisServer::start).await.unwrap(),
            #[cfg(feature = "cluster")]
            cluster: RedisCluster::start(3).await,
        }
    }

    /// The limiter of a row. An error of the settings is its sentence.
    pub(super) async fn limiter(&self, row: &Row) -> Result<Limiter, String> {
        let with_options = |mut builder: RedisStoreBuilder| {
            for value in &row.values {
                if let Apply::Store(apply) = value.apply {
                    builder = apply(builder);
                }
            }
            builder
        };
        let limiter = match row.of("store") {
            "memory" => Limiter::new(MemoryStore::new()),
            "wrapper" => Limiter::new(self.wrapper.clone()),
            "wrapper that decides at once" => Limiter::new(Wrapper {
                decides_at_once: true,
                ..self.wrapper.clone()
            }),
            "pool" => {
                let manager = RedisConnectionManager::new(self.redis.url()).unwrap();
                connected(with_options(RedisStore::builder(
                    Pool::builder().max_size(4).build_unchecked(manager),
                )))
                .await?
            }
            #[cfg(feature = "cluster")]
            "cluster" => {
                let urls = self.cluster.0.iter().map(RedisServer::url);
                connected(with_options(RedisStore::builder(RedisSource::cluster(
                    urls,
                ))))
                .await?
            }
            _ => connected(with_options(RedisStore::builder(self.redis.url()))).await?,
        };
        let options = row.values.iter().filter_map(|value| {
            if let Apply::Limiter(apply) = value.apply {
                Some(apply)
            } else {
                None
            }
        });
        Ok(options.fold(limiter.deadline(DEADLINE), |limiter, apply| apply(limiter)))
    }

    fn nodes(&mut self) -> impl Iterator<Item = &mut RedisServer> {
        let nodes = [&mut self.redis].into_iter();
        #[cfg(feature = "cluster")]
        let nodes = nodes.chain(self.cluster.0.iter_mut());
        nodes
    }

    pub(super) fn pause(&mut self) {
        self.wrapper.state.store(PAUSED, Ordering::Relaxed);
        self.nodes().for_each(|node| node.pause());
    }

    pub(super) fn resume(&mut self) {
        self.nodes().for_each(|node| node.resume());
        self.wrapper.state.store(FINE, Ordering::Relaxed);
    }

    pub(super) fn lose(&mut self) {
        self.wrapper.state.store(LOST, Ordering::Relaxed);
        self.nodes().for_each(RedisServer::kill);
    }

    /// Starts it again, without data.
    pub(super) async fn restore(&mut self) {
        self.nodes().for_each(RedisServer::restart);
        #[cfg(feature = "cluster")]
        until("the cluster does not come back", || {
            self.cluster.0.iter().all(|node| {
                node.run::<String>("CLUSTER INFO")
                    .contains("cluster_state:ok")
            })
        })
        .await;
        self.wrapper.state.store(FINE, Ordering::Relaxed);
    }
}
