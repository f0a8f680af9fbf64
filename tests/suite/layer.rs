//! The layer by tower's rules, with mocks for the inner service and for the store.

use std::{
    convert::Infallible,
    fmt::Debug,
    future::{Future, Ready, ready},
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use axum::{body::Body, response::IntoResponse};
use http::{Request, Response, StatusCode, request::Parts};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_sliding_window::{
    AdmissionId, Breaker, Charge, Check, Decision, Degraded, EXPOSED_HEADERS, Error, FailureMode, Header, Key,
    KeyError, KeyExtractor, Limit, LimitStatus, Limiter, ManualClock, MemoryStore, PeerIp, RateLimitLayer, Rejection,
    ResetFormat, Settlement, Store, StoreError,
};

use crate::support::{
    log::Log,
    requests::{anyone, figures, hello, json, request},
    stores::{Failing, Silent},
    until,
};

const CALLS: Limit = Limit::per_minute("calls", 2);

#[tokio::test]
async fn an_admitted_request_carries_its_decision_and_its_response_the_figures() {
    let service = |request: Request<Body>| async move {
        let decision: &Decision = request.extensions().get().unwrap();
        Ok::<_, Infallible>(Response::new(Body::from(decision.remaining().to_string())))
    };
    let app = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone)).layer(service_fn(service));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!(figures(response.headers()), [Some("2"), Some("1"), Some("60"), None]);
    assert_eq!(json(response).await, "1");
}

#[tokio::test]
async fn a_refused_request_is_answered_in_the_services_place() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(&clock).build();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let app = RateLimitLayer::new(store).limit(CALLS.by(anyone)).layer(service_fn(move |request| {
        counted.fetch_add(1, Ordering::Relaxed);
        hello(request)
    }));
    for _ in 0..2 {
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
    clock.advance(Duration::from_millis(59_001));
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(response.status(), 429);
    assert_eq!(figures(response.headers()), [Some("2"), Some("0"), Some("1"), Some("1")]);
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert_eq!(response.headers()["content-type"], "application/json");
    let reason: &Rejection = response.extensions().get().unwrap();
    assert!(matches!(reason, Rejection::Limited(decision) if decision.limit() == &CALLS));
    assert_eq!(json(response).await, r#"{"error":"rate limit exceeded","limit":"calls","retry_after":1}"#);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

/// The limit that refuses speaks for the response, however much the other has left.
#[tokio::test]
async fn several_limits_are_one_check() {
    let (wide, narrow) = (Limit::per_hour("wide", 10), Limit::per_second("narrow", 1));
    let clock = ManualClock::new();
    let app = RateLimitLayer::new(MemoryStore::builder().clock(&clock).build())
        .limit(wide.by(anyone))
        .limit(narrow.by(anyone))
        .layer(service_fn(hello));
    for (wait, status, limit, remaining) in [(0, 200, "1", "0"), (0, 429, "1", "0"), (1, 200, "1", "0")] {
        clock.advance(Duration::from_secs(wait));
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), status);
        assert_eq!(figures(response.headers())[..2], [Some(limit), Some(remaining)]);
    }
    clock.advance(Duration::from_secs(1));
    let decision = app.clone().oneshot(request()).await.unwrap();
    assert_eq!(decision.status(), 200, "the refusal took nothing from the wide limit");
}

#[tokio::test]
async fn a_request_takes_its_cost_from_every_limit() {
    let limit = Limit::per_minute("units", 100);
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(limit.by(anyone))
        .cost(|request| request.uri.path().trim_start_matches('/').parse().unwrap())
        .layer(service_fn(hello));
    let call = |cost: u64| {
        let request = Request::get(format!("/{cost}")).body(Body::empty()).unwrap();
        app.clone().oneshot(request)
    };
    assert_eq!(figures(call(60).await.unwrap().headers())[1], Some("40"));
    assert_eq!(call(41).await.unwrap().status(), 429);
    assert_eq!(figures(call(40).await.unwrap().headers())[1], Some("0"));
    assert_eq!(call(0).await.unwrap().status(), 200, "what costs nothing is not refused");

    let never = call(101).await.unwrap();
    assert_eq!(never.status(), 429);
    assert_eq!(figures(never.headers()), [None; 4], "waiting does not help");
    assert!(matches!(never.extensions().get(), Some(Rejection::NeverFits(error)) if error.cost() == 101));
    assert_eq!(
        json(never).await,
        r#"{"error":"request costs more than the limit","limit":"units","cost":101,"units":100}"#
    );
}

