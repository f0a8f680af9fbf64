//! Checks that their callers send: when they are sent, and what a late poll means.

use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use futures_util::future::poll_immediate;
use http::{Request, Response, StatusCode};
use tokio::time::sleep;
use tower::{Layer, Service, service_fn};
use tower_sliding_window::{
    Error, Key, Limit, Limiter, RateLimitLayer, extract::KeyError, limiter::Breaker,
    middleware::RateLimit,
};

use crate::support::{
    ALGORITHMS, TEST_TIMEOUT, ms, one_thread,
    proxy::{Cut, Proxy},
    redis_server::{RedisServer, store_at},
    seconds,
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

/// A limiter that has had replies, so that its next check is a lone one.
async fn used(url: &str) -> Limiter {
    let limiter = Limiter::new(store_at(url).connect().await.unwrap()).breaker(Breaker::OFF);
    let patient = limiter.clone().deadline(TEST_TIMEOUT);
    for _ in 0..20 {
        let first = patient.check(&CALLS, "first", 1).await.unwrap();
        assert!(first.is_allowed());
    }
    limiter
}

/// A layer of one limit for all requests.
fn guarded<S>(limiter: &Limiter, limit: &Limit, service: S) -> RateLimit<S> {
    let all = limit
        .clone()
        .by(|_: &http::request::Parts| Ok::<_, KeyError>(Key::from("all")));
    let layer = RateLimitLayer::new(limiter.clone()).limit(all);
    layer.fail_closed().layer(service)
}

async fn hello(_: Request<String>) -> Result<Response<String>, Infallible> {
    Ok(Response::new("hello".into()))
}

/// The response future is made, and polled only after the idle connection was closed. A check whose
/// id is not remembered must not be sent over such a connection.
#[tokio::test]
async fn a_check_is_sent_over_a_connection_that_works_when_it_is_polled() {
    let server = RedisServer::start();
    for algorithm in ALGORITHMS {
        let proxy = Proxy::start(&server).await;
        let limiter = used(proxy.url()).await.deadline(ms(900));
        let limit = CALLS.with_algorithm(algorithm);
        let mut service = guarded(&limiter, &limit, service_fn(hello));
        let response = service.call(Request::new(String::new()));
        sleep(ms(600)).await;
        proxy.cut(Cut::Close);
        sleep(ms(50)).await;
        let response: Response<String> = response.await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{algorithm:?}");
    }
}

/// The response future is made in a runtime that is not driven any more, and polled in another.
#[test]
fn a_check_belongs_to_the_runtime_that_polls_it() {
    let server = RedisServer::start();
    let (idle, driven) = (one_thread(), one_thread());
    let limiter = idle.block_on(used(&server.url())).deadline(TEST_TIMEOUT);
    let mut service = guarded(&limiter, &CALLS, service_fn(hello));
    let response = {
        let _entered = idle.enter();
        service.call(Request::new(String::new()))
    };
    let begun = Instant::now();
    let response: Response<String> = driven.block_on(response).unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(
        begun.elapsed() < TEST_TIMEOUT / 2,
        "it waits for the other runtime"
    );
}

/// A check asks whether a remembered refusal still stands, and its server is silent. `shutdown`
/// waits for the answer no longer than a reply may take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_does_not_wait_for_the_confirmation_of_a_refusal() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = used(proxy.url())
        .await
        .deadline(ms(200))
        .refusal_cache(ms(100));
    let once = Limit::per_hour("once", 1);
    assert!(limiter.check(&once, "ada", 1).await.unwrap().is_allowed());
    assert!(!limiter.check(&once, "ada", 1).await.unwrap().is_allowed());
    sleep(ms(150)).await;
    proxy.silence_open_connections();
    assert!(!limiter.check(&once, "ada", 1).await.unwrap().is_allowed());
    let begun = Instant::now();
    drop(limiter.shutdown(seconds(14)).await);
    assert!(begun.elapsed() < seconds(4), "{:?}", begun.elapsed());
}

/// The callers of a few checks poll their futures late. This says nothing about the round trip.
#[tokio::test]
async fn a_late_poll_makes_the_default_deadline_no_longer() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = used(proxy.url()).await.refusal_cache(Duration::ZERO);
    let mut checks: Vec<_> = (0..4)
        .map(|_| Box::pin(limiter.check(&CALLS, "late", 1)))
        .collect();
    for check in &mut checks {
        assert!(poll_immediate(check).await.is_none());
    }
    sleep(ms(1_500)).await;
    for check in checks {
        assert!(check.await.unwrap().is_allowed());
    }
    proxy.silence_open_connections();
    let outcome = limiter.check(&CALLS, "ada", 1).await;
    let Err(Error::TimedOut { deadline, .. }) = outcome else {
        panic!("{outcome:?}")
    };
    assert!(deadline < ms(500), "{deadline:?}");
}
