//! `settle`: the response decides what its request has cost.

use std::{
    convert::Infallible,
    future::{Future, pending, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    Algorithm, Charge, Check, Key, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Store,
    middleware::{Degraded, Exchange},
    settlement::Settlement,
    store::ManualClock,
    testing::Fault,
};

use crate::support::{
    Fixture, TEST_TIMEOUT,
    log::Log,
    memory, ms, redis,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, request},
    stores::{Watched, failing, settled_costs},
};

const LOGIN: Limit = Limit::per_minute("login", 2);
const TOKENS: Limit = Limit::per_hour("tokens", 1_000);

/// The units that a response has used, in its extensions.
#[derive(Clone)]
struct Used(u64);

/// Responds with the status in the path and the tokens in a header.
async fn answer(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let status: StatusCode = request.uri().path()[1..].parse().unwrap();
    let used = request
        .headers()
        .get("x-use")
        .map(|value| Used(value.to_str().unwrap().parse().unwrap()));
    let response = Response::builder().status(status);
    let response = used
        .into_iter()
        .fold(response, |response, used| response.extension(used));
    Ok(response.body(Body::empty()).unwrap())
}

fn asks(status: u16, tokens: u64) -> Request<Body> {
    Request::get(format!("/{status}"))
        .header("x-use", tokens)
        .body(Body::empty())
        .unwrap()
}

fn used(outcome: &Exchange<'_>) -> u64 {
    outcome
        .response
        .extensions
        .get()
        .map_or_else(|| outcome.cost, |Used(tokens)| *tokens)
}

/// A store, its clock, and a limiter to inspect it.
fn store() -> (MemoryStore, ManualClock, Limiter) {
    let clock = ManualClock::new();
    let store = MemoryStore::new().clock(&clock);
    (store.clone(), clock, Limiter::new(store))
}

async fn spent(limiter: &Limiter, limit: &Limit) -> u64 {
    limiter
        .peek(limit, anyone(&request().into_parts().0).unwrap())
        .await
        .unwrap()
        .binding()
        .used
}

#[tokio::test]
async fn only_failed_logins_count() {
    let limit = LOGIN
        .by(anyone)
        .settle(|o| u64::from(o.response.status == 401));
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .layer(service_fn(answer));
    let mut seen = Vec::new();
    for status in [200, 401, 200, 200, 401, 200] {
        let response = app.clone().oneshot(asks(status, 0)).await.unwrap();
        let [_, remaining, _, _] =
            figures(response.headers()).map(|figure| figure.map(str::to_owned));
        seen.push((response.status().as_u16(), remaining.unwrap()));
    }
    let seen: Vec<_> = seen
        .iter()
        .map(|(status, remaining)| (*status, &**remaining))
        .collect();
    assert_eq!(
        seen,
        [
            (200, "2"),
            (401, "1"),
            (200, "1"),
            (200, "1"),
            (401, "0"),
            (429, "0")
        ]
    );
}

#[tokio::test]
async fn a_response_is_settled_at_less_or_more_than_was_reserved() {
    let (store, clock, limiter) = store();
    let app = RateLimitLayer::new(store)
        .limit(TOKENS.by(anyone).cost(|_| 500).settle(used))
        .layer(service_fn(answer));
    for (tokens, all) in [(10, 10), (490, 500)] {
        let response = app.clone().oneshot(asks(200, tokens)).await.unwrap();
        assert_eq!(
            figures(response.headers())[1],
            Some(&*(1_000 - all).to_string())
        );
        assert_eq!(spent(&limiter, &TOKENS).await, all);
        clock.advance(Duration::from_secs(60));
    }
    // More than the limit: spent units count.
    let response = app.clone().oneshot(asks(200, 5_000)).await.unwrap();
    assert_eq!(
        (response.status(), figures(response.headers())[1]),
        (StatusCode::OK, Some("0"))
    );
    assert_eq!(spent(&limiter, &TOKENS).await, 5_500);
    let refused = app.clone().oneshot(asks(200, 1)).await.unwrap();
    assert_eq!(
        (refused.status(), figures(refused.headers())[3]),
        (StatusCode::TOO_MANY_REQUESTS, Some("3600"))
    );
}

