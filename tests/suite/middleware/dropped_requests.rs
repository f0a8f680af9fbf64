//! Requests that are dropped before their response, and the units that they keep charged.

use std::{
    convert::Infallible,
    future::{Future, pending, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response};
use tokio::task::yield_now;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    Check, Decision, Key, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Store,
    error::StoreError,
    middleware::Exchange,
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
    testing::Fault,
};

use crate::support::{
    TEST_TIMEOUT, let_tasks_run,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, request},
    stores::{Watched, settled_costs},
};

const TOKENS: Limit = Limit::per_hour("tokens", 10_000);
const MINUTE: Duration = Duration::from_secs(60);

/// 500 units are reserved for a response that uses 100.
fn tokens() -> KeyedLimit {
    TOKENS.by(anyone).cost(|_| 500).settle(|_| 100)
}

fn store() -> (MemoryStore, ManualClock, Limiter) {
    let clock = ManualClock::new();
    let store = MemoryStore::new().clock(&clock);
    (store.clone(), clock, Limiter::new(store))
}

fn key() -> Key {
    anyone(&request().into_parts().0).unwrap()
}

async fn spent(limiter: &Limiter) -> u64 {
    limiter.peek(&TOKENS, key()).await.unwrap().binding().used
}

/// A store that yields before each operation.
#[derive(Clone)]
struct Slow<S>(S);

impl<S: Store + Clone> Slow<S> {
    fn later<T, F>(&self, answer: impl FnOnce(S) -> F + Send + 'static) -> StoreFuture<T>
    where
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let store = self.0.clone();
        Box::pin(async move {
            yield_now().await;
            answer(store).await
        })
    }
}

impl<S: Store + Clone> Store for Slow<S> {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.later(|store| store.decide(check))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.later(|store| store.settle(settlement))
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.later(|store| store.reset(limit, key))
    }
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Ways in which a request ends without a response.
#[derive(Clone, Copy, Debug)]
enum Ends {
    HangsUp,
    HangsUpBeforeTheDecision,
    Fails,
    PanicsWhenCalled,
    Panics,
}

const ALL: [Ends; 5] = [
    Ends::HangsUp,
    Ends::HangsUpBeforeTheDecision,
    Ends::Fails,
    Ends::PanicsWhenCalled,
    Ends::Panics,
];

impl Ends {
    async fn work(self) -> Result<Response<Body>, &'static str> {
        match self {
            Self::HangsUp | Self::HangsUpBeforeTheDecision => pending().await,
            Self::Fails => Err("broken"),
            Self::PanicsWhenCalled | Self::Panics => panic!("as handlers do"),
        }
    }

    /// Sends a request and drops it.
    async fn send(self, layer: &RateLimitLayer) {
        let service = service_fn(move |_: Request<Body>| {
            assert!(!matches!(self, Self::PanicsWhenCalled), "as handlers do");
            self.work()
        });
        let mut service = layer.layer(service);
        match self {
            Self::HangsUpBeforeTheDecision => {
                let mut response = pin!(service.call(request()));
                assert!(poll_once(response.as_mut()).is_pending());
            }
            Self::HangsUp => {
                let mut response = pin!(service.call(request()));
                for _ in 0..10 {
                    assert!(poll_once(response.as_mut()).is_pending());
                    yield_now().await;
                }
            }
            Self::Fails => assert!(service.call(request()).await.is_err()),
            Self::PanicsWhenCalled | Self::Panics => {
                let mut response = pin!(async { service.call(request()).await });
                poll_fn(
                    |cx| match catch_unwind(AssertUnwindSafe(|| response.as_mut().poll(cx))) {
                        Ok(Poll::Pending) => Poll::Pending,
                        Ok(Poll::Ready(_)) => panic!("it has not panicked"),
                        Err(_) => Poll::Ready(()),
                    },
                )
                .await;
            }
        }
    }
}

