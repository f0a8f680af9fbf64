//! `heed_upstream`: which limits an upstream blocks, for how long, and when it reports nothing new.

use std::{
    convert::Infallible,
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, request::Parts};
use tokio::time::{self, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Check, Decision, Everyone, Header, Key, KeyExtractor, KeyedLimit, Limit, Limiter, MemoryStore,
    RateLimitLayer, Store,
    extract::UpstreamHost,
    middleware::Degraded,
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
    testing::{Fault, FaultyStore},
};

use crate::support::{
    TEST_TIMEOUT,
    log::Log,
    ms,
    requests::{anyone, figures, hello, request, scripted_response},
    seconds,
    stores::{failing, silent},
};

const CALLS: Limit = Limit::per_minute("calls", 10);

fn layer(limit: KeyedLimit) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .deadline(TEST_TIMEOUT)
}

/// Calls an upstream that responds as the request's headers describe.
async fn call(layer: &RateLimitLayer, url: &str, headers: &[(&str, &str)]) -> Response<Body> {
    let upstream = service_fn(|request: Request<Body>| {
        ready(Ok::<_, Infallible>(scripted_response(request.headers())))
    });
    let request = headers
        .iter()
        .fold(Request::get(url), |request, (name, value)| {
            request.header(*name, *value)
        });
    layer
        .layer(upstream)
        .oneshot(request.body(Body::empty()).unwrap())
        .await
        .unwrap()
}

/// A success that says that nothing is left for a day.
const USED_UP: (&str, &str) = ("answer-ratelimit", r#""x";r=0;t=86400"#);

/// Other upstreams and the limit on all calls are not affected.
#[tokio::test]
async fn a_hostile_upstream_blocks_only_itself() {
    let away = [("answer", "429"), ("answer-retry-after", "86400")];
    for says in [&[USED_UP][..], &away] {
        let store = MemoryStore::new();
        let (host, total, account) = (
            Limit::per_hour("host", 50),
            Limit::per_hour("total", 500),
            "account",
        );
        let layer = RateLimitLayer::new(store.clone())
            .limit(host.clone().by(UpstreamHost).heed_upstream())
            .limit(total.clone().by(Everyone))
            .limit(Limit::per_hour(account, 500).by(anyone));
        call(&layer, "http://hostile.example/", says).await;
        for url in [
            "http://hostile.example/",
            "http://HOSTILE.example.:80/other?x",
        ] {
            let refused = call(&layer, url, &[]).await;
            assert_eq!(
                (refused.status().as_u16(), figures(refused.headers())[0]),
                (429, Some("50")),
                "{url}"
            );
        }
        for url in [
            "http://honest.example/",
            "http://hostile.example:8080/",
            "https://hostile.example/",
        ] {
            assert_eq!(call(&layer, url, &[]).await.status(), 200, "{url}");
        }
        let everyone = Everyone.extract(&request().into_parts().0).unwrap();
        assert_eq!(
            Limiter::new(store)
                .peek(&total, everyone)
                .await
                .unwrap()
                .binding()
                .used,
            4
        );
    }
}

#[tokio::test]
async fn an_upstream_blocks_a_limit_for_its_window_at_most() {
    let says: [&[(&str, &str)]; 3] = [
        &[USED_UP],
        &[("answer", "429"), ("answer-retry-after", "86400")],
        &[
            ("answer-x-ratelimit-remaining", "0"),
            ("answer-x-ratelimit-reset", "86400"),
        ],
    ];
    for says in says {
        let layer = layer(CALLS.by(UpstreamHost).heed_upstream());
        call(&layer, "http://upstream.example/", says).await;
        let refused = call(&layer, "http://upstream.example/", &[]).await;
        assert_eq!(
            (refused.status().as_u16(), figures(refused.headers())[3]),
            (429, Some("60"))
        );
    }
}

#[tokio::test]
async fn a_limit_heeds_an_upstream_if_it_says_so() {
    let tenant = || Header::new("x-tenant");
    let closure = |parts: &Parts| UpstreamHost.extract(parts);
    let chosen = || KeyedLimit::chosen(UpstreamHost, |_: &Parts| CALLS);
    for limit in [
        CALLS.by(UpstreamHost),
        CALLS.by(UpstreamHost.and(tenant())),
        CALLS.by(UpstreamHost.or(tenant())),
        CALLS.by(tenant()),
        CALLS.by(closure),
        CALLS.by(Everyone),
        chosen(),
    ] {
        for heeds in [false, true] {
            let log = Log::start();
            let layer = layer(if heeds {
                limit.clone().heed_upstream()
            } else {
                limit.clone()
            });
            call(
                &layer,
                "http://upstream.example/",
                &[("x-tenant", "7"), ("answer", "429")],
            )
            .await;
            let closed = call(&layer, "http://upstream.example/", &[("x-tenant", "7")])
                .await
                .status()
                == 429;
            assert_eq!(closed, heeds, "{}", log.text());
            assert_eq!(log.text().contains("says to stay away"), heeds);
        }
    }
}

/// A store that decides once and then fails.
#[derive(Clone)]
struct Once {
    store: MemoryStore,
    asked: Arc<AtomicUsize>,
}

impl Store for Once {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        match self.asked.fetch_add(1, Ordering::Relaxed) {
            0 => self.store.decide(check),
            _ => failing().decide(check),
        }
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }
}