#[tokio::test]
async fn settled_and_plain_limits_are_decided_and_settled_together() {
    let (store, _clock, limiter) = store();
    let watched = Watched::new(store);
    let errors = Limit::per_minute("errors", 10);
    let app = RateLimitLayer::new(watched.clone())
        .limit(LOGIN.by(anyone))
        .limit(TOKENS.by(anyone).cost(|_| 500).settle(used))
        .limit(errors.clone().by(anyone).settle(|o| {
            if o.response.status.is_server_error() {
                0
            } else {
                o.cost
            }
        }))
        .layer(service_fn(answer));
    app.clone().oneshot(asks(500, 20)).await.unwrap();
    assert_eq!(settled_costs(&watched), [[None, Some(20), Some(0)]]);
    let all = (
        spent(&limiter, &LOGIN).await,
        spent(&limiter, &TOKENS).await,
        spent(&limiter, &errors).await,
    );
    assert_eq!(all, (1, 20, 0));

    // A settlement at the charged cost is also sent, so that the lease does not return the units.
    app.oneshot(asks(200, 500)).await.unwrap();
    assert_eq!(settled_costs(&watched)[1..], [[None, Some(500), Some(1)]]);
    let app = RateLimitLayer::new(watched.clone())
        .limit(errors.by(anyone).settle(|o| o.cost))
        .layer(service_fn(answer));
    app.oneshot(asks(200, 0)).await.unwrap();
    assert_eq!(settled_costs(&watched)[2..], [[Some(1)]]);
}

#[tokio::test]
async fn a_limit_may_have_its_own_cost() {
    let (store, _clock, limiter) = store();
    let app = RateLimitLayer::new(store)
        .limit(
            TOKENS
                .by(anyone)
                .cost(|request| request.headers.len() as u64),
        )
        .limit(LOGIN.by(anyone))
        .cost(|_| 2)
        .layer(service_fn(hello));
    let request = Request::get("/")
        .header("a", "1")
        .header("b", "2")
        .header("c", "3")
        .body(Body::empty())
        .unwrap();
    app.oneshot(request).await.unwrap();
    assert_eq!(
        (
            spent(&limiter, &TOKENS).await,
            spent(&limiter, &LOGIN).await
        ),
        (3, 2)
    );
}

#[tokio::test]
async fn an_exchange_holds_the_request_and_the_response() {
    let (store, _clock, limiter) = store();
    let cost = |outcome: &Exchange<'_>| {
        assert_eq!(
            (
                outcome.request.uri.path(),
                outcome.response.status.as_u16(),
                outcome.cost
            ),
            ("/404", 404, 7)
        );
        assert!(
            !format!("{outcome:?}").contains("x-use"),
            "headers may be secret"
        );
        outcome.request.headers["x-use"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap()
    };
    let app = RateLimitLayer::new(store)
        .limit(TOKENS.by(anyone).settle(cost))
        .cost(|_| 7)
        .layer(service_fn(answer));
    app.oneshot(asks(404, 77)).await.unwrap();
    assert_eq!(spent(&limiter, &TOKENS).await, 77);
}

#[tokio::test]
async fn with_a_lease_shorter_than_the_window_every_response_is_settled() {
    let log = Log::start();
    let (store, clock, limiter) = store();
    let watched = Watched::new(store);
    let limit = TOKENS
        .by(anyone)
        .cost(|_| 500)
        .settle(used)
        .lease(Duration::from_secs(30));
    let app = RateLimitLayer::new(watched.clone())
        .limit(limit)
        .layer(service_fn(answer));
    app.oneshot(asks(200, 500)).await.unwrap();
    assert_eq!(settled_costs(&watched), [[Some(500)]]);
    clock.advance(Duration::from_secs(31));
    assert_eq!(
        spent(&limiter, &TOKENS).await,
        500,
        "without the settlement it would have returned"
    );
    assert_eq!(log.text(), "");
}

