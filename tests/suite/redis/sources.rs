//! Connections that the application opens, and credentials that change.

use std::{
    future::pending,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bb8_redis::{
    RedisConnectionManager,
    bb8::{ManageConnection, Pool},
};
use futures_util::{Stream, StreamExt, future::join_all, stream};
use redis::{
    AsyncConnectionConfig, AsyncTypedCommands, BasicAuth, Client, Cmd, ErrorKind, Pipeline,
    RedisError, RedisFuture, RedisResult, StreamingCredentialsProvider, Value,
    aio::{ConnectionLike, ConnectionManager, MultiplexedConnection},
};
use tokio::{
    runtime::Handle,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_sliding_window::{
    Error, Limit, Limiter, RedisStore,
    error::StoreErrorKind,
    limiter::Breaker,
    store::{RedisSource, RedisStoreBuilder},
};

use super::sentinel::Sentinel;
#[cfg(feature = "cluster")]
use crate::support::redis_cluster::RedisCluster;
use crate::support::{
    TEST_TIMEOUT, ms, one_thread, proxy::Proxy, redis_server::RedisServer, seconds, two_threads,
    until, with_causes,
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

fn limiter(builder: RedisStoreBuilder) -> Limiter {
    Limiter::new(builder.build().unwrap())
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
}

/// A pool of four connections that are open.
async fn pool(server: &RedisServer, tests_connections: bool) -> Pool<RedisConnectionManager> {
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    Pool::builder()
        .max_size(4)
        .min_idle(4)
        .test_on_check_out(tests_connections)
        .build(manager)
        .await
        .unwrap()
}

/// So many checks of different keys at once. How many have a decision.
async fn decided(limiter: &Limiter, checks: usize) -> usize {
    let checks = join_all((0..checks).map(|key| limiter.check(&CALLS, key.to_string(), 1))).await;
    checks
        .into_iter()
        .filter(|decision| {
            decision
                .as_ref()
                .is_ok_and(|decision| decision.is_allowed())
        })
        .count()
}

fn opened_by(server: &RedisServer, opened: Arc<AtomicUsize>) -> RedisStoreBuilder {
    let url = server.url();
    RedisStore::builder(RedisSource::connections(move || {
        let (url, opened) = (url.clone(), Arc::clone(&opened));
        async move {
            opened.fetch_add(1, Ordering::SeqCst);
            Client::open(url)?.get_multiplexed_async_connection().await
        }
    }))
}

#[tokio::test]
async fn a_pool_of_the_application_is_shared() {
    let server = RedisServer::start();
    let pool = pool(&server, true).await;
    let store = RedisStore::builder(pool.clone())
        .connect_timeout(TEST_TIMEOUT)
        .connect()
        .await
        .unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for _ in 0..10 {
        let (sessions, decided) = tokio::join!(
            join_all((0..8).map(|user| {
                let pool = pool.clone();
                async move {
                    pool.get()
                        .await
                        .unwrap()
                        .set(format!("session-{user}"), user)
                        .await
                        .unwrap();
                }
            })),
            decided(&limiter, 1_000)
        );
        assert_eq!((sessions.len(), decided), (8, 1_000));
    }
    assert_eq!(server.connections(), 4);
    assert_eq!(pool.state().connections, 4);
}

/// A connection manager, a client of the application, and a closure that opens a connection each
/// time.
#[tokio::test]
async fn other_sources_decide() {
    let server = RedisServer::start();
    let client = Client::open(server.url()).unwrap();
    let manager = ConnectionManager::new(client.clone()).await.unwrap();
    let managed = RedisStore::builder(RedisSource::connections(move || {
        let manager = manager.clone();
        async move { Ok(manager) }
    }));
    let opened = Arc::new(AtomicUsize::new(0));
    let opening = opened_by(&server, Arc::clone(&opened));
    for (builder, connections) in [
        (managed, 1),
        (opening, 4),
        (RedisStore::builder(client.clone()), 4),
    ] {
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
        let limiter = limiter(RedisStore::builder(pool));
        assert_eq!(decided(&limiter, 100).await, 100);
        server.kill();
        server.restart();
        // The broken connections are found by these, which are sent again.
        assert_eq!(
            decided(&limiter, 100).await,
            100,
            "tests its connections: {tests_connections}"
        );
        assert_eq!(decided(&limiter, 100).await, 100);
    }
}

/// A pool waits longer and longer between its tries to reach a server that is down, also if the
/// application keeps one of its connections, and if the store has little time to connect.
#[tokio::test]
async fn a_store_decides_as_soon_as_the_server_of_its_pool_is_back() {
    tokio::join!(
        comes_back(false, seconds(1)),
        comes_back(true, seconds(1)),
        comes_back(false, ms(350))
    );
}

async fn comes_back(is_one_kept: bool, connect_timeout: Duration) {
    let mut server = RedisServer::start();
    let manager = RedisConnectionManager::new(server.url()).unwrap();
    let pool = Pool::builder()
        .max_size(8)
        .min_idle(4)
        .build(manager)
        .await
        .unwrap();
    let limiter = limiter(RedisStore::builder(pool.clone()).connect_timeout(connect_timeout));
    assert_eq!(decided(&limiter, 10).await, 10);
    let _kept = if is_one_kept {
        Some(pool.get().await.unwrap())
    } else {
        None
    };
    server.kill();
    let begun = Instant::now();
    let mut texts = Vec::new();
    while begun.elapsed() < seconds(6) {
        texts.push(with_causes(
            &limiter.check(&CALLS, "ada", 1).await.unwrap_err(),
        ));
    }
    // On a busy machine, the last try may have been too slow to learn that.
    let is_refused = texts.iter().any(|text| text.contains("Connection refused"));
    assert!(is_refused, "{:?}", texts.last());
    server.restart();
    let begun = Instant::now();
    while limiter.check(&CALLS, "ada", 1).await.is_err() {
        assert!(begun.elapsed() < seconds(2), "the pool is waited for");
    }
}

/// Opens connections that wait for replies as long as it takes, as slow commands need it.
struct Patient(Client);

impl ManageConnection for Patient {
    type Connection = MultiplexedConnection;
    type Error = RedisError;

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        self.0
            .get_multiplexed_async_connection_with_config(&config)
            .await
    }

    async fn is_valid(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        connection.ping().await.map(drop)
    }

    fn has_broken(&self, _: &mut MultiplexedConnection) -> bool {
        false
    }
}

/// The server or the network in between is silent on the connections of a pool, which tests them
/// for half a second, for ever, or not at all.
#[tokio::test]
async fn silent_connections_of_a_pool_are_given_up() {
    let server = RedisServer::start();
    for (tests_connections, connect_timeout, is_patient) in [
        (false, seconds(1), false),
        (false, ms(350), false),
        (true, seconds(1), false),
        (true, seconds(1), true),
    ] {
        let proxy = Proxy::start(&server).await;
        // Many are silent, one after the other.
        let pool = |of| {
            Pool::builder()
                .max_size(of)
                .min_idle(of)
                .test_on_check_out(tests_connections)
        };
        let builder = if is_patient {
            let manager = Patient(Client::open(proxy.url()).unwrap());
            RedisStore::builder(
                Pool::builder()
                    .max_size(4)
                    .min_idle(4)
                    .build(manager)
                    .await
                    .unwrap(),
            )
        } else {
            let manager = RedisConnectionManager::new(proxy.url()).unwrap();
            RedisStore::builder(pool(48).build(manager).await.unwrap())
        };
        let limiter = limiter(builder.connect_timeout(connect_timeout));
        assert_eq!(decided(&limiter, 10).await, 10);
        proxy.silence_open_connections();
        let begun = Instant::now();
        while decided(&limiter, 1).await == 0 {
            assert!(
                begun.elapsed() < seconds(10),
                "tests them: {tests_connections}, patient: {is_patient}"
            );
        }
        assert_eq!(decided(&limiter, 100).await, 100);
    }
}

/// Replies that take long are not taken for silence, if the store has the time.
#[tokio::test]
async fn a_pool_far_away_is_shared() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.delay_replies(ms(450));
    let manager = Patient(Client::open(proxy.url()).unwrap());
    let pool = Pool::builder()
        .max_size(4)
        .min_idle(4)
        .build(manager)
        .await
        .unwrap();
    let store = RedisStore::builder(pool.clone())
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT);
    let limiter = Limiter::new(store.connect().await.unwrap()).deadline(TEST_TIMEOUT);
    assert_eq!(decided(&limiter, 100).await, 100);
    assert_eq!((server.connections(), pool.state().connections), (4, 4));
}

