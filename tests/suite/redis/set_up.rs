//! Each mistake in the set-up of the guide's table is made, and its message is that of the table.

use std::{
    convert::Infallible,
    error::Error,
    panic::{AssertUnwindSafe, catch_unwind},
};

use axum::{Router, body::Body, routing::get};
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::{Full, Limited};
use hyper::body::Bytes;
use tokio::runtime;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Everyone, Header, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer, RedisStore, Rejection,
    Secret, store,
};

use super::CALLS;
use crate::support::{
    TEST_TIMEOUT, log::Log, ms, proxy::Proxy, redis_server::RedisServer, with_causes,
};

/// True if a message has all that the row of a mistake quotes.
fn has(mistake: &str, message: &str) -> bool {
    let page = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/guide/what_happens_when.md"
    ));
    let (_, table) = page.split_once("# Mistakes in the set-up").unwrap();
    let row = table
        .lines()
        .find_map(|line| line.strip_prefix(&format!("| {mistake} | ")))
        .unwrap();
    let mut quoted = row
        .split(" | ")
        .next()
        .unwrap()
        .split('"')
        .skip(1)
        .step_by(2)
        .peekable();
    assert!(quoted.peek().is_some(), "{row}");
    quoted.all(|quote| message.contains(quote))
}

#[track_caller]
fn check(mistake: &str, message: &str) {
    assert!(has(mistake, message), "{mistake}: {message}");
}

#[track_caller]
fn check_error(mistake: &str, error: &dyn Error) {
    check(mistake, &with_causes(error));
}

fn panic_of(mistake: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(mistake)).unwrap_err();
    panic
        .downcast_ref::<String>()
        .cloned()
        .unwrap_or_else(|| (*panic.downcast_ref::<&str>().unwrap()).to_owned())
}

#[tokio::test]
async fn a_mistake_in_a_layer_says_what_to_write() {
    let layer = || RateLimitLayer::new(MemoryStore::new());
    let two = || {
        [Limit::per_minute("calls", 1), Limit::per_hour("calls", 9)].map(|limit| limit.by(Everyone))
    };
    check_error(
        "two limits of one name in a layer",
        &layer().limits(two()).unwrap_err(),
    );
    check(
        "two limits of one name in a layer",
        &panic_of(|| drop(two().into_iter().fold(layer(), RateLimitLayer::limit))),
    );
    let places = Limit::concurrent("streams", 1).by(Everyone).settle(|_| 1);
    check_error(
        "an option that has no effect on its limit, such as `settle` on a concurrent one",
        &layer().limits([places]).unwrap_err(),
    );
    check(
        "a layer without a limit",
        &panic_of(|| drop(Router::<()>::new().layer(layer()))),
    );
    check_error(
        "a secret that is short, or stands in an example",
        &Secret::new("short").unwrap_err(),
    );
    for (mistake, url) in [
        ("the URL of another kind of server", "http://127.0.0.1"),
        (
            "another scheme for several servers, such as `redis-sentinel://`",
            "redis-sentinel://127.0.0.1/main",
        ),
        (
            "an option of a URL that nothing reads, such as `?db=8`",
            "redis://127.0.0.1?db=8",
        ),
        (
            "a password with `/`, `?` or `#` in a URL",
            "redis://shop:1234?p4ss@127.0.0.1",
        ),
    ] {
        check_error(mistake, &store::from_url(url).unwrap_err());
    }
    check(
        "a [`Header`](crate::Header) or [`ApiKey::header`](crate::ApiKey::header) of \
         `authorization`, `cookie` or `x-forwarded-for`",
        &panic_of(|| drop(Header::new("cookie"))),
    );

    let log = Log::start();
    let app = Router::new()
        .route("/", get(|| async {}))
        .layer(layer().limit(CALLS.by(PeerIp::new())));
    let response = app.oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!(response.status(), 500);
    check("axum without `ConnectInfo`", &log.text());

    let twice = layer().limit(CALLS.by(Everyone));
    let app = Router::new()
        .route("/", get(|| async {}).layer(twice.clone()))
        .layer(twice);
    assert_eq!(
        app.oneshot(Request::new(Body::empty()))
            .await
            .unwrap()
            .status(),
        200
    );
    check("one layer on a router and on a route in it", &log.text());

    let body = || Limited::new(Full::<Bytes>::default(), 1);
    let streams = layer().limit(Limit::concurrent("streams", 1).by(Everyone));
    let streams =
        streams.respond_with(move |_: &Rejection, head: Response<()>| head.map(|()| body()));
    let app = streams.layer(service_fn(move |_: Request<Body>| async move {
        Ok::<_, Infallible>(Response::new(body()))
    }));
    assert_eq!(
        app.oneshot(Request::new(Body::empty()))
            .await
            .unwrap()
            .status(),
        500
    );
    check("a body that cannot hold a place", &log.text());
}