/// The limit is shared by all clients, which is the worst case.
#[tokio::test]
async fn twenty_dropped_requests_block_a_limit_for_a_minute_at_most() {
    let (store, clock, _) = store();
    let layer = RateLimitLayer::new(store).limit(tokens());
    for _ in 0..20 {
        Ends::HangsUp.send(&layer).await;
    }
    let honest = layer.layer(service_fn(hello));
    let refused = honest.clone().oneshot(request()).await.unwrap();
    // The store does not know that the requests are gone, so each reservation may return at any
    // time.
    assert_eq!(
        (refused.status().as_u16(), figures(refused.headers())[3]),
        (429, Some("1"))
    );
    clock.advance(MINUTE - Duration::from_micros(1));
    let refused = honest.clone().oneshot(request()).await.unwrap();
    assert_eq!(
        (refused.status().as_u16(), figures(refused.headers())[3]),
        (429, Some("1"))
    );
    clock.advance(Duration::from_micros(1));
    let admitted = honest.oneshot(request()).await.unwrap();
    assert_eq!(
        (admitted.status().as_u16(), figures(admitted.headers())[1]),
        (200, Some("9900"))
    );
}

/// A shorter window is the lease.
#[tokio::test]
async fn the_default_lease_is_no_longer_than_the_window() {
    let (store, clock, limiter) = store();
    let limit = Limit::per("short", 5, Duration::from_secs(2));
    let layer = RateLimitLayer::new(store).limit(limit.clone().by(anyone).settle(|_| 0));
    Ends::HangsUp.send(&layer).await;
    clock.advance(Duration::from_millis(1_999));
    assert_eq!(limiter.peek(&limit, key()).await.unwrap().binding().used, 1);
    clock.advance(Duration::from_millis(1));
    assert_eq!(limiter.peek(&limit, key()).await.unwrap().binding().used, 0);
}

async fn assert_dropped_request_costs<S: Store + Clone>(
    store: S,
    clock: &ManualClock,
    limiter: &Limiter,
    ends: Ends,
    chosen: bool,
) {
    for lease in [MINUTE, TOKENS.window()] {
        let limit = if chosen {
            KeyedLimit::chosen(anyone, |_: &http::request::Parts| TOKENS)
                .cost(|_| 500)
                .settle(|_| 100)
        } else {
            tokens()
        };
        let layer = RateLimitLayer::new(store.clone()).limit(limit.lease(lease));
        ends.send(&layer).await;
        let_tasks_run().await;
        let at_once = spent(limiter).await;
        // A request that is dropped before its decision may not be charged at all.
        let may_be_nothing = matches!(ends, Ends::HangsUpBeforeTheDecision);
        assert!(
            at_once == 500 || may_be_nothing && at_once == 0,
            "{ends:?} {lease:?} {at_once}"
        );
        clock.advance(lease - Duration::from_micros(1));
        assert_eq!(spent(limiter).await, at_once, "{ends:?} {lease:?}");
        clock.advance(Duration::from_micros(1));
        assert_eq!(spent(limiter).await, 0, "{ends:?} {lease:?}");
    }
}

#[tokio::test]
async fn a_dropped_request_costs_its_charge_until_its_lease_ends() {
    for ends in ALL {
        for chosen in [false, true] {
            let (store, clock, limiter) = store();
            if !matches!(ends, Ends::HangsUpBeforeTheDecision) {
                assert_dropped_request_costs(store.clone(), &clock, &limiter, ends, chosen).await;
            }
            assert_dropped_request_costs(Slow(store), &clock, &limiter, ends, chosen).await;
        }
    }
}

/// A refused request, and one that a shadow limit would have refused.
#[tokio::test]
async fn an_uncharged_request_is_not_settled() {
    let (store, _clock, limiter) = store();
    let watched = Watched::new(store.clone());
    let _ = limiter.check(&TOKENS, key(), 9_999).await.unwrap();
    let layer = || RateLimitLayer::new(watched.clone()).limit(tokens());
    assert_eq!(
        layer()
            .layer(service_fn(hello))
            .oneshot(request())
            .await
            .unwrap()
            .status(),
        429
    );
    Ends::HangsUpBeforeTheDecision
        .send(&RateLimitLayer::new(Slow(watched.clone())).limit(tokens()))
        .await;
    Ends::HangsUp
        .send(&RateLimitLayer::new(watched.clone()).limit(tokens().in_shadow()))
        .await;
    let_tasks_run().await;
    assert_eq!(
        (settled_costs(&watched).len(), spent(&limiter).await),
        (0, 9_999)
    );
}

