//! Attacks on failure modes.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use http::StatusCode;
use tower_sliding_window::{
    Check, Decision, Key, RedisStore, Store,
    check::Takes,
    error::{StoreError, StoreErrorKind},
    limiter::{Limiter, Share},
    middleware::Degraded,
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use super::*;
use crate::support::{TEST_TIMEOUT, log::Log, redis_server::RedisServer, stores::failing};

/// A request that no limit charges but one in the shadow.
#[tokio::test]
async fn a_shadow_limit_alone_in_a_check_rejects_nothing() {
    let layer = RateLimitLayer::new(failing())
        .fail_closed()
        .limit(KeyedLimit::chosen(
            anyone,
            |parts: &http::request::Parts| {
                (parts.uri.path() == "/login").then(|| Limit::per_minute("login", 5))
            },
        ))
        .clone();
    let app = BoxCloneService::new(layer.clone().layer(handler()));
    assert_eq!(
        ask(&app).await.status(),
        200,
        "no limit charges the request"
    );
    let app = BoxCloneService::new(
        layer
            .limit(Limit::per_minute("tried", 1).by(anyone).in_shadow())
            .layer(handler()),
    );
    assert_eq!(
        ask(&app).await.status(),
        200,
        "a limit in the shadow refuses none"
    );
}

/// A store on Redis that fails to count this many costs afterwards.
#[derive(Clone)]
struct FailsToCount(RedisStore, Arc<AtomicU32>);

impl Store for FailsToCount {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let is_count = check
            .charges()
            .any(|charge| charge.takes() == Takes::Always && charge.limit().name() == "login");
        if is_count
            && self
                .1
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    left.checked_sub(1)
                })
                .is_ok()
        {
            let error = StoreError::new(
                "deciding a check",
                StoreErrorKind::Unreachable,
                "a short fault",
            );
            return Box::pin(async move { Err(error) });
        }
        self.0.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

/// One failed login in four is no ban, even if Redis did not count it in time.
#[tokio::test]
async fn a_failed_count_begins_no_ban_for_all_processes() {
    let server = RedisServer::start();
    let store = server.store().connect().await.unwrap();
    let ban = Limit::per("ban", 1, Limit::MAX_WINDOW);
    let limit = || {
        let login = Limit::per_minute("login", 4).by(anyone);
        login
            .count_afterwards(|exchange| u64::from(exchange.response.status == 401))
            .ban(ban.clone(), minutes(15))
    };
    let refuses = || {
        service_fn(|_: Request<Body>| {
            let response = axum::response::Response::builder()
                .status(401)
                .body(Body::empty())
                .unwrap();
            ready(Ok::<_, Infallible>(response))
        })
    };
    let mut statuses = Vec::new();
    for is_local in [false, true] {
        let one = Limiter::new(FailsToCount(store.clone(), Arc::new(AtomicU32::new(1))))
            .deadline(TEST_TIMEOUT);
        let layer = RateLimitLayer::new(one).limit(limit());
        let layer = if is_local {
            layer.fail_local(Share::one_of(4))
        } else {
            layer
        };
        assert_eq!(
            ask(&BoxCloneService::new(layer.layer(refuses())))
                .await
                .status(),
            401
        );
        // Another process, without faults.
        let other = server.store().connect().await.unwrap();
        let other = RateLimitLayer::new(Limiter::new(other).deadline(TEST_TIMEOUT)).limit(limit());
        statuses.push(
            ask(&BoxCloneService::new(other.layer(handler())))
                .await
                .status(),
        );
    }
    assert_eq!(
        statuses,
        [StatusCode::OK, StatusCode::OK],
        "after one failed login of four; open, local"
    );
}

/// Redis has decided the request, and then fails to count its cost.
#[tokio::test]
async fn a_failed_count_is_told_and_shows_no_share() {
    let server = RedisServer::start();
    let store = server.store().connect().await.unwrap();
    for is_local in [false, true] {
        let log = Log::start();
        let one = Limiter::new(FailsToCount(store.clone(), Arc::new(AtomicU32::new(1))))
            .deadline(TEST_TIMEOUT);
        let layer = RateLimitLayer::new(one).limit(
            Limit::per_minute("login", 4)
                .by(anyone)
                .count_afterwards(|_| 1),
        );
        let layer = if is_local {
            layer.fail_local(Share::one_of(4))
        } else {
            layer
        };
        let response = ask(&BoxCloneService::new(layer.layer(handler()))).await;
        let is_told = response.extensions().get::<Degraded>().is_some() || !log.text().is_empty();
        let limit = response.headers()["x-ratelimit-limit"].to_str().unwrap();
        assert_eq!(
            (limit, is_told),
            ("4", true),
            "the limit in the header, and whether anything tells; local: {is_local}"
        );
    }
}

/// A request that costs nothing, "and is admitted even if nothing is left".
#[tokio::test]
async fn a_free_request_is_rejected_in_no_failure_mode() {
    let layer = RateLimitLayer::new(failing())
        .limit(Limit::per_minute("calls", 5).by(anyone))
        .cost(|_| 0);
    let modes = [
        layer.clone().fail_open(),
        layer.clone().fail_local(Share::one_of(8)),
        layer.fail_closed(),
    ];
    let mut statuses = Vec::new();
    for layer in modes {
        statuses.push(
            ask(&BoxCloneService::new(layer.layer(handler())))
                .await
                .status()
                .as_u16(),
        );
    }
    assert_eq!(statuses, [200; 3]);
}