#[test]
fn a_missing_runtime_is_named() {
    let limiter = Limiter::new(RedisStore::builder("redis://127.0.0.1:1").build().unwrap());
    check_error(
        "no tokio runtime",
        &limiter
            .check(&CALLS, "ada", 1)
            .now_or_never()
            .unwrap()
            .unwrap_err(),
    );
    check_error(
        "no tokio runtime",
        &RedisStore::connect("redis://127.0.0.1:1")
            .now_or_never()
            .unwrap()
            .unwrap_err(),
    );
    let without_time = runtime::Builder::new_current_thread().build().unwrap();
    let panic = panic_of(|| drop(without_time.block_on(limiter.check(&CALLS, "ada", 1))));
    check("a runtime without timers", &panic);
}

#[tokio::test]
async fn a_server_that_refuses_says_what_to_write() {
    let server = RedisServer::start();
    let error = async |url: &str| RedisStore::connect(url).await.unwrap_err();
    let signed_in = |login: &str| {
        server
            .url()
            .replace("redis://", &format!("redis://{login}@"))
    };
    check_error(
        "no Redis at the address",
        &error("redis://127.0.0.1:1").await,
    );

    server.run::<()>("ACL SETUSER limiter on >limiter ~tsw1:* -@all");
    check_error(
        "the user may not run a command",
        &error(&signed_in("limiter:limiter")).await,
    );
    server.run::<()>("ACL SETUSER limiter +@all -time");
    check_error(
        "the user may not run a command",
        &error(&signed_in("limiter:limiter")).await,
    );
    server.run::<()>("ACL SETUSER limiter +@all resetkeys ~other:*");
    check_error(
        "the user may not write the keys",
        &error(&signed_in("limiter:limiter")).await,
    );
    check_error(
        "a wrong user or password",
        &error(&signed_in("limiter:wrong")).await,
    );

    server.run::<()>("REPLICAOF 127.0.0.1 1");
    check_error("Redis is a replica", &error(&server.url()).await);
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    check_error(
        "Redis is a replica",
        &limiter.check(&CALLS, "ada", 1).await.unwrap_err(),
    );
    server.run::<()>("REPLICAOF NO ONE");
    server.run::<()>("CONFIG SET requirepass s3cret");
    check_error("Redis needs a password", &error(&server.url()).await);
}

#[tokio::test]
async fn a_server_that_does_not_fit_is_logged() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.delay_replies(ms(80));
    let log = Log::start();
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(ms(50));
    check_error(
        "Redis is farther away than a deadline that is set",
        &limiter.check(&CALLS, "ada", 1).await.unwrap_err(),
    );

    // Without a limit of its memory, it evicts nothing.
    server.run::<()>("CONFIG SET maxmemory-policy allkeys-lru");
    RedisStore::connect(&server.url()).await.unwrap();
    assert!(!has("Redis evicts keys", &log.text()));
    server.run::<()>("CONFIG SET maxmemory 100mb");
    RedisStore::connect(&server.url()).await.unwrap();
    check("Redis evicts keys", &log.text());
}

/// One server must not hide another behind the line of this second.
#[tokio::test]
async fn each_server_that_does_not_fit_is_logged() {
    let (log, servers) = (Log::start(), [RedisServer::start(), RedisServer::start()]);
    for server in &servers {
        server.run::<()>("CONFIG SET maxmemory-policy volatile-lru");
        server.run::<()>("CONFIG SET maxmemory 100mb");
        RedisStore::connect(&server.url()).await.unwrap();
    }
    let text = log.text();
    let lines: Vec<_> = text
        .lines()
        .filter(|line| has("Redis evicts keys", line))
        .collect();
    let are_named = servers
        .iter()
        .all(|server| lines.iter().any(|line| line.contains(&server.address())));
    assert!(are_named && lines.len() == 2, "{text}");
}
