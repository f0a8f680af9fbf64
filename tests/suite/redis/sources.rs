//! Connections that the application opens, and credentials that change.

use std::{
    future::pending,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use bb8_redis::{RedisConnectionManager, bb8::Pool};
use futures_util::{Stream, future::join_all, stream};
use redis::{
    AsyncTypedCommands, BasicAuth, Client, ErrorKind, RedisError, RedisResult, StreamingCredentialsProvider, Value,
    aio::{ConnectionManager, MultiplexedConnection},
};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_sliding_window::{
    Error, Limit, Limiter, RedisStore, error::StoreErrorKind, limiter::Breaker, store::RedisStoreBuilder,
};

use super::sentinel::Sentinel;
#[cfg(feature = "cluster")]
use crate::support::redis_cluster::RedisCluster;
use crate::support::{TEST_TIMEOUT, ms, proxy::Proxy, redis_server::RedisServer, seconds, two_threads, with_causes};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

fn limiter(builder: RedisStoreBuilder) -> Limiter {
    Limiter::new(builder.build().unwrap()).deadline(TEST_TIMEOUT).breaker(Breaker::OFF)
}

/// A pool of four connections that are open.
async fn pool(server: &RedisServer, tests_connections: bool) -> Pool<RedisConnectionManager> {
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    Pool::builder().max_size(4).min_idle(4).test_on_check_out(tests_connections).build(manager).await.unwrap()
}

/// So many checks of different keys at once. How many have a decision.
async fn decided(limiter: &Limiter, checks: usize) -> usize {
    let checks = join_all((0..checks).map(|key| limiter.check(&CALLS, key.to_string(), 1))).await;
    checks.into_iter().filter(|decision| decision.as_ref().is_ok_and(|decision| decision.is_allowed())).count()
}

fn opened_by(server: &RedisServer, opened: Arc<AtomicUsize>) -> RedisStoreBuilder {
    let url = server.url();
    RedisStore::from_connections(move || {
        let (url, opened) = (url.clone(), Arc::clone(&opened));
        async move {
            opened.fetch_add(1, Ordering::SeqCst);
            Client::open(url)?.get_multiplexed_async_connection().await
        }
    })
}

#[tokio::test]
async fn a_pool_of_the_application_is_shared() {
    let server = RedisServer::start();
    let pool = pool(&server, true).await;
    let store = RedisStore::from_pool(pool.clone()).connect().await.unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for _ in 0..10 {
        let (sessions, decided) = tokio::join!(
            join_all((0..8).map(|user| {
                let pool = pool.clone();
                async move { pool.get().await.unwrap().set(format!("session-{user}"), user).await.unwrap() }
            })),
            decided(&limiter, 1_000)
        );
        assert_eq!((sessions.len(), decided), (8, 1_000));
    }
    assert_eq!(server.connections(), 4);
    assert_eq!(pool.state().connections, 4);
}

/// A connection manager, a client of the application, and a closure that opens a connection each time.
#[tokio::test]
async fn other_sources_decide() {
    let server = RedisServer::start();
    let client = Client::open(server.url()).unwrap();
    let manager = ConnectionManager::new(client.clone()).await.unwrap();
    let managed = RedisStore::from_connections(move || {
        let manager = manager.clone();
        async move { Ok(manager) }
    });
    let opened = Arc::new(AtomicUsize::new(0));
    let opening = opened_by(&server, Arc::clone(&opened));
    for (builder, connections) in [(managed, 1), (opening, 4), (RedisStore::from_client(&client), 4)] {
        let limiter = Limiter::new(builder.connect().await.unwrap()).deadline(TEST_TIMEOUT);
        assert_eq!(decided(&limiter, 500).await, 500);
        assert_eq!(server.connections(), connections);
        drop(limiter);
        while server.connections() > 0 {
            sleep(ms(5)).await;
        }
    }
    assert_eq!(opened.load(Ordering::SeqCst), 4);
}

/// The pool tests its connections, or does not and hands out dead ones.
#[tokio::test]
async fn a_server_that_restarts_costs_a_pool_no_decision_afterwards() {
    for tests_connections in [true, false] {
        let mut server = RedisServer::start();
        let pool = pool(&server, tests_connections).await;
        let limiter = limiter(RedisStore::from_pool(pool));
        assert_eq!(decided(&limiter, 100).await, 100);
        server.kill();
        server.restart();
        // The broken connections are found by these, which are sent again.
        assert_eq!(decided(&limiter, 100).await, 100, "tests its connections: {tests_connections}");
        assert_eq!(decided(&limiter, 100).await, 100);
    }
}

/// A pool waits longer and longer between its tries to reach a server that is down.
#[tokio::test]
async fn a_store_decides_as_soon_as_the_server_of_its_pool_is_back() {
    let mut server = RedisServer::start();
    let limiter = limiter(RedisStore::from_pool(pool(&server, true).await));
    assert_eq!(decided(&limiter, 10).await, 10);
    server.kill();
    let begun = Instant::now();
    let mut texts = Vec::new();
    while begun.elapsed() < seconds(6) {
        texts.push(with_causes(&limiter.check(&CALLS, "ada", 1).await.unwrap_err()));
    }
    let text = texts.last().unwrap();
    assert!(text.contains("Connection refused"), "{text}");
    server.restart();
    let begun = Instant::now();
    while limiter.check(&CALLS, "ada", 1).await.is_err() {
        assert!(begun.elapsed() < seconds(2), "the pool is waited for");
    }
}

/// The pool does not test its connections, and the server or the network in between is silent on them.
#[tokio::test]
async fn silent_connections_of_a_pool_are_given_up() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let manager = RedisConnectionManager::new(proxy.url()).unwrap();
    let pool = Pool::builder().max_size(4).min_idle(4).test_on_check_out(false).build(manager).await.unwrap();
    let limiter = limiter(RedisStore::from_pool(pool));
    assert_eq!(decided(&limiter, 10).await, 10);
    proxy.silence_open_connections();
    let begun = Instant::now();
    while decided(&limiter, 1).await == 0 {
        assert!(begun.elapsed() < TEST_TIMEOUT);
    }
    assert_eq!(decided(&limiter, 100).await, 100);
}

