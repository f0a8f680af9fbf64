//! The responses of a layer to admitted, refused and invalid requests, and its own log lines.

use std::{
    convert::Infallible,
    future::ready,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use axum::{body::Body, response::IntoResponse};
use http::{Request, Response, StatusCode, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Decision, Header, HeaderSets, Key, KeyExtractor, Limit, Limiter, MemoryStore,
    PeerIp, RateLimitLayer, Rejection, Store,
    check::AdmissionId,
    decision::LimitStatus,
    extract::KeyError,
    limiter::{Breaker, FailureMode},
    middleware::{Degraded, JsonResponse, RejectionResponse, exposed_headers},
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
};

use crate::support::{
    log::Log,
    requests::{QUOTA_EXCEEDED, anyone, figures, hello, json, refusal_body, request},
    stores::failing,
    until,
};

const CALLS: Limit = Limit::per_minute("calls", 2);

#[tokio::test]
async fn an_admitted_request_carries_its_decision_and_its_response_the_headers() {
    let service = |request: Request<Body>| async move {
        let decision: &Decision = request.extensions().get().unwrap();
        Ok::<_, Infallible>(Response::new(Body::from(decision.remaining().to_string())))
    };
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .layer(service_fn(service));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!(
        figures(response.headers()),
        [Some("2"), Some("1"), Some("60"), None]
    );
    assert_eq!(json(response).await, "1");
}

#[tokio::test]
async fn a_refused_request_never_reaches_the_service() {
    let clock = ManualClock::new();
    let store = MemoryStore::new().clock(&clock);
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let app = RateLimitLayer::new(store)
        .limit(CALLS.by(anyone))
        .layer(service_fn(move |request| {
            counted.fetch_add(1, Ordering::Relaxed);
            hello(request)
        }));
    for _ in 0..2 {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
    clock.advance(Duration::from_millis(59_001));
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(response.status(), 429);
    assert_eq!(
        figures(response.headers()),
        [Some("2"), Some("0"), Some("1"), Some("1")]
    );
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert_eq!(
        response.headers()["content-type"],
        "application/problem+json"
    );
    let reason: &Rejection = response.extensions().get().unwrap();
    assert!(matches!(reason, Rejection::Limited(decision) if decision.binding().limit == CALLS));
    assert_eq!(json(response).await, refusal_body(Some("calls"), 1));
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

/// The limit that refuses sets the headers, however much the other has left.
#[tokio::test]
async fn several_limits_are_one_check() {
    let (wide, narrow) = (Limit::per_hour("wide", 10), Limit::per_second("narrow", 1));
    let clock = ManualClock::new();
    let app = RateLimitLayer::new(MemoryStore::new().clock(&clock))
        .limit(wide.by(anyone))
        .limit(narrow.by(anyone))
        .layer(service_fn(hello));
    for (wait, status, limit, remaining) in
        [(0, 200, "1", "0"), (0, 429, "1", "0"), (1, 200, "1", "0")]
    {
        clock.advance(Duration::from_secs(wait));
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), status);
        assert_eq!(
            figures(response.headers())[..2],
            [Some(limit), Some(remaining)]
        );
    }
    clock.advance(Duration::from_secs(1));
    let decision = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(
        decision.status(),
        200,
        "the refusal took nothing from the wide limit"
    );
}

#[tokio::test]
async fn a_request_is_charged_its_cost_under_every_limit() {
    let limit = Limit::per_minute("units", 100);
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(limit.by(anyone))
        .cost(|request| request.uri.path().trim_start_matches('/').parse().unwrap())
        .layer(service_fn(hello));
    let call = |cost: u64| {
        let request = Request::get(format!("/{cost}"))
            .body(Body::empty())
            .unwrap();
        app.clone().oneshot(request)
    };
    assert_eq!(figures(call(60).await.unwrap().headers())[1], Some("40"));
    assert_eq!(call(41).await.unwrap().status(), 429);
    assert_eq!(figures(call(40).await.unwrap().headers())[1], Some("0"));
    assert_eq!(
        call(0).await.unwrap().status(),
        200,
        "a cost of zero is never refused"
    );

    let never = call(101).await.unwrap();
    assert_eq!(never.status(), 429);
    assert_eq!(figures(never.headers()), [None; 4], "waiting does not help");
    assert!(
        matches!(never.extensions().get(), Some(Rejection::NeverFits(error)) if error.cost == 101)
    );
    assert_eq!(
        json(never).await,
        format!(
            r#"{{{QUOTA_EXCEEDED},"detail":"{}","violated-policies":["units"]}}"#,
            "The request costs 101 units. The limit 'units' never admits more than 100."
        )
    );
}

#[tokio::test]
async fn reset_can_be_a_unix_time() {
    let clock = ManualClock::new();
    let app = RateLimitLayer::new(MemoryStore::new().clock(&clock))
        .limit(CALLS.by(anyone))
        .headers(HeaderSets::X_RATE_LIMIT_UNIX)
        .layer(service_fn(hello));
    let now = clock.now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let reset = (now + CALLS.window())
        .as_micros()
        .div_ceil(1_000_000)
        .to_string();
    assert_eq!(
        figures(app.oneshot(request()).await.unwrap().headers())[2],
        Some(&*reset)
    );
}

#[tokio::test]
async fn stacked_layers_show_the_strictest_limit() {
    let store = MemoryStore::new();
    let layer = |name, units| {
        RateLimitLayer::new(store.clone()).limit(Limit::per_minute(name, units).by(anyone))
    };
    for (outer, inner) in [(("a", 10), ("b", 5)), (("c", 5), ("d", 10))] {
        let app = layer(outer.0, outer.1).layer(layer(inner.0, inner.1).layer(service_fn(hello)));
        assert_eq!(
            figures(app.oneshot(request()).await.unwrap().headers())[..2],
            [Some("5"), Some("4")]
        );
    }
}

/// If both have the same number left, the response keeps its headers.
#[tokio::test]
async fn equally_strict_layers_show_the_inner_limit() {
    let layer = |limit: Limit| RateLimitLayer::new(MemoryStore::new()).limit(limit.by(anyone));
    let app = layer(Limit::per_hour("outer", 5))
        .layer(layer(Limit::per_minute("inner", 5)).layer(service_fn(hello)));
    assert_eq!(
        figures(app.oneshot(request()).await.unwrap().headers())[2],
        Some("60")
    );
}

/// Otherwise the reset and the wait would belong to different limits.
#[tokio::test]
async fn a_rejection_of_an_inner_layer_keeps_its_figures() {
    let hourly = Limit::per_hour("hourly", 5);
    for (cost, expected) in [
        (3, [Some("5"), Some("2"), Some("3600"), Some("3600")]),
        (6, [None; 4]),
    ] {
        let layer = |limit: Limit| RateLimitLayer::new(MemoryStore::new()).limit(limit.by(anyone));
        let inner = layer(hourly.clone())
            .cost(move |_| cost)
            .layer(service_fn(hello));
        let app = layer(CALLS).layer(inner);
        let _ = app.clone().oneshot(request()).await;
        let response = app.oneshot(request()).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())),
            (429, expected)
        );
    }
}

