//! Fail-local: while the store fails, the process decides under its share of each limit.

use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use tokio::{task::JoinSet, time::sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Error, KeyedLimit, Limit, Limiter, RateLimitLayer, RedisStore, Rejection,
    limiter::{FailureMode, Share},
    middleware::{Degraded, ShadowRefusals},
    settlement::Settlement,
    testing::Fault,
};

use crate::support::{
    TEST_TIMEOUT,
    outage::row,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, request},
    stores::{failing, with_fault},
};

const CALLS: Limit = Limit::per_hour("calls", 100);
const QUARTER: Share = Share::one_of(4);

async fn status(
    app: &(impl Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone),
) -> StatusCode {
    app.clone().oneshot(request()).await.unwrap().status()
}

fn degraded(response: &Response<Body>) -> &Degraded {
    response.extensions().get().unwrap()
}

/// All instances get requests at once, far more than there are units.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_without_redis_admit_the_limit_together() {
    let mut server = RedisServer::start();
    let instances = [(); 4].map(|()| {
        let store = RedisStore::builder(server.url()).build().unwrap();
        RateLimitLayer::new(store)
            .limit(CALLS.by(anyone))
            .fail_local(QUARTER)
            .deadline(TEST_TIMEOUT)
            .layer(service_fn(hello))
    });
    assert_eq!(status(&instances[0]).await, 200);
    server.kill();

    let mut requests = JoinSet::new();
    for number in 0..400 {
        let instance = instances[number % 4].clone();
        requests.spawn(async move { instance.oneshot(request()).await.unwrap() });
    }
    let responses = requests.join_all().await;
    let admitted = responses
        .iter()
        .filter(|response| response.status() == 200)
        .count();
    row(
        "Redis is gone, `fail_local` on 4 instances with a share of 1/4",
        format!("{admitted} of 400 requests admitted in total, under a limit of 100"),
        "at most the limit admitted in total",
    );
    assert_eq!(
        admitted, 100,
        "each instance admits its quarter, and no more"
    );
    for response in &responses {
        assert_eq!(degraded(response).mode, FailureMode::Local(QUARTER));
        let [limit, _, _, retry_after] = figures(response.headers());
        assert_eq!(limit, Some("25"), "the figures are those of the share");
        assert_eq!(retry_after.is_some(), response.status() == 429);
    }

    server.restart();
    let up = Instant::now();
    loop {
        let response = instances[1].clone().oneshot(request()).await.unwrap();
        if response.extensions().get::<Degraded>().is_none() {
            assert_eq!(
                (response.status(), figures(response.headers())[0]),
                (StatusCode::OK, Some("100"))
            );
            break;
        }
        assert!(up.elapsed() < TEST_TIMEOUT);
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_share_is_rounded_down() {
    for (units, processes, admitted) in [
        (10, 4, 2),
        (100, 1, 100),
        (7, 7, 1),
        (7, 8, 0),
        (1, u32::MAX, 0),
    ] {
        let limiter = Limiter::new(failing()).fail_local(Share::one_of(processes));
        let limit = Limit::per_hour("calls", units);
        for number in 0..=units {
            let decision = limiter.check(&limit, "ada", 1).await;
            match admitted {
                0 => {
                    assert!(
                        matches!(decision, Err(error) if !matches!(error, Error::NeverFits(_)))
                    );
                }
                _ => assert_eq!(
                    decision.unwrap().is_allowed(),
                    number < admitted,
                    "{number} of {units}"
                ),
            }
        }
    }
}

/// The cost may fit once the store is back, so the response is not a 429 without a retry time.
#[tokio::test]
async fn a_cost_above_the_share_is_unavailable() {
    let app = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .cost(|request: &Parts| {
            request
                .uri
                .path()
                .trim_start_matches('/')
                .parse()
                .unwrap_or(1)
        })
        .fail_local(QUARTER)
        .layer(service_fn(hello));
    let call = |cost: u64| {
        app.clone().oneshot(
            Request::get(format!("/{cost}"))
                .body(Body::empty())
                .unwrap(),
        )
    };

    let costly = call(26).await.unwrap();
    assert_eq!(costly.status(), 503);
    assert!(figures(costly.headers())[3].is_some());
    assert!(matches!(
        costly.extensions().get(),
        Some(Rejection::Unavailable(_))
    ));
    assert_eq!(degraded(&costly).mode, FailureMode::Local(QUARTER));

    let never = call(101).await.unwrap();
    assert_eq!(
        (never.status(), figures(never.headers())[3]),
        (StatusCode::TOO_MANY_REQUESTS, None)
    );
    assert!(
        never.extensions().get::<Degraded>().is_none(),
        "the store had no say in this"
    );

    assert_eq!(
        call(25).await.unwrap().status(),
        200,
        "a refused check takes nothing"
    );
    assert_eq!(call(1).await.unwrap().status(), 429);
}

#[tokio::test]
async fn several_limits_are_still_all_or_nothing() {
    let limiter = Limiter::new(failing()).fail_local(QUARTER);
    let (wide, narrow) = (Limit::per_hour("wide", 100), Limit::per_hour("narrow", 8));
    let both = |cost| {
        let check = Check::new(Charge::new(wide.clone(), "ada", cost).unwrap());
        limiter.check_all(
            check
                .and(Charge::new(narrow.clone(), "ada", 1).unwrap())
                .unwrap(),
        )
    };
    assert!(both(1).await.unwrap().is_allowed() && both(1).await.unwrap().is_allowed());
    let refused = both(1).await.unwrap();
    assert_eq!(
        (refused.is_allowed(), refused.binding().limit.name()),
        (false, "narrow")
    );
    assert_eq!(limiter.peek(&wide, "ada").await.unwrap().binding().used, 2);
}

#[tokio::test]
async fn a_shadow_limit_keeps_its_units_and_refuses_nothing() {
    let app = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone))
        .limit(Limit::per_hour("trial", 2).by(anyone).in_shadow())
        .fail_local(QUARTER)
        .layer(service_fn(hello));
    for number in 0..25 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(
            response.extensions().get::<ShadowRefusals>().is_some(),
            number >= 2
        );
    }
    assert_eq!(status(&app).await, 429);

    let only_shadow = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone).in_shadow())
        .fail_local(QUARTER);
    let response = only_shadow
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(
        (response.status(), degraded(&response).mode),
        (StatusCode::OK, FailureMode::Local(QUARTER))
    );
}

