//! Concurrent limits in a layer: how long a request holds its place, and what the client sees.

use std::{
    convert::Infallible,
    future::{Future, pending},
    panic::AssertUnwindSafe,
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{Router, body::Body, http::StatusCode, routing::get};
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Channel, Full};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Decision, HeaderSets, Key, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore, Rejection,
};

use crate::support::{
    TEST_TIMEOUT, let_tasks_run, ms,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, request},
};

const STREAMS: Limit = Limit::concurrent("streams", 2);

fn limiter() -> Limiter {
    Limiter::new(MemoryStore::new())
}

fn layer(limiter: &Limiter) -> RateLimitLayer {
    RateLimitLayer::new(limiter.clone()).limit(STREAMS.by(anyone))
}

fn key() -> Key {
    anyone(&request().into_parts().0).unwrap()
}

async fn held(limiter: &Limiter) -> u64 {
    limiter.peek(&STREAMS, key()).await.unwrap().binding().used
}

/// Two streams are open in a process that ends in order, and their clients come back to the next
/// one before the streams have ended.
#[tokio::test]
async fn places_that_are_freed_before_their_streams_end_admit_clients_of_the_next_process() {
    let server = RedisServer::start();
    let process = async || {
        Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT)
    };
    let stream = service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::new(
            Channel::<axum::body::Bytes, Infallible>::new(1).1,
        )))
    });
    let (ending, next) = (process().await, process().await);
    let old = layer(&ending).layer(stream);
    let _streams = [
        old.clone().oneshot(request()).await.unwrap(),
        old.oneshot(request()).await.unwrap(),
    ];
    let [new, remembering] = [
        layer(&next.clone().refusal_cache(Duration::ZERO)),
        layer(&next),
    ]
    .map(|layer| layer.layer(stream));
    for service in [&new, &remembering] {
        assert_eq!(
            service.clone().oneshot(request()).await.unwrap().status(),
            StatusCode::TOO_MANY_REQUESTS
        );
    }
    ending.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(
        remembering.oneshot(request()).await.unwrap().status(),
        StatusCode::TOO_MANY_REQUESTS,
        "for a second"
    );
    assert_eq!(
        new.oneshot(request()).await.unwrap().status(),
        StatusCode::OK
    );
}

#[tokio::test]
async fn a_place_is_held_until_the_body_has_ended() {
    let (limiter, bodies) = (limiter(), Arc::new(Mutex::new(Vec::new())));
    let service = layer(&limiter).layer(service_fn({
        let bodies = Arc::clone(&bodies);
        move |_: Request<Body>| {
            let (sender, body) = Channel::<axum::body::Bytes, Infallible>::new(1);
            bodies.lock().unwrap().push(sender);
            async move { Ok::<_, Infallible>(Response::new(Body::new(body))) }
        }
    }));
    let read = service.clone().oneshot(request()).await.unwrap();
    let dropped = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(held(&limiter).await, 2);
    let refused = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(
        figures(refused.headers()),
        [Some("2"), Some("0"), None, Some("1")]
    );
    assert!(matches!(
        refused.extensions().get(),
        Some(Rejection::Limited(_))
    ));

    drop(dropped);
    assert_eq!(
        held(&limiter).await,
        1,
        "a client that leaves frees its place"
    );
    let mut body = read.into_body();
    let mut sender = bodies.lock().unwrap().remove(0);
    sender.send_data("data".into()).await.unwrap();
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_data().unwrap(),
        "data"
    );
    assert_eq!(held(&limiter).await, 1);
    drop(sender);
    assert!(body.frame().await.is_none());
    assert_eq!(
        held(&limiter).await,
        0,
        "the body has ended, although it is still there"
    );
}

#[tokio::test]
async fn a_place_is_freed_with_the_head_on_request_and_under_other_bodies() {
    let limiter = limiter();
    let early = layer(&limiter).free_with_head().layer(service_fn(hello));
    let response = early.oneshot(request()).await.unwrap();
    assert_eq!(held(&limiter).await, 0);
    drop(response);

    let full = async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Full::<axum::body::Bytes>::from("hello")))
    };
    let response = layer(&limiter)
        .layer(service_fn(full))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(held(&limiter).await, 0);
    drop(response);
}

#[tokio::test]
async fn a_task_that_keeps_the_decision_keeps_the_place() {
    let (limiter, kept) = (limiter(), Arc::new(Mutex::new(None)));
    let keep = Arc::clone(&kept);
    let service = layer(&limiter).layer(service_fn(move |mut request: Request<Body>| {
        *keep.lock().unwrap() = request.extensions_mut().remove::<Decision>();
        hello(request)
    }));
    drop(service.oneshot(request()).await.unwrap());
    assert_eq!(held(&limiter).await, 1);
    drop(kept.lock().unwrap().take());
    assert_eq!(held(&limiter).await, 0);
}