/// Whatever error a handler returns, its response equals that of a fail-closed layer.
#[tokio::test]
async fn a_handlers_rejection_equals_a_layers_rejection() {
    async fn spend<S: Store + Clone>(store: S, cost: u64, parts: &Parts) -> Result<(), Rejection> {
        let key = Header::new("x-tenant").extract(parts)?;
        match Limiter::new(store).check(&CALLS, key, cost).await? {
            decision if decision.is_allowed() => Ok(()),
            refusal => Err(Rejection::Limited(refusal)),
        }
    }
    let (anonymous, _) = request().into_parts();
    let (known, _) = Request::get("/")
        .header("x-tenant", "acme")
        .body(())
        .unwrap()
        .into_parts();
    let store = MemoryStore::new();
    spend(store.clone(), 2, &known).await.unwrap();
    let error: Box<dyn std::error::Error> = spend(failing(), 1, &known).await.unwrap_err().into();
    let cause = error.source().unwrap();
    assert_eq!(
        format!("{error}: {cause}"),
        "the rate-limit store is unavailable: deciding a check failed"
    );
    let refusal = [Some("2"), Some("0"), Some("60"), Some("60")];
    for (answer, status, expected) in [
        (spend(store.clone(), 1, &known).await, 429, Some(refusal)),
        (spend(store.clone(), 3, &known).await, 429, Some([None; 4])),
        (spend(store, 1, &anonymous).await, 400, Some([None; 4])),
        (spend(failing(), 1, &known).await, 503, None),
    ] {
        let handler = service_fn(|_: Request<Body>| {
            ready(Ok::<_, Infallible>(answer.clone().into_response()))
        });
        let app = RateLimitLayer::new(MemoryStore::new())
            .limit(Limit::per_hour("all", 1).by(anyone))
            .layer(handler);
        let response = app.oneshot(request()).await.unwrap();
        let figures = figures(response.headers());
        assert_eq!(response.status().as_u16(), status, "{answer:?}");
        assert!(
            expected.map_or_else(|| figures[3].is_some(), |expected| figures == expected),
            "{figures:?}: {answer:?}"
        );
        assert_eq!(
            response.headers()["content-type"],
            "application/problem+json"
        );
        assert!(response.extensions().get::<Rejection>().is_some());
        let degraded = response.extensions().get::<Degraded>();
        assert_eq!(
            degraded.map(|degraded: &Degraded| degraded.mode),
            (status == 503).then_some(FailureMode::Closed)
        );
    }
}