/// Connections that a runtime opens break when it ends, and a `ConnectionManager` that reconnects
/// there panics from then on. So places are given back over connections that the application's
/// runtime opens: those of a lost batch, and those that a thread without a runtime drops.
#[tokio::test]
async fn places_are_given_back_in_the_runtime_of_the_applications_connections() {
    let (server, home) = (RedisServer::start(), Handle::current().id());
    let (url, is_elsewhere) = (server.url(), Arc::<AtomicBool>::default());
    let was_elsewhere = Arc::clone(&is_elsewhere);
    let builder = RedisStore::builder(RedisSource::connections(move || {
        was_elsewhere.fetch_or(Handle::current().id() != home, Ordering::SeqCst);
        let url = url.clone();
        async move { Client::open(url)?.get_multiplexed_async_connection().await }
    }));
    let limiter = limiter(builder.reply_timeout(ms(300)));
    let places = Limit::concurrent("streams", 100).freed_after(seconds(3_600));
    let place = limiter.check(&places, "ada", 1).await.unwrap();
    server.pause();
    assert!(limiter.check(&places, "ada", 1).await.is_err());
    server.resume();
    thread::spawn(move || drop(place)).join().unwrap();
    let begun = Instant::now();
    while held(&server) > 0 {
        assert!(begun.elapsed() < TEST_TIMEOUT, "places are left");
        sleep(ms(20)).await;
    }
    assert!(!is_elsewhere.load(Ordering::SeqCst));
}

