//! Hostile keys and requests, and clients that obey.

use http::request::Parts;
use proptest::prelude::*;
use tonic::Code;
use tonic_types::StatusExt;
use tower_sliding_window::{
    Header, Key, KeyExtractor, Limiter, Rejection, Store,
    extract::KeyError,
    limiter::Share,
    middleware::{GrpcOr, GrpcResponse, JsonResponse},
    store,
};

use super::*;
use crate::support::{
    Numbers, one_thread,
    stores::{failing, silent},
};

fn texts() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[\"\\\\%\u{0}-\u{1f}\u{7f}-\u{9f}\u{2028}é😀a1]{0,40}",
        "%[0-9A-Fa-f]{2}{0,9}"
    ]
}

/// Any text of a key error is valid JSON, and arrives in gRPC as it was.
#[test]
fn any_text_of_a_key_error_arrives_whole() {
    let runtime = one_thread();
    proptest!(|(text in texts(), status in 400_u16..500)| {
        let error = KeyError::invalid(text.clone(), text.clone()).with_status(status.try_into().unwrap());
        let limit = Limit::per_hour("calls", 1).by(move |_: &Parts| -> Result<Key, KeyError> { Err(error.clone()) });
        let layer = RateLimitLayer::new(MemoryStore::new()).limit(limit).respond_with(GrpcOr(JsonResponse));
        let app = BoxCloneService::new(layer.layer(handler()));
        let expected = format!("The request cannot be counted: {text}: {text}.");
        let response = runtime.block_on(ask(&app));
        prop_assert_eq!(response.status().as_u16(), status);
        let body: serde_json::Value = serde_json::from_str(&runtime.block_on(json(response))).unwrap();
        prop_assert_eq!(body["detail"].as_str(), Some(&*expected));
        prop_assert_eq!(body["status"].as_u64(), Some(u64::from(status)));
        let call = Request::post("/").header("content-type", "application/grpc").body(Body::empty()).unwrap();
        let response = runtime.block_on(app.clone().oneshot(call)).unwrap();
        prop_assert_eq!(response.status(), 200);
        let status = tonic::Status::from_header_map(response.headers()).unwrap();
        prop_assert_eq!(status.message(), expected);
        prop_assert!(axum::body::HttpBody::is_end_stream(response.body()));
    });
}

/// Ten thousand lines of the service, and one of a megabyte.
#[tokio::test]
async fn huge_fields_of_a_service_become_one_list() {
    let service = BoxCloneService::new(service_fn(|_: Request<Body>| {
        let mut response = Response::new(Body::empty());
        for number in 0..10_000 {
            response
                .headers_mut()
                .append("ratelimit", format!("\"a{number}\";r=1").parse().unwrap());
        }
        let large = format!("\"{}\";r=1", "x".repeat(1 << 20));
        response
            .headers_mut()
            .append("ratelimit", large.parse().unwrap());
        response
            .headers_mut()
            .append("ratelimit", HeaderValue::from_static(" \t"));
        ready(Ok::<_, Infallible>(response))
    }));
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("own", 5).by(anyone));
    let app = around(&layer.headers(HeaderSets::RATE_LIMIT), service);
    let items = items(ask(&app).await.headers(), "ratelimit").unwrap();
    assert_eq!((items.len(), &*items[0].0), (10_002, "own"));
}

fn chosen(limit: Limit) -> KeyedLimit {
    KeyedLimit::chosen(anyone, move |_| limit.clone())
}

/// All that a client sees of a response.
async fn seen(response: Response) -> String {
    let head: String = response
        .headers()
        .iter()
        .map(|(name, value)| format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())))
        .collect();
    let details = tonic::Status::from_header_map(response.headers())
        .map(|status| format!("{status:?} {:?}", status.get_error_details()));
    head + &details.unwrap_or_default() + &json(response).await
}