/// The error is logged as a layer would log it, at most once a second over all tests together.
#[tokio::test]
async fn a_handlers_rejection_is_logged() {
    let log = Log::start();
    let (parts, _) = request().into_parts();
    let unknown = PeerIp::new().extract(&parts).unwrap_err();
    let failed = Limiter::new(failing())
        .check(&CALLS, "ada", 1)
        .await
        .unwrap_err();
    let costly = Limiter::new(failing())
        .check(&CALLS, "ada", 3)
        .await
        .unwrap_err();
    let rejections = [Rejection::from(unknown), failed.into(), costly.into()];
    let lines = [
        "is not set up to find a rate-limit key",
        "no rate-limit decision",
        "can never be admitted",
    ];
    let logged = || {
        rejections
            .iter()
            .for_each(|rejection| drop(rejection.clone().into_response()));
        let text = log.text();
        lines.iter().all(|line| text.contains(line))
    };
    until("it is not logged", logged).await;
}

/// Waiting would not help, as it would after a 503.
#[tokio::test]
async fn a_handler_that_resets_places_gets_a_500_which_the_log_explains() {
    let log = Log::start();
    let limiter = Limiter::new(MemoryStore::new());
    let error = limiter
        .reset(&Limit::concurrent("streams", 2), "ada")
        .await
        .unwrap_err();
    let rejection = Rejection::from(error);
    let logged = || {
        let response = rejection.clone().into_response();
        assert_eq!(
            (
                response.status().as_u16(),
                response.headers().get("retry-after")
            ),
            (500, None)
        );
        log.text()
            .contains("places are held until their decisions are dropped")
    };
    until("it is not logged", logged).await;
}

/// A store that refuses everything forever.
#[derive(Clone)]
struct Bans;

impl Store for Bans {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let never = Duration::MAX;
        let status = |charge: &Charge| {
            LimitStatus::new(
                charge,
                charge.limit().units(),
                0,
                never,
                Some((never, never)),
            )
        };
        Box::pin(ready(Ok(Decision::new(
            &check,
            SystemTime::now(),
            AdmissionId::fresh(),
            status,
        ))))
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        failing().settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        failing().reset(limit, key)
    }
}

