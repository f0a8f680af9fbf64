//! The store that a URL names. That it keeps the rules of every store is tested wherever
//! `for_every_store!` is used.

use std::sync::Arc;

use axum::{Router, body::Body, routing::get};
use http::Request;
use tower::ServiceExt;
use tower_sliding_window::{
    Charge, Check, ConfigError, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer,
    RedisStore, Store,
    store::{self, RedisSource},
};

use crate::support::{TEST_TIMEOUT, redis_server::RedisServer, requests::anyone, with_causes};

const TWO: Limit = Limit::per_minute("two", 2);

fn limiter(store: Arc<dyn Store>) -> Limiter {
    Limiter::new(store).deadline(TEST_TIMEOUT)
}

async fn is_allowed(limiter: &Limiter) -> bool {
    limiter.check(&TWO, "ada", 1).await.unwrap().is_allowed()
}

#[tokio::test]
async fn the_application_is_the_same_type_in_process_and_on_redis() {
    fn app(store: Arc<dyn Store>) -> Router {
        let limits = RateLimitLayer::new(store)
            .limit(TWO.by(anyone))
            .deadline(TEST_TIMEOUT);
        Router::new()
            .route("/", get(|| async { "hello" }))
            .layer(limits)
    }
    let server = RedisServer::start();
    for url in ["memory:", &server.url()] {
        let app = app(store::from_url(url).unwrap());
        let mut statuses = Vec::new();
        for _ in 0..3 {
            let response = app
                .clone()
                .oneshot(Request::new(Body::empty()))
                .await
                .unwrap();
            statuses.push(response.status().as_u16());
        }
        assert_eq!(statuses, [200, 200, 429], "{url}");
    }
}

#[tokio::test]
async fn stores_at_one_url_share_their_limits_and_stores_in_process_do_not() {
    let server = RedisServer::start();
    let (first, second) = (
        store::connect(&server.url()).await.unwrap(),
        store::from_url(&server.url()).unwrap(),
    );
    let (first, second) = (limiter(first), limiter(second));
    assert_eq!(
        [
            is_allowed(&first).await,
            is_allowed(&second).await,
            is_allowed(&first).await
        ],
        [true, true, false]
    );

    let [first, second] = ["memory:", "memory"].map(|url| limiter(store::from_url(url).unwrap()));
    for _ in 0..2 {
        assert!(is_allowed(&first).await && is_allowed(&second).await);
    }
    assert!(!is_allowed(&first).await && !is_allowed(&second).await);
}

#[test]
fn only_the_in_process_store_decides_without_a_future() {
    let check = Check::new(Charge::new(TWO, "ada", 2).unwrap());
    let memory = store::from_url("memory:").unwrap();
    assert_eq!(
        [(); 2].map(|()| memory.decide_now(&check).unwrap().unwrap().is_allowed()),
        [true, false]
    );
    assert!(
        store::from_url("redis://127.0.0.1:1")
            .unwrap()
            .decide_now(&check)
            .is_none()
    );
}

/// Otherwise each limiter would have a breaker of its own, and would ask Redis about each refusal.
#[tokio::test]
async fn clones_share_what_a_store_on_redis_remembers_in_the_process() {
    let server = RedisServer::start();
    let store = store::connect(&server.url()).await.unwrap();
    let (first, second) = (limiter(store.clone()), limiter(store));
    assert!(is_allowed(&first).await && is_allowed(&first).await && !is_allowed(&first).await);
    let asked = server.script_calls();
    assert!(!is_allowed(&second).await);
    assert_eq!(
        server.script_calls(),
        asked,
        "the second limiter knows the refusal"
    );
}

#[tokio::test]
async fn a_url_may_name_a_socket() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock");
    let _server = RedisServer::start_with(&["--unixsocket", socket.to_str().unwrap()]);
    for (scheme, allowed) in [("unix", [true, true]), ("redis+unix", [false, false])] {
        let limiter = limiter(
            store::connect(&format!("{scheme}://{}", socket.display()))
                .await
                .unwrap(),
        );
        assert_eq!(
            [is_allowed(&limiter).await, is_allowed(&limiter).await],
            allowed,
            "both spend from one limit"
        );
    }
}