/// However it is counted, a hidden limit is in no header, body or detail.
#[tokio::test]
async fn a_hidden_limit_is_nowhere() {
    let total = || Limit::per_hour("secret", 7);
    let new = || RateLimitLayer::new(MemoryStore::new());
    let layers = [
        new().limit(total().by(anyone).hidden()),
        new().limit(total().by(anyone).hidden().settle(|_| 9)),
        new().limit(total().by(anyone).hidden().settle(|exchange| exchange.cost)),
        new().limit(total().by(anyone).hidden().count_afterwards(|_| 3)),
        new().limit(total().by(anyone).hidden().in_shadow()),
        new().limit(total().by(anyone).hidden().cost(|_| 8)),
        new().limit(total().by(anyone).hidden().cost(|_| 8).in_shadow()),
        new().limit(total().split(3).by(anyone).hidden()),
        new().limit(chosen(total()).hidden()),
        new().limit(chosen(total()).hidden().cost(|_| 8)),
        new().limit(chosen(total()).hidden()).limit(chosen(total())),
        new()
            .limit(chosen(total()).hidden().count_afterwards(|_| 3))
            .limit(chosen(total())),
        new()
            .limit(chosen(total()).hidden().settle(|_| 2))
            .wait_up_to(Duration::from_millis(1)),
    ];
    for (number, layer) in layers.into_iter().enumerate() {
        let layer = layer
            .limit(Limit::per_hour("seen", 1_000).by(anyone).settle(|_| 1))
            .headers(HeaderSets::BOTH);
        let json = around(&layer.clone(), handler());
        let grpc = BoxCloneService::new(layer.respond_with(GrpcResponse).layer(handler()));
        for sent in 0..20 {
            let seen = seen(ask(if sent % 2 == 0 { &json } else { &grpc }).await).await;
            assert!(!seen.contains("secret"), "{number} {sent}: {seen}");
        }
    }
}

/// One of the layers of the random client, with costs of at most 1.
fn random_layer<S: Store + Clone>(
    store: &S,
    numbers: &mut Numbers,
    names: [&str; 2],
    history: u64,
) -> RateLimitLayer {
    let limits = names.map(|name| {
        let window = Duration::from_millis(300 + numbers.below(20_000));
        let limit = Limit::new(format!("{name}-{history}"), 2 + numbers.below(8), window).unwrap();
        let limit = limit.with_algorithm(
            crate::support::ALGORITHMS
                [numbers.below(crate::support::ALGORITHMS.len() as u64) as usize],
        );
        match numbers.below(6) {
            0 => limit.by(anyone).settle(|_| 1),
            1 => limit.by(anyone).settle(|_| 0),
            2 => limit.by(anyone).count_afterwards(|_| 1),
            3 => limit.split(2).by(anyone),
            4 => chosen(limit),
            _ => limit.by(anyone),
        }
    });
    let layer = RateLimitLayer::new(store.clone())
        .limits(limits)
        .unwrap()
        .headers(HeaderSets::RATE_LIMIT);
    layer.deadline(crate::support::TEST_TIMEOUT).fail_closed()
}

async fn an_obedient_client<S: Store + Clone>(fixture: crate::support::Fixture<S>, histories: u64) {
    let mut numbers = Numbers(5);
    let mut waits = 0;
    for history in 0..histories {
        let inner = around(
            &random_layer(&fixture.store, &mut numbers, ["c", "d"], history),
            handler(),
        );
        let app = around(
            &random_layer(&fixture.store, &mut numbers, ["a", "b"], history),
            inner,
        );
        for sent in 0..25 {
            let response = ask(&app).await;
            assert_eq!(
                response.status(),
                200,
                "{history} {sent} {:?}",
                response.headers()
            );
            let wait = obedient_wait(response.headers());
            waits += u64::from(!wait.is_zero());
            fixture
                .clock
                .advance(wait + Duration::from_millis(numbers.below(2) * numbers.below(900)));
        }
    }
    assert!(waits > histories, "{waits}");
}