/// A short lease loses no units.
#[tokio::test]
async fn a_response_after_its_lease_still_counts() {
    let log = Log::start();
    for lease in [None, Some(Duration::from_secs(30))] {
        let (store, clock, limiter) = store();
        let slow = {
            let clock = clock.clone();
            move |request| {
                clock.advance(Duration::from_secs(61));
                answer(request)
            }
        };
        let limit = TOKENS.by(anyone).cost(|_| 500).settle(used);
        let limit = lease.into_iter().fold(limit, KeyedLimit::lease);
        let app = RateLimitLayer::new(store)
            .limit(limit)
            .layer(service_fn(slow));
        let response = app.oneshot(asks(200, 400)).await.unwrap();
        assert_eq!(figures(response.headers())[1], Some("600"));
        assert_eq!(spent(&limiter, &TOKENS).await, 400);
        // The charge counts from its admission.
        clock.advance(TOKENS.window() - Duration::from_secs(62));
        assert_eq!(spent(&limiter, &TOKENS).await, 400);
        clock.advance(Duration::from_secs(1));
        assert_eq!(spent(&limiter, &TOKENS).await, 0);
    }
    assert_eq!(log.text(), "");
}

/// Neither a client that gives up nor a service that fails avoids the charge.
#[tokio::test]
async fn without_a_response_the_charge_stays_for_its_lease() {
    fn panicking() -> StatusCode {
        panic!("as handlers do")
    }
    let free = |limit: Limit| limit.by(anyone).settle(|_| 0);
    for lease in [None, Some(Duration::from_secs(5))] {
        let (store, clock, limiter) = store();
        let layer = |limit: KeyedLimit| {
            let limit = lease.into_iter().fold(limit, KeyedLimit::lease);
            RateLimitLayer::new(store.clone()).limit(limit)
        };
        let (failed, dropped, panicked) = (
            Limit::per_minute("failed", 9),
            Limit::per_minute("dropped", 9),
            Limit::per_minute("panicked", 9),
        );

        let failing = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("broken") });
        assert!(
            layer(free(failed.clone()))
                .layer(failing)
                .oneshot(request())
                .await
                .is_err()
        );

        let hanging =
            service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
        {
            let mut response = pin!(layer(free(dropped.clone())).layer(hanging).call(request()));
            assert!(
                response
                    .as_mut()
                    .poll(&mut Context::from_waker(Waker::noop()))
                    .is_pending()
            );
        }

        let broken = service_fn(|_: Request<Body>| async {
            let status = panicking();
            Ok::<_, Infallible>(
                Response::builder()
                    .status(status)
                    .body(Body::empty())
                    .unwrap(),
            )
        });
        let mut response = pin!(layer(free(panicked.clone())).layer(broken).call(request()));
        let poll = |cx: &mut Context<'_>| match catch_unwind(AssertUnwindSafe(|| {
            response.as_mut().poll(cx)
        })) {
            Ok(_) => panic!("it has not panicked"),
            Err(_) => Poll::Ready(()),
        };
        poll_fn(poll).await;

        for limit in [&failed, &dropped, &panicked] {
            assert_eq!(spent(&limiter, limit).await, 1, "{limit:?}");
        }
        clock.advance(lease.unwrap_or(Duration::from_secs(60)));
        for limit in [&failed, &dropped, &panicked] {
            assert_eq!(spent(&limiter, limit).await, 0, "{limit:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_settlement_sends_the_response_and_keeps_the_charge() {
    let log = Log::start();
    for fault in [Fault::Fails, Fault::Hangs] {
        let (store, _clock, limiter) = store();
        let store = Watched::new(store);
        store.set_for_settlements(fault);
        let limit = TOKENS.by(anyone).cost(|_| 500).settle(used);
        let app = RateLimitLayer::new(store)
            .limit(limit)
            .deadline(Duration::from_millis(40))
            .layer(service_fn(answer));
        let asked = tokio::time::Instant::now();
        for remaining in ["500", "0"] {
            let response = app.clone().oneshot(asks(200, 1)).await.unwrap();
            assert_eq!(
                (response.status(), figures(response.headers())[1]),
                (StatusCode::OK, Some(remaining))
            );
        }
        let waited = if fault == Fault::Hangs { 80 } else { 0 };
        assert_eq!(asked.elapsed(), Duration::from_millis(waited));
        assert_eq!(spent(&limiter, &TOKENS).await, 1_000);
    }
    let lines = |text: &str| {
        log.text()
            .lines()
            .filter(|line| line.contains(text))
            .count()
    };
    assert_eq!(
        lines("a request may not be settled"),
        2,
        "one a second and layer: {}",
        log.text()
    );
    assert_eq!(
        lines("settling an admission failed: out of order"),
        1,
        "{}",
        log.text()
    );
    assert_eq!(lines("did not answer within 40ms"), 1, "{}", log.text());
}

#[tokio::test]
async fn a_request_without_a_decision_is_not_settled() {
    let limit = || TOKENS.by(anyone).settle(|_| panic!("nothing to settle"));
    let app = RateLimitLayer::new(failing())
        .limit(limit())
        .layer(service_fn(answer));
    let response = app.oneshot(asks(200, 1)).await.unwrap();
    assert!(response.extensions().get::<Degraded>().is_some());
}

/// An estimated cost of zero must not make a request free.
#[tokio::test]
async fn a_settled_limit_reserves_at_least_one_unit() {
    let watched = Watched::new(MemoryStore::new());
    let limit = TOKENS
        .by(anyone)
        .cost(|_| 0)
        .settle(|outcome| 7 * outcome.cost);
    let app = RateLimitLayer::new(watched.clone())
        .limit(limit)
        .layer(service_fn(answer));
    let response = app.oneshot(asks(200, 1)).await.unwrap();
    assert_eq!(figures(response.headers())[1], Some("993"));
    assert_eq!(settled_costs(&watched).len(), 1);
}

/// One charge of a check is settled and the other is not.
async fn assert_only_one_of_two_charges_is_settled(fixture: Fixture<impl Store + Clone>) {
    let key = || Key::new("test", "anyone");
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ] {
        for lease in [None, Some(Duration::from_secs(60))] {
            let limiter = &fixture.limiter;
            let (kept, settled) = (
                LOGIN.with_algorithm(algorithm),
                TOKENS.with_algorithm(algorithm),
            );
            let charge = |limit: &Limit| Charge::new(limit.clone(), key(), 2).unwrap();
            let plain = lease.into_iter().fold(charge(&kept), Charge::reserve);
            let check = Check::new(plain)
                .and(charge(&settled).reserve(Duration::from_secs(60)))
                .unwrap();
            let decision = limiter.check_all(check.clone()).await.unwrap();
            let settlement = Settlement::new(check, &decision, |charge| {
                (charge.limit() == &settled).then_some(1)
            });
            assert!(limiter.settle(settlement).await.unwrap().was_applied);
            let kept = limiter.peek(&kept, key()).await.unwrap().binding().used;
            let settled = limiter.peek(&settled, key()).await.unwrap().binding().used;
            assert_eq!((kept, settled), (2, 1), "{algorithm:?} {lease:?}");
            fixture.clock.advance(2 * TOKENS.window());
        }
    }
}