/// The runtime that took the place is driven no more, and it alone has connections.
#[test]
fn a_place_that_is_dropped_between_two_runs_of_its_runtime_is_free_at_once() {
    let server = RedisServer::start();
    let places = Limit::concurrent("streams", 100).freed_after(seconds(3_600));
    for of_pool in [false, true] {
        let idle = one_thread();
        let builder = if of_pool {
            RedisStore::builder(idle.block_on(pool(&server, false)))
        } else {
            opened_by(&server, Arc::default())
        };
        let limiter = limiter(builder);
        for _ in 0..2 {
            let place = idle.block_on(limiter.check(&places, "ada", 1)).unwrap();
            drop(place);
            let begun = Instant::now();
            while held(&server) > 0 {
                assert!(begun.elapsed() < TEST_TIMEOUT, "pool: {of_pool}");
                thread::sleep(ms(20));
            }
        }
    }
}

#[tokio::test]
async fn a_pool_that_the_application_keeps_empty_costs_no_decision() {
    let server = RedisServer::start();
    // Sooner than the store, and later.
    for pool_waits in [ms(100), seconds(30)] {
        let manager = RedisConnectionManager::new(server.url()).unwrap();
        let pool = Pool::builder()
            .max_size(1)
            .connection_timeout(pool_waits)
            .build(manager)
            .await
            .unwrap();
        let _held = pool.get().await.unwrap();
        let limiter = limiter(RedisStore::builder(pool.clone()));
        assert_eq!(decided(&limiter, 100).await, 100);
    }
}

/// A runtime of one thread is driven only while something blocks on it.
#[test]
fn a_runtime_that_is_not_driven_delays_no_other() {
    let (server, idle, other) = (RedisServer::start(), one_thread(), two_threads());
    let limiter = limiter(opened_by(&server, Arc::default()));
    let places = Limit::concurrent("streams", 100).freed_after(seconds(3_600));
    let _place = idle.block_on(limiter.check(&places, "ada", 1)).unwrap();
    let reserved = idle
        .block_on(limiter.reserve(&CALLS, "ada", 5, seconds(60)))
        .unwrap()
        .expect("admitted");
    assert!(other.block_on(reserved.settle(1)).unwrap().was_applied);
    other.block_on(limiter.shutdown(TEST_TIMEOUT)).unwrap();
    assert_eq!(held(&server), 0);
}

/// Something of the application that takes a moment to end, such as a file that is closed.
struct Slow;

impl Drop for Slow {
    fn drop(&mut self) {
        thread::sleep(ms(10));
    }
}

