//! How a limit is chosen for each request, and its options.

use std::{
    convert::Infallible,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::body::Body;
use http::{Request, Response, request::Parts};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    Decision, Header, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection, Store,
    limiter::Share, middleware::ShadowRefusals,
};

use super::{BURST, by_plan, request_of_plan};
use crate::support::{
    Fixture, MICROSECOND, for_every_store,
    requests::{anyone, figures, hello, request},
    seconds,
    stores::failing,
};

/// Limits beside it keep their units.
#[tokio::test]
async fn a_closure_that_panics_charges_nothing() {
    let limiter = Limiter::new(MemoryStore::new());
    let layer = RateLimitLayer::new(limiter.clone())
        .limit(BURST.by(anyone))
        .limit(KeyedLimit::chosen(anyone, |_: &Parts| -> Limit {
            panic!("no plan")
        }));
    let app = layer.layer(service_fn(hello));
    let ended = tokio::spawn(app.oneshot(request())).await.unwrap_err();
    assert!(ended.is_panic());
    assert_eq!(
        limiter
            .peek(&BURST, anyone(&request().into_parts().0).unwrap())
            .await
            .unwrap()
            .binding()
            .used,
        0
    );
}

async fn a_request_gets_the_limit_of_its_plan_now<S: Store>(fixture: Fixture<S>) {
    let limits = [KeyedLimit::chosen(anyone, by_plan), BURST.by(anyone)];
    let app = RateLimitLayer::new(fixture.limiter)
        .limits(limits)
        .unwrap()
        .layer(service_fn(hello));
    for (plan, status, limit, remaining) in [
        ("free", 200, "1", "0"),
        ("free", 429, "1", "0"),
        // The used units of the plan before.
        ("pro", 200, "3", "1"),
        ("own", 200, "10", "7"),
        ("free", 429, "1", "0"),
        ("pro", 200, "3", "0"),
        ("own", 200, "10", "5"),
    ] {
        let response = app.clone().oneshot(request_of_plan(plan)).await.unwrap();
        let [shown, left, ..] = figures(response.headers());
        assert_eq!(
            (response.status().as_u16(), shown, left),
            (status, Some(limit), Some(remaining)),
            "{plan}"
        );
    }
}

async fn a_limit_that_changes_keeps_what_is_counted<S: Store>(fixture: Fixture<S>) {
    let fixture = fixture.without_refusal_cache();
    let setting = Arc::new(RwLock::new(Limit::per_minute("calls", 4)));
    let set = |units| *setting.write().unwrap() = Limit::per_minute("calls", units);
    let current = Arc::clone(&setting);
    let calls = KeyedLimit::chosen(anyone, move |_: &Parts| {
        current
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    });
    let app = RateLimitLayer::new(fixture.limiter.clone())
        .limit(calls)
        .layer(service_fn(hello));
    let call = async || app.clone().oneshot(request()).await.unwrap();
    for remaining in ["3", "2", "1"] {
        assert_eq!(figures(call().await.headers())[1], Some(remaining));
        fixture.clock.advance(seconds(10));
    }
    // Raised.
    set(10);
    assert_eq!(
        figures(call().await.headers())[..2],
        [Some("10"), Some("6")]
    );
    // Below its use: three of the four units, of which the third is 10 s old, have to leave.
    set(2);
    let refused = call().await;
    assert_eq!(
        (
            refused.status().as_u16(),
            figures(refused.headers())[..2].to_vec()
        ),
        (429, vec![Some("2"), Some("0")])
    );
    let Some(Rejection::Limited(decision)) = refused.extensions().get() else {
        panic!("{refused:?}")
    };
    assert_eq!(
        (decision.binding().used, decision.retry_after()),
        (4, Some(seconds(50)))
    );
    fixture.clock.advance(seconds(50) - MICROSECOND);
    assert_eq!(call().await.status(), 429);
    fixture.clock.advance(MICROSECOND);
    assert_eq!(figures(call().await.headers())[1], Some("0"));
}