/// Without a runtime, too.
#[test]
fn a_store_from_a_url_is_made_while_redis_is_down() {
    assert!(store::from_url("redis://127.0.0.1:1").is_ok());
}

#[tokio::test]
async fn connecting_fails_while_redis_is_down() {
    assert!(store::connect("memory:").await.is_ok());
    let error = with_causes(&store::connect("redis://127.0.0.1:1").await.unwrap_err());
    assert!(error.contains("127.0.0.1:1"), "{error}");
}

#[tokio::test]
async fn an_error_says_what_is_wrong_with_a_url_and_shows_no_password() {
    for (url, problem) in [
        ("", "is not a Redis URL such as redis://127.0.0.1:6379/0"),
        (" \n", "is not a Redis URL"),
        (
            "memory:?capacity=5",
            "`memory:`, without options, is a URL for",
        ),
        (
            "memcached://shop:s3cr3t@host",
            "a URL, not shown since it may hold a password, is not a Redis URL",
        ),
        (
            "shop:s3cr3t@host",
            "a URL, not shown since it may hold a password, is not a Redis URL",
        ),
        ("s3cr3t://host", "is not a Redis URL"),
        ("10.0.0.1:6379", "it does not begin with redis://"),
        (
            "redis://10.0.0.1:6379,10.0.0.2:6379",
            "URLs of sentinels begin with redis+sentinel://",
        ),
        (
            "sentinel://shop:s3cr3t@host/main",
            "sentinels begin with redis+sentinel://",
        ),
        (
            "redis-sentinel://shop:s3cr3t@host/main",
            "sentinels begin with redis+sentinel://",
        ),
        ("sentinel.internal:26379", "begin with redis+sentinel://"),
        (
            "rediss-cluster://shop:s3cr3t@host",
            "of a cluster with redis+cluster://",
        ),
        ("shop:s3://cr3t@host", "is not a Redis URL"),
        ("://s3cr3t@host", "is not a Redis URL"),
        (
            "redis+sentinel://shop:s3cr3t/@host/main",
            "In a user name or password write / as %2F",
        ),
        (
            "redis+sentinel://shop:s3cr3t@host",
            "has the name of the primary behind their hosts",
        ),
        (
            "redis+sentinel://shop:s3cr3t@host:port/main",
            "is not a Redis URL",
        ),
        ("redis+other://shop:s3cr3t@host", "is not a Redis URL"),
        #[cfg(not(feature = "cluster"))]
        (
            "redis+cluster://shop:s3cr3t@host",
            "need this crate's feature `cluster`",
        ),
        #[cfg(feature = "cluster")]
        (
            "redis+cluster://shop:s3cr3t/@host",
            "In a user name or password write / as %2F",
        ),
        (
            "redis://:s3cr3t@ss/w0rd@host",
            "In a user name or password write / as %2F",
        ),
        (
            "memory://shop:s3cr3t",
            "`memory:`, without options, is a URL for",
        ),
        (
            "redis://shop:s3cr3t@host/db",
            "is not a Redis URL such as redis://",
        ),
        #[cfg(not(feature = "tls"))]
        (
            "rediss://shop:s3cr3t@host",
            "need this crate's feature `tls`",
        ),
    ] {
        let error = with_causes(&store::from_url(url).unwrap_err());
        assert!(
            error.contains(problem) && !error.contains("s3cr3t"),
            "{error}"
        );
        let error = with_causes(&store::connect(url).await.unwrap_err());
        assert!(
            error.starts_with("setting up the store failed: ") && error.contains(problem),
            "{error}"
        );
        assert!(!error.contains("s3cr3t"), "{error}");
    }
}