/// A runtime ends with checks whose replies are out, beside other tasks.
#[test]
fn a_runtime_that_ends_leaves_no_place() {
    let (server, runtime) = (RedisServer::start(), two_threads());
    let limiter = limiter(opened_by(&server, Arc::default()));
    assert_eq!(runtime.block_on(decided(&limiter, 30)), 30);
    server.pause();
    for key in 0..40 {
        let limiter = limiter.clone();
        let places = Limit::concurrent("streams", 100).freed_after(seconds(3_600));
        runtime.spawn(async move { limiter.check(&places, key.to_string(), 1).await.map(drop) });
        runtime.spawn(async {
            let _slow = Slow;
            pending::<()>().await;
        });
    }
    thread::sleep(ms(200));
    drop(runtime);
    server.resume();
    // Until it has run what was sent, and then until that is given back.
    thread::sleep(ms(300));
    let begun = Instant::now();
    while held(&server) > 0 {
        assert!(
            begun.elapsed() < TEST_TIMEOUT,
            "{} places are held",
            held(&server)
        );
        thread::sleep(ms(20));
    }
}

/// A connection that breaks by this error after a reply.
#[derive(Clone)]
struct Tunnel(MultiplexedConnection, Arc<AtomicBool>, io::ErrorKind);

impl ConnectionLike for Tunnel {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let reply = self.0.req_packed_command(command).await;
            if self.1.swap(false, Ordering::SeqCst) {
                Err(io::Error::from(self.2).into())
            } else {
                reply
            }
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.0.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.0.get_db()
    }
}

/// `InvalidData` is a damaged record of TLS.
#[tokio::test]
async fn a_connection_that_breaks_by_any_error_leaves_no_place() {
    use io::ErrorKind::{ConnectionReset, HostUnreachable, InvalidData, TimedOut};

    let server = RedisServer::start();
    for kind in [ConnectionReset, TimedOut, HostUnreachable, InvalidData] {
        let (breaks, url) = (Arc::<AtomicBool>::default(), server.url());
        let breaking = Arc::clone(&breaks);
        let limiter = limiter(RedisStore::builder(RedisSource::connections(move || {
            let (breaks, url) = (Arc::clone(&breaking), url.clone());
            async move {
                Ok(Tunnel(
                    Client::open(url)?
                        .get_multiplexed_async_connection()
                        .await?,
                    breaks,
                    kind,
                ))
            }
        })));
        assert_eq!(decided(&limiter, 1).await, 1);
        sleep(ms(100)).await;
        breaks.store(true, Ordering::SeqCst);
        let places = Limit::concurrent("streams", 100).freed_after(seconds(3_600));
        drop(limiter.check(&places, "ada", 1).await);
        until("nobody holds the place", || held(&server) == 0).await;
    }
}

/// All entries of all keys of places.
fn held(server: &RedisServer) -> u64 {
    let keys = server
        .keys()
        .into_iter()
        .filter(|key| key.contains("streams"));
    keys.map(|key| server.run::<u64>(&format!("ZCARD {key}")))
        .sum()
}

/// The application's connections lead to a replica, belong to a runtime that has ended, or do not
/// open.
#[tokio::test]
async fn connections_that_are_of_no_use_are_errors() {
    let (primary, opened) = (RedisServer::start(), Arc::new(AtomicUsize::new(0)));
    let replica =
        RedisServer::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    let error = opened_by(&replica, Arc::clone(&opened))
        .connect()
        .await
        .unwrap_err();
    assert!(
        with_causes(&error).contains("the server is a replica"),
        "{error:?}"
    );

    let never = RedisStore::builder(RedisSource::connections(
        pending::<RedisResult<MultiplexedConnection>>,
    ));
    let begun = Instant::now();
    let error = limiter(never.connect_timeout(ms(100)))
        .check(&CALLS, "ada", 1)
        .await
        .unwrap_err();
    assert!(
        with_causes(&error).contains("not within 100ms"),
        "{error:?}"
    );
    assert!(begun.elapsed() < TEST_TIMEOUT);

    let panics = AtomicBool::new(true);
    let url = primary.url();
    let limiter_of_panics = limiter(RedisStore::builder(RedisSource::connections(move || {
        let (url, panics) = (url.clone(), panics.swap(false, Ordering::SeqCst));
        async move {
            assert!(!panics, "a mistake of the application");
            Client::open(url)?.get_multiplexed_async_connection().await
        }
    })));
    let error = limiter_of_panics.check(&CALLS, "ada", 1).await.unwrap_err();
    assert!(
        with_causes(&error).contains("opening it has panicked"),
        "{error:?}"
    );
    assert_eq!(
        decided(&limiter_of_panics, 10).await,
        10,
        "the next connection works"
    );

    let url = primary.url();
    let in_transaction = RedisStore::builder(RedisSource::connections(move || {
        let url = url.clone();
        async move {
            let mut connection = Client::open(url)?
                .get_multiplexed_async_connection()
                .await?;
            redis::cmd("MULTI")
                .query_async::<()>(&mut connection)
                .await?;
            Ok(connection)
        }
    }));
    let error = in_transaction.connect().await.unwrap_err();
    assert!(
        with_causes(&error).contains("the reply is not the script's"),
        "{error:?}"
    );

    let fails = || async {
        Err::<MultiplexedConnection, _>(RedisError::from((ErrorKind::Client, "no tunnel")))
    };
    let error = RedisStore::builder(RedisSource::connections(fails))
        .connect()
        .await
        .unwrap_err();
    let text = with_causes(&error);
    assert!(
        text.contains("no tunnel") && text.contains("the application's pool or closure"),
        "{text}"
    );
    assert_eq!(error.kind, StoreErrorKind::Unreachable);
}