#[tokio::test]
async fn a_charge_that_is_not_settled_stays_in_process() {
    assert_only_one_of_two_charges_is_settled(memory()).await;
}

#[tokio::test]
async fn a_charge_that_is_not_settled_stays_on_redis() {
    assert_only_one_of_two_charges_is_settled(redis()).await;
}

#[tokio::test]
async fn a_layer_on_redis_settles() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let limit = LOGIN
        .by(anyone)
        .settle(|o| u64::from(o.response.status == 401));
    let app = RateLimitLayer::new(store)
        .limit(limit)
        .deadline(TEST_TIMEOUT)
        .layer(service_fn(answer));
    let mut seen = Vec::new();
    for status in [200, 401, 200, 200, 401, 200] {
        let response = app.clone().oneshot(asks(status, 0)).await.unwrap();
        seen.push((
            response.status().as_u16(),
            figures(response.headers())[1].map(str::to_owned),
        ));
    }
    let seen: Vec<_> = seen
        .iter()
        .map(|(status, remaining)| (*status, remaining.as_deref().unwrap()))
        .collect();
    assert_eq!(
        seen,
        [
            (200, "2"),
            (401, "1"),
            (200, "1"),
            (200, "1"),
            (401, "0"),
            (429, "0")
        ]
    );
}