for_every_store! {
    a_request_gets_the_limit_of_its_plan_now
    a_limit_that_changes_keeps_what_is_counted
}

/// The inner service is called before the first poll, as with a limit that is not chosen.
#[tokio::test]
async fn a_limit_that_is_chosen_is_decided_in_the_call() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let service = service_fn(move |request: Request<Body>| {
        assert!(request.extensions().get::<Decision>().is_some());
        counted.fetch_add(1, Ordering::Relaxed);
        hello(request)
    });
    let layer = RateLimitLayer::new(MemoryStore::new());
    let mut app = layer
        .limit(KeyedLimit::chosen(anyone, by_plan))
        .layer(service);
    let response = app.ready().await.unwrap().call(request_of_plan("free"));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert_eq!(response.await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_limit_that_is_chosen_has_all_options() {
    let respond = async |limits: Vec<KeyedLimit>, requests: usize| {
        let app = RateLimitLayer::new(MemoryStore::new())
            .limits(limits)
            .unwrap()
            .layer(service_fn(hello));
        let mut last = None;
        for _ in 0..requests {
            last = Some(app.clone().oneshot(request_of_plan("pro")).await.unwrap());
        }
        last.unwrap()
    };
    let pro = || KeyedLimit::chosen(anyone, by_plan);
    let shown = |response: &Response<Body>| figures(response.headers())[1].map(str::to_owned);
    assert_eq!(
        shown(&respond(vec![pro().cost(|_| 2)], 1).await).as_deref(),
        Some("1")
    );
    assert_eq!(
        shown(&respond(vec![pro().settle(|_| 3)], 1).await).as_deref(),
        Some("0")
    );
    assert_eq!(
        shown(&respond(vec![pro().count_afterwards(|_| 2)], 1).await).as_deref(),
        Some("1")
    );
    assert_eq!(
        shown(&respond(vec![pro().hidden(), BURST.by(anyone)], 1).await).as_deref(),
        Some("9")
    );
    let never_fits = respond(vec![pro().cost(|_| 4)], 1).await;
    assert!(
        matches!(never_fits.extensions().get(), Some(Rejection::NeverFits(_))),
        "{never_fits:?}"
    );
    let in_shadow = respond(vec![pro().in_shadow(), BURST.by(anyone)], 4).await;
    let refusals: &ShadowRefusals = in_shadow.extensions().get().unwrap();
    assert_eq!(
        (
            in_shadow.status().as_u16(),
            refusals.names().collect::<Vec<_>>()
        ),
        (200, vec!["calls"])
    );
}

#[tokio::test]
async fn a_request_without_a_key_or_a_store_chooses_as_any_other() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let limit = KeyedLimit::chosen(Header::new("x-user"), move |parts: &Parts| {
        count.fetch_add(1, Ordering::Relaxed);
        by_plan(parts)
    });
    let layer = RateLimitLayer::new(failing())
        .fail_local(Share::one_of(1))
        .limit(limit);
    let app = layer.layer(service_fn(hello));
    assert_eq!(
        app.clone()
            .oneshot(request_of_plan("free"))
            .await
            .unwrap()
            .status(),
        400
    );
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    for (plan, status) in [("free", 200), ("free", 429), ("own", 200)] {
        let mut request = request_of_plan(plan);
        request
            .headers_mut()
            .insert("x-user", "ada".parse().unwrap());
        assert_eq!(
            app.clone().oneshot(request).await.unwrap().status(),
            status,
            "{plan}"
        );
    }
    assert_eq!(asked.load(Ordering::Relaxed), 3);
}

/// In a layer that waits for capacity, too.
#[tokio::test(start_paused = true)]
async fn a_limit_that_is_chosen_is_waited_for() {
    let limit = KeyedLimit::chosen(anyone, |_: &Parts| Limit::per_second("calls", 1));
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .wait_up_to(seconds(5));
    let app = layer.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    for _ in 0..3 {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
}