#[test]
fn a_connection_of_a_runtime_that_has_ended_is_replaced() {
    let (server, other) = (RedisServer::start(), two_threads());
    let url = server.url();
    let first = other.block_on(async {
        Client::open(url.as_str())
            .unwrap()
            .get_multiplexed_async_connection()
            .await
            .unwrap()
    });
    let first = std::sync::Mutex::new(Some(first));
    let limiter = limiter(RedisStore::builder(RedisSource::connections(move || {
        let (url, first) = (url.clone(), first.lock().unwrap().take());
        async move {
            match first {
                Some(first) => Ok(first),
                None => Client::open(url)?.get_multiplexed_async_connection().await,
            }
        }
    })));
    drop(other);
    assert_eq!(two_threads().block_on(decided(&limiter, 100)), 100);
}

/// The store of a second runtime needs more connections than the pool has open. The pool would keep
/// those that it opens there.
#[test]
fn a_pool_is_given_no_connection_of_another_runtime() {
    let (server, first, second) = (RedisServer::start(), two_threads(), two_threads());
    let pool = first.block_on(async {
        let manager = RedisConnectionManager::new(server.url()).unwrap();
        Pool::builder()
            .max_size(4)
            .test_on_check_out(false)
            .build(manager)
            .await
            .unwrap()
    });
    let limiter = limiter(RedisStore::builder(pool.clone()));
    assert_eq!(first.block_on(decided(&limiter, 1)), 1);
    first.block_on(async {
        let _held = pool.get().await.unwrap();
        assert_eq!(
            second
                .spawn(async move { decided(&limiter, 1_000).await })
                .await
                .unwrap(),
            1_000
        );
    });
    drop(second);
    first.block_on(async {
        for mut connection in join_all((0..4).map(|_| pool.get_owned()))
            .await
            .into_iter()
            .map(Result::unwrap)
        {
            connection.set("session", 1).await.unwrap();
        }
    });
}

#[tokio::test]
async fn settings_that_belong_to_the_application_are_errors() {
    let server = RedisServer::start();
    let given = || {
        RedisStore::builder(
            Pool::builder().build_unchecked(RedisConnectionManager::new(server.url()).unwrap()),
        )
    };
    let builder = given().credentials(Rotating::new("s3cret"));
    let error = builder.build().unwrap_err().to_string();
    assert!(
        error.contains("the application opens the connections"),
        "{error}"
    );
}

/// The last credentials, and each that follows.
#[derive(Clone)]
struct Rotating(watch::Sender<BasicAuth>);