/// A client that obeys only the fields, under limits that settle, are counted afterwards, split or
/// chosen.
#[tokio::test]
async fn an_obedient_client_is_never_refused_however_limits_count() {
    an_obedient_client(crate::support::memory(), 1_500).await;
}

#[tokio::test]
async fn an_obedient_client_is_never_refused_however_limits_count_on_redis() {
    an_obedient_client(crate::support::redis(), 60).await;
}

/// At any cost that fits: after `t`, more is left than `r`. A refusal has the same figures in the
/// body, and no `t` above `Retry-After`.
async fn more_is_left_after_t<S: Store + Clone>(
    fixture: crate::support::Fixture<S>,
    histories: u64,
) {
    let mut numbers = Numbers(6);
    let limiter = Limiter::new(fixture.store.clone()).deadline(crate::support::TEST_TIMEOUT);
    let key = anyone(&request().into_parts().0).unwrap();
    for history in 0..histories {
        let (units, window) = (
            1 + numbers.below(40),
            Duration::from_millis(1 + numbers.below(30_000)),
        );
        let limit = Limit::new(format!("l-{history}"), units, window).unwrap();
        let limit = limit.with_algorithm(
            crate::support::ALGORITHMS
                [numbers.below(crate::support::ALGORITHMS.len() as u64) as usize],
        );
        let cost = Arc::new(AtomicU64::new(1));
        let costs = Arc::clone(&cost);
        let layer = RateLimitLayer::new(limiter.clone())
            .limit(limit.clone().by(anyone))
            .headers(HeaderSets::BOTH);
        let app = around(
            &layer.cost(move |_| costs.load(Ordering::Relaxed)),
            handler(),
        );
        for sent in 0..20 {
            cost.store(numbers.below(units + 1), Ordering::Relaxed);
            let response = ask(&app).await;
            let item = of(
                &items(response.headers(), "ratelimit").unwrap(),
                limit.name(),
            )
            .unwrap();
            let header = |name: &str| {
                response
                    .headers()
                    .get(name)
                    .map(|value| value.to_str().unwrap().parse::<i64>().unwrap())
            };
            assert_eq!(header("x-ratelimit-remaining"), Some(item["r"]));
            let t = item.get("t").copied();
            assert_eq!(
                t.is_none(),
                item["r"] == i64::try_from(units).unwrap(),
                "{:?}",
                response.headers()
            );
            if response.status() == 429 {
                let retry_after = header("retry-after").unwrap();
                assert!(t.unwrap() <= retry_after, "{:?}", response.headers());
                let body: serde_json::Value = serde_json::from_str(&json(response).await).unwrap();
                assert_eq!(body["retry-after"].as_i64(), Some(retry_after));
                assert_eq!(body["violated-policies"][0].as_str(), Some(limit.name()));
            }
            if numbers.below(2) == 0 {
                let Some(t) = t else { continue };
                fixture
                    .clock
                    .advance(Duration::from_secs(t.try_into().unwrap()));
                let left = limiter.peek(&limit, key.clone()).await.unwrap().remaining();
                assert!(
                    i64::try_from(left).unwrap() > item["r"],
                    "{history} {sent}: {item:?}, then {left} of {limit}"
                );
            } else {
                fixture
                    .clock
                    .advance(Duration::from_micros(numbers.below(2_000_000)));
            }
        }
    }
}

#[tokio::test]
async fn after_t_more_is_left() {
    more_is_left_after_t(crate::support::memory(), 2_000).await;
}

#[tokio::test]
async fn after_t_more_is_left_on_redis() {
    more_is_left_after_t(crate::support::redis(), 60).await;
}