#[tokio::test]
async fn reset_can_be_a_unix_time() {
    let clock = ManualClock::new();
    let app = RateLimitLayer::new(MemoryStore::builder().clock(&clock).build())
        .limit(CALLS.by(anyone))
        .reset_format(ResetFormat::EpochSeconds)
        .layer(service_fn(hello));
    let now = clock.now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let reset = (now + CALLS.window()).as_micros().div_ceil(1_000_000).to_string();
    assert_eq!(figures(app.oneshot(request()).await.unwrap().headers())[2], Some(&*reset));
}

#[tokio::test]
async fn of_stacked_layers_the_strictest_is_shown() {
    let store = MemoryStore::new();
    let layer = |name, units| RateLimitLayer::new(store.clone()).limit(Limit::per_minute(name, units).by(anyone));
    for (outer, inner) in [(("a", 10), ("b", 5)), (("c", 5), ("d", 10))] {
        let app = layer(outer.0, outer.1).layer(layer(inner.0, inner.1).layer(service_fn(hello)));
        assert_eq!(figures(app.oneshot(request()).await.unwrap().headers())[..2], [Some("5"), Some("4")]);
    }
}

/// With as much left under both, the response keeps what it has.
#[tokio::test]
async fn of_equally_strict_layers_the_inner_is_shown() {
    let layer = |limit: Limit| RateLimitLayer::new(MemoryStore::new()).limit(limit.by(anyone));
    let app = layer(Limit::per_hour("outer", 5)).layer(layer(Limit::per_minute("inner", 5)).layer(service_fn(hello)));
    assert_eq!(figures(app.oneshot(request()).await.unwrap().headers())[2], Some("60"));
}

/// Else the reset would be another limit's than the wait.
#[tokio::test]
async fn a_rejection_of_an_inner_layer_keeps_its_figures() {
    let hourly = Limit::per_hour("hourly", 5);
    for (cost, expected) in [(3, [Some("5"), Some("2"), Some("3600"), Some("3600")]), (6, [None; 4])] {
        let layer = |limit: Limit| RateLimitLayer::new(MemoryStore::new()).limit(limit.by(anyone));
        let inner = layer(hourly.clone()).cost(move |_| cost).layer(service_fn(hello));
        let app = layer(CALLS).layer(inner);
        let _ = app.clone().oneshot(request()).await;
        let response = app.oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())), (429, expected));
    }
}

/// Whatever keeps a handler from going on, it answers as a layer would that fails closed.
#[tokio::test]
async fn a_handler_answers_as_the_layer_does() {
    async fn spend<S: Store>(store: S, cost: u64, parts: &Parts) -> Result<(), Rejection> {
        let key = Header::new("x-tenant").extract(parts)?;
        match Limiter::new(store).check(&CALLS, key, cost).await? {
            decision if decision.is_allowed() => Ok(()),
            refusal => Err(Rejection::Limited(refusal)),
        }
    }
    let (anonymous, _) = request().into_parts();
    let (known, _) = Request::get("/").header("x-tenant", "acme").body(()).unwrap().into_parts();
    let store = MemoryStore::new();
    spend(store.clone(), 2, &known).await.unwrap();
    let error: Box<dyn std::error::Error> = spend(Failing, 1, &known).await.unwrap_err().into();
    let cause = error.source().unwrap();
    assert_eq!(format!("{error}: {cause}"), "the rate-limit store is unavailable: deciding a check failed");
    let refusal = [Some("2"), Some("0"), Some("60"), Some("60")];
    for (answer, status, expected) in [
        (spend(store.clone(), 1, &known).await, 429, Some(refusal)),
        (spend(store.clone(), 3, &known).await, 429, Some([None; 4])),
        (spend(store, 1, &anonymous).await, 400, Some([None; 4])),
        (spend(Failing, 1, &known).await, 503, None),
    ] {
        let handler = service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(answer.clone().into_response())));
        let app = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("all", 1).by(anyone)).layer(handler);
        let response = app.oneshot(request()).await.unwrap();
        let figures = figures(response.headers());
        assert_eq!(response.status().as_u16(), status, "{answer:?}");
        assert!(
            expected.map_or_else(|| figures[3].is_some(), |expected| figures == expected),
            "{figures:?}: {answer:?}"
        );
        assert_eq!(response.headers()["content-type"], "application/json");
        assert!(response.extensions().get::<Rejection>().is_some());
        let degraded = response.extensions().get::<Degraded>();
        assert_eq!(degraded.and_then(Degraded::mode), (status == 503).then_some(FailureMode::Closed));
    }
}

