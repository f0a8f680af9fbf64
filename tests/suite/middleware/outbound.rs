//! The layer around a client: calls wait for capacity, and an upstream that refuses blocks their
//! limit.

use std::{
    convert::Infallible,
    future::ready,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant, UNIX_EPOCH},
};

use axum::{Router, body::Body, response::Redirect, routing::get};
use http::{HeaderMap, Request, Response, StatusCode, header::RETRY_AFTER, request::Parts};
use hyper::body::Bytes;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{
    task::{JoinSet, yield_now},
    time::{Sleep, advance, sleep},
};
use tower::{
    Layer, ServiceBuilder, ServiceExt,
    retry::{Policy, RetryLayer},
    service_fn,
};
use tower_sliding_window::{
    Algorithm, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection,
    extract::UpstreamHost, store::ManualClock,
};

use crate::support::{
    TEST_TIMEOUT,
    http_server::serve,
    log::Log,
    redis_server::RedisServer,
    requests::{anyone, figures, request, scripted_response},
};

const CALLS: Limit = Limit::per_minute("calls", 10);

/// A window that is short enough to wait for.
const TIGHT: Limit = Limit::per("tight", 2, Duration::from_millis(300));

/// An upstream that responds as the request's headers describe, and counts its calls.
struct Upstream {
    url: String,
    calls: Arc<AtomicUsize>,
}

impl Upstream {
    async fn start() -> Self {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let answer = move |headers: HeaderMap| {
            counted.fetch_add(1, Ordering::Relaxed);
            ready(scripted_response(&headers))
        };
        let url = serve(Router::new().route("/", get(answer))).await;
        Self { url, calls }
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Sends a call through the layer and a new client.
    async fn call(&self, layer: &RateLimitLayer, headers: &[(&str, &str)]) -> Response<Body> {
        let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
        let client = client.map_response(|response| response.map(Body::new));
        let client = ServiceBuilder::new().layer(layer.clone()).service(client);
        let request = headers
            .iter()
            .fold(Request::get(&self.url), |request, (name, value)| {
                request.header(*name, *value)
            });
        client
            .oneshot(request.body(Body::empty()).unwrap())
            .await
            .unwrap()
    }
}

fn layer(limit: KeyedLimit) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .deadline(TEST_TIMEOUT)
}

#[tokio::test]
async fn a_call_over_the_limit_does_not_reach_the_upstream() {
    let (upstream, layer) = (Upstream::start().await, layer(TIGHT.by(anyone)).cost(|_| 2));
    assert_eq!(upstream.call(&layer, &[]).await.status(), 200);
    let refused = upstream.call(&layer, &[]).await;
    assert_eq!(
        (refused.status().as_u16(), figures(refused.headers())[3]),
        (429, Some("1"))
    );
    assert_eq!(upstream.calls(), 1);
}

#[tokio::test]
async fn a_call_waits_for_capacity_up_to_max_wait() {
    let (upstream, layer) = (Upstream::start().await, layer(TIGHT.by(anyone)));
    let patient = layer.clone().wait_up_to(TEST_TIMEOUT);
    let asked = Instant::now();
    for _ in 0..5 {
        assert_eq!(upstream.call(&patient, &[]).await.status(), 200);
    }
    assert!(
        asked.elapsed() >= 2 * TIGHT.window(),
        "{:?}",
        asked.elapsed()
    );
    assert_eq!(upstream.calls(), 5);

    // A limit with a longer window refuses: a day is longer than `max_wait`.
    let impatient = self::layer(Limit::per_day("day", 1).by(anyone)).wait_up_to(TEST_TIMEOUT);
    assert_eq!(upstream.call(&impatient, &[]).await.status(), 200);
    let asked = Instant::now();
    let refused = upstream.call(&impatient, &[]).await;
    assert!(
        matches!(refused.extensions().get(), Some(Rejection::Limited(_))),
        "{refused:?}"
    );
    assert!(asked.elapsed() < TEST_TIMEOUT / 2, "{:?}", asked.elapsed());
}