/// A store that takes a millisecond for each operation, and never decides a check of `SILENT`
/// alone.
#[derive(Clone)]
struct Slow(MemoryStore);

const SILENT: &str = "silent";

impl Slow {
    fn after<T: 'static>(answer: StoreFuture<T>) -> StoreFuture<T> {
        Box::pin(async move {
            sleep(Duration::from_millis(1)).await;
            answer.await
        })
    }
}

impl Store for Slow {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let is_silent = check
            .charges()
            .all(|charge| charge.limit().name() == SILENT);
        if is_silent {
            silent().decide(check)
        } else {
            Self::after(self.0.decide(check))
        }
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        Self::after(self.0.settle(settlement))
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        Self::after(self.0.reset(limit, key))
    }
}

/// Calls an upstream that takes so long to respond, by the store's clock.
async fn call_that_takes(
    layer: &RateLimitLayer,
    clock: &ManualClock,
    time: Duration,
    headers: &[(&str, &str)],
) -> Response<Body> {
    let upstream = service_fn(|request: Request<Body>| {
        clock.advance(time);
        ready(Ok::<_, Infallible>(scripted_response(request.headers())))
    });
    let request = headers
        .iter()
        .fold(Request::get("/"), |request, (name, value)| {
            request.header(*name, *value)
        });
    layer
        .layer(upstream)
        .oneshot(request.body(Body::empty()).unwrap())
        .await
        .unwrap()
}

/// A layer with two calls a minute, and the clock of its store.
fn two_a_minute() -> (RateLimitLayer, ManualClock) {
    let clock = ManualClock::new();
    let store = MemoryStore::new().clock(&clock);
    let two = Limit::per_minute("two", 2).by(anyone).heed_upstream();
    (RateLimitLayer::new(store).limit(two), clock)
}

/// Calls with different latencies arrive at the upstream closer together than they were sent. So
/// each counts from its response, at most a tenth of the window later.
#[tokio::test]
async fn a_heeded_call_counts_from_its_response() {
    for (takes, later) in [(0, 0), (4, 4), (6, 6), (30, 6)] {
        let (layer, clock) = two_a_minute();
        for _ in 0..2 {
            assert_eq!(
                call_that_takes(&layer, &clock, seconds(takes), &[])
                    .await
                    .status(),
                200
            );
        }
        // The first call was sent before the second.
        clock.advance(seconds(60 + later - 2 * takes) - Duration::from_micros(1));
        assert_eq!(
            call_that_takes(&layer, &clock, seconds(0), &[])
                .await
                .status(),
            429,
            "{takes}"
        );
        clock.advance(Duration::from_micros(1));
        assert_eq!(
            call_that_takes(&layer, &clock, seconds(0), &[])
                .await
                .status(),
            200,
            "{takes}"
        );
    }
}