/// What an operator has to know of it is logged as of a layer, at most once a second: here, of all tests together.
#[tokio::test]
async fn what_a_handler_answers_is_logged() {
    let log = Log::start();
    let (parts, _) = request().into_parts();
    let unknown = PeerIp::new().extract(&parts).unwrap_err();
    let failed = Limiter::new(Failing).check(&CALLS, "ada", 1).await.unwrap_err();
    let dear = Limiter::new(Failing).check(&CALLS, "ada", 3).await.unwrap_err();
    let rejections = [Rejection::from(unknown), failed.into(), dear.into()];
    let lines = ["is not set up to find a rate-limit key", "no rate-limit decision", "can never be admitted"];
    let logged = || {
        rejections.iter().for_each(|rejection| drop(rejection.clone().into_response()));
        let text = log.text();
        lines.iter().all(|line| text.contains(line))
    };
    until("it is not logged", logged).await;
}

/// A store that never admits anybody again, and says so.
#[derive(Clone)]
struct Bans;

impl Store for Bans {
    type Decide = Ready<Result<Decision, StoreError>>;
    type Settle = <Failing as Store>::Settle;
    type Reset = <Failing as Store>::Reset;

    fn decide(&self, check: Check) -> Self::Decide {
        let never = Duration::MAX;
        let status = |charge: &Charge| LimitStatus::new(charge, charge.limit().units(), never, Some(never));
        ready(Ok(Decision::new(&check, SystemTime::now(), AdmissionId::fresh(), status)))
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        Failing.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        Failing.reset(limit, key)
    }
}

#[tokio::test]
async fn a_store_may_refuse_for_ever() {
    for format in [ResetFormat::DeltaSeconds, ResetFormat::EpochSeconds] {
        let app = RateLimitLayer::new(Bans).limit(CALLS.by(anyone)).reset_format(format).layer(service_fn(hello));
        let response = app.oneshot(request()).await.unwrap();
        let ever = Some("18446744073709551615");
        assert_eq!(figures(response.headers()), [Some("2"), Some("0"), ever, ever]);
    }
}

#[tokio::test]
async fn fail_open_lets_through_and_shows_no_figures() {
    let app = RateLimitLayer::new(Failing).limit(CALLS.by(anyone)).fail_open().layer(service_fn(hello));
    let response = app.oneshot(request()).await.unwrap();
    assert_eq!((response.status(), figures(response.headers())), (StatusCode::OK, [None; 4]));
    let degraded: &Degraded = response.extensions().get().unwrap();
    assert!(matches!(degraded.error(), Error::Unavailable(_)));
}

#[tokio::test]
async fn fail_open_is_the_default() {
    let app = RateLimitLayer::new(Failing).limit(CALLS.by(anyone)).layer(service_fn(hello));
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
}

