//! `count_afterwards`: a limit that reserves nothing and charges what the response says, also
//! beyond the limit.

use std::{
    convert::Infallible,
    future::{Future, pending},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::{sync::Barrier, task::JoinSet};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Decision, Key, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer,
    RedisStore, Store, check::Takes, limiter::Share, middleware::ShadowRefusals,
    settlement::Settled, store::StoreFuture,
};

use crate::support::{
    ALGORITHMS, Fixture, MICROSECOND, TEST_TIMEOUT, for_every_store,
    log::Log,
    proxy::Proxy,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, request},
    stores::failing,
    to_the_start_of_a_window,
};

const FAILURES: Limit = Limit::per_minute("failures", 5);

/// Responds with the status in the path.
async fn answer(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let status: StatusCode = request.uri().path()[1..].parse().unwrap();
    Ok(Response::builder()
        .status(status)
        .body(Body::empty())
        .unwrap())
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// Responds like `answer`, but only once so many requests are in flight.
fn answer_together(requests: usize) -> impl Fn(Request<Body>) -> Answer + Clone {
    let together = Arc::new(Barrier::new(requests));
    move |request| {
        let together = Arc::clone(&together);
        Box::pin(async move {
            together.wait().await;
            answer(request).await
        })
    }
}

fn asks(status: u16) -> Request<Body> {
    Request::get(format!("/{status}"))
        .body(Body::empty())
        .unwrap()
}

fn failed(limit: Limit) -> KeyedLimit {
    limit
        .by(anyone)
        .count_afterwards(|o| u64::from(o.response.status == 401))
}

fn key() -> Key {
    anyone(&request().into_parts().0).unwrap()
}

impl<S: Store> Fixture<S> {
    fn layer(&self, limit: KeyedLimit) -> RateLimitLayer {
        RateLimitLayer::new(self.limiter.clone()).limit(limit)
    }

    async fn counted(&self, limit: &Limit) -> u64 {
        self.limiter
            .peek(limit, key())
            .await
            .unwrap()
            .binding()
            .used
    }
}

async fn only_failures_count_and_nothing_is_reserved(test: Fixture<impl Store + Clone>) {
    for algorithm in ALGORITHMS {
        to_the_start_of_a_window(&test.clock, FAILURES.window());
        let app = test
            .layer(failed(FAILURES.with_algorithm(algorithm)))
            .layer(service_fn(answer));
        let mut seen = Vec::new();
        for status in [200, 401, 200, 401, 401, 401, 401, 200] {
            let response = app.clone().oneshot(asks(status)).await.unwrap();
            let [_, remaining, _, retry] =
                figures(response.headers()).map(|figure| figure.map(str::to_owned));
            seen.push((
                response.status().as_u16(),
                remaining.unwrap(),
                retry.is_some(),
            ));
        }
        let seen: Vec<_> = seen
            .iter()
            .map(|(status, remaining, retry)| (*status, &**remaining, *retry))
            .collect();
        let good = [
            (200, "5", false),
            (401, "4", false),
            (200, "4", false),
            (401, "3", false),
            (401, "2", false),
        ];
        assert_eq!(
            seen,
            [
                &good[..],
                &[(401, "1", false), (401, "0", false), (429, "0", true)]
            ]
            .concat()
        );
        test.clock.advance(2 * FAILURES.window());
    }
}

/// Ten concurrent requests turn out to be free: none is refused, and all units are left.
async fn concurrent_free_requests_are_all_admitted(test: Fixture<impl Store + Clone>) {
    let waiting = service_fn(answer_together(10));
    let app = test.layer(failed(FAILURES)).layer(waiting);
    let mut requests: JoinSet<_> = (0..10).map(|_| app.clone().oneshot(asks(200))).collect();
    while let Some(response) = requests.join_next().await {
        let response = response.unwrap().unwrap();
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())[1]),
            (200, Some("5"))
        );
    }
}

