//! The paths that are counted. Each sends some requests in a process of its own, which valgrind
//! counts.
//!
//! Nothing depends on time: no deadline is reached, unless the machine stops, and clients that ask
//! at once wait for each other, so that batches always have the same sizes.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::extract::ConnectInfo;
use http::{Request, Response, StatusCode};
use tokio::{
    runtime::{Builder, Runtime},
    sync::Barrier,
    task::{JoinSet, yield_now},
};
use tower_layer::Layer;
use tower_service::Service;
use tower_sliding_window::{
    Algorithm, HeaderSets, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer, RedisStore, Store,
    limit::prefetch::MAX_LIFE, middleware::RateLimit, store::RedisStoreBuilder,
};

/// No run takes as long, however slow valgrind makes it.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(60);

/// The longest deadline that a limiter has by default. The timers of longer ones are not used
/// again.
const DEADLINE: Duration = Duration::from_secs(1);

/// As long as [`MAX_WAIT`] and longer, so that no unit leaves.
const HOUR: Duration = Duration::from_secs(3_600);

/// So many clients ask at once.
const CLIENTS: usize = 256;

/// So many requests, and some more, take a prefetch in much less than its life.
const EXPENSIVE: usize = 500;

pub(crate) struct Path {
    pub(crate) name: &'static str,
    /// Each count has as many requests, and one with twice as many.
    pub(crate) requests: usize,
    pub(crate) redis: Redis,
    send: fn(&Load),
}

/// The redis-server of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redis {
    Absent,
    Present,
    /// It is counted as well, under this name.
    Counted(&'static str),
}

use Redis::{Absent, Counted, Present};

pub(crate) const PATHS: &[Path] = &[
    path("no layer", 10_240, Absent, |load| {
        load.one_client(Inner, StatusCode::OK);
    }),
    path("skipped by the layer", 10_240, Absent, |load| {
        load.one_client(
            layer(MemoryStore::new(), wide())
                .exempt(|_| true)
                .layer(Inner),
            StatusCode::OK,
        );
    }),
    path("in process, admitted", 10_240, Absent, |load| {
        load.one_client(
            layer(MemoryStore::new(), wide()).layer(Inner),
            StatusCode::OK,
        );
    }),
    path(
        "in process, admitted, a name from a file",
        10_240,
        Absent,
        |load| {
            let text = "wide=1000000000/hour".parse().expect("a limit");
            load.one_client(layer(MemoryStore::new(), text).layer(Inner), StatusCode::OK);
        },
    ),
    path("in process, refused", 10_240, Absent, |load| {
        load.one_client(
            layer(MemoryStore::new(), spent()).layer(Inner),
            StatusCode::TOO_MANY_REQUESTS,
        );
    }),
    path(
        "in process, admitted, both header sets",
        10_240,
        Absent,
        |load| {
            load.one_client(
                layer(MemoryStore::new(), wide())
                    .headers(HeaderSets::BOTH)
                    .layer(Inner),
                StatusCode::OK,
            );
        },
    ),
    path("a remembered refusal", 10_240, Present, |load| {
        load.one_client(
            layer(load.store(), spent()).layer(Inner),
            StatusCode::TOO_MANY_REQUESTS,
        );
    }),
    path(
        "a remembered refusal, Limiter::check",
        10_240,
        Present,
        |load| load.refused_checks(&limiter(load.store())),
    ),
    // Within the life of the prefetch, even on a busy machine.
    path("a unit of a prefetch", 640, Present, |load| {
        let limit = wide().prefetch(MAX_LIFE);
        load.one_busy_client(&layer(load.store(), limit));
    }),
    path(
        "Redis, one client",
        1_280,
        Counted("Redis's own share, one client"),
        |load| {
            load.one_client(layer(load.store(), wide()).layer(Inner), StatusCode::OK);
        },
    ),
    path(
        "Redis, one client, a place as well",
        1_280,
        Counted("Redis's own share, one client, a place as well"),
        |load| {
            let places = Limit::concurrent("places", 1_000_000);
            load.one_client(
                layer(load.store(), wide())
                    .limit(places.by(PeerIp::new()))
                    .layer(Inner),
                StatusCode::OK,
            );
        },
    ),
    path(
        "Redis, one client, a counter",
        1_280,
        Counted("Redis's own share, one client, a counter"),
        |load| {
            let limit = wide().with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
            load.one_client(layer(load.store(), limit).layer(Inner), StatusCode::OK);
        },
    ),
    path(
        "Redis, 3 clients with a key each",
        1_281,
        Counted("Redis's own share, 3 clients with a key each"),
        |load| {
            load.many_clients(&layer(load.store(), wide()).layer(Inner), 3, 3);
        },
    ),
    // Then they travel as one batch.
    path(
        "Redis, 3 clients with a key each, after a burst",
        1_281,
        Counted("Redis's own share, 3 clients with a key each, after a burst"),
        |load| {
            let service = layer(load.store(), wide()).layer(Inner);
            load.burst(&service);
            load.many_clients(&service, 3, 3);
        },
    ),
    path(
        "Redis, 256 clients with a key each",
        2_560,
        Counted("Redis's own share, 256 clients with a key each"),
        |load| {
            load.many_clients(
                &layer(load.store_in_order(), wide()).layer(Inner),
                CLIENTS,
                CLIENTS,
            );
        },
    ),
    path(
        "Redis, 256 clients with one key",
        10_240,
        Counted("Redis's own share, 256 clients with one key"),
        |load| {
            load.many_clients(
                &layer(load.store_in_order(), wide()).layer(Inner),
                CLIENTS,
                1,
            );
        },
    ),
];