#[tokio::test]
async fn a_chosen_limit_is_decided_locally() {
    let chosen = KeyedLimit::chosen(anyone, |_| Limit::per_hour("plan", 4));
    let app = RateLimitLayer::new(failing())
        .limit(chosen)
        .fail_local(QUARTER)
        .layer(service_fn(hello));
    assert_eq!(
        (status(&app).await, status(&app).await),
        (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS)
    );
}

/// Even once the store is back, because the store does not know of it.
#[tokio::test]
async fn a_local_reservation_is_settled_locally() {
    let store = with_fault(Fault::Fails);
    let limiter = Limiter::new(store.clone()).fail_local(QUARTER);
    let reservation = limiter
        .reserve(&CALLS, "ada", 20, Duration::MAX)
        .await
        .unwrap()
        .unwrap();
    assert!(reservation.decision().local_cause().is_some());
    store.set(Fault::None);
    let settled = reservation.settle(5).await.unwrap();
    assert_eq!(
        (
            settled.was_applied,
            settled.decision.binding().used,
            settled.decision.remaining()
        ),
        (true, 5, 20)
    );
    assert_eq!(
        limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
        0,
        "the store has not heard of it"
    );

    let check = Check::new(Charge::new(CALLS, "ada", 1).unwrap());
    let decision = limiter.check_all(check.clone()).await.unwrap();
    assert!(decision.local_cause().is_none());
    store.set(Fault::Fails);
    assert!(
        limiter
            .settle(Settlement::new(check, &decision, |_| Some(0)))
            .await
            .is_err(),
        "that is the store's"
    );
}