/// Concurrent requests may exceed the limit, but only they. The next request waits until enough
/// units have left.
async fn overspending_is_bounded_by_the_requests_in_flight(test: Fixture<impl Store + Clone>) {
    let waiting = service_fn(answer_together(12));
    let app = test.layer(failed(FAILURES)).layer(waiting);
    let mut requests: JoinSet<_> = (0..12).map(|_| app.clone().oneshot(asks(401))).collect();
    while let Some(response) = requests.join_next().await {
        assert_eq!(response.unwrap().unwrap().status(), 401);
    }
    assert_eq!(test.counted(&FAILURES).await, 12);
    let refused = app.oneshot(asks(401)).await.unwrap();
    assert_eq!(
        (refused.status().as_u16(), figures(refused.headers())[3]),
        (429, Some("60"))
    );
    assert_eq!(test.counted(&FAILURES).await, 12, "a refusal costs nothing");
}

/// A client that delays the response beyond the window gets nothing for free.
async fn a_cost_counts_from_the_response(test: Fixture<impl Store + Clone>) {
    let clock = test.clock.clone();
    let slow = service_fn(move |request| {
        clock.advance(2 * FAILURES.window());
        answer(request)
    });
    let app = test.layer(failed(FAILURES)).layer(slow);
    assert_eq!(app.oneshot(asks(401)).await.unwrap().status(), 401);
    test.clock.advance(FAILURES.window() - MICROSECOND);
    assert_eq!(test.counted(&FAILURES).await, 1);
    test.clock.advance(MICROSECOND);
    assert_eq!(test.counted(&FAILURES).await, 0);
}