/// No backend detail, key or secret in what a client sees.
#[tokio::test]
async fn no_rejection_shows_a_backend_or_a_key() {
    async fn both(layer: RateLimitLayer, request: impl Fn() -> Request<Body>) -> String {
        let http = BoxCloneService::new(layer.layer(handler()))
            .oneshot(request())
            .await
            .unwrap();
        let grpc = BoxCloneService::new(layer.respond_with(GrpcResponse).layer(handler()));
        seen(http).await + &seen(grpc.oneshot(request()).await.unwrap()).await
    }
    let calls = || Limit::per_hour("calls", 1).by(Header::new("x-tenant"));
    let request = || {
        Request::get("/")
            .header("x-tenant", "t0ken-k3y")
            .body(Body::empty())
            .unwrap()
    };
    let failing = RateLimitLayer::new(failing()).limit(calls());
    let redis = store::from_url("redis://shop:s3cr3t@127.0.0.1:1/0").unwrap();
    let texts = [
        both(failing.clone().fail_closed(), request).await,
        both(failing.fail_local(Share::one_of(2)), request).await,
        both(
            RateLimitLayer::new(silent()).limit(calls()).fail_closed(),
            request,
        )
        .await,
        both(
            RateLimitLayer::new(redis)
                .limit(calls())
                .fail_closed()
                .deadline(Duration::from_secs(2)),
            request,
        )
        .await,
        both(
            RateLimitLayer::new(MemoryStore::new())
                .limit(calls())
                .cost(|_| 2),
            request,
        )
        .await,
        both(
            RateLimitLayer::new(MemoryStore::new())
                .limit(Limit::per_hour("calls", 1).by(tower_sliding_window::PeerIp::new())),
            request,
        )
        .await,
    ];
    for text in texts {
        for secret in [
            "out of order",
            "s3cr3t",
            "127.0.0.1",
            "t0ken",
            "k3y",
            "shop",
            "into_make_service",
        ] {
            assert!(!text.contains(secret), "{secret}: {text}");
        }
    }
}

/// Random requests of a hostile client: each response in the service's place counts once, and the
/// series are bounded.
#[tokio::test]
async fn rejections_count_once_and_a_client_makes_no_series() {
    let recorded = Recorded::start();
    let tenant = Header::new("x-tenant");
    let layer = RateLimitLayer::new(MemoryStore::new())
        .named("api")
        .limit(Limit::per_hour("calls", 3).by(tenant.clone()))
        .limit(Limit::per_hour("all", 300).by(anyone).hidden())
        .limit(Limit::per_hour("tried", 1).by(tenant.clone()).in_shadow())
        .cost(|parts| parts.uri.path().len() as u64 - 1)
        .exempt(|parts| parts.uri.path() == "/health")
        .deny(tenant.clone().one_of([tenant.key("eve")]));
    let served = Arc::new(AtomicU64::new(0));
    let serving = Arc::clone(&served);
    let app = BoxCloneService::new(layer.layer(service_fn(move |_: Request<Body>| {
        serving.fetch_add(1, Ordering::Relaxed);
        ready(Ok::<_, Infallible>(Response::new(Body::empty())))
    })));
    let mut numbers = Numbers(3);
    let mut rejected = BTreeMap::new();
    for _ in 0..3_000 {
        let path = ["/", "/a", "/ab", "/abc", "/abcd", "/health"][numbers.below(6) as usize];
        let mut request = Request::builder()
            .uri(path)
            .header("x-junk", format!("{}", numbers.below(1 << 30)));
        let tenant = [
            "eve".to_owned(),
            String::new(),
            format!("t{}", numbers.below(1_000)),
        ];
        for _ in 0..numbers.below(3) {
            request = request.header("x-tenant", tenant[numbers.below(3) as usize].clone());
        }
        let response: Response = app
            .clone()
            .oneshot(request.body(Body::empty()).unwrap())
            .await
            .unwrap();
        if let Some(rejection) = response.extensions().get::<Rejection>() {
            let kind = match rejection {
                Rejection::Limited(_) => "limited",
                Rejection::NeverFits(_) => "never_fits",
                Rejection::NoKey(_) => "no_key",
                Rejection::Denied => "denied",
                _ => "other",
            };
            *rejected
                .entry(format!("rate_limit_rejections_total api {kind}"))
                .or_insert(0) += 1;
        }
    }
    let counters = recorded.counters();
    let counted: BTreeMap<_, _> = counters
        .iter()
        .filter(|(series, _)| series.starts_with("rate_limit_rejections_total"))
        .map(|(series, count)| (series.clone(), *count))
        .collect();
    assert_eq!(counted, rejected);
    assert_eq!(
        rejected.values().sum::<u64>() + served.load(Ordering::Relaxed),
        3_000
    );
    assert!(rejected.len() == 4 && counters.len() < 16, "{counters:?}");
}