/// Connections that a runtime opens break when it ends, and a `ConnectionManager` that reconnects there panics from then on. So places are
/// given back over connections that the application's runtime opens: those of a lost batch, and those that a thread without a runtime drops.
#[tokio::test]
async fn places_are_given_back_in_the_runtime_of_the_applications_connections() {
    let (server, home) = (RedisServer::start(), Handle::current().id());
    let (url, is_elsewhere) = (server.url(), Arc::<AtomicBool>::default());
    let was_elsewhere = Arc::clone(&is_elsewhere);
    let builder = RedisStore::from_connections(move || {
        was_elsewhere.fetch_or(Handle::current().id() != home, Ordering::SeqCst);
        let url = url.clone();
        async move { Client::open(url)?.get_multiplexed_async_connection().await }
    });
    let limiter = limiter(builder.reply_timeout(ms(300)));
    let places = Limit::concurrent("streams", 100).freed_after(seconds(3_600));
    let held = limiter.check(&places, "ada", 1).await.unwrap();
    server.pause();
    assert!(limiter.check(&places, "ada", 1).await.is_err());
    server.resume();
    thread::spawn(move || drop(held)).join().unwrap();
    let begun = Instant::now();
    while server.keys().iter().any(|key| server.run::<u64>(&format!("ZCARD {key}")) > 0) {
        assert!(begun.elapsed() < TEST_TIMEOUT, "places are left");
        sleep(ms(20)).await;
    }
    assert!(!is_elsewhere.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_pool_that_the_application_keeps_empty_is_waited_for_and_named() {
    let server = RedisServer::start();
    // Sooner than the store's own timeout, and later.
    for pool_waits in [ms(100), seconds(30)] {
        let manager = RedisConnectionManager::new(server.url()).unwrap();
        let pool = Pool::builder().max_size(1).connection_timeout(pool_waits).build(manager).await.unwrap();
        let limiter = limiter(RedisStore::from_pool(pool.clone()).connect_timeout(ms(600)));
        let held = pool.get().await.unwrap();
        let error = limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        let text = with_causes(&error);
        assert!(text.contains("Are all connections of its pool in use"), "{text}");
        drop(held);
        assert_eq!(decided(&limiter, 100).await, 100);
        // It has a clone.
        let _held = pool.get().await.unwrap();
        assert_eq!(decided(&limiter, 100).await, 100);
    }
}

/// The application's connections lead to a replica, belong to a runtime that has ended, or do not open.
#[tokio::test]
async fn connections_that_are_of_no_use_are_errors() {
    let (primary, opened) = (RedisServer::start(), Arc::new(AtomicUsize::new(0)));
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    let error = opened_by(&replica, Arc::clone(&opened)).connect().await.unwrap_err();
    assert!(with_causes(&error).contains("the server is a replica"), "{error:?}");

    let never = RedisStore::from_connections(pending::<RedisResult<MultiplexedConnection>>);
    let begun = Instant::now();
    let error = limiter(never.connect_timeout(ms(100))).check(&CALLS, "ada", 1).await.unwrap_err();
    assert!(with_causes(&error).contains("not within 100ms"), "{error:?}");
    assert!(begun.elapsed() < TEST_TIMEOUT);

    let panics = AtomicBool::new(true);
    let url = primary.url();
    let limiter_of_panics = limiter(RedisStore::from_connections(move || {
        let (url, panics) = (url.clone(), panics.swap(false, Ordering::SeqCst));
        async move {
            assert!(!panics, "a mistake of the application");
            Client::open(url)?.get_multiplexed_async_connection().await
        }
    }));
    let error = limiter_of_panics.check(&CALLS, "ada", 1).await.unwrap_err();
    assert!(with_causes(&error).contains("opening it has panicked"), "{error:?}");
    assert_eq!(decided(&limiter_of_panics, 10).await, 10, "the next connection works");

    let url = primary.url();
    let in_transaction = RedisStore::from_connections(move || {
        let url = url.clone();
        async move {
            let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
            redis::cmd("MULTI").query_async::<()>(&mut connection).await?;
            Ok(connection)
        }
    });
    let error = in_transaction.connect().await.unwrap_err();
    assert!(with_causes(&error).contains("the reply is not the script's"), "{error:?}");

    let fails = || async { Err::<MultiplexedConnection, _>(RedisError::from((ErrorKind::Client, "no tunnel"))) };
    let error = RedisStore::from_connections(fails).connect().await.unwrap_err();
    let text = with_causes(&error);
    assert!(text.contains("no tunnel") && text.contains("the application's connections"), "{text}");
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
}

#[test]
fn a_connection_of_a_runtime_that_has_ended_is_replaced() {
    let (server, other) = (RedisServer::start(), two_threads());
    let url = server.url();
    let first =
        other.block_on(async { Client::open(url.as_str()).unwrap().get_multiplexed_async_connection().await.unwrap() });
    let first = std::sync::Mutex::new(Some(first));
    let limiter = limiter(RedisStore::from_connections(move || {
        let (url, first) = (url.clone(), first.lock().unwrap().take());
        async move {
            match first {
                Some(first) => Ok(first),
                None => Client::open(url)?.get_multiplexed_async_connection().await,
            }
        }
    }));
    drop(other);
    assert_eq!(two_threads().block_on(decided(&limiter, 100)), 100);
}

/// The store of a second runtime needs more connections than the pool has open. The pool would keep those that it opens there.
#[test]
fn a_pool_is_given_no_connection_of_another_runtime() {
    let (server, first, second) = (RedisServer::start(), two_threads(), two_threads());
    let pool = first.block_on(async {
        let manager = RedisConnectionManager::new(server.url()).unwrap();
        Pool::builder().max_size(4).test_on_check_out(false).build(manager).await.unwrap()
    });
    let limiter = limiter(RedisStore::from_pool(pool.clone()));
    assert_eq!(first.block_on(decided(&limiter, 1)), 1);
    first.block_on(async {
        let _held = pool.get().await.unwrap();
        assert_eq!(second.spawn(async move { decided(&limiter, 1_000).await }).await.unwrap(), 1_000);
    });
    drop(second);
    first.block_on(async {
        for mut connection in join_all((0..4).map(|_| pool.get_owned())).await.into_iter().map(Result::unwrap) {
            connection.set("session", 1).await.unwrap();
        }
    });
}

#[tokio::test]
async fn settings_that_belong_to_the_application_are_errors() {
    let server = RedisServer::start();
    let given =
        || RedisStore::from_pool(Pool::builder().build_unchecked(RedisConnectionManager::new(server.url()).unwrap()));
    for builder in [given().login("shop", "s3cret"), given().database(3), given().credentials(Rotating::new("s3cret"))]
    {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains("the application opens the connections"), "{error}");
    }
}

/// The last credentials, and each that follows.
#[derive(Clone)]
struct Rotating(watch::Sender<BasicAuth>);

impl Rotating {
    fn new(password: &str) -> Self {
        Self(watch::Sender::new(BasicAuth::new("shop".into(), password.into())))
    }

    fn rotate(&self, password: String) {
        self.0.send_replace(BasicAuth::new("shop".into(), password));
    }
}

impl StreamingCredentialsProvider for Rotating {
    fn subscribe(&self) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send + 'static>> {
        let mut credentials = self.0.subscribe();
        credentials.mark_changed();
        Box::pin(stream::unfold(credentials, |mut credentials| async move {
            credentials.changed().await.ok()?;
            let now = credentials.borrow_and_update().clone();
            Some((Ok(now), credentials))
        }))
    }
}

