//! Connections that are opened while others work, hang, or are not needed any more.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_sliding_window::{
    Limiter, RedisStore,
    error::StoreErrorKind,
    limiter::Breaker,
    store::{RedisSource, RedisStoreBuilder},
};

use super::CALLS;
use crate::support::{
    TEST_TIMEOUT, ms, proxy::Proxy, redis_server::RedisServer, until, with_causes,
};

/// What becomes of a connection.
#[derive(Clone, Copy)]
enum Fate {
    Works,
    Hangs,
    /// The sign-in is answered, and nothing after it.
    SignsIn,
}

/// In front of a server.
struct Door {
    url: String,
    /// Connections that the store has opened and not closed.
    open: Arc<AtomicUsize>,
}

impl Door {
    /// The number of a connection decides about it.
    async fn to(server: &RedisServer, fate: impl Fn(usize) -> Fate + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let (address, open) = (server.address(), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&open);
        tokio::spawn(async move {
            for number in 0.. {
                let (client, _) = listener.accept().await.unwrap();
                let (fate, address, open) = (fate(number), address.clone(), Arc::clone(&counted));
                open.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    pass(client, fate, address).await;
                    open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { url, open }
    }
}

/// Until the client closes the connection.
async fn pass(mut client: TcpStream, fate: Fate, address: String) {
    let mut bytes = vec![0; 65_536];
    match fate {
        Fate::Works => {
            let mut server = TcpStream::connect(address).await.unwrap();
            let _ = copy_bidirectional(&mut client, &mut server).await;
            return;
        }
        Fate::Hangs => {}
        Fate::SignsIn => {
            let _ = client.read(&mut bytes).await;
            let _ = client.write_all(b"+OK\r\n+OK\r\n+OK\r\n").await;
        }
    }
    while let Ok(1..) = client.read(&mut bytes).await {}
}

/// Without a breaker, which would hide what a store does.
fn limiter(store: RedisStoreBuilder) -> Limiter {
    Limiter::new(store.build().unwrap())
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
}

async fn only_the_first_works(server: &RedisServer) -> Limiter {
    let door = Door::to(server, |number| {
        if number == 0 {
            Fate::Works
        } else {
            Fate::Hangs
        }
    })
    .await;
    let patient = limiter(RedisStore::builder(&door.url).connect_timeout(TEST_TIMEOUT));
    assert!(patient.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    patient.deadline(ms(500))
}

#[tokio::test]
async fn a_hanging_connection_fails_no_check_that_can_use_another() {
    let server = RedisServer::start();
    let limiter = only_the_first_works(&server).await;
    for _ in 0..20 {
        let mut checks = Vec::new();
        // One after the other, so that they do not travel together.
        for key in ["ada", "bob", "eve", "joe"] {
            checks.push(tokio::spawn(limiter.check(&CALLS, key, 1)));
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
        }
        for check in checks {
            assert!(check.await.unwrap().unwrap().is_allowed());
        }
    }
}

/// The connection that works is idle before each call.
#[tokio::test]
async fn a_hanging_connection_fails_no_lone_call() {
    let server = RedisServer::start();
    let limiter = only_the_first_works(&server).await;
    let calls = CALLS;
    // Two calls meet, so each needs a connection.
    let (ada, bob) = tokio::join!(limiter.reset(&calls, "ada"), limiter.reset(&calls, "bob"));
    ada.and(bob).unwrap();
    for _ in 0..20 {
        limiter.reset(&calls, "eve").await.unwrap();
        sleep(ms(10)).await;
    }
}

/// The first connection is lost in the middle of signing in. All others work.
#[tokio::test]
async fn a_connection_that_does_not_sign_in_in_time_holds_no_place() {
    let server = RedisServer::start();
    let door = Door::to(&server, |number| {
        if number == 0 {
            Fate::SignsIn
        } else {
            Fate::Works
        }
    })
    .await;
    let store = RedisStore::builder(door.url.replace("://", "://default:any@"))
        .connections(1)
        .connect_timeout(ms(200))
        .reply_timeout(TEST_TIMEOUT);
    let (limiter, begun) = (limiter(store), Instant::now());
    while limiter.check(&CALLS, "ada", 1).await.is_err() {}
    assert!(
        begun.elapsed() < TEST_TIMEOUT / 2,
        "the reply timeout, and not the connect timeout: {:?}",
        begun.elapsed()
    );
}

/// The application stops waiting for a new store.
#[tokio::test]
async fn opening_ends_with_the_store() {
    let server = RedisServer::start();
    let door = Door::to(&server, |_| Fate::SignsIn).await;
    let store = RedisStore::builder(door.url.replace("://", "://default:any@"))
        .connect_timeout(10 * TEST_TIMEOUT)
        .reply_timeout(10 * TEST_TIMEOUT);
    assert!(timeout(ms(300), store.connect()).await.is_err());
    until("the connection stays open", || {
        door.open.load(Ordering::SeqCst) == 0
    })
    .await;
}

/// The Redis client would take a second at most by itself, and half a second for each reply.
#[tokio::test]
async fn signing_in_may_take_as_long_as_the_connect_timeout() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.delay_replies(ms(1_200));
    let store = RedisStore::builder(proxy.url())
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT);
    assert!(
        limiter(store)
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
}

/// A caller that opens a connection, and those that wait for it, learn the same.
#[tokio::test]
async fn each_error_tells_how_long_no_connection_could_be_opened() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", silent.local_addr().unwrap());
    let limiter = limiter(
        RedisStore::builder(&url)
            .connections(1)
            .connect_timeout(ms(300)),
    );
    for _ in 0..3 {
        let error = limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        assert!(
            with_causes(&error).contains("not within 300ms"),
            "{}",
            with_causes(&error)
        );
    }
}

/// A sentinel, or what looks like one. It names this port after a while.
pub(super) async fn sentinel(names: u16, after: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = vec![0; 65_536];
                while let Ok(length @ 1..) = client.read(&mut bytes).await {
                    let mut reply = "+OK\r\n+OK\r\n".to_owned();
                    if String::from_utf8_lossy(&bytes[..length]).contains("GET-MASTER") {
                        sleep(ms(after)).await;
                        let port = names.to_string();
                        reply = format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len());
                    }
                    let _ = client.write_all(reply.as_bytes()).await;
                }
            });
        }
    });
    url
}