/// White space around a URL, as a secret's file has it.
#[tokio::test]
async fn white_space_around_a_url_makes_no_difference() {
    for url in [
        " redis://127.0.0.1:1/0\n",
        "\tREDIS://127.0.0.1:1\r\n",
        "memory:\n",
        " MEMORY://",
        "unix:///tmp/x.sock\n",
    ] {
        assert!(store::from_url(url).is_ok(), "{url:?}");
    }
}

/// Waits of a microsecond and of a year in all forms.
#[tokio::test]
async fn the_shortest_and_the_longest_wait_are_valid_everywhere() {
    for (window, pushback) in [(Limit::MIN_WINDOW, "1"), (Limit::MAX_WINDOW, "-1")] {
        let (store, _clock) = clocked();
        let layer = RateLimitLayer::new(store)
            .limit(Limit::per("calls", 1, window).by(anyone))
            .headers(HeaderSets::BOTH);
        let http = around(&layer, handler());
        let grpc = BoxCloneService::new(layer.respond_with(GrpcResponse).layer(handler()));
        assert_eq!(ask(&http).await.status(), 200);
        let refused = ask(&http).await;
        let retry_after: i64 = refused.headers()["retry-after"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap();
        assert!(
            of(&items(refused.headers(), "ratelimit").unwrap(), "calls").unwrap()["t"]
                <= retry_after
        );
        let body: serde_json::Value = serde_json::from_str(&json(refused).await).unwrap();
        assert_eq!(body["retry-after"].as_i64(), Some(retry_after));
        let refused = ask(&grpc).await;
        assert_eq!(refused.headers()["grpc-retry-pushback-ms"], pushback);
        let status = tonic::Status::from_header_map(refused.headers()).unwrap();
        let wait = status
            .get_details_retry_info()
            .unwrap()
            .retry_delay
            .unwrap();
        assert_eq!((status.code(), wait), (Code::ResourceExhausted, window));
    }
}

/// A limiter under two named layers still has one line and one share of this process.
#[tokio::test]
async fn named_layers_share_the_limiter() {
    let limiter = Limiter::new(failing()).fail_local(Share::one_of(1));
    let layer = |name| {
        RateLimitLayer::new(limiter.clone())
            .named(name)
            .limit(Limit::per_hour("calls", 1).by(anyone))
    };
    assert_eq!(ask(&around(&layer("one"), handler())).await.status(), 200);
    assert_eq!(ask(&around(&layer("other"), handler())).await.status(), 429);
}

/// A layer that nests in itself many times still makes one list, and a client that hangs up changes
/// nothing.
#[tokio::test]
async fn many_nested_layers_and_dropped_requests_keep_one_list() {
    let (store, _clock) = clocked();
    let mut app = handler();
    for number in 0..50 {
        let limit = Limit::new(format!("l{number}"), 1_000, minutes(60)).unwrap();
        let layer = RateLimitLayer::new(store.clone()).limit(limit.by(anyone).settle(|_| 1));
        app = around(&layer.headers(HeaderSets::RATE_LIMIT), app);
    }
    for _ in 0..20 {
        drop(app.clone().oneshot(request()));
    }
    let items = items(ask(&app).await.headers(), "ratelimit").unwrap();
    let names: Vec<_> = items.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(
        names,
        (0..50)
            .rev()
            .map(|number| format!("l{number}"))
            .collect::<Vec<_>>()
    );
    assert!(
        items.iter().all(|(_, numbers)| numbers["r"] == 999),
        "{items:?}"
    );
}