/// What the Redis client ignores would be a limit that counts elsewhere, or a store without its
/// login.
#[test]
fn what_nobody_heeds_in_a_url_is_an_error_at_every_door() {
    fn of_each_door(scheme: &str, tail: &str) -> Vec<Result<(), ConfigError>> {
        let url = format!("{scheme}://127.0.0.1{tail}");
        let several = |kind, path| format!("{scheme}+{kind}://127.0.0.1{path}{tail}");
        let of_url = |url: &str| store::from_url(url).map(drop);
        let mut doors = vec![
            RedisStore::builder(&url).build().map(drop),
            RedisStore::builder(RedisSource::sentinels([&url], "redis://main"))
                .build()
                .map(drop),
            RedisStore::builder(RedisSource::sentinels(["redis://127.0.0.1"], &url))
                .build()
                .map(drop),
            of_url(&url),
            of_url(&several("sentinel", "/main")),
        ];
        #[cfg(feature = "cluster")]
        doors.extend([
            RedisStore::builder(RedisSource::cluster([&url]))
                .build()
                .map(drop),
            RedisStore::builder(RedisSource::cluster(["redis://127.0.0.1", &url]))
                .build()
                .map(drop),
            of_url(&several("cluster", "")),
        ]);
        doors
    }
    const OPTIONS: &str =
        "write redis://user:password@host:6379/8, where ?protocol=resp3 is the only option";
    for tail in [
        "?db=8",
        "?user=limits&password=s3cr3t",
        "/8?Protocol=resp3",
        "?protocol=resp2&protocol=resp3",
        "?protocol=resp4",
        "?protocol",
        "?s3cr3t",
        "?&timeout=1s",
        "/0?ssl=true",
        "#insecure",
        "/0#s3cr3t",
    ] {
        for scheme in ["redis", "Valkey"] {
            for outcome in of_each_door(scheme, tail) {
                let error = outcome.expect_err(tail).to_string();
                assert!(
                    error.contains(OPTIONS) && !error.contains("s3cr3t"),
                    "{tail}: {error}"
                );
            }
        }
    }
    for url in [
        "redis+unix:///run/redis.sock?database=1",
        "redis+unix:///run/redis.sock?password=s3cr3t",
        "unix:///run/redis.sock?DB=1",
        "unix:///run/redis.sock?db=1&db=2",
        "unix://limits:s3cr3t@localhost/run/redis.sock",
        "valkey+unix://localhost:6379/run/redis.sock",
        "unix:///run/redis.sock#s3cr3t",
    ] {
        let error = store::from_url(url).map(drop).expect_err(url).to_string();
        let options = "unix:///path?db=8&user=user&pass=password&protocol=resp3";
        assert!(
            error.contains(options) && !error.contains("s3cr3t"),
            "{url}: {error}"
        );
    }
    for url in [
        "redis://127.0.0.1/?",
        "redis://127.0.0.1?protocol=resp3",
        "redis://127.0.0.1/8?protocol=2",
        "unix:///run/redis.sock",
        "redis+unix:///run/redis.sock?pass=p@ss&user=limits&db=3&protocol=3",
        "redis+sentinel://127.0.0.1/main?protocol=resp3",
        "redis+sentinel://limits:s3cr3t@127.0.0.1,127.0.0.1:1/main/3?protocol=resp3",
        #[cfg(feature = "cluster")]
        "redis+cluster://limits:s3cr3t@127.0.0.1,127.0.0.1:1/?protocol=resp3",
        #[cfg(feature = "cluster")]
        "redis+cluster://127.0.0.1,127.0.0.1:1?protocol=resp3",
    ] {
        assert!(store::from_url(url).is_ok(), "{url}");
    }
}