impl Rotating {
    fn new(password: &str) -> Self {
        Self(watch::Sender::new(BasicAuth::new(
            "shop".into(),
            password.into(),
        )))
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

/// Passwords change ten times a second while checks come, and now and then all connections of the
/// store are closed.
async fn a_password_changes(servers: &[RedisServer], builder: RedisStoreBuilder) {
    let all = |command: &str| {
        servers
            .iter()
            .for_each(|server| drop(server.run::<Value>(command)));
    };
    let only = |password: usize| format!("ACL SETUSER shop on resetpass >{password} ~* +@all");
    all(&only(0));
    let provider = Rotating::new("0");
    let store = builder
        .credentials(provider.clone())
        .connect()
        .await
        .unwrap();
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
    assert!(
        lost.is_empty() && all.iter().all(|(decided, _)| *decided > 0),
        "{} are lost: {lost:?}",
        lost.len()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_changes_costs_no_decision() {
    let server = RedisServer::start();
    let builder = RedisStore::builder(server.url());
    a_password_changes(&[server], builder).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_changes_behind_sentinels_costs_no_decision() {
    let primary = RedisServer::start();
    let sentinel = Sentinel::start(&primary);
    a_password_changes(
        &[primary],
        RedisStore::builder(RedisSource::sentinels([sentinel.url()], "redis://main")),
    )
    .await;
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
    let error = RedisStore::builder(server.url())
        .credentials(Rotating::new("wrong"))
        .connect()
        .await
        .unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Denied, "{error:?}");

    #[derive(Clone)]
    struct Ends;
    impl StreamingCredentialsProvider for Ends {
        fn subscribe(
            &self,
        ) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send + 'static>> {
            Box::pin(stream::empty())
        }
    }
    let error = RedisStore::builder(server.url())
        .credentials(Ends)
        .connect()
        .await
        .unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Denied, "{error:?}");

    #[derive(Clone)]
    struct Never;
    impl StreamingCredentialsProvider for Never {
        fn subscribe(
            &self,
        ) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send + 'static>> {
            Box::pin(stream::pending())
        }
    }
    let never = RedisStore::builder(server.url())
        .credentials(Never)
        .connect_timeout(ms(100));
    let error = timeout(seconds(5), never.connect())
        .await
        .unwrap()
        .unwrap_err();
    assert!(with_causes(&error).contains("not within"), "{error:?}");
    let outcome = limiter(RedisStore::builder(server.url()).credentials(Rotating::new("right")));
    let outcome: Result<_, Error> = outcome.check(&CALLS, "ada", 1).await;
    assert!(outcome.unwrap().is_allowed());
}

/// Gives credentials after this time.
#[derive(Clone)]
struct After(Duration);

impl StreamingCredentialsProvider for After {
    fn subscribe(&self) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send + 'static>> {
        let wait = sleep(self.0);
        let given = stream::once(async move {
            wait.await;
            Ok(BasicAuth::new("shop".into(), "s3cret".into()))
        });
        Box::pin(given.chain(stream::pending()))
    }
}

/// Signing in takes most of the connect timeout.
#[tokio::test]
async fn a_sentinel_that_is_down_takes_no_time_from_the_primary() {
    let primary = RedisServer::start();
    primary.run::<()>("ACL SETUSER shop on >s3cret ~* +@all");
    let sentinel = Sentinel::start(&primary);
    let urls = ["redis://127.0.0.1:1".to_owned(), sentinel.url()];
    let builder = RedisStore::builder(RedisSource::sentinels(urls, "redis://main"));
    let builder = builder.credentials(After(ms(1_700)));
    builder.connect_timeout(seconds(3)).connect().await.unwrap();
}

#[cfg(feature = "cluster")]
#[tokio::test]
async fn the_nodes_of_a_cluster_have_the_whole_connect_timeout() {
    let cluster = RedisCluster::start(1).await;
    let node = &cluster.0[0];
    node.run::<()>("ACL SETUSER shop on >s3cret ~* +@all");
    let builder = RedisStore::builder(RedisSource::cluster([node.url()]));
    let builder = builder.credentials(After(ms(1_500)));
    builder
        .connect_timeout(TEST_TIMEOUT)
        .connect()
        .await
        .unwrap();
}

/// Only the store needs `INFO`, for a warning.
#[tokio::test]
async fn a_pool_whose_user_may_not_run_info_is_shared() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER shop on >s3cret ~* +@all -info");
    let url = server.url().replace("://", "://shop:s3cret@");
    let manager = RedisConnectionManager::new(url).unwrap();
    let pool = Pool::builder().max_size(4).min_idle(4);
    let pool = pool.build(manager).await.unwrap();
    RedisStore::builder(pool.clone()).connect().await.unwrap();
    assert_eq!(server.connections(), 4);
}
