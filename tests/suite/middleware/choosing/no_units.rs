//! Limits of 0 units: they refuse each request, such as those of a tenant that is kept out.

use axum::body::Body;
use http::Response;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Error, Key, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection,
    Store, limit::prefetch::DEFAULT_LIFE, limiter::Share, middleware::ShadowRefusals,
};

use super::chosen;
use crate::support::{
    Fixture, TEST_TIMEOUT, for_every_store,
    log::Log,
    requests::{anyone, figures, hello, json, request},
    seconds,
    stores::failing,
};

const NONE: Limit = Limit::per_minute("calls", 0);
const BAN: Limit = Limit::per_hour("calls.ban", 1);

async fn respond(layer: &RateLimitLayer) -> Response<Body> {
    layer
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap()
}

/// Each option and kind of limit, and the name of the limit that refuses.
fn all() -> Vec<(&'static str, KeyedLimit)> {
    vec![
        ("calls", NONE.by(anyone)),
        ("calls", chosen(NONE)),
        ("calls", NONE.by(anyone).cost(|_| 7)),
        ("calls", NONE.by(anyone).settle(|_| 0)),
        ("calls", NONE.by(anyone).count_afterwards(|_| 0)),
        ("calls", NONE.by(anyone).ban(BAN, seconds(60))),
        ("calls", NONE.by(anyone).heed_upstream()),
        ("calls", NONE.prefetch(DEFAULT_LIFE).by(anyone)),
        ("places", Limit::concurrent("places", 0).by(anyone)),
    ]
}

async fn a_limit_of_no_units_refuses_each_request<S: Store>(fixture: Fixture<S>) {
    let log = Log::start();
    let other = Limit::per_minute("other", 5);
    for (name, limit) in all() {
        let layer = RateLimitLayer::new(fixture.limiter.clone())
            .limit(other.clone().by(anyone))
            .limit(limit);
        for layer in [layer.clone(), layer.wait_up_to(TEST_TIMEOUT)] {
            let refused = respond(&layer).await;
            assert_eq!(
                (refused.status().as_u16(), figures(refused.headers())),
                (429, [None; 4]),
                "{layer:?}"
            );
            assert!(
                matches!(refused.extensions().get(), Some(Rejection::NeverFits(_))),
                "{layer:?}"
            );
            let body = json(refused).await;
            assert!(
                body.contains(&format!("The limit '{name}' admits no requests.")),
                "{body}"
            );
            assert!(
                body.contains(&format!(r#""violated-policies":["{name}"]"#)),
                "{body}"
            );
        }
    }
    // Nothing was charged, and the limit is set on purpose.
    for limit in [other, BAN] {
        assert_eq!(
            fixture
                .limiter
                .peek(&limit, Key::new("test", "anyone"))
                .await
                .unwrap()
                .binding()
                .used,
            0,
            "{limit:?}"
        );
    }
    assert!(!log.text().contains("WARN"), "{}", log.text());
}

/// A request that costs nothing is admitted, as under any limit.
async fn a_request_at_no_cost_passes<S: Store>(fixture: Fixture<S>) {
    let layer = RateLimitLayer::new(fixture.limiter)
        .limit(NONE.by(anyone))
        .cost(|_| 0);
    let admitted = respond(&layer).await;
    assert_eq!(
        (admitted.status().as_u16(), figures(admitted.headers())[1]),
        (200, Some("0"))
    );
    // But each request takes a place.
    let layer = layer.limit(Limit::concurrent("places", 0).by(anyone));
    assert_eq!(respond(&layer).await.status(), 429);
}

/// The units that a tenant has used before count on, and again when it is let in.
async fn units_of_before_stay_counted<S: Store>(fixture: Fixture<S>) {
    let limiter = &fixture.limiter;
    let some = Limit::per_minute("calls", 3);
    assert!(limiter.check(&some, "ada", 2).await.unwrap().is_allowed());
    let shown = limiter.peek(&NONE, "ada").await.unwrap();
    assert_eq!((shown.binding().used, shown.remaining()), (2, 0));
    assert!(matches!(
        limiter.check(&NONE, "ada", 1).await,
        Err(Error::NeverFits(_))
    ));
    assert!(matches!(
        limiter.acquire(&NONE, "ada", 1, TEST_TIMEOUT).await,
        Err(Error::NeverFits(_))
    ));
    assert!(limiter.reserve(&NONE, "ada", 1, seconds(9)).await.is_err());
    assert!(Charge::any_left(NONE, "ada").is_err());
    assert_eq!(
        limiter
            .check_all(Check::new(Charge::spent(NONE, "ada", 1)))
            .await
            .unwrap()
            .binding()
            .used,
        3
    );
    assert!(!limiter.check(&some, "ada", 1).await.unwrap().is_allowed());
    limiter.block(&NONE, "ada", seconds(60)).await.unwrap();
    limiter.reset(&NONE, "ada").await.unwrap();
    assert_eq!(
        limiter.check(&some, "ada", 3).await.unwrap().binding().used,
        3
    );
}

for_every_store! {
    a_limit_of_no_units_refuses_each_request
    a_request_at_no_cost_passes
    units_of_before_stay_counted
}

#[tokio::test]
async fn it_refuses_while_the_store_is_gone_and_the_layer_fails_open() {
    let layer = RateLimitLayer::new(Limiter::new(failing())).fail_open();
    assert_eq!(
        respond(
            &layer
                .clone()
                .limit(Limit::per_minute("calls", 1).by(anyone))
        )
        .await
        .status(),
        200
    );
    assert_eq!(respond(&layer.limit(NONE.by(anyone))).await.status(), 429);
}

/// A share of no units admits no less than the limit.
#[tokio::test]
async fn a_request_at_no_cost_passes_under_a_share() {
    let layer = RateLimitLayer::new(Limiter::new(failing()))
        .fail_local(Share::one_of(2))
        .limit(NONE.by(anyone));
    assert_eq!(respond(&layer.clone().cost(|_| 0)).await.status(), 200);
    assert_eq!(respond(&layer).await.status(), 429);
}

#[tokio::test]
async fn in_the_shadow_it_only_reports() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(NONE.by(anyone).in_shadow());
    let admitted = respond(&layer).await;
    assert_eq!(admitted.status(), 200);
    let reported: &ShadowRefusals = admitted.extensions().get().unwrap();
    assert_eq!(reported.names().collect::<Vec<_>>(), ["calls"]);
}