#[tokio::test]
async fn a_response_is_settled_locally() {
    let app = RateLimitLayer::new(failing())
        .limit(CALLS.by(anyone).cost(|_| 10).settle(|_| 1))
        .fail_local(QUARTER)
        .layer(service_fn(hello));
    for remaining in (15..25).rev() {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            figures(response.headers())[..2],
            [Some("25"), Some(&*remaining.to_string())]
        );
    }
}

#[tokio::test]
async fn a_local_decision_names_its_cause_and_nothing_is_blocked_locally() {
    let limiter = Limiter::new(failing()).fail_local(QUARTER);
    let decision = limiter.check(&CALLS, "ada", 1).await.unwrap();
    assert!(matches!(
        decision.local_cause(),
        Some(Error::Unavailable(_))
    ));
    assert_eq!(
        (decision.binding().limit.units(), decision.remaining()),
        (25, 24)
    );

    assert!(
        limiter
            .block(&CALLS, "ada", Duration::from_secs(60))
            .await
            .is_err()
    );
    assert_eq!(limiter.peek(&CALLS, "ada").await.unwrap().binding().used, 1);
    assert!(
        Limiter::new(failing())
            .check(&CALLS, "ada", 1)
            .await
            .is_err(),
        "unless it is reported so"
    );
}

#[tokio::test]
async fn a_waiting_request_waits_for_the_share() {
    let limit = Limit::per("calls", 8, Duration::from_millis(50));
    let app = RateLimitLayer::new(failing())
        .limit(limit.by(anyone))
        .fail_local(QUARTER)
        .wait_up_to(TEST_TIMEOUT)
        .layer(service_fn(hello));
    let begun = Instant::now();
    for _ in 0..6 {
        assert_eq!(status(&app).await, 200);
    }
    assert!(
        begun.elapsed() >= Duration::from_millis(100),
        "two in 50 ms"
    );
}

#[tokio::test]
async fn layers_on_one_limiter_share_the_share() {
    let limiter = Limiter::new(failing());
    let [one, other] = [(); 2].map(|()| {
        let layer =
            RateLimitLayer::new(limiter.clone()).limit(Limit::per_hour("calls", 8).by(anyone));
        layer.fail_local(QUARTER).layer(service_fn(hello))
    });
    assert_eq!(
        (status(&one).await, status(&other).await),
        (StatusCode::OK, StatusCode::OK)
    );
    assert_eq!(
        (status(&one).await, status(&other).await),
        (StatusCode::TOO_MANY_REQUESTS, StatusCode::TOO_MANY_REQUESTS)
    );
}

#[tokio::test]
async fn a_layer_uses_its_limiters_share_by_default() {
    let limiter = Limiter::new(failing()).fail_local(QUARTER);
    let layer = RateLimitLayer::new(limiter).limit(Limit::per_hour("calls", 4).by(anyone));
    let app = layer.clone().layer(service_fn(hello));
    assert_eq!(
        (status(&app).await, status(&app).await),
        (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS)
    );
    let open = layer.fail_open().layer(service_fn(hello));
    assert_eq!(
        degraded(&open.oneshot(request()).await.unwrap()).mode,
        FailureMode::Open
    );
}

#[tokio::test(start_paused = true)]
async fn a_hanging_store_gets_its_deadline_before_a_local_decision() {
    let store = with_fault(Fault::Hangs);
    let limiter = Limiter::new(store.clone()).fail_local(QUARTER);
    let asked = tokio::time::Instant::now();
    let decision = limiter.check(&CALLS, "ada", 1).await.unwrap();
    assert!(matches!(
        decision.local_cause(),
        Some(Error::TimedOut { .. })
    ));
    assert_eq!(
        (asked.elapsed(), store.calls()),
        (Duration::from_millis(50), 1)
    );
}
