//! Ways to connect to a server: over a Unix socket, as a user, under a name, from an existing
//! client.

use std::path::Path;

use redis::{ConnectionAddr, IntoConnectionInfo};
use tower_sliding_window::{Error, Limit, Limiter, RedisStore, store::RedisStoreBuilder};

use crate::support::{TEST_TIMEOUT, redis_server::RedisServer};

const CALLS: Limit = Limit::per_hour("calls", 3);

fn limiter(builder: RedisStoreBuilder) -> Limiter {
    Limiter::new(
        builder
            .connect_timeout(TEST_TIMEOUT)
            .reply_timeout(TEST_TIMEOUT)
            .build()
            .unwrap(),
    )
    .deadline(TEST_TIMEOUT)
}

async fn used(limiter: &Limiter) -> Result<u64, Error> {
    limiter
        .check(&CALLS, "ada", 1)
        .await
        .map(|decision| decision.binding().used)
}

#[tokio::test]
async fn a_store_connects_over_a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock");
    let server = RedisServer::start_with(&["--unixsocket", &socket.display().to_string()]);
    assert!(Path::new(&socket).exists());
    let url = format!("redis+unix://{}?db=2", socket.display());
    assert!(matches!(
        url.as_str().into_connection_info().unwrap().addr(),
        ConnectionAddr::Unix(_)
    ));
    assert_eq!(used(&limiter(RedisStore::builder(&url))).await.unwrap(), 1);
    assert!(server.run::<String>("INFO keyspace").contains("db2:keys=1"));
}

#[tokio::test]
async fn a_connection_has_the_user_and_database_of_its_url() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER shop on >s3cret ~* +@all");
    server.run::<()>("ACL SETUSER nameless on >s3cret ~* +@all -client");
    let builder = |user| {
        let url = server.url().replace("://", &format!("://{user}:s3cret@"));
        RedisStore::builder(format!("{}/5", url.trim_end_matches('/')))
    };
    let store = builder("shop");
    assert!(!format!("{store:?}").contains("s3cret"));
    let store = limiter(store);
    used(&store).await.unwrap();
    let clients: String = server.run("CLIENT LIST");
    let ours = clients
        .lines()
        .find(|client| client.contains("user=shop "))
        .unwrap();
    assert!(ours.contains(" db=5 "), "{ours}");

    let nameless = limiter(builder("nameless"));
    assert_eq!(
        used(&nameless).await.unwrap(),
        2,
        "a user that may not run CLIENT is still counted"
    );
}

/// The client may have a user, a database, a protocol, or a socket.
#[tokio::test]
async fn a_store_from_an_existing_client_uses_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock").display().to_string();
    let server = RedisServer::start_with(&["--unixsocket", &socket]);
    server.run::<()>("ACL SETUSER shop on >s3cret ~* +@all");
    let over_tcp = format!("redis://shop:s3cret@{}/5", server.address());
    for (url, db) in [
        (over_tcp.clone(), 5),
        (format!("{over_tcp}?protocol=resp3"), 5),
        (
            format!("redis+unix://{socket}?db=6&user=shop&pass=s3cret"),
            6,
        ),
        (
            format!("redis+unix://{socket}?db=6&user=shop&pass=s3cret&protocol=resp3"),
            6,
        ),
    ] {
        let client = redis::Client::open(url.as_str()).unwrap();
        let builder = RedisStore::builder(client.clone());
        assert!(!format!("{builder:?}").contains("s3cret"));
        builder.clone().connect().await.unwrap();
        let store = limiter(builder);
        server.run::<()>("FLUSHALL");
        for expected in 1..=3 {
            assert_eq!(used(&store).await.unwrap(), expected, "{url}");
        }
        assert!(!store.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        let clients: String = server.run("CLIENT LIST");
        let db = format!(" db={db} ");
        let is_right = |client: &str| client.contains("user=shop ") && client.contains(&db);
        assert!(clients.lines().any(is_right), "{clients}");
    }
    let error = RedisStore::builder(redis::Client::open("redis://127.0.0.1:1").unwrap())
        .connect()
        .await
        .unwrap_err();
    assert!(format!("{error:?}").contains("127.0.0.1:1"), "{error:?}");
}