/// The limit is exhausted here as well, so a success that says so is no news. A unit may leave
/// sooner than the upstream says, because it rounds times up.
#[tokio::test]
async fn a_success_that_reports_nothing_new_blocks_nothing() {
    let says = [
        ("answer-x-ratelimit-remaining", "0"),
        ("answer-x-ratelimit-reset", "30"),
    ];
    // Exhausted by this call. While it is answered, an earlier call leaves the window.
    let (layer, clock) = two_a_minute();
    assert_eq!(
        call_that_takes(&layer, &clock, seconds(59), &[])
            .await
            .status(),
        200
    );
    assert_eq!(
        call_that_takes(&layer, &clock, seconds(7), &says)
            .await
            .status(),
        200
    );
    assert_eq!(
        call_that_takes(&layer, &clock, seconds(0), &[])
            .await
            .status(),
        200
    );

    // Exhausted by a later call that is answered earlier.
    let (layer, clock) = two_a_minute();
    let (inner, time) = (layer.clone(), clock.clone());
    let slow = layer.layer(service_fn(move |request: Request<Body>| {
        let (inner, time) = (inner.clone(), time.clone());
        async move {
            assert_eq!(
                call_that_takes(&inner, &time, seconds(40), &[])
                    .await
                    .status(),
                200
            );
            Ok::<_, Infallible>(scripted_response(request.headers()))
        }
    }));
    let request = says
        .iter()
        .fold(Request::get("/"), |request, (name, value)| {
            request.header(*name, *value)
        });
    assert_eq!(
        slow.oneshot(request.body(Body::empty()).unwrap())
            .await
            .unwrap()
            .status(),
        200
    );
    assert_eq!(
        call_that_takes(&layer, &clock, seconds(0), &[])
            .await
            .status(),
        429,
        "both are used"
    );
    clock.advance(seconds(26));
    assert_eq!(
        call_that_takes(&layer, &clock, seconds(0), &[])
            .await
            .status(),
        200,
        "both have left"
    );
}

/// With units left here, it is news.
#[tokio::test]
async fn a_success_that_reports_more_use_than_counted_blocks_the_limit() {
    let says = [
        ("answer-x-ratelimit-remaining", "0"),
        ("answer-x-ratelimit-reset", "30"),
    ];
    let (layer, clock) = two_a_minute();
    assert_eq!(
        call_that_takes(&layer, &clock, seconds(0), &says)
            .await
            .status(),
        200
    );
    clock.advance(seconds(29));
    assert_eq!(
        figures(
            call_that_takes(&layer, &clock, seconds(0), &[])
                .await
                .headers()
        )[3],
        Some("1")
    );
    clock.advance(seconds(1));
    assert_eq!(
        call_that_takes(&layer, &clock, seconds(0), &[])
            .await
            .status(),
        200
    );
}

/// Limits that had units left are blocked.
#[tokio::test]
async fn a_success_blocks_only_limits_with_units_left() {
    let store = MemoryStore::new();
    let (one, nine) = (Limit::per_hour("one", 1), Limit::per_hour("nine", 9));
    let layer = RateLimitLayer::new(store.clone())
        .limit(one.clone().by(anyone).heed_upstream())
        .limit(nine.clone().by(anyone).heed_upstream());
    let says = [
        ("answer-x-ratelimit-remaining", "0"),
        ("answer-x-ratelimit-reset", "30"),
    ];
    assert_eq!(call(&layer, "/", &says).await.status(), 200);
    let (limiter, key) = (
        Limiter::new(store),
        anyone(&request().into_parts().0).unwrap(),
    );
    let (mut left, mut ends_soon) = (Vec::new(), Vec::new());
    for limit in [&one, &nine] {
        let decision = limiter.peek(limit, key.clone()).await.unwrap();
        left.push(decision.remaining());
        ends_soon.push(decision.binding().reset_after() <= seconds(30));
    }
    assert_eq!((left, ends_soon), (vec![0; 2], vec![false, true]));
}