#[tokio::test]
async fn fail_closed_answers_503_with_a_jittered_retry_after_and_no_figures() {
    let app = RateLimitLayer::new(Failing).limit(CALLS.by(anyone)).fail_closed().layer(service_fn(hello));
    let mut waits = Vec::new();
    for _ in 0..100 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert!(matches!(response.extensions().get(), Some(Rejection::Unavailable(_))));
        let [None, None, None, Some(wait)] = figures(response.headers()) else { panic!("{:?}", response.headers()) };
        waits.push(wait.parse::<u64>().unwrap());
        assert_eq!(json(response).await, r#"{"error":"rate limiting is unavailable"}"#);
    }
    waits.sort_unstable();
    waits.dedup();
    assert_eq!(waits, [1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_is_given_up_at_the_deadline() {
    for deadline in [Duration::from_millis(50), Duration::from_millis(7)] {
        let asked = tokio::time::Instant::now();
        let layer = RateLimitLayer::new(Silent).limit(CALLS.by(anyone)).fail_closed();
        let layer = if deadline.as_millis() == 50 { layer } else { layer.deadline(deadline) };
        let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
        assert_eq!((response.status(), asked.elapsed()), (StatusCode::SERVICE_UNAVAILABLE, deadline));
    }
}

#[tokio::test]
async fn a_request_without_a_key_does_not_reach_the_service() {
    let store = MemoryStore::new();
    let layer = RateLimitLayer::new(store.clone()).limit(CALLS.by(Header::new("x-tenant")));
    let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert_eq!((response.status(), figures(response.headers())), (StatusCode::BAD_REQUEST, [None; 4]));
    assert_eq!(response.headers()["cache-control"], "no-store");
    assert!(matches!(response.extensions().get(), Some(Rejection::NoKey(error)) if error.is_missing()));
    assert_eq!(json(response).await, r#"{"error":"x-tenant: missing"}"#);
    assert_eq!(store.keys(), 0);

    let awkward = |_: &Parts| Err(KeyError::invalid("a \"key\"", "back\\slash\n").with_status(StatusCode::FORBIDDEN));
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(awkward));
    let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert_eq!(response.status(), 403);
    assert_eq!(json(response).await, r#"{"error":"a \"key\": back\\slash\u000a"}"#);
}

#[tokio::test]
async fn a_server_that_does_not_know_its_peers_answers_500_and_keeps_the_reason_to_itself() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(PeerIp::new()));
    let response = layer.clone().layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert_eq!(response.status(), 500);
    assert_eq!(json(response).await, r#"{"error":"internal error"}"#);

    let mut known = request();
    known.extensions_mut().insert(SocketAddr::from(([127, 0, 0, 1], 1)));
    assert_eq!(layer.layer(service_fn(hello)).oneshot(known).await.unwrap().status(), 200);
}

#[tokio::test]
async fn every_rejection_can_be_replaced() {
    let layer = RateLimitLayer::new(Failing).limit(CALLS.by(Header::new("x-tenant"))).fail_closed().on_rejection(
        |rejection: &Rejection, head: Response<()>| match rejection {
            Rejection::NoKey(_) => Response::builder().status(418).body(Body::from("teapot")).unwrap(),
            _ => head.map(|()| Body::from("later")),
        },
    );
    let app = layer.layer(service_fn(hello));
    let response = app.clone().oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().len()), (418, 0));
    let keyed = Request::get("/").header("x-tenant", "7").body(Body::empty()).unwrap();
    let response = app.oneshot(keyed).await.unwrap();
    assert!(response.status() == 503 && response.headers().contains_key("retry-after"), "the head is kept");
    assert!(response.extensions().get::<Rejection>().is_some(), "the reason stays");
    assert_eq!(json(response).await, "later");
}

/// An operator finds every set-up error and every outage in the log, with its cause, and not a thousand times.
#[tokio::test]
async fn what_an_operator_has_to_know_is_logged_once_a_second() {
    let log = Log::start();
    let lines = |text: &str| log.text().lines().filter(|line| line.contains(text)).count();
    let no_peer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(PeerIp::new())).layer(service_fn(hello));
    let too_dear = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone)).cost(|_| 3).layer(service_fn(hello));
    let no_store = RateLimitLayer::new(Failing).limit(CALLS.by(anyone)).breaker(Breaker::off());
    let no_store = no_store.layer(service_fn(hello));
    for _ in 0..10 {
        no_peer.clone().oneshot(request()).await.unwrap();
        too_dear.clone().oneshot(request()).await.unwrap();
        no_store.clone().oneshot(request()).await.unwrap();
    }
    assert_eq!(lines("into_make_service_with_connect_info"), 1, "{}", log.text());
    assert_eq!(lines("a cost of 3 never fits into the limit"), 1, "{}", log.text());
    assert_eq!(lines("unavailable: deciding a check failed: out of order"), 1, "{}", log.text());
}

/// A service that panics if it is called without having been polled ready, as `Buffer` or `ConcurrencyLimit` would.
struct Strict {
    is_ready: bool,
}

impl Clone for Strict {
    /// Readiness belongs to the instance.
    fn clone(&self) -> Self {
        Self { is_ready: false }
    }
}

impl Service<Request<Body>> for Strict {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without having been polled ready");
        ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test]
async fn the_instance_that_was_polled_ready_is_the_one_that_is_called() {
    let mut app = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone)).layer(Strict { is_ready: false });
    for status in [200, 200, 429, 429] {
        assert_eq!(app.ready().await.unwrap().call(request()).await.unwrap().status(), status);
    }
}

#[tokio::test]
async fn a_refusal_gives_back_the_inner_services_permit() {
    let service = ConcurrencyLimit::new(service_fn(hello), 1);
    let mut app = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone)).layer(service);
    for _ in 0..5 {
        // With the only permit lost, this would wait for ever.
        let ready = tokio::time::timeout(Duration::from_secs(20), app.ready()).await.unwrap().unwrap();
        ready.call(request()).await.unwrap();
    }
}

