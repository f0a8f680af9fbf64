//! The layer keeps tower's rules: readiness, permits, errors, clones and types, with mocks for the
//! inner service.

use std::{
    convert::Infallible,
    fmt::Debug,
    future::{Future, Ready, ready},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_sliding_window::{Limit, MemoryStore, RateLimitLayer, Rejection};

use crate::support::{
    requests::{anyone, hello, request},
    stores::silent,
};

const CALLS: Limit = Limit::per_minute("calls", 2);

/// A service that panics if it is called without having been polled ready, as `Buffer` or
/// `ConcurrencyLimit` would.
struct Strict {
    is_ready: bool,
}

impl Clone for Strict {
    /// Readiness belongs to the instance.
    fn clone(&self) -> Self {
        Self { is_ready: false }
    }
}

impl Service<Request<Body>> for Strict {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.is_ready),
            "called without having been polled ready"
        );
        ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test]
async fn the_layer_calls_the_instance_that_was_polled_ready() {
    let mut app = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .layer(Strict { is_ready: false });
    for status in [200, 200, 429, 429] {
        assert_eq!(
            app.ready()
                .await
                .unwrap()
                .call(request())
                .await
                .unwrap()
                .status(),
            status
        );
    }
}

#[tokio::test]
async fn a_refusal_releases_the_inner_services_permit() {
    let service = ConcurrencyLimit::new(service_fn(hello), 1);
    let mut app = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .layer(service);
    for _ in 0..5 {
        // If the only permit were lost, this would wait forever.
        let ready = tokio::time::timeout(Duration::from_secs(20), app.ready())
            .await
            .unwrap()
            .unwrap();
        ready.call(request()).await.unwrap();
    }
}

#[tokio::test]
async fn a_dropped_pending_response_calls_nothing_and_releases_the_permit() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let service = service_fn(move |request| {
        counted.fetch_add(1, Ordering::Relaxed);
        hello(request)
    });
    let service = ConcurrencyLimit::new(service, 1);
    let mut app = RateLimitLayer::new(silent())
        .limit(CALLS.by(anyone))
        .layer(service);
    for _ in 0..3 {
        let ready = tokio::time::timeout(Duration::from_secs(20), app.ready())
            .await
            .unwrap()
            .unwrap();
        let response = ready.call(request());
        assert!(
            pin!(response)
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_pending()
        );
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn the_services_own_errors_pass_through() {
    let failing = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("broken") });
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .layer(failing);
    assert_eq!(app.oneshot(request()).await.unwrap_err(), "broken");
}

/// axum applies a layer once per route and clones the service once per request. All of them count
/// together.
#[tokio::test]
async fn clones_and_services_of_one_layer_count_together() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone));
    let statuses = [layer.clone(), layer.clone(), layer]
        .map(|layer| layer.layer(service_fn(hello)).oneshot(request()));
    let mut seen = Vec::new();
    for response in statuses {
        seen.push(response.await.unwrap().status().as_u16());
    }
    assert_eq!(seen, [200, 200, 429]);
}

#[tokio::test]
async fn a_custom_body_type_needs_its_own_responder() {
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .respond_with(|_: &Rejection, head: Response<()>| head.map(|()| Full::new(&[0_u8; 4][..])));
    let service = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::new(&[1_u8; 4][..])))
    });
    let app = ServiceBuilder::new().layer(layer).service(service);
    let mut bodies = Vec::new();
    for _ in 0..3 {
        bodies.push(
            app.clone()
                .oneshot(Request::new(()))
                .await
                .unwrap()
                .into_body(),
        );
    }
    let mut seen = Vec::new();
    for body in bodies {
        seen.push(body.collect().await.unwrap().to_bytes()[0]);
    }
    assert_eq!(seen, [1, 1, 0]);
}

#[test]
fn two_limits_of_one_name_are_an_error_that_names_them() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone));
    let error = layer.limits([CALLS.by(anyone)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"two limits of one layer are named "calls": give one of them another name"#
    );
    let error = RateLimitLayer::new(MemoryStore::new())
        .limits([])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "a layer needs at least one limit: add `.limit(..)`"
    );
    let limits = ["a", "b"].map(|name| {
        Limit::new(name, 1, Duration::from_secs(1))
            .unwrap()
            .by(anyone)
    });
    assert!(
        RateLimitLayer::new(MemoryStore::new())
            .limits(limits.clone())
            .is_ok()
    );
    for twice in &limits {
        let limits = limits.iter().chain([twice]).cloned();
        assert!(
            RateLimitLayer::new(MemoryStore::new())
                .limits(limits)
                .is_err()
        );
    }
}

#[test]
#[should_panic = r#"two limits of one layer are named "calls": give one of them another name"#]
fn two_literal_limits_of_one_name_panic_where_the_layer_is_built() {
    let _ = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .limit(CALLS.by(anyone));
}

/// Layer, service and future can be built, polled and dropped without a runtime.
#[test]
fn the_layer_needs_no_runtime_until_a_store_waits() {
    let mut app = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .layer(Strict { is_ready: false });
    let mut context = Context::from_waker(Waker::noop());
    assert!(app.poll_ready(&mut context).is_ready());
    let Poll::Ready(Ok(response)) = pin!(app.call(request())).poll(&mut context) else {
        panic!("not ready")
    };
    assert_eq!(response.status(), 200);
    drop(
        RateLimitLayer::new(silent())
            .limit(CALLS.by(anyone))
            .layer(Strict { is_ready: true })
            .call(request()),
    );
}

/// The types can be named, sent and shared, as axum and a struct of the user require.
#[test]
fn types_can_be_named_and_sent() {
    struct App {
        _layer: RateLimitLayer,
        _service: tower_sliding_window::middleware::RateLimit<Strict>,
    }
    fn is_shareable<T: Clone + Send + Sync + 'static>() {}
    fn is_handled_as_any_other<T: Clone + Debug + Send + Sync + 'static>(_: &T) {}
    fn is_sent<T: Send>(_: &T) {}

    is_shareable::<RateLimitLayer>();
    is_shareable::<tower_sliding_window::RedisStore>();
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone));
    let mut service = layer.layer(Strict { is_ready: true });
    is_sent(&service.call(request()));
    // A responder may hold a value that is not `Clone`.
    let (count, answered) = (AtomicUsize::new(0), layer.clone());
    is_handled_as_any_other(
        &answered.respond_with(move |_: &Rejection, head: Response<()>| {
            count.fetch_add(1, Ordering::Relaxed);
            head.map(|()| Body::empty())
        }),
    );
    let _app = App {
        _layer: layer,
        _service: service,
    };
}

/// A layer has one type, whatever limits it has.
#[tokio::test]
async fn a_layer_may_get_its_limits_one_by_one_and_only_if_they_are_needed() {
    for (is_strict, statuses) in [(false, [200, 200]), (true, [200, 429])] {
        let mut layer = RateLimitLayer::new(MemoryStore::new());
        layer = layer.limit(Limit::per_minute("calls", 9).by(anyone));
        if is_strict {
            layer = layer.limit(Limit::per_minute("strict", 1).by(anyone));
        }
        let app = layer.layer(service_fn(hello));
        for status in statuses {
            assert_eq!(
                app.clone().oneshot(request()).await.unwrap().status(),
                status,
                "{is_strict}"
            );
        }
    }
}

#[test]
#[should_panic(expected = "a layer needs at least one limit")]
fn a_layer_without_limits_panics_when_it_is_applied() {
    let _ = RateLimitLayer::new(MemoryStore::new())
        .fail_closed()
        .layer(service_fn(hello));
}