#[tokio::test]
async fn a_store_may_refuse_forever() {
    for format in [HeaderSets::X_RATE_LIMIT, HeaderSets::X_RATE_LIMIT_UNIX] {
        let app = RateLimitLayer::new(Bans)
            .limit(CALLS.by(anyone))
            .headers(format)
            .layer(service_fn(hello));
        let response = app.oneshot(request()).await.unwrap();
        // As many seconds as 2^64 microseconds have, and by Unix time so many from now.
        let ever = 18_446_744_073_710_u64;
        let [limit, remaining, reset, retry] = figures(response.headers());
        assert_eq!((limit, remaining), (Some("2"), Some("0")));
        assert_eq!(retry, Some(&*ever.to_string()));
        assert!(reset.unwrap().parse::<u64>().unwrap() >= ever);
    }
}

#[tokio::test]
async fn a_request_without_a_key_does_not_reach_the_service() {
    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(store.clone()).limit(CALLS.by(Header::new("x-tenant")));
    let response = layer
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(
        (response.status(), figures(response.headers())),
        (StatusCode::BAD_REQUEST, [None; 4])
    );
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert!(
        matches!(response.extensions().get(), Some(Rejection::NoKey(error)) if error.to_string() == "x-tenant: missing")
    );
    assert_eq!(
        json(response).await,
        r#"{"title":"Bad Request","status":400,"detail":"The request cannot be counted: x-tenant: missing."}"#
    );
    assert_eq!(store.keys(), 0);

    let awkward = |_: &Parts| {
        Err(KeyError::invalid("a \"key\"", "back\\slash\n").with_status(StatusCode::FORBIDDEN))
    };
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(awkward));
    let response = layer
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(response.status(), 403);
    let detail = r#"The request cannot be counted: a \"key\": back\\slash\u000a."#;
    assert_eq!(
        json(response).await,
        format!(r#"{{"title":"Forbidden","status":403,"detail":"{detail}"}}"#)
    );
}

#[tokio::test]
async fn a_missing_peer_address_is_a_500_without_details() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(PeerIp::new()));
    let response = layer
        .clone()
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(response.status(), 500);
    assert_eq!(
        json(response).await,
        r#"{"title":"Internal Server Error","status":500,"detail":"The server has made a mistake."}"#
    );

    let mut known = request();
    known
        .extensions_mut()
        .insert(SocketAddr::from(([127, 0, 0, 1], 1)));
    assert_eq!(
        layer
            .layer(service_fn(hello))
            .oneshot(known)
            .await
            .unwrap()
            .status(),
        200
    );
}

#[tokio::test]
async fn a_rejection_can_be_plain_text() {
    let text =
        |rejection: &Rejection, head: Response<()>| (head, rejection.detail()).into_response();
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .cost(|_| 2)
        .respond_with(text);
    let app = layer.layer(service_fn(hello));
    assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    let refused = app.oneshot(request()).await.unwrap();
    assert_eq!(
        refused.headers()["content-type"],
        "text/plain; charset=utf-8"
    );
    assert_eq!(
        figures(refused.headers()),
        [Some("2"), Some("0"), Some("60"), Some("60")]
    );
    assert_eq!(
        json(refused).await,
        "The limit 'calls' is used up. Retry in 60 seconds."
    );
}