/// A login needs a password. One that stands in one URL of several would not be used, or would be
/// the login of another server.
#[test]
fn a_login_that_nobody_uses_is_an_error() {
    let url = |url: &str| store::from_url(url).map(drop);
    let alone = "A password alone is redis://:password@host";
    let one_login = "has one login, in front of its first host";
    let mut outcomes = vec![
        (url("redis://limits@127.0.0.1"), alone),
        (url("unix:///run/redis.sock?user=limits"), alone),
        (
            RedisStore::builder(redis::Client::open("redis://limits@127.0.0.1").unwrap())
                .build()
                .map(drop),
            "a client has a user without a password",
        ),
        (url("redis+sentinel://limits@127.0.0.1/main"), alone),
        (
            RedisStore::builder(RedisSource::sentinels(
                ["redis://limits@127.0.0.1"],
                "redis://main",
            ))
            .build()
            .map(drop),
            alone,
        ),
        (
            url("redis+sentinel://shop:s3cr3t@127.0.0.1,limits:s3cr3t@127.0.0.2/main"),
            one_login,
        ),
        (
            url("redis+sentinel://127.0.0.1,limits:s3cr3t@127.0.0.2/main"),
            one_login,
        ),
        (
            RedisStore::builder(RedisSource::sentinels(
                ["redis://127.0.0.1/3"],
                "redis://main",
            ))
            .build()
            .map(drop),
            "a sentinel has no databases",
        ),
        (
            RedisStore::builder(RedisSource::sentinels(["redis://127.0.0.1"], "main"))
                .build()
                .map(drop),
            "is not a Redis URL such as",
        ),
        (
            RedisStore::builder(RedisSource::sentinels(
                ["redis://127.0.0.1"],
                "unix:///run/redis.sock",
            ))
            .build()
            .map(drop),
            "the host of the primary is its name",
        ),
        (
            url("redis+sentinel://127.0.0.1/main:6380"),
            "the primary has no port",
        ),
        (
            RedisStore::builder(RedisSource::sentinels(
                ["redis://127.0.0.1"],
                "redis://main:1",
            ))
            .build()
            .map(drop),
            "the primary has no port",
        ),
        (
            RedisStore::builder(RedisSource::sentinels(
                ["redis+sentinel://127.0.0.1/main"],
                "redis://main",
            ))
            .build()
            .map(drop),
            "one server each",
        ),
        (
            url("redis+sentinel://127.0.0.1/ma%69n"),
            "the host of the primary is its name",
        ),
        (
            url("redis+sentinel://127.0.0.1/ma in?protocol=resp3"),
            "is not a Redis URL such as",
        ),
    ];
    #[cfg(feature = "cluster")]
    {
        outcomes.push((
            url("redis+cluster://shop:s3cr3t@127.0.0.1,limits:s3cr3t@127.0.0.2"),
            one_login,
        ));
        for others in [
            "redis://limits:s3cr3t@127.0.0.1",
            "redis://127.0.0.1/3",
            "redis://127.0.0.1?protocol=resp3",
        ] {
            for first in ["redis://127.0.0.1", "redis://shop:0ther@127.0.0.1/4"] {
                let store = RedisStore::builder(RedisSource::cluster([first, others])).build();
                outcomes.push((store.map(drop), "in the first URL alone"));
            }
        }
    }
    for (outcome, problem) in outcomes {
        let error = outcome.expect_err(problem).to_string();
        assert!(
            error.contains(problem) && !error.contains("s3cr3t"),
            "{error}"
        );
    }
}

#[test]
fn a_url_of_several_servers_is_no_server_of_several() {
    let hosts = "shop:s3cr3t@10.0.0.1:26379,10.0.0.2:26379";
    for (scheme, tail) in [("redis+sentinel", "/main"), ("Redis+Cluster", "")] {
        let url = format!("{scheme}://{hosts}{tail}");
        let sentinels = RedisSource::sentinels([&url], "redis://main");
        let error = RedisStore::builder(sentinels).build().unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("one server each") && !error.contains("s3cr3t"),
            "{error}"
        );
    }
}

/// A `main` that returns the error prints its `Debug`.
#[test]
fn the_debug_output_of_a_wrong_configuration_is_its_text() {
    let url = store::from_url("mongodb://host").unwrap_err();
    assert_eq!(
        format!("{url:?}"),
        format!("ConfigError({:?})", url.to_string())
    );
    let url = format!("{:?}", store::from_url("redis://").unwrap_err());
    assert!(
        url.starts_with("ConfigError(\"") && url.contains("is not a Redis URL"),
        "{url}"
    );

    let limits = |limits: Vec<KeyedLimit>| {
        RateLimitLayer::new(MemoryStore::new())
            .limits(limits)
            .unwrap_err()
    };
    assert_eq!(
        format!("{:?}", limits(Vec::new())),
        "ConfigError(\"a layer needs at least one limit: add `.limit(..)`\")"
    );
    let twice = limits(vec![TWO.by(anyone), TWO.by(anyone)]);
    let text = "two limits of one layer are named \"two\": give one of them another name";
    assert_eq!(format!("{twice:?}"), format!("ConfigError({text:?})"));
}