/// Passwords change ten times a second while checks come, and now and then all connections of the store are closed.
async fn a_password_changes(servers: &[RedisServer], builder: RedisStoreBuilder) {
    let all = |command: &str| servers.iter().for_each(|server| drop(server.run::<Value>(command)));
    let only = |password: usize| format!("ACL SETUSER shop on resetpass >{password} ~* +@all");
    all(&only(0));
    let provider = Rotating::new("0");
    let store = builder.credentials(provider.clone()).connect().await.unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let is_over = Arc::<AtomicBool>::default();
    let mut clients = JoinSet::new();
    for client in 0..20 {
        let (limiter, is_over) = (limiter.clone(), Arc::clone(&is_over));
        clients.spawn(async move {
            let (mut decided, mut lost) = (0, Vec::new());
            while !is_over.load(Ordering::SeqCst) {
                match limiter.check(&CALLS, client.to_string(), 1).await {
                    Ok(_) => decided += 1,
                    Err(error) => lost.push(with_causes(&error)),
                }
            }
            (decided, lost)
        });
    }
    for password in 1..=30 {
        // The new one is valid before the old one ends.
        all(&format!("ACL SETUSER shop >{password}"));
        provider.rotate(password.to_string());
        sleep(ms(20)).await;
        all(&only(password));
        if password % 10 == 0 {
            all("CLIENT KILL USER shop");
        }
        sleep(ms(80)).await;
    }
    is_over.store(true, Ordering::SeqCst);
    let all = clients.join_all().await;
    let lost: Vec<_> = all.iter().flat_map(|(_, lost)| lost).collect();
    assert!(lost.is_empty() && all.iter().all(|(decided, _)| *decided > 0), "{} are lost: {lost:?}", lost.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_changes_costs_no_decision() {
    let server = RedisServer::start();
    let builder = RedisStore::builder(&server.url());
    a_password_changes(&[server], builder).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_changes_behind_sentinels_costs_no_decision() {
    let primary = RedisServer::start();
    let sentinel = Sentinel::start(&primary);
    a_password_changes(&[primary], RedisStore::sentinel([sentinel.url()], "main")).await;
}

#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_changes_in_a_cluster_costs_no_decision() {
    let cluster = RedisCluster::start(3).await;
    let builder = cluster.builder();
    a_password_changes(&cluster.0, builder).await;
}

#[tokio::test]
async fn credentials_that_are_refused_or_end_are_errors() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER shop on >right ~* +@all");
    let error = RedisStore::builder(&server.url()).credentials(Rotating::new("wrong")).connect().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");

    #[derive(Clone)]
    struct Ends;
    impl StreamingCredentialsProvider for Ends {
        fn subscribe(&self) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send + 'static>> {
            Box::pin(stream::empty())
        }
    }
    let error = RedisStore::builder(&server.url()).credentials(Ends).connect().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");

    #[derive(Clone)]
    struct Never;
    impl StreamingCredentialsProvider for Never {
        fn subscribe(&self) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send + 'static>> {
            Box::pin(stream::pending())
        }
    }
    let never = RedisStore::builder(&server.url()).credentials(Never).connect_timeout(ms(100));
    let error = timeout(seconds(5), never.connect()).await.unwrap().unwrap_err();
    assert!(with_causes(&error).contains("not within"), "{error:?}");
    let outcome = limiter(RedisStore::builder(&server.url()).credentials(Rotating::new("right")));
    let outcome: Result<_, Error> = outcome.check(&CALLS, "ada", 1).await;
    assert!(outcome.unwrap().is_allowed());
}
