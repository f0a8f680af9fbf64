//! A check that needs no waiting is decided without a future, with the same result.

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt};
use tower_sliding_window::{
    Check, Decision, Error, Key, Limit, Limiter, MemoryStore, RateLimitLayer, Store,
    error::{StoreError, StoreErrorKind},
    limiter::{FailureMode, Share},
    middleware::Degraded,
    settlement::{Settled, Settlement},
    store::{LocalState, StoreFuture},
};

use crate::support::{
    in_mode,
    requests::{anyone, figures, request},
    stores::failing,
};

const CALLS: Limit = Limit::per_minute("calls", 2);

/// How often a service was cloned and called.
#[derive(Default)]
struct Counts {
    clones: AtomicUsize,
    calls: AtomicUsize,
}

#[derive(Default)]
struct CountingService(Arc<Counts>);

impl CountingService {
    /// The clones and calls so far.
    fn clones_and_calls(counts: &Counts) -> (usize, usize) {
        (
            counts.clones.load(Ordering::Relaxed),
            counts.calls.load(Ordering::Relaxed),
        )
    }
}

impl Clone for CountingService {
    fn clone(&self) -> Self {
        self.0.clones.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(&self.0))
    }
}

impl Service<Request<Body>> for CountingService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        let has_decision = request.extensions().get::<Decision>().is_some();
        ready(Ok(Response::new(Body::from(if has_decision {
            "decided"
        } else {
            "undecided"
        }))))
    }
}

/// A store with a local state that does not forward `decide_now`.
#[derive(Clone)]
struct Wrapped {
    store: MemoryStore,
    local_state: LocalState,
    asked: Arc<AtomicUsize>,
}

impl Wrapped {
    fn new() -> Self {
        Self {
            store: MemoryStore::new(),
            local_state: LocalState::default(),
            asked: Arc::default(),
        }
    }
}

impl Store for Wrapped {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.store.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.local_state)
    }
}

/// A store that fails immediately, and counts the futures it is asked for.
#[derive(Clone, Default)]
struct FailsAtOnce(Arc<AtomicUsize>);

impl Store for FailsAtOnce {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.0.fetch_add(1, Ordering::Relaxed);
        failing().decide(check)
    }

    fn decide_now(&self, _: &Check) -> Option<Result<Decision, StoreError>> {
        Some(Err(StoreError::new(
            "deciding a check",
            StoreErrorKind::Other,
            "out of order",
        )))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        failing().settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        failing().reset(limit, key)
    }
}

/// An immediate decision needs no clone. A refusal replaces the service that was polled ready, so
/// it costs a clone.
#[tokio::test]
async fn an_admitted_request_calls_the_ready_service_without_cloning_it() {
    let service = CountingService::default();
    let counts = Arc::clone(&service.0);
    let mut app = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .layer(service);
    for (status, reported) in [(200, (0, 1)), (200, (0, 2)), (429, (1, 2)), (429, (2, 2))] {
        let response = app.ready().await.unwrap().call(request());
        assert_eq!(
            CountingService::clones_and_calls(&counts),
            reported,
            "as soon as it is called"
        );
        assert_eq!(response.await.unwrap().status(), status);
    }
    assert_eq!(CountingService::clones_and_calls(&counts), (2, 2));
}

#[tokio::test]
async fn a_skipped_request_does_not_clone_the_service() {
    let service = CountingService::default();
    let counts = Arc::clone(&service.0);
    let layer = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .exempt(|_| true);
    assert_eq!(
        layer.layer(service).call(request()).await.unwrap().status(),
        200
    );
    assert_eq!(CountingService::clones_and_calls(&counts), (0, 1));
}

#[tokio::test]
async fn a_store_without_immediate_decisions_decides_the_same() {
    let prompt = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .layer(CountingService::default());
    let wrapped = RateLimitLayer::new(Wrapped::new())
        .limit(CALLS.by(anyone))
        .layer(CountingService::default());
    for status in [200, 200, 429, 429] {
        let prompt = prompt.clone().oneshot(request()).await.unwrap();
        let wrapped = wrapped.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            (prompt.status(), wrapped.status()),
            (status.try_into().unwrap(), status.try_into().unwrap())
        );
        assert_eq!(figures(prompt.headers()), figures(wrapped.headers()));
    }
}