/// The host of the old primary is gone, so that connecting to it hangs.
#[tokio::test]
async fn a_sentinel_that_is_behind_delays_nothing() {
    let server = RedisServer::start();
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (old, new) = (gone.local_addr().unwrap().port(), server.port());
    let urls = [
        sentinel(old, 0).await,
        sentinel(new, 20).await,
        sentinel(new, 20).await,
    ];
    let store = RedisStore::builder(RedisSource::sentinels(urls, "redis://main"))
        .connect_timeout(2 * TEST_TIMEOUT);
    assert!(
        limiter(store)
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
}

/// A primary that refuses connections, and one that is silent, as an address that leads nowhere.
#[tokio::test]
async fn an_error_names_the_primary_that_cannot_be_reached() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for port in [1, silent.local_addr().unwrap().port()] {
        let source = RedisSource::sentinels([sentinel(port, 0).await], "redis://main");
        let error = RedisStore::builder(source).connect().await.unwrap_err();
        let text = with_causes(&error);
        let named = format!("127.0.0.1:{port}");
        assert!(
            text.contains("the primary that the sentinels name") && text.contains(&named),
            "{text}"
        );
        assert_eq!(error.kind, StoreErrorKind::Unreachable);
    }
}

#[tokio::test]
async fn a_sentinel_that_hangs_hides_no_error_of_another() {
    let hangs = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let hangs = format!("redis://{}", hangs.local_addr().unwrap());
    let urls = ["redis://127.0.0.1:1".to_owned(), hangs];
    let source = RedisSource::sentinels(urls, "redis://main");
    let error = RedisStore::builder(source).connect().await.unwrap_err();
    let text = with_causes(&error);
    assert!(text.contains("refused"), "{text}");
}

/// The server takes two connections of the store, and rejects all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_connections_are_all_in_use_is_not_asked_for_more_with_each_batch() {
    let server = RedisServer::start_with(&["--maxclients", "3"]);
    let mut own = server.connect();
    let limiter = Limiter::new(server.store().build().unwrap())
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF);
    let checks = async |number: u64| {
        let mut callers = JoinSet::new();
        for key in 0..64_u64 {
            let limiter = limiter.clone();
            callers.spawn(async move {
                for _ in 0..number {
                    assert!(limiter.check(&CALLS, key, 1).await.unwrap().is_allowed());
                }
            });
        }
        callers.join_all().await;
    };
    let mut rejected = || {
        let info: String = redis::cmd("INFO").arg("stats").query(&mut own).unwrap();
        let number = info
            .lines()
            .find_map(|line| line.strip_prefix("rejected_connections:"))
            .unwrap();
        number.parse::<u64>().unwrap()
    };
    // A connection works before the next ones are rejected.
    assert!(
        limiter
            .check(&CALLS, "first", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    checks(10).await;
    let before = rejected();
    checks(300).await;
    let rejected = rejected() - before;
    assert!(
        rejected < 100,
        "{rejected} rejected connections in 64 times 300 checks"
    );
}