#[tokio::test]
async fn a_request_with_a_response_is_settled_once() {
    let (store, _clock, limiter) = store();
    for fault in [Fault::None, Fault::Fails] {
        let store = Watched::new(store.clone());
        store.set_for_settlements(fault);
        let layer = RateLimitLayer::new(store.clone()).limit(tokens());
        assert_eq!(
            layer
                .layer(service_fn(hello))
                .oneshot(request())
                .await
                .unwrap()
                .status(),
            200
        );
        let_tasks_run().await;
        assert_eq!(settled_costs(&store), [[Some(100)]]);
    }
    assert_eq!(spent(&limiter).await, 600);
}

/// Otherwise a client that disconnects at that moment would use the response for free.
#[tokio::test]
async fn a_settlement_finishes_after_its_request_is_dropped() {
    let (store, clock, limiter) = store();
    let mut service = RateLimitLayer::new(Slow(store))
        .limit(tokens())
        .layer(service_fn(hello));
    {
        let mut response = pin!(service.call(request()));
        while spent(&limiter).await == 0 {
            assert!(poll_once(response.as_mut()).is_pending());
            yield_now().await;
        }
        // The service has responded and the settlement has begun.
        assert_eq!(spent(&limiter).await, 500);
    }
    let_tasks_run().await;
    assert_eq!(spent(&limiter).await, 100);
    clock.advance(MINUTE);
    assert_eq!(spent(&limiter).await, 100);
}

/// The closure that returns the cost may also panic.
#[tokio::test]
async fn a_panicking_settle_closure_ends_as_a_dropped_request() {
    let (store, clock, limiter) = store();
    let cost = |_: &Exchange<'_>| -> u64 { panic!("as closures do") };
    let limit = TOKENS.by(anyone).cost(|_| 500).settle(cost);
    let app = RateLimitLayer::new(store)
        .limit(limit)
        .layer(service_fn(hello));
    assert!(
        tokio::spawn(app.oneshot(request()))
            .await
            .unwrap_err()
            .is_panic()
    );
    let_tasks_run().await;
    assert_eq!(spent(&limiter).await, 500);
    clock.advance(MINUTE);
    assert_eq!(spent(&limiter).await, 0);
}

/// A dropped request takes nothing and blocks no other.
#[tokio::test]
async fn a_dropped_request_leaves_the_line() {
    let (store, clock, limiter) = store();
    let watched = Watched::new(store);
    let layer = RateLimitLayer::new(watched.clone())
        .limit(tokens())
        .wait_up_to(2 * TOKENS.window());
    let _ = limiter.check(&TOKENS, key(), 10_000).await.unwrap();
    Ends::HangsUpBeforeTheDecision.send(&layer).await;
    let_tasks_run().await;
    clock.advance(TOKENS.window());
    assert_eq!(
        layer
            .layer(service_fn(hello))
            .oneshot(request())
            .await
            .unwrap()
            .status(),
        200
    );
    assert_eq!(
        (settled_costs(&watched).len(), spent(&limiter).await),
        (1, 100)
    );
}

/// The lease ends the charge.
#[test]
fn a_dropped_request_without_a_runtime_does_not_panic() {
    let (store, clock, limiter) = store();
    let layer = RateLimitLayer::new(store).limit(tokens());
    let spent = || {
        let Poll::Ready(decision) = poll_once(pin!(limiter.peek(&TOKENS, key()))) else {
            panic!("it waits")
        };
        decision.unwrap().binding().used
    };
    let hanging = service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
    {
        let mut response = pin!(layer.layer(hanging).call(request()));
        assert!(poll_once(response.as_mut()).is_pending());
    }
    assert_eq!(spent(), 500);
    clock.advance(MINUTE);
    assert_eq!(spent(), 0);
}

/// Before the decision, and while a connection is still being made.
#[tokio::test]
async fn a_request_that_is_dropped_on_redis_costs_nothing_after_its_lease() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let lease = Duration::from_millis(100);
    let layer = RateLimitLayer::new(store.clone())
        .limit(tokens().lease(lease))
        .deadline(TEST_TIMEOUT);
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for ends in [
        Ends::HangsUpBeforeTheDecision,
        Ends::HangsUpBeforeTheDecision,
        Ends::Fails,
    ] {
        ends.send(&layer).await;
        tokio::time::sleep(3 * lease).await;
        assert_eq!(spent(&limiter).await, 0, "{ends:?}");
    }
}