/// With a store that decides immediately, the call charges. With any other store, and through a
/// limiter, the first poll charges.
#[tokio::test]
async fn an_unpolled_response_is_charged_only_if_it_was_decided_immediately() {
    let (store, wrapped, service) = (
        MemoryStore::new(),
        Wrapped::new(),
        CountingService::default(),
    );
    let counts = Arc::clone(&service.0);
    let key = || Key::new("test", "anyone");

    drop(
        RateLimitLayer::new(store.clone())
            .limit(CALLS.by(anyone))
            .layer(service.clone())
            .call(request()),
    );
    assert_eq!(CountingService::clones_and_calls(&counts), (1, 1));
    let limiter = Limiter::new(store);
    assert_eq!(limiter.peek(&CALLS, key()).await.unwrap().binding().used, 1);

    drop(
        RateLimitLayer::new(wrapped.clone())
            .limit(CALLS.by(anyone))
            .layer(service)
            .call(request()),
    );
    assert_eq!(CountingService::clones_and_calls(&counts).1, 1);
    assert_eq!(
        Limiter::new(wrapped)
            .peek(&CALLS, key())
            .await
            .unwrap()
            .binding()
            .used,
        0
    );

    drop(limiter.check(&CALLS, key(), 1));
    assert_eq!(limiter.peek(&CALLS, key()).await.unwrap().binding().used, 1);
}

/// The cached refusal needs neither the store nor a future.
#[tokio::test]
async fn a_cached_refusal_is_returned_without_waiting() {
    let (wrapped, service) = (Wrapped::new(), CountingService::default());
    let counts = Arc::clone(&service.0);
    let mut app = RateLimitLayer::new(wrapped.clone())
        .limit(CALLS.by(anyone))
        .layer(service);
    for _ in 0..3 {
        app.call(request()).await.unwrap();
    }
    let asked = wrapped.asked.load(Ordering::Relaxed);
    let Poll::Ready(Ok(response)) =
        pin!(app.call(request())).poll(&mut Context::from_waker(Waker::noop()))
    else {
        panic!("not ready")
    };
    assert_eq!(response.status(), 429);
    assert_eq!(
        (
            wrapped.asked.load(Ordering::Relaxed),
            CountingService::clones_and_calls(&counts).1
        ),
        (asked, 2)
    );
}

/// The failure mode and the breaker treat an immediate failure like a late one.
#[tokio::test]
async fn an_immediate_failure_reaches_the_failure_mode_and_the_breaker() {
    for (mode, statuses) in [
        (FailureMode::Open, [200, 200, 200]),
        (FailureMode::Closed, [503, 503, 503]),
        (FailureMode::Local(Share::one_of(2)), [200, 429, 429]),
    ] {
        let layer = in_mode(
            RateLimitLayer::new(FailsAtOnce::default()).limit(CALLS.by(anyone)),
            mode,
        );
        let mut app = layer.layer(CountingService::default());
        for status in statuses {
            let response = app.call(request()).await.unwrap();
            assert_eq!(response.status(), status);
            let degraded: &Degraded = response.extensions().get().unwrap();
            assert_eq!(degraded.mode, mode);
        }
    }
    let store = FailsAtOnce::default();
    let limiter = Limiter::new(store.clone());
    for asked in [0, 0, 0, 0, 0, 1] {
        let error = limiter.check(&CALLS, "anyone", 1).await.unwrap_err();
        assert_eq!(matches!(error, Error::BreakerOpen(_)), asked == 1);
        tokio::task::yield_now().await;
        assert_eq!(
            store.0.load(Ordering::Relaxed),
            asked,
            "only the probe takes a future"
        );
    }
}