/// Responds after a while, with the status in the path.
async fn sign_in(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let status: StatusCode = request.uri().path()[1..].parse().unwrap();
    sleep(ms(300)).await;
    Ok(Response::builder()
        .status(status)
        .body(Body::empty())
        .unwrap())
}

/// Five failed logins a minute: correct ones use nothing in the end. If more of them come at once
/// than failures are left, the excess ones retry a second later.
async fn assert_excess_concurrent_logins_retry_after_a_second(store: impl Store + Clone) {
    let login = Limit::per_minute("login", 5);
    let limit = login
        .clone()
        .by(anyone)
        .settle(|o| u64::from(o.response.status == 401));
    let app = RateLimitLayer::new(store.clone())
        .limit(limit)
        .deadline(TEST_TIMEOUT)
        .layer(service_fn(sign_in));
    let sign_in = |status: u16| {
        let request = Request::get(format!("/{status}"))
            .body(Body::empty())
            .unwrap();
        tokio::spawn(app.clone().oneshot(request))
    };
    let said = |response: Response<Body>| {
        let figures = figures(response.headers())
            .map(|figure| figure.map(|text| text.parse::<u64>().unwrap()));
        (response.status().as_u16(), figures)
    };
    let answers: Vec<_> = (0..10).map(|_| sign_in(200)).collect();
    let (mut passed, mut refused) = (0, 0);
    for answer in answers {
        match said(answer.await.unwrap().unwrap()) {
            (200, [Some(5), Some(_), Some(_), None]) => passed += 1,
            (429, [Some(5), Some(0), Some(1), Some(1)]) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((passed, refused), (5, 5));

    // The responses have settled all charges.
    sleep(ms(500)).await;
    let (status, [_, remaining, reset, _]) = said(sign_in(200).await.unwrap().unwrap());
    assert_eq!((status, remaining, reset), (200, Some(5), Some(0)));

    let begun = std::time::Instant::now();
    for left in (0..5).rev() {
        let (status, [_, remaining, ..]) = said(sign_in(401).await.unwrap().unwrap());
        assert_eq!((status, remaining), (401, Some(left)));
    }
    // The first failed login leaves a minute after its admission, some 1.5 s ago.
    let (status, [_, remaining, reset, retry_after]) = said(sign_in(200).await.unwrap().unwrap());
    let least = 60 - begun.elapsed().as_secs() - 1;
    assert_eq!((status, remaining), (429, Some(0)));
    assert!(
        retry_after >= Some(least) && retry_after <= Some(59),
        "{retry_after:?}"
    );
    assert_eq!(reset, retry_after);
}

#[tokio::test]
async fn excess_concurrent_logins_retry_after_a_second_in_process() {
    assert_excess_concurrent_logins_retry_after_a_second(MemoryStore::new()).await;
}

#[tokio::test]
async fn excess_concurrent_logins_retry_after_a_second_on_redis() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    assert_excess_concurrent_logins_retry_after_a_second(store).await;
}