const fn path(name: &'static str, requests: usize, redis: Redis, send: fn(&Load)) -> Path {
    Path {
        name,
        requests,
        redis,
        send,
    }
}

/// The requests of one process.
pub(crate) struct Load {
    runtime: Runtime,
    requests: usize,
    /// The URL of redis-server, if the path has one.
    redis: String,
}

impl Load {
    /// Sends them all.
    pub(crate) fn send(path: &Path, requests: usize, redis: String) {
        // All tasks run before the next look at the sockets and timers.
        let runtime = Builder::new_current_thread()
            .enable_all()
            .event_interval(u32::MAX)
            .build()
            .expect("a runtime");
        (path.send)(&Self {
            runtime,
            requests,
            redis,
        });
    }

    fn store(&self) -> RedisStore {
        self.connect(RedisStore::builder(&self.redis))
    }

    /// One batch is in flight, so that replies have an order.
    fn store_in_order(&self) -> RedisStore {
        self.connect(RedisStore::builder(&self.redis).connections(1))
    }

    fn connect(&self, store: RedisStoreBuilder) -> RedisStore {
        let store = store.connect_timeout(MAX_WAIT).reply_timeout(MAX_WAIT);
        self.runtime
            .block_on(store.connect())
            .expect("the server is up")
    }

    /// One request after the other, all with this response but the first.
    fn one_client<S: Guarded>(&self, mut service: S, expected: StatusCode) {
        self.runtime.block_on(status(&mut service, 0));
        counted(&self.runtime, async {
            for _ in 0..self.requests {
                assert_eq!(status(&mut service, 0).await, expected);
            }
        });
    }

    /// The same after expensive requests, for which the process takes more units than it needs
    /// then.
    fn one_busy_client(&self, layer: &RateLimitLayer) {
        let mut expensive = layer.clone().cost(|_| 100).layer(Inner);
        self.runtime.block_on(async {
            for _ in 0..EXPENSIVE {
                status(&mut expensive, 0).await;
                yield_now().await;
            }
        });
        self.one_client(layer.layer(Inner), StatusCode::OK);
    }

    /// All are refused but the first.
    fn refused_checks(&self, limiter: &Limiter) {
        let (limit, client) = (spent(), 0_usize);
        let is_allowed = async || {
            let decision = limiter.check(&limit, client.to_string(), 1).await;
            decision.expect("a decision").is_allowed()
        };
        assert!(self.runtime.block_on(is_allowed()));
        counted(&self.runtime, async {
            for _ in 0..self.requests {
                assert!(!is_allowed().await);
            }
        });
    }

    /// More requests at once than skip the queue.
    fn burst(&self, service: &RateLimit<Inner>) {
        let mut requests = JoinSet::new();
        for client in 0..CLIENTS {
            let mut service = service.clone();
            requests.spawn_on(
                async move { status(&mut service, client).await },
                self.runtime.handle(),
            );
        }
        self.runtime.block_on(requests.join_all());
    }

    /// So many clients, and keys. Each asks once all have their answers, and all are admitted. The
    /// first round opens connections.
    fn many_clients(&self, service: &RateLimit<Inner>, count: usize, keys: usize) {
        let rounds = 1 + self.requests / count;
        let barrier = Arc::new(Barrier::new(count));
        let mut clients = JoinSet::new();
        for client in 0..count {
            let (mut service, barrier) = (service.clone(), Arc::clone(&barrier));
            let client = async move {
                for _ in 0..rounds {
                    assert_eq!(status(&mut service, client % keys).await, StatusCode::OK);
                    barrier.wait().await;
                }
            };
            clients.spawn_on(client, self.runtime.handle());
        }
        counted(&self.runtime, clients.join_all());
    }
}

/// What valgrind counts, which finds it by its name.
#[inline(never)]
fn counted<T>(runtime: &Runtime, requests: impl Future<Output = T>) -> T {
    runtime.block_on(requests)
}

/// A limit that is never reached.
pub(crate) fn wide() -> Limit {
    Limit::per("wide", 1_000_000_000, HOUR)
}

/// A limit that is reached at once.
fn spent() -> Limit {
    Limit::per_hour("spent", 1)
}

/// Its refusal cache forgets nothing.
pub(crate) fn limiter(store: impl Store) -> Limiter {
    Limiter::new(store).refusal_cache(HOUR).deadline(DEADLINE)
}

fn layer(store: impl Store, limit: Limit) -> RateLimitLayer {
    RateLimitLayer::new(limiter(store))
        .limit(limit.by(PeerIp::new()))
        .fail_closed()
}

/// The service behind the layer.
#[derive(Clone)]
struct Inner;

impl Service<Request<()>> for Inner {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(String::new())))
    }
}

trait Guarded: Service<Request<()>, Response = Response<String>, Error = Infallible> {}

impl<S: Service<Request<()>, Response = Response<String>, Error = Infallible>> Guarded for S {}

async fn status<S: Guarded>(service: &mut S, client: usize) -> StatusCode {
    let mut request = Request::new(());
    request
        .extensions_mut()
        .insert(ConnectInfo(SocketAddr::from((
            [10, 0, 0, client as u8],
            443,
        ))));
    let Ok(response) = service.call(request).await;
    response.status()
}