#[tokio::test]
async fn a_chosen_limit_waits_and_settles_like_any_other() {
    let choose = |_: &Parts| TIGHT;
    let layer = layer(KeyedLimit::chosen(anyone, choose).cost(|_| 2).settle(|_| 1))
        .wait_up_to(TEST_TIMEOUT);
    let (upstream, asked) = (Upstream::start().await, Instant::now());
    for remaining in ["1", "1"] {
        let response = upstream.call(&layer, &[]).await;
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())[1]),
            (200, Some(remaining))
        );
    }
    assert!(asked.elapsed() >= TIGHT.window(), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn an_upstreams_refusal_blocks_the_limit() {
    let log = Log::start();
    let says = [
        (
            &[("answer", "429"), ("answer-retry-after", "30")][..],
            429,
            "30",
        ),
        (
            &[("answer", "503"), ("answer-retry-after", "20")],
            503,
            "20",
        ),
        (
            &[
                ("answer-x-ratelimit-remaining", "0"),
                ("answer-x-ratelimit-reset", "10"),
            ],
            200,
            "10",
        ),
        (&[("answer", "429")], 429, "1"),
    ];
    for (headers, status, wait) in says {
        let (upstream, layer) = (
            Upstream::start().await,
            layer(CALLS.by(anyone).heed_upstream()),
        );
        assert_eq!(upstream.call(&layer, &[]).await.status(), 200);
        assert_eq!(upstream.call(&layer, headers).await.status(), status);
        let refused = upstream.call(&layer, &[]).await;
        assert_eq!(
            (refused.status().as_u16(), figures(refused.headers())),
            (429, [Some("10"), Some("0"), Some(wait), Some(wait)])
        );
        assert_eq!(upstream.calls(), 2);
    }
    assert!(
        log.text().contains("an upstream says to stay away"),
        "{}",
        log.text()
    );
}

/// Whatever the upstream says about its limits.
#[tokio::test]
async fn an_upstream_that_is_not_heeded_blocks_nothing() {
    let (upstream, layer) = (Upstream::start().await, layer(CALLS.by(anyone)));
    for _ in 0..3 {
        let response = upstream
            .call(&layer, &[("answer", "429"), ("answer-retry-after", "30")])
            .await;
        assert_eq!(response.headers()["retry-after"], "30");
    }
    assert_eq!(upstream.calls(), 3);
}

#[tokio::test]
async fn a_heeded_upstreams_headers_pass_through() {
    let upstream = Upstream::start().await;
    let layer = layer(CALLS.by(anyone).heed_upstream().settle(|_| 3));
    let response = upstream
        .call(&layer, &[("answer-x-ratelimit-remaining", "4000")])
        .await;
    assert_eq!(
        figures(response.headers()),
        [None, Some("4000"), None, None]
    );
    let response = upstream.call(&layer, &[]).await;
    assert_eq!(figures(response.headers()), [None; 4]);
}

#[tokio::test]
async fn a_waiting_call_is_sent_when_the_block_ends() {
    let (upstream, layer) = (
        Upstream::start().await,
        layer(CALLS.by(anyone).heed_upstream()),
    );
    let layer = layer.wait_up_to(TEST_TIMEOUT);
    assert_eq!(
        upstream
            .call(&layer, &[("answer", "429"), ("answer-retry-after", "1")])
            .await
            .status(),
        429
    );
    let asked = Instant::now();
    assert_eq!(upstream.call(&layer, &[]).await.status(), 200);
    assert!(
        asked.elapsed() > Duration::from_millis(800),
        "{:?}",
        asked.elapsed()
    );
}

/// The settlement and the block are independent. A shadow limit is not blocked.
#[tokio::test]
async fn a_refusal_settles_the_call_and_blocks_every_heeding_limit() {
    let store = MemoryStore::new();
    let (free, tried, plain) = (
        Limit::per_hour("free", 9),
        Limit::per_hour("tried", 9),
        Limit::per_hour("plain", 9),
    );
    let layer = RateLimitLayer::new(store.clone())
        .limit(
            free.clone()
                .by(anyone)
                .cost(|_| 4)
                .settle(|_| 0)
                .heed_upstream(),
        )
        .limit(tried.clone().by(anyone).in_shadow().heed_upstream())
        .limit(plain.clone().by(anyone).heed_upstream())
        .deadline(TEST_TIMEOUT);
    let upstream = Upstream::start().await;
    upstream
        .call(&layer, &[("answer", "429"), ("answer-retry-after", "60")])
        .await;
    let (limiter, mut left) = (Limiter::new(store), Vec::new());
    for limit in [&free, &tried, &plain] {
        let key = anyone(&request().into_parts().0).unwrap();
        let decision = limiter.peek(limit, key).await.unwrap();
        left.push((
            decision.remaining(),
            decision.binding().reset_after() <= Duration::from_secs(60),
        ));
    }
    assert_eq!(left, [(0, true), (8, false), (0, true)]);
}

/// Latencies of the upstream, to the nanosecond.
const TIMES: [Duration; 3] = [
    Duration::from_nanos(300_001_500),
    Duration::from_nanos(999_999_999),
    Duration::from_secs(3),
];

/// The settled cost counts from the response, whether the lease has ended by then or not.
#[tokio::test(start_paused = true)]
async fn a_heeded_response_counts_whenever_its_lease_ends() {
    let key = || anyone(&request().into_parts().0).unwrap();
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::FIXED_WINDOW,
        Algorithm::SLIDING_WINDOW_COUNTER,
    ] {
        for (heeds, took) in [false, true]
            .into_iter()
            .flat_map(|heeds| TIMES.map(|took| (heeds, took)))
        {
            let limit = Limit::per_hour("calls", 10).with_algorithm(algorithm);
            // By a clock at the beginning of an hour, so that no hour ends meanwhile.
            let clock = ManualClock::new();
            let since_1970 = clock.now().duration_since(UNIX_EPOCH).unwrap();
            clock.step_back(Duration::from_secs(since_1970.as_secs() % 3_600));
            let limiter = Limiter::new(MemoryStore::new().clock(&clock));
            let keyed = limit
                .clone()
                .by(anyone)
                .settle(|_| 5)
                .lease(Duration::from_secs(1));
            let keyed = if heeds { keyed.heed_upstream() } else { keyed };
            let upstream = service_fn(move |_: Request<Body>| {
                clock.advance(took);
                async move {
                    advance(took).await;
                    Ok::<_, Infallible>(Response::new(Body::empty()))
                }
            });
            let app = RateLimitLayer::new(limiter.clone())
                .limit(keyed)
                .layer(upstream);
            assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
            let standing = limiter.peek(&limit, key()).await.unwrap();
            let reserved = standing.binding().reserved;
            assert_eq!(
                (standing.binding().used, reserved),
                (5, 0),
                "{algorithm:?}, heeds: {heeds}, {took:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_heeded_response_after_its_lease_counts_on_redis() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::FIXED_WINDOW,
        Algorithm::SLIDING_WINDOW_COUNTER,
    ] {
        let limit = Limit::per_day("calls", 10).with_algorithm(algorithm);
        let keyed = limit
            .clone()
            .by(anyone)
            .settle(|_| 5)
            .lease(Duration::from_millis(50))
            .heed_upstream();
        let upstream = service_fn(|_: Request<Body>| async {
            sleep(Duration::from_millis(120)).await;
            Ok::<_, Infallible>(Response::new(Body::empty()))
        });
        let app = RateLimitLayer::new(limiter.clone())
            .limit(keyed)
            .layer(upstream);
        assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
        let key = anyone(&request().into_parts().0).unwrap();
        assert_eq!(
            limiter
                .peek(&limit, key.clone())
                .await
                .unwrap()
                .binding()
                .used,
            5,
            "{algorithm:?}"
        );
        limiter.reset(&limit, key).await.unwrap();
    }
}

/// Sends a call through the layer and a client of reqwest.
async fn call_by_reqwest(
    layer: &RateLimitLayer,
    request: Request<Bytes>,
) -> (u16, HeaderMap, String) {
    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .build()
        .unwrap();
    let client = service_fn(move |request: Request<Bytes>| {
        let client = client.clone();
        async move {
            client
                .execute(request.try_into()?)
                .await
                .map(Response::from)
        }
    });
    let response = layer.layer(client).oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = http_body_util::BodyExt::collect(body)
        .await
        .unwrap()
        .to_bytes();
    (
        parts.status.as_u16(),
        parts.headers,
        String::from_utf8(body.into()).unwrap(),
    )
}

#[tokio::test]
async fn a_client_of_reqwest_is_limited_and_heeds_its_upstream() {
    let (upstream, layer) = (
        Upstream::start().await,
        layer(CALLS.by(anyone).heed_upstream()),
    );
    let call = |headers: &[(&str, &str)]| {
        let request = headers
            .iter()
            .fold(Request::get(&upstream.url), |request, (name, value)| {
                request.header(*name, *value)
            });
        request.body(Bytes::new()).unwrap()
    };
    let (status, _, _) = call_by_reqwest(&layer, call(&[])).await;
    assert_eq!(status, 200);
    let (status, _, _) = call_by_reqwest(
        &layer,
        call(&[("answer", "429"), ("answer-retry-after", "30")]),
    )
    .await;
    assert_eq!(status, 429);
    let (status, headers, body) = call_by_reqwest(&layer, call(&[])).await;
    assert_eq!(
        (status, figures(&headers)),
        (429, [Some("10"), Some("0"), Some("30"), Some("30")])
    );
    assert!(body.contains(r#""violated-policies":["calls"]"#), "{body}");
    assert_eq!(upstream.calls(), 2);
}

/// The layer sees only the last response of a client that follows redirects by itself, and would
/// take the refusal for that of the first host.
#[tokio::test]
async fn a_redirect_blocks_only_the_host_that_refuses() {
    let busy = || ready((StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "30")]));
    let refuses = serve(Router::new().route("/", get(busy))).await;
    let location = refuses.clone();
    let moved = move || ready(Redirect::temporary(&location));
    let moves = Router::new()
        .route("/moved", get(moved))
        .route("/", get(|| ready("hello")));
    let moves = serve(moves).await;
    let layer = layer(CALLS.by(UpstreamHost).heed_upstream());
    let mut statuses = Vec::new();
    for url in [format!("{moves}/moved"), refuses.clone(), moves, refuses] {
        let request = Request::get(url).body(Bytes::new()).unwrap();
        let (status, headers, _) = call_by_reqwest(&layer, request).await;
        statuses.push((status, figures(&headers)[3].map(str::to_owned)));
    }
    let wait = || Some("30".to_owned());
    assert_eq!(
        statuses,
        [(307, None), (503, wait()), (200, None), (429, wait())]
    );
}

/// Without a layer, each call acquires its unit first.
#[tokio::test]
async fn a_call_of_reqwest_waits_for_the_limiter() {
    let (upstream, limiter) = (Upstream::start().await, Limiter::new(MemoryStore::new()));
    let (client, asked) = (
        reqwest::Client::builder().no_proxy().build().unwrap(),
        Instant::now(),
    );
    for _ in 0..5 {
        assert!(
            limiter
                .acquire(&TIGHT, "token", 1, TEST_TIMEOUT)
                .await
                .unwrap()
                .is_allowed()
        );
        assert_eq!(
            client.get(&upstream.url).send().await.unwrap().status(),
            200
        );
    }
    assert!(
        asked.elapsed() >= 2 * TIGHT.window(),
        "{:?}",
        asked.elapsed()
    );
    assert_eq!(upstream.calls(), 5);
}

/// Sends a call again when its `Retry-After` is over, this many times.
#[derive(Clone)]
struct RetryAfter(u32);

impl<B, E> Policy<Request<Bytes>, Response<B>, E> for RetryAfter {
    type Future = Sleep;

    fn retry(
        &mut self,
        _: &mut Request<Bytes>,
        result: &mut Result<Response<B>, E>,
    ) -> Option<Sleep> {
        let seconds = result
            .as_ref()
            .ok()?
            .headers()
            .get(RETRY_AFTER)?
            .to_str()
            .ok()?
            .parse()
            .ok()?;
        self.0 = self.0.checked_sub(1)?;
        Some(sleep(Duration::from_secs(seconds)))
    }

    fn clone_request(&mut self, request: &Request<Bytes>) -> Option<Request<Bytes>> {
        Some(request.clone())
    }
}

/// The first call is refused for a second by the upstream. Its retry is counted, and comes after
/// those that wait already.
#[tokio::test(start_paused = true)]
async fn a_retry_outside_of_the_layer_waits_at_the_end_of_the_line() {
    let slow = Limit::per("slow", 1, Duration::from_secs(2));
    let (served, begun) = (
        Arc::new(Mutex::new(Vec::new())),
        tokio::time::Instant::now(),
    );
    let log = Arc::clone(&served);
    let upstream = service_fn(move |request: Request<Bytes>| {
        let mut log = log.lock().unwrap();
        log.push((request.uri().path().to_owned(), begun.elapsed().as_secs()));
        let response = Response::builder().status(if log.len() == 1 { 503 } else { 200 });
        let response = if log.len() == 1 {
            response.header(RETRY_AFTER, 1)
        } else {
            response
        };
        ready(Ok::<_, Infallible>(response.body(Body::empty()).unwrap()))
    });
    let limits = layer(slow.by(anyone)).wait_up_to(Duration::from_secs(60));
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new(RetryAfter(1)))
        .layer(limits)
        .service(upstream);
    let mut calls = JoinSet::new();
    for path in ["/first", "/second", "/third"] {
        let request = Request::get(path).body(Bytes::new()).unwrap();
        calls.spawn(client.clone().oneshot(request));
        yield_now().await;
    }
    for response in calls.join_all().await {
        assert_eq!(response.unwrap().status(), 200);
    }
    let served = served.lock().unwrap();
    let served: Vec<_> = served
        .iter()
        .map(|(path, second)| (path.as_str(), *second))
        .collect();
    assert_eq!(
        served,
        [("/first", 0), ("/second", 2), ("/third", 4), ("/first", 6)]
    );
}

/// The layer's own refusal says when to come back, too. A call that never fits does not, so it is
/// not tried again.
#[tokio::test(start_paused = true)]
async fn a_retry_comes_back_when_the_layer_says_so() {
    let one = Limit::per("one", 1, Duration::from_secs(5));
    let cost = |request: &Parts| {
        if request.uri.path() == "/too-large" {
            2
        } else {
            1
        }
    };
    let upstream =
        service_fn(|_: Request<Bytes>| ready(Ok::<_, Infallible>(Response::new(Body::empty()))));
    let limits = layer(one.by(anyone)).cost(cost);
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new(RetryAfter(1)))
        .layer(limits)
        .service(upstream);
    let begun = tokio::time::Instant::now();
    for (path, status, second) in [("/", 200, 0), ("/", 200, 5), ("/too-large", 429, 5)] {
        let request = Request::get(path).body(Bytes::new()).unwrap();
        let response = client.clone().oneshot(request).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), begun.elapsed().as_secs()),
            (status, second),
            "{path}"
        );
    }
}
