//! Options have their effect on each kind of limit, or a layer does not take them.

use std::{convert::Infallible, sync::Arc};

use axum::body::Body;
use futures_util::future::join_all;
use http::{Request, Response, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Error, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection,
    Store, error::StoreErrorKind, middleware::ShadowRefusals,
};

use crate::support::{
    Fixture, TEST_TIMEOUT, for_every_store,
    log::Log,
    requests::{anyone, hello, request},
    seconds,
};

const STREAMS: Limit = Limit::concurrent("streams", 1);
const BAN: Limit = Limit::per_day("ban", 1);

type Change = fn(KeyedLimit) -> KeyedLimit;

const WITHOUT_EFFECT: [(&str, Change); 6] = [
    ("heed_upstream", |limit| limit.heed_upstream()),
    ("count_afterwards", |limit| limit.count_afterwards(|_| 1)),
    ("settle", |limit| limit.settle(|_| 1)),
    ("cost", |limit| limit.cost(|_| 1)),
    ("ban", |limit| limit.ban(BAN, TEST_TIMEOUT)),
    ("lease", |limit| limit.lease(TEST_TIMEOUT)),
];

/// What to write instead.
const INSTEAD: &str = "on a limit of a window beside it. `Limit::freed_after` sets";

/// The statuses of so many requests at once.
async fn at_once(layer: &RateLimitLayer, requests: usize) -> Vec<u16> {
    let service = layer.layer(service_fn(|_: Request<Body>| async {
        tokio::task::yield_now().await;
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    // Their bodies hold the places until all have come.
    let responses = join_all((0..requests).map(|_| service.clone().oneshot(request()))).await;
    responses
        .iter()
        .map(|response| response.as_ref().unwrap().status().as_u16())
        .collect()
}

#[test]
fn a_layer_takes_no_option_without_effect() {
    for (option, change) in WITHOUT_EFFECT {
        let error = RateLimitLayer::new(MemoryStore::new())
            .limits([change(STREAMS.by(anyone))])
            .unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains(&format!("`{option}`")) && error.contains(INSTEAD),
            "{error}"
        );
        let panicked = std::panic::catch_unwind(|| {
            RateLimitLayer::new(MemoryStore::new()).limit(change(STREAMS.by(anyone)))
        });
        assert!(panicked.is_err(), "{option}");
    }
    let window = || Limit::per_minute("calls", 9).by(anyone);
    for limit in [
        window().lease(TEST_TIMEOUT),
        window().count_afterwards(|_| 1).lease(TEST_TIMEOUT),
    ] {
        let error = RateLimitLayer::new(MemoryStore::new())
            .limits([limit])
            .unwrap_err();
        assert!(error.to_string().contains("add `settle`"), "{error}");
    }
    let counted = window().cost(|_| 2).count_afterwards(|_| 1);
    let error = RateLimitLayer::new(MemoryStore::new())
        .limits([counted])
        .unwrap_err();
    assert!(error.to_string().contains("leave `cost` out"), "{error}");
    for limit in [
        window().settle(|_| 1).count_afterwards(|_| 1),
        window().cost(|_| 2).count_afterwards(|_| 1).settle(|_| 1),
    ] {
        let error = RateLimitLayer::new(MemoryStore::new())
            .limits([limit])
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains("`settle` and `count_afterwards`"),
            "{error}"
        );
    }
    for limit in [
        window().lease(TEST_TIMEOUT).settle(|_| 1),
        window().count_afterwards(|_| 1).count_afterwards(|_| 2),
    ] {
        assert!(
            RateLimitLayer::new(MemoryStore::new())
                .limits([limit])
                .is_ok()
        );
    }
}

/// Only the request shows the kind of the limit. Then the server has made a mistake, whatever the
/// failure mode, and the log has the words.
#[tokio::test]
async fn a_chosen_limit_loses_no_option_in_silence() {
    let chosen = || KeyedLimit::chosen(anyone, |_: &Parts| STREAMS);
    for (option, change) in WITHOUT_EFFECT {
        if option == "lease" {
            continue; // needs `settle`
        }
        let layer = || RateLimitLayer::new(MemoryStore::new()).limit(change(chosen()));
        for layer in [layer(), layer().fail_closed()] {
            let log = Log::start();
            assert!(
                at_once(&layer, 5).await.iter().all(|status| *status == 500),
                "{option}"
            );
            assert!(log.text().contains(INSTEAD), "{}", log.text());
        }
        // In the shadow it refuses nothing, and is left out.
        let shadow = RateLimitLayer::new(MemoryStore::new()).limit(change(chosen()).in_shadow());
        let response = shadow
            .layer(service_fn(hello))
            .oneshot(request())
            .await
            .unwrap();
        let left_out: &ShadowRefusals = response.extensions().get().unwrap();
        assert!(
            matches!(left_out.left_out[0].1, Rejection::NotSetUp(_)) && response.status() == 200,
            "{option}"
        );
    }
    // With an option that it can have.
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(chosen().hidden());
    assert_eq!(
        at_once(&layer, 5)
            .await
            .iter()
            .filter(|status| **status == 200)
            .count(),
        1
    );
}

#[tokio::test]
async fn a_request_of_no_cost_takes_a_place() {
    let limiter = Limiter::new(MemoryStore::new());
    let chosen = KeyedLimit::chosen(anyone, |_: &Parts| STREAMS);
    for limit in [STREAMS.by(anyone), STREAMS.by(anyone).hidden(), chosen] {
        let layer = RateLimitLayer::new(limiter.clone())
            .limit(limit)
            .cost(|_| 0);
        assert_eq!(
            at_once(&layer, 5)
                .await
                .iter()
                .filter(|status| **status == 200)
                .count(),
            1
        );
        assert_eq!(
            limiter
                .peek(&STREAMS, anyone(&request().into_parts().0).unwrap())
                .await
                .unwrap()
                .binding()
                .used,
            0
        );
    }
    let key = anyone(&request().into_parts().0).unwrap();
    let held = limiter.check(&STREAMS, key.clone(), 1).await.unwrap();
    assert!(
        limiter.check(&STREAMS, key, 0).await.unwrap().is_allowed(),
        "a look takes no place"
    );
    drop(held);
}

async fn places_cannot_be_blocked_reset_or_spent(test: Fixture<impl Store + Clone>) {
    let limiter = &test.limiter;
    let held = limiter.check(&STREAMS, "ada", 1).await.unwrap();
    assert!(held.is_allowed());
    let reserved = limiter
        .reserve(&STREAMS, "bob", 1, seconds(5))
        .await
        .map(drop);
    for outcome in [
        limiter.block(&STREAMS, "ada", seconds(5)).await,
        limiter.reset(&STREAMS, "ada").await,
        reserved,
    ] {
        let Err(Error::Unavailable(error)) = outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(error.kind, StoreErrorKind::Config);
        let words = std::error::Error::source(&error).unwrap().to_string();
        assert!(words.starts_with("limit \"streams\": places "), "{words}");
    }
    test.store.reset(STREAMS, "ada".into()).await.unwrap();
    assert_eq!(
        limiter.peek(&STREAMS, "ada").await.unwrap().binding().used,
        1,
        "it is held"
    );
    let spent = limiter
        .check_all(Check::new(Charge::spent(STREAMS, "ada", 1)))
        .await
        .unwrap();
    assert!(!spent.is_allowed());
    drop((held, Arc::new(spent)));
}

for_every_store! {
    places_cannot_be_blocked_reset_or_spent
}