#[tokio::test]
async fn a_request_that_is_dropped_or_panics_frees_its_place() {
    let limiter = limiter();
    let hangs = layer(&limiter).layer(service_fn(|_: Request<Body>| {
        pending::<Result<Response<Body>, Infallible>>()
    }));
    let mut hanging = Box::pin(hangs.oneshot(request()));
    assert!(
        hanging
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
    assert_eq!(held(&limiter).await, 1);
    drop(hanging);
    assert_eq!(held(&limiter).await, 0);

    let panics = layer(&limiter).layer(service_fn(|_: Request<Body>| async {
        if true {
            panic!("a handler panics");
        }
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    assert!(
        AssertUnwindSafe(panics.oneshot(request()))
            .catch_unwind()
            .await
            .is_err()
    );
    assert_eq!(held(&limiter).await, 0);

    struct Panics;
    impl http_body::Body for Panics {
        type Data = axum::body::Bytes;
        type Error = Infallible;
        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Self::Data>, Infallible>>> {
            panic!("a body panics")
        }
    }
    let service = layer(&limiter).layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::new(Panics)))
    }));
    let body = service.oneshot(request()).await.unwrap().into_body();
    assert!(
        AssertUnwindSafe(body.collect())
            .catch_unwind()
            .await
            .is_err()
    );
    assert_eq!(held(&limiter).await, 0);
}

/// An error of the service is no response, so no body ends.
#[tokio::test]
async fn an_error_of_the_service_frees_its_place() {
    let limiter = limiter();
    let fails = layer(&limiter).layer(service_fn(async |_: Request<Body>| {
        Err::<Response<Body>, _>("failed")
    }));
    assert!(fails.oneshot(request()).await.is_err());
    assert_eq!(held(&limiter).await, 0);
}

#[tokio::test]
async fn places_and_windows_are_decided_together_and_the_window_is_shown() {
    let (limiter, requests) = (limiter(), Limit::per_minute("requests", 3));
    let layer = layer(&limiter)
        .limit(requests.clone().by(anyone))
        .headers(HeaderSets::BOTH);
    let service = layer.layer(service_fn(hello));
    let first = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(
        figures(first.headers()),
        [Some("3"), Some("2"), Some("60"), None]
    );
    assert_eq!(
        first.headers()["ratelimit-policy"],
        r#""streams";q=2;qu="concurrent-requests", "requests";q=3;w=60"#
    );
    assert_eq!(
        first.headers()["ratelimit"],
        r#""streams";r=1, "requests";r=2;t=60"#
    );
    let second = service.clone().oneshot(request()).await.unwrap();
    let third = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(
        figures(third.headers()),
        [Some("2"), Some("0"), None, Some("1")]
    );
    assert_eq!(
        limiter.peek(&requests, key()).await.unwrap().binding().used,
        2,
        "a request without a place costs nothing"
    );
    drop((first, second));
    drop(service.clone().oneshot(request()).await.unwrap());
    let fourth = service.oneshot(request()).await.unwrap();
    assert_eq!(figures(fourth.headers())[..2], [Some("3"), Some("0")]);
    assert_eq!(
        held(&limiter).await,
        0,
        "a request without a unit takes no place"
    );
}

/// The layers' figures are those of the window, in either order.
#[tokio::test]
async fn a_concurrent_limit_hides_no_window_of_another_layer() {
    let limiter = limiter();
    let window =
        RateLimitLayer::new(limiter.clone()).limit(Limit::per_minute("requests", 9).by(anyone));
    let inside = window.layer(layer(&limiter).layer(service_fn(hello)));
    let response = inside.oneshot(request()).await.unwrap();
    assert_eq!(
        figures(response.headers())[..2],
        [Some("2"), Some("1")],
        "the least left, as of any two limits"
    );
    drop(response);
    let outside = layer(&limiter).layer(window.layer(service_fn(hello)));
    let response = outside.oneshot(request()).await.unwrap();
    assert_eq!(
        figures(response.headers()),
        [Some("9"), Some("7"), Some("60"), None]
    );
}

#[tokio::test]
async fn a_limit_in_the_shadow_holds_places_and_refuses_nothing() {
    let limiter = limiter();
    let layer = RateLimitLayer::new(limiter.clone()).limit(STREAMS.by(anyone).in_shadow());
    let service = layer.layer(service_fn(hello));
    let mut responses = Vec::new();
    for _ in 0..5 {
        responses.push(service.clone().oneshot(request()).await.unwrap());
    }
    assert!(
        responses
            .iter()
            .all(|response| response.status() == StatusCode::OK)
    );
    assert_eq!(held(&limiter).await, 2);
    responses.clear();
    assert_eq!(held(&limiter).await, 0);
}

#[tokio::test]
async fn a_request_waits_for_a_place() {
    let limiter = limiter();
    let service = layer(&limiter)
        .wait_up_to(TEST_TIMEOUT)
        .layer(service_fn(hello));
    let first = service.clone().oneshot(request()).await.unwrap();
    let second = service.clone().oneshot(request()).await.unwrap();
    let mut waiting = pin!(service.oneshot(request()));
    assert!(
        waiting
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
    let_tasks_run().await;
    drop(first);
    let third = waiting.await.unwrap();
    assert_eq!((third.status(), held(&limiter).await), (StatusCode::OK, 2));
    drop((second, third));
}

#[tokio::test]
async fn on_redis_a_place_is_free_soon_after_the_client_has_left() {
    let server = RedisServer::start();
    let limiter =
        Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(layer(&limiter));
    let responses = [
        app.clone().oneshot(request()).await.unwrap(),
        app.clone().oneshot(request()).await.unwrap(),
    ];
    assert_eq!(
        app.clone().oneshot(request()).await.unwrap().status(),
        StatusCode::TOO_MANY_REQUESTS
    );
    drop(responses);
    while held(&limiter).await > 0 {
        tokio::time::sleep(ms(5)).await;
    }
    assert_eq!(
        app.oneshot(request()).await.unwrap().status(),
        StatusCode::OK
    );
}