/// Returned units are free here, whatever was left when the call was admitted.
#[tokio::test]
async fn a_success_blocks_a_limit_whose_call_returned_units() {
    for (cost, closes) in [(2, false), (0, true)] {
        let store = MemoryStore::new();
        let layer = RateLimitLayer::new(store.clone());
        let limit = Limit::per_hour("calls", 2);
        let layer = layer.limit(
            limit
                .clone()
                .by(anyone)
                .cost(|_| 2)
                .settle(move |_| cost)
                .heed_upstream(),
        );
        let says = [
            ("answer-x-ratelimit-remaining", "0"),
            ("answer-x-ratelimit-reset", "30"),
        ];
        assert_eq!(call(&layer, "/", &says).await.status(), 200);
        let left = Limiter::new(store)
            .peek(&limit, anyone(&request().into_parts().0).unwrap())
            .await
            .unwrap();
        assert_eq!(
            (
                left.remaining(),
                left.binding().reset_after() <= seconds(30)
            ),
            (0, closes)
        );
    }
}

/// A refusal shows that the count here is wrong, also for an exhausted limit whose oldest unit
/// leaves sooner.
#[tokio::test]
async fn a_refusal_blocks_an_exhausted_limit_until_the_stated_time() {
    let says: [&[(&str, &str)]; 3] = [
        &[("answer", "429"), ("answer-retry-after", "40")],
        &[("answer", "503"), ("answer-retry-after", "40")],
        &[
            ("answer", "403"),
            ("answer-x-ratelimit-remaining", "0"),
            ("answer-x-ratelimit-reset", "40"),
        ],
    ];
    for says in says {
        let (layer, clock) = two_a_minute();
        assert_eq!(
            call_that_takes(&layer, &clock, seconds(0), &[])
                .await
                .status(),
            200
        );
        call_that_takes(&layer, &clock, seconds(30), says).await;
        let refused = call_that_takes(&layer, &clock, seconds(0), &[]).await;
        assert_eq!(
            (refused.status().as_u16(), figures(refused.headers())[3]),
            (429, Some("40")),
            "{says:?}"
        );
        clock.advance(seconds(39));
        let refused = call_that_takes(&layer, &clock, seconds(0), &[]).await;
        assert_eq!(
            (refused.status().as_u16(), figures(refused.headers())[3]),
            (429, Some("1")),
            "{says:?}"
        );
        clock.advance(seconds(1));
        assert_eq!(
            call_that_takes(&layer, &clock, seconds(0), &[])
                .await
                .status(),
            200,
            "{says:?}"
        );
    }
}