async fn a_dropped_request_costs_nothing(test: Fixture<impl Store + Clone>) {
    let hanging = service_fn(|_: Request<Body>| pending::<Result<Response<Body>, Infallible>>());
    let mut app = test.layer(failed(FAILURES)).layer(hanging);
    {
        let mut response = pin!(app.call(request()));
        // A store on a server needs some time to decide.
        for _ in 0..100 {
            assert!(
                response
                    .as_mut()
                    .poll(&mut Context::from_waker(Waker::noop()))
                    .is_pending()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(test.counted(&FAILURES).await, 0);
}

/// All or nothing, in both orders: a request that one limit refuses costs the others nothing.
async fn all_limits_of_a_request_are_decided_together(test: Fixture<impl Store + Clone>) {
    let (calls, tokens) = (
        Limit::per_minute("calls", 3),
        Limit::per_minute("tokens", 100),
    );
    let app = test
        .layer(calls.clone().by(anyone))
        .limit(tokens.clone().by(anyone).cost(|_| 10).settle(|_| 4))
        .limit(failed(FAILURES))
        .layer(service_fn(answer));
    for status in [401, 401, 401, 429] {
        assert_eq!(
            app.clone().oneshot(asks(401)).await.unwrap().status(),
            status
        );
    }
    let counted = (
        test.counted(&calls).await,
        test.counted(&tokens).await,
        test.counted(&FAILURES).await,
    );
    assert_eq!(counted, (3, 12, 3));

    test.limiter.reset(&calls, key()).await.unwrap();
    let more = Check::new(Charge::spent(FAILURES, key(), 2));
    assert!(test.limiter.check_all(more).await.unwrap().is_allowed());
    assert_eq!(app.oneshot(asks(200)).await.unwrap().status(), 429);
    assert_eq!(
        (test.counted(&calls).await, test.counted(&tokens).await),
        (0, 12)
    );
}

async fn a_shadow_limit_counts_only_requests_it_would_admit(test: Fixture<impl Store + Clone>) {
    let app = test
        .layer(failed(FAILURES).in_shadow())
        .layer(service_fn(answer));
    for number in 0..8 {
        let response = app.clone().oneshot(asks(401)).await.unwrap();
        let reported = response.extensions().get::<ShadowRefusals>().is_some();
        assert_eq!((response.status().as_u16(), reported), (401, number >= 5));
    }
    assert_eq!(test.counted(&FAILURES).await, 5);
}

/// The same part is asked and charged.
async fn a_split_limit_charges_the_part_it_asked(test: Fixture<impl Store + Clone>) {
    let whole = Limit::per_minute("parts", 6);
    let limit = whole
        .clone()
        .split(3)
        .by(anyone)
        .count_afterwards(|exchange| u64::from(exchange.response.status == 401));
    let app = test.layer(limit).layer(service_fn(answer));
    let mut served = 0;
    for _ in 0..20 {
        served += u64::from(app.clone().oneshot(asks(401)).await.unwrap().status() == 401);
    }
    let (split, mut counted) = (whole.split(3), Vec::new());
    for part in split.keys(key()) {
        counted.push(
            test.limiter
                .peek(&split.part, part)
                .await
                .unwrap()
                .binding()
                .used,
        );
    }
    assert_eq!((served, counted), (6, vec![2; 3]));
}

for_every_store! {
    only_failures_count_and_nothing_is_reserved
    concurrent_free_requests_are_all_admitted
    overspending_is_bounded_by_the_requests_in_flight
    a_cost_counts_from_the_response
    a_dropped_request_costs_nothing
    all_limits_of_a_request_are_decided_together
    a_shadow_limit_counts_only_requests_it_would_admit
    a_split_limit_charges_the_part_it_asked
}

/// A store that decides checks, but cannot count spent units.
#[derive(Clone)]
struct CountsNothing(MemoryStore);

impl Store for CountsNothing {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        if check
            .charges()
            .any(|charge| charge.takes() == Takes::Always)
        {
            failing().decide(check)
        } else {
            self.0.decide(check)
        }
    }

    fn settle(
        &self,
        settlement: tower_sliding_window::settlement::Settlement,
    ) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

#[tokio::test]
async fn a_failed_count_sends_the_response_and_is_logged() {
    let log = Log::start();
    let layer = RateLimitLayer::new(CountsNothing(MemoryStore::new())).limit(failed(FAILURES));
    let response = layer
        .layer(service_fn(answer))
        .oneshot(asks(401))
        .await
        .unwrap();
    assert_eq!(
        (response.status().as_u16(), figures(response.headers())[1]),
        (401, Some("5"))
    );
    assert!(log.text().contains("out of order"), "{}", log.text());
}

#[tokio::test]
async fn fail_local_counts_in_the_process() {
    let layer = RateLimitLayer::new(failing())
        .limit(failed(FAILURES))
        .fail_local(Share::one_of(2));
    let app = layer.layer(service_fn(answer));
    for status in [401, 401, 429] {
        assert_eq!(
            app.clone().oneshot(asks(401)).await.unwrap().status(),
            status
        );
    }
}

/// Without other requests in flight, a client gets exactly the limit.
#[tokio::test]
async fn sequential_requests_spend_exactly_the_limit() {
    let app =
        RateLimitLayer::new(MemoryStore::new()).limit(FAILURES.by(anyone).count_afterwards(|_| 1));
    let app = app.layer(service_fn(hello));
    let mut served = 0;
    while app.clone().oneshot(request()).await.unwrap().status() == 200 {
        served += 1;
    }
    assert_eq!(served, 5);
}

/// The reply is lost, and the store sends the count again.
#[tokio::test]
async fn a_count_whose_reply_is_lost_counts_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limit = Limit::per_hour("sent", 1_000);
    let limiter =
        Limiter::new(RedisStore::builder(proxy.url()).build().unwrap()).deadline(TEST_TIMEOUT);
    assert!(limiter.peek(&limit, "ada").await.unwrap().is_allowed());
    for number in 1..=100 {
        proxy.lose_replies(1);
        let counted = limiter
            .check_all(Check::new(Charge::spent(limit.clone(), "ada", 30)))
            .await
            .unwrap();
        assert!(proxy.has_lost_them());
        assert_eq!(
            (counted.is_allowed(), counted.binding().used),
            (true, 30 * number)
        );
    }
}