/// A number that is none would break the JSON.
#[tokio::test]
async fn problem_details_are_valid_json_whatever_a_responder_makes_of_retry_after() {
    struct Changed(Option<&'static str>);

    impl RejectionResponse<Body> for Changed {
        fn respond(
            &self,
            rejection: &Rejection,
            request: &Parts,
            mut head: Response<()>,
        ) -> Response<Body> {
            head.headers_mut().remove("retry-after");
            if let Some(text) = self.0 {
                head.headers_mut()
                    .insert("retry-after", text.parse().unwrap());
            }
            JsonResponse.respond(rejection, request, head)
        }
    }

    for (text, seconds) in [
        (None, None),
        (Some("Sun, 06 Nov 1994 08:49:37 GMT"), None),
        (Some("7"), Some(7)),
    ] {
        let layer = RateLimitLayer::new(MemoryStore::new())
            .limit(CALLS.by(anyone))
            .cost(|_| 2);
        let app = layer.respond_with(Changed(text)).layer(service_fn(hello));
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
        let body = json(app.oneshot(request()).await.unwrap()).await;
        let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(problem["retry-after"].as_u64(), seconds);
        let retry = seconds
            .map(|seconds| format!(" Retry in {seconds} seconds."))
            .unwrap_or_default();
        assert_eq!(
            problem["detail"],
            format!("The limit 'calls' is used up.{retry}")
        );
    }
}

/// A responder of one's own, for a server that speaks several languages.
#[tokio::test]
async fn a_responder_sees_the_head_of_the_request() {
    struct Negotiated;

    impl RejectionResponse<Body> for Negotiated {
        fn respond(
            &self,
            rejection: &Rejection,
            request: &Parts,
            head: Response<()>,
        ) -> Response<Body> {
            match request.headers.get("accept") {
                Some(accept) if accept == "text/plain" => {
                    (head, rejection.detail()).into_response()
                }
                _ => JsonResponse.respond(rejection, request, head),
            }
        }
    }

    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .cost(|_| 3)
        .respond_with(Negotiated);
    for (accept, expected) in [
        ("text/plain", "text/plain; charset=utf-8"),
        ("*/*", "application/problem+json"),
    ] {
        let request = Request::get("/")
            .header("accept", accept)
            .body(Body::empty())
            .unwrap();
        let response = layer
            .layer(service_fn(hello))
            .oneshot(request)
            .await
            .unwrap();
        assert_eq!(response.headers()["content-type"], expected);
    }
}

#[tokio::test]
async fn every_rejection_can_be_replaced() {
    let layer = RateLimitLayer::new(failing())
        .limit(CALLS.by(Header::new("x-tenant")))
        .fail_closed()
        .respond_with(
            |rejection: &Rejection, head: Response<()>| match rejection {
                Rejection::NoKey(_) => Response::builder()
                    .status(418)
                    .body(Body::from("teapot"))
                    .unwrap(),
                _ => head.map(|()| Body::from("later")),
            },
        );
    let app = layer.layer(service_fn(hello));
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(
        (response.status().as_u16(), response.headers().len()),
        (418, 0)
    );
    let keyed = Request::get("/")
        .header("x-tenant", "7")
        .body(Body::empty())
        .unwrap();
    let response = app.oneshot(keyed).await.unwrap();
    assert!(
        response.status() == 503 && response.headers().contains_key("retry-after"),
        "the head is kept"
    );
    assert!(
        response.extensions().get::<Rejection>().is_some(),
        "the reason is kept"
    );
    assert_eq!(json(response).await, "later");
}

/// Every set-up error and every outage is logged with its cause, at most once a second.
#[tokio::test]
async fn setup_errors_and_outages_are_logged_once_a_second() {
    let log = Log::start();
    let lines = |text: &str| {
        log.text()
            .lines()
            .filter(|line| line.contains(text))
            .count()
    };
    let no_peer = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(PeerIp::new()))
        .layer(service_fn(hello));
    let too_costly = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .cost(|_| 3)
        .layer(service_fn(hello));
    let no_store =
        RateLimitLayer::new(Limiter::new(failing()).breaker(Breaker::OFF)).limit(CALLS.by(anyone));
    let no_store = no_store.layer(service_fn(hello));
    for _ in 0..10 {
        no_peer.clone().oneshot(request()).await.unwrap();
        too_costly.clone().oneshot(request()).await.unwrap();
        no_store.clone().oneshot(request()).await.unwrap();
    }
    assert_eq!(
        lines("into_make_service_with_connect_info"),
        1,
        "{}",
        log.text()
    );
    assert_eq!(
        lines("a cost of 3 never fits into the limit"),
        1,
        "{}",
        log.text()
    );
    assert_eq!(
        lines("unavailable: deciding a check failed: out of order"),
        1,
        "{}",
        log.text()
    );
}

#[test]
fn exposed_headers_lists_every_header_a_browser_needs() {
    let names: Vec<_> = exposed_headers()
        .into_iter()
        .map(|name| name.to_string())
        .collect();
    let x_rate_limit = [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
    ];
    assert_eq!(
        names[..4],
        [&["retry-after"][..], &x_rate_limit[..]].concat()
    );
    assert_eq!(names[4..], ["ratelimit-policy", "ratelimit"]);
}