#[tokio::test]
async fn dropping_a_pending_response_calls_nothing_and_gives_back_the_permit() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let service = service_fn(move |request| {
        counted.fetch_add(1, Ordering::Relaxed);
        hello(request)
    });
    let service = ConcurrencyLimit::new(service, 1);
    let mut app = RateLimitLayer::new(Silent).limit(CALLS.by(anyone)).layer(service);
    for _ in 0..3 {
        let ready = tokio::time::timeout(Duration::from_secs(20), app.ready()).await.unwrap().unwrap();
        let response = ready.call(request());
        assert!(pin!(response).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

/// The service's own errors pass through as they are.
#[tokio::test]
async fn the_error_type_stays() {
    let failing = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("broken") });
    let app = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone)).layer(failing);
    assert_eq!(app.oneshot(request()).await.unwrap_err(), "broken");
}

/// axum applies a layer once a route and clones the service once a request: all of them count together.
#[tokio::test]
async fn clones_and_services_of_one_layer_count_together() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone));
    let statuses = [layer.clone(), layer.clone(), layer].map(|layer| layer.layer(service_fn(hello)).oneshot(request()));
    let mut seen = Vec::new();
    for response in statuses {
        seen.push(response.await.unwrap().status().as_u16());
    }
    assert_eq!(seen, [200, 200, 429]);
}

#[tokio::test]
async fn a_body_that_is_no_string_takes_a_responder_of_its_own() {
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .on_rejection(|_, head| head.map(|()| [0_u8; 4]));
    let service = service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new([1_u8; 4])) });
    let app = ServiceBuilder::new().layer(layer).service(service);
    let mut bodies = Vec::new();
    for _ in 0..3 {
        bodies.push(app.clone().oneshot(Request::new(())).await.unwrap().into_body()[0]);
    }
    assert_eq!(bodies, [1, 1, 0]);
}

#[test]
fn two_limits_of_one_name_are_refused_by_name() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone));
    let error = layer.try_limit(CALLS.by(anyone)).unwrap_err();
    assert_eq!(error.to_string(), r#"two limits of one layer are named "calls""#);
    let error = RateLimitLayer::new(MemoryStore::new()).limits([]).unwrap_err();
    assert_eq!(error.to_string(), "a layer needs at least one limit");
    let limits = ["a", "b"].map(|name| Limit::new(name, 1, Duration::from_secs(1)).unwrap().by(anyone));
    assert!(RateLimitLayer::new(MemoryStore::new()).limits(limits.clone()).is_ok());
    for twice in &limits {
        let limits = limits.iter().chain([twice]).cloned();
        assert!(RateLimitLayer::new(MemoryStore::new()).limits(limits).is_err());
    }
}

#[test]
#[should_panic = r#"two limits of one layer are named "calls""#]
fn two_literal_limits_of_one_name_fail_where_the_layer_is_built() {
    let _ = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone)).limit(CALLS.by(anyone));
}

/// Layer, service and future can be built, polled and dropped where no runtime is.
#[test]
fn nothing_needs_a_runtime_until_a_store_makes_somebody_wait() {
    let mut app = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone)).layer(Strict { is_ready: false });
    let mut context = Context::from_waker(Waker::noop());
    assert!(app.poll_ready(&mut context).is_ready());
    let Poll::Ready(Ok(response)) = pin!(app.call(request())).poll(&mut context) else { panic!("not ready") };
    assert_eq!(response.status(), 200);
    drop(RateLimitLayer::new(Silent).limit(CALLS.by(anyone)).layer(Strict { is_ready: true }).call(request()));
}

/// The types can be named, sent and shared: what axum, and a struct of the user's, ask of them.
#[test]
fn types_can_be_named_and_sent() {
    struct App {
        _layer: RateLimitLayer<MemoryStore>,
        _service: tower_sliding_window::RateLimit<Strict, MemoryStore>,
    }
    fn is_shareable<T: Clone + Send + Sync + 'static>() {}
    fn is_handled_as_any_other<T: Clone + Debug + Send + Sync + 'static>(_: &T) {}
    fn is_sent<T: Send>(_: &T) {}

    is_shareable::<RateLimitLayer<MemoryStore>>();
    is_shareable::<tower_sliding_window::RedisStore>();
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(anyone));
    let mut service = layer.layer(Strict { is_ready: true });
    is_sent(&service.call(request()));
    // Whatever a responder holds on to.
    let (count, answered) = (AtomicUsize::new(0), layer.clone());
    is_handled_as_any_other(&answered.on_rejection(move |_, head| {
        count.fetch_add(1, Ordering::Relaxed);
        head.map(|()| Body::empty())
    }));
    let _app = App { _layer: layer, _service: service };
}

#[test]
fn the_headers_a_browser_must_be_shown_are_listed() {
    let names = EXPOSED_HEADERS.map(|name| name.to_string());
    assert_eq!(names, ["retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]);
}