/// The upstream counts like the client and reports it. Callers wait as long as necessary.
#[tokio::test(start_paused = true)]
async fn heeding_an_upstream_with_the_same_limit_costs_no_time() {
    const TEN: Limit = Limit::per_second("ten", 10);
    const CALLS: usize = 1_000;
    const LATENCY: Duration = Duration::from_millis(20);

    let mut times = Vec::new();
    for (callers, heeds) in [
        (1, false),
        (1, true),
        (5, false),
        (5, true),
        (20, false),
        (20, true),
    ] {
        let counted = RateLimitLayer::new(MemoryStore::new())
            .limit(TEN.by(anyone))
            .layer(service_fn(hello));
        let upstream = service_fn(move |request: Request<Body>| {
            let counted = counted.clone();
            async move {
                sleep(LATENCY).await;
                let response = counted.oneshot(request).await;
                sleep(LATENCY).await;
                response
            }
        });
        let limit = if heeds {
            TEN.by(anyone).heed_upstream()
        } else {
            TEN.by(anyone)
        };
        let client = RateLimitLayer::new(MemoryStore::new()).limit(limit);
        let client = client.wait_up_to(Duration::from_secs(600)).layer(upstream);
        let begun = time::Instant::now();
        let tasks = (0..callers).map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                for _ in 0..CALLS / callers {
                    assert_eq!(
                        client.clone().oneshot(request()).await.unwrap().status(),
                        200
                    );
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        times.push(begun.elapsed());
    }
    assert!(
        times.chunks(2).all(|times| times[1] < times[0] * 11 / 10),
        "{times:?}"
    );
}

/// Neither many limits nor one that cannot be blocked delays the others.
#[tokio::test(start_paused = true)]
async fn all_limits_are_blocked_concurrently() {
    let store = MemoryStore::new();
    let others: Vec<_> = (0..32)
        .map(|number| Limit::new(format!("calls-{number}"), 10, seconds(3_600)).unwrap())
        .collect();
    let silent = Limit::per_hour(SILENT, 10);
    let all = [silent]
        .into_iter()
        .chain(others.clone())
        .map(|limit| limit.by(anyone).heed_upstream());
    let layer = RateLimitLayer::new(Slow(store.clone()))
        .limits(all)
        .unwrap();
    let app = layer.layer(service_fn(|request: Request<Body>| {
        ready(Ok::<_, Infallible>(scripted_response(request.headers())))
    }));
    let reported = Request::get("/")
        .header("answer", "429")
        .header("answer-retry-after", "60")
        .body(Body::empty());
    assert_eq!(app.oneshot(reported.unwrap()).await.unwrap().status(), 429);
    let limiter = Limiter::new(store);
    let key = anyone(&request().into_parts().0).unwrap();
    for limit in &others {
        assert_eq!(
            limiter.peek(limit, key.clone()).await.unwrap().remaining(),
            0
        );
    }
}

#[tokio::test]
async fn a_failed_block_leaves_the_response_unchanged() {
    let log = Log::start();
    let store = Once {
        store: MemoryStore::new(),
        asked: Arc::default(),
    };
    let layer = RateLimitLayer::new(store).limit(CALLS.by(anyone).heed_upstream());
    let app = layer.layer(service_fn(|request: Request<Body>| {
        ready(Ok::<_, Infallible>(scripted_response(request.headers())))
    }));
    let reported = Request::get("/")
        .header("answer", "429")
        .header("answer-retry-after", "7")
        .body(Body::empty())
        .unwrap();
    let response = app.clone().oneshot(reported).await.unwrap();
    assert_eq!(
        (response.status().as_u16(), figures(response.headers())[3]),
        (429, Some("7"))
    );
    assert!(
        log.text().contains("its limits stay open"),
        "{}",
        log.text()
    );

    let response = app.oneshot(request()).await.unwrap();
    assert!(response.status() == 200 && response.extensions().get::<Degraded>().is_some());
}

/// To find out whether anything is left, and then to block, takes longer than the deadline.
#[tokio::test(start_paused = true)]
async fn a_block_that_is_too_slow_goes_on_behind_the_response() {
    for (takes, is_blocked) in [(30, true), (80, false)] {
        let (log, memory) = (Log::start(), MemoryStore::new());
        let store = FaultyStore::new(memory.clone());
        let layer = RateLimitLayer::new(store.clone())
            .limit(CALLS.by(anyone).heed_upstream())
            .deadline(ms(50));
        let upstream = service_fn(move |request: Request<Body>| {
            store.set(Fault::Slow(ms(takes)));
            ready(Ok::<_, Infallible>(scripted_response(request.headers())))
        });
        let request_used_up = Request::get("/").header(USED_UP.0, USED_UP.1);
        let request_used_up = request_used_up.body(Body::empty()).unwrap();
        let begun = time::Instant::now();
        let response = layer
            .layer(upstream)
            .oneshot(request_used_up)
            .await
            .unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(begun.elapsed(), ms(50));
        sleep(ms(100)).await;
        let key = anyone(&request().into_parts().0).unwrap();
        let left = Limiter::new(memory).peek(&CALLS, key).await.unwrap();
        assert_eq!(left.remaining() == 0, is_blocked);
        let text = log.text();
        assert_eq!(text.contains("its limits stay open"), !is_blocked, "{text}");
    }
}
