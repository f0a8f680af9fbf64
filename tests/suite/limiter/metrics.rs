//! The metrics that a recorder gets, by the names in the docs.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use http::{Method, Request, Response, StatusCode};
use metrics::{Counter, Gauge, Histogram, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::{
    task::{JoinSet, yield_now},
    time::sleep,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Error, Header, KeyExtractor, KeyedLimit, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer,
    Rejection,
    limiter::{Breaker, FailureMode, Share},
    testing::Fault,
};

use crate::support::{
    TEST_TIMEOUT, in_mode,
    log::Log,
    redis_server::RedisServer,
    requests::{anyone, hello, request},
    stores::{failing, silent, with_fault},
};

const CALLS: Limit = Limit::per_hour("calls", 3);

/// The metrics recorded in this thread.
struct Recorded {
    snapshotter: Snapshotter,
    _recorder: metrics::LocalRecorderGuard<'static>,
}

impl Recorded {
    fn start() -> Self {
        let recorder: &'static DebuggingRecorder = Box::leak(Box::default());
        Self {
            snapshotter: recorder.snapshotter(),
            _recorder: metrics::set_default_local_recorder(recorder),
        }
    }

    /// All values by name and labels since the last call. Each metric has a unit and a description.
    fn all(&self) -> BTreeMap<String, DebugValue> {
        let series = self.snapshotter.snapshot().into_vec().into_iter().map(
            |(key, unit, description, value)| {
                assert!(unit.is_some() && description.is_some(), "{key:?}");
                let labels = key
                    .key()
                    .labels()
                    .map(|label| format!(" {}={}", label.key(), label.value()));
                (
                    format!("{}{}", key.key().name(), labels.collect::<String>()),
                    value,
                )
            },
        );
        series.collect()
    }
}

fn count(all: &BTreeMap<String, DebugValue>, series: &str) -> u64 {
    match all.get(series) {
        Some(DebugValue::Counter(count)) => *count,
        None => 0,
        other => panic!("{series} is {other:?}"),
    }
}

fn gauge(all: &BTreeMap<String, DebugValue>, series: &str) -> f64 {
    match all.get(series) {
        Some(DebugValue::Gauge(value)) => value.into_inner(),
        other => panic!("{series} is {other:?}"),
    }
}

fn values(all: &BTreeMap<String, DebugValue>, series: &str) -> Vec<f64> {
    match all.get(series) {
        Some(DebugValue::Histogram(values)) => {
            values.iter().map(|value| value.into_inner()).collect()
        }
        other => panic!("{series} is {other:?}"),
    }
}

#[tokio::test]
async fn decisions_count_by_limit_and_outcome() {
    let recorded = Recorded::start();
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(anyone))
        .limit(Limit::per_hour("wide", 100).by(anyone))
        .limit(Limit::per_hour("trial", 1).by(anyone).in_shadow())
        .layer(service_fn(hello));
    for _ in 0..5 {
        app.clone().oneshot(request()).await.unwrap();
    }
    let all = recorded.all();
    let decisions = |limit: &str, outcome: &str| {
        count(
            &all,
            &format!("rate_limit_decisions_total layer= limit={limit} outcome={outcome}"),
        )
    };
    assert_eq!(
        ["allowed", "refused"].map(|outcome| decisions("calls", outcome)),
        [3, 2]
    );
    assert_eq!(
        ["allowed", "refused"].map(|outcome| decisions("wide", outcome)),
        [3, 0],
        "this limit had capacity"
    );
    assert_eq!(
        ["allowed", "refused", "shadow_refused"].map(|outcome| decisions("trial", outcome)),
        [1, 0, 4]
    );
    assert_eq!(
        count(&all, "rate_limit_rejections_total layer= kind=limited"),
        2
    );
    let names = ["rate_limit_decisions_total", "rate_limit_rejections_total"];
    assert!(
        all.keys()
            .all(|series| names.iter().any(|name| series.starts_with(name))),
        "{all:?}"
    );
}

/// The limiter asks the store for the figures of the refusal at no cost, as a caller that only
/// looks does.
#[tokio::test(start_paused = true)]
async fn a_refusal_in_line_counts_once() {
    let limiter = Limiter::new(MemoryStore::new());
    assert!(limiter.check(&CALLS, "ada", 3).await.unwrap().is_allowed());
    let waiter = limiter.clone();
    let waiting =
        tokio::spawn(async move { waiter.acquire(&CALLS, "ada", 1, Duration::MAX).await });
    yield_now().await;
    let recorded = Recorded::start();
    assert!(
        !limiter
            .acquire(&CALLS, "ada", 1, TEST_TIMEOUT)
            .await
            .unwrap()
            .is_allowed()
    );
    assert_eq!(limiter.peek(&CALLS, "ada").await.unwrap().remaining(), 0);
    let all = recorded.all();
    let decisions = |outcome| {
        count(
            &all,
            &format!("rate_limit_decisions_total layer= limit=calls outcome={outcome}"),
        )
    };
    assert_eq!(["allowed", "refused"].map(decisions), [0, 1]);
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn failures_count_by_cause_and_degraded_responses_by_mode() {
    let recorded = Recorded::start();
    let failing = Limiter::new(failing());
    for mode in [
        FailureMode::Open,
        FailureMode::Closed,
        FailureMode::Local(Share::one_of(1)),
    ] {
        let layer = in_mode(
            RateLimitLayer::new(failing.clone()).limit(CALLS.by(anyone)),
            mode,
        );
        let app = layer.layer(service_fn(hello));
        for _ in 0..3 {
            app.clone().oneshot(request()).await.unwrap();
        }
    }
    let never = failing.check(&CALLS, "ada", 4).await;
    assert!(matches!(never, Err(Error::NeverFits(_))));
    Limiter::new(silent())
        .check(&CALLS, "ada", 1)
        .await
        .unwrap_err();
    Limiter::new(silent())
        .reset(&CALLS, "ada")
        .await
        .unwrap_err();
    let chosen = KeyedLimit::chosen(anyone, |_| None::<Limit>);
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(chosen)
        .layer(service_fn(hello));
    app.oneshot(request()).await.unwrap();

    let all = recorded.all();
    let failures = ["unavailable", "breaker_open", "timed_out"].map(|cause| {
        count(
            &all,
            &format!("rate_limit_failures_total layer= cause={cause}"),
        )
    });
    assert_eq!(failures, [5, 4, 2]);
    let degraded = ["open", "closed", "local"].map(|mode| {
        count(
            &all,
            &format!("rate_limit_degraded_total layer= mode={mode}"),
        )
    });
    assert_eq!(degraded, [3, 3, 3]);
    let allowed = count(
        &all,
        "rate_limit_decisions_total layer= limit=calls outcome=allowed",
    );
    assert_eq!(allowed, 3, "of this process");
}

#[tokio::test]
async fn the_gauge_shows_how_many_breakers_are_open() {
    let recorded = Recorded::start();
    let mut open = 0.0;
    let mut breakers = || {
        open += gauge(&recorded.all(), "rate_limit_breakers_open");
        open
    };
    let store = with_fault(Fault::Fails);
    let [one, other] = [(); 2]
        .map(|()| Limiter::new(store.clone()).breaker(Breaker::new(1, Duration::from_millis(200))));
    one.check(&CALLS, "ada", 1).await.unwrap_err();
    assert_eq!(breakers(), 1.0);
    other.check(&CALLS, "ada", 1).await.unwrap_err();
    assert_eq!(breakers(), 2.0);
    drop(other);
    assert_eq!(breakers(), 1.0);
    store.set(Fault::None);
    while one.check(&CALLS, "ada", 1).await.is_err() {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(breakers(), 0.0);
    drop(one);
    assert_eq!(breakers(), 0.0);
}

#[tokio::test]
async fn each_redis_batch_is_measured() {
    let recorded = Recorded::start();
    let server = RedisServer::start();
    let store = server.store().connections(2).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for number in 0..5 {
        assert_eq!(
            limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed(),
            number < 3
        );
    }
    let all = recorded.all();
    assert_eq!(
        values(&all, "rate_limit_batch_checks"),
        [1.0; 4],
        "the last refusal was repeated"
    );
    assert_eq!(count(&all, "rate_limit_refusal_cache_hits_total"), 1);
    assert_eq!(
        count(
            &all,
            "rate_limit_decisions_total layer= limit=calls outcome=refused"
        ),
        2
    );
    let seconds = values(&all, "rate_limit_script_seconds");
    assert!(
        seconds.len() == 4 && seconds.iter().all(|seconds| (1e-6..20.0).contains(seconds)),
        "{seconds:?}"
    );

    let limiter = limiter.refusal_cache(Duration::ZERO);
    let mut checks = JoinSet::new();
    for number in 0..500 {
        let limiter = limiter.clone();
        checks.spawn(async move {
            limiter
                .check(&CALLS, format!("key-{number}"), 1)
                .await
                .unwrap()
        });
    }
    checks.join_all().await;
    let all = recorded.all();
    let (batches, waiting) = (
        values(&all, "rate_limit_batch_checks"),
        values(&all, "rate_limit_queue_checks"),
    );
    assert_eq!(
        (batches.iter().sum::<f64>(), batches.len()),
        (500.0, waiting.len())
    );
    assert!(
        batches.iter().any(|checks| *checks > 1.0) && batches.iter().all(|checks| *checks <= 128.0)
    );
    assert!(waiting.iter().any(|checks| *checks > 0.0) && waiting.contains(&0.0));
    assert_eq!(
        values(&all, "rate_limit_script_seconds").len(),
        batches.len()
    );
}

#[tokio::test]
async fn a_full_queue_is_counted() {
    let recorded = Recorded::start();
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let limiter = Limiter::new(store).breaker(Breaker::OFF);
    server.pause();
    let mut checks = JoinSet::new();
    for number in 0..70_000_u64 {
        let limiter = limiter.clone();
        checks.spawn(async move { limiter.check(&CALLS, number, 1).await.is_err() });
    }
    let failed = checks
        .join_all()
        .await
        .into_iter()
        .filter(|failed| *failed)
        .count() as u64;
    server.resume();
    let all = recorded.all();
    let full = count(&all, "rate_limit_queue_full_total");
    assert!(full > 0);
    assert_eq!(
        count(&all, "rate_limit_failures_total layer= cause=unavailable"),
        full
    );
    assert_eq!(
        count(&all, "rate_limit_failures_total layer= cause=timed_out"),
        failed - full
    );
}

/// A request by method and path, with these headers.
fn to(method: Method, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let request = Request::builder().method(method).uri(path);
    let request = headers.iter().fold(request, |request, (name, value)| {
        request.header(*name, *value)
    });
    request.body(Body::empty()).unwrap()
}

async fn send(layer: &RateLimitLayer, request: Request<Body>) -> StatusCode {
    layer
        .layer(service_fn(hello))
        .oneshot(request)
        .await
        .unwrap()
        .status()
}

#[tokio::test(start_paused = true)]
async fn rejections_count_by_layer_and_kind() {
    let recorded = Recorded::start();
    let tenant = Header::new("x-tenant");
    let api = RateLimitLayer::new(MemoryStore::new())
        .named("api")
        .limit(CALLS.by(tenant.clone()))
        .cost(|request| {
            if request.uri.path() == "/too-large" {
                4
            } else {
                1
            }
        })
        .deny(tenant.clone().one_of([tenant.key("eve")]));
    let get = |path: &str, tenant: &str| to(Method::GET, path, &[("x-tenant", tenant)]);
    let mut statuses = Vec::new();
    for request in [
        get("/", "ada"),
        get("/", "ada"),
        get("/", "ada"),
        get("/", "ada"),
        get("/too-large", "bob"),
        to(Method::GET, "/", &[]),
        get("/", "eve"),
    ] {
        statuses.push(send(&api, request).await.as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 429, 429, 400, 403]);
    let closed = RateLimitLayer::new(failing())
        .named("login")
        .limit(CALLS.by(anyone))
        .fail_closed();
    for _ in 0..2 {
        assert_eq!(send(&closed, request()).await, 503);
    }
    let no_peer = RateLimitLayer::new(MemoryStore::new())
        .named("admin")
        .limit(CALLS.by(PeerIp::new()));
    assert_eq!(send(&no_peer, request()).await, 500);
    // A limit of no units is used up, whatever a request costs.
    let kept_out = Limit::per_minute("calls", 0).by(anyone);
    let kept_out = RateLimitLayer::new(MemoryStore::new())
        .named("kept out")
        .limit(kept_out);
    assert_eq!(send(&kept_out, request()).await, 429);
    let all = recorded.all();
    let kinds = [
        "limited",
        "never_fits",
        "no_key",
        "not_set_up",
        "denied",
        "unavailable",
    ];
    let rejections = |layer: &str| {
        kinds.map(|kind| {
            count(
                &all,
                &format!("rate_limit_rejections_total layer={layer} kind={kind}"),
            )
        })
    };
    let expected = [
        [1, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 2],
        [0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [0; 6],
    ];
    assert_eq!(
        ["api", "login", "admin", "kept out", ""].map(rejections),
        expected
    );
}

#[tokio::test(start_paused = true)]
async fn decisions_failures_and_degraded_requests_have_the_name_of_their_layer() {
    let recorded = Recorded::start();
    let limiter = Limiter::new(MemoryStore::new());
    // Settings before and after the name, whatever makes a limiter of its own.
    let named = |name| {
        let limiter = limiter
            .clone()
            .breaker(Breaker::OFF)
            .refusal_cache(Duration::from_secs(1));
        RateLimitLayer::new(limiter)
            .named(name)
            .limit(CALLS.by(anyone))
            .deadline(Duration::from_secs(1))
    };
    assert_eq!(send(&named("one"), request()).await, 200);
    for status in [200, 200, 429] {
        assert_eq!(send(&named("other"), request()).await, status);
    }
    assert_eq!(
        send(
            &named("waits").wait_up_to(Duration::from_secs(1)),
            request()
        )
        .await,
        429
    );
    let key = anyone(&request().into_parts().0).unwrap();
    assert!(!limiter.check(&CALLS, key, 1).await.unwrap().is_allowed());
    for (name, mode) in [
        ("open", FailureMode::Open),
        ("local", FailureMode::Local(Share::one_of(1))),
    ] {
        let layer = RateLimitLayer::new(Limiter::new(failing()))
            .named(name)
            .limit(CALLS.by(anyone));
        assert_eq!(send(&in_mode(layer, mode), request()).await, 200);
    }

    let all = recorded.all();
    let series: BTreeMap<_, _> = all
        .keys()
        .map(|series| (series.as_str(), count(&all, series)))
        .collect();
    let expected = [
        (
            "rate_limit_decisions_total layer= limit=calls outcome=refused",
            1,
        ),
        (
            "rate_limit_decisions_total layer=local limit=calls outcome=allowed",
            1,
        ),
        (
            "rate_limit_decisions_total layer=one limit=calls outcome=allowed",
            1,
        ),
        (
            "rate_limit_decisions_total layer=other limit=calls outcome=allowed",
            2,
        ),
        (
            "rate_limit_decisions_total layer=other limit=calls outcome=refused",
            1,
        ),
        (
            "rate_limit_decisions_total layer=waits limit=calls outcome=refused",
            1,
        ),
        ("rate_limit_degraded_total layer=local mode=local", 1),
        ("rate_limit_degraded_total layer=open mode=open", 1),
        ("rate_limit_failures_total layer=local cause=unavailable", 1),
        ("rate_limit_failures_total layer=open cause=unavailable", 1),
        ("rate_limit_rejections_total layer=other kind=limited", 1),
        ("rate_limit_rejections_total layer=waits kind=limited", 1),
    ];
    assert_eq!(series, BTreeMap::from(expected));
}

/// The name is also a field of log lines.
#[tokio::test(start_paused = true)]
async fn log_lines_have_the_name_of_their_layer() {
    for (layer, is_named) in [
        (RateLimitLayer::new(failing()).named("api"), true),
        (RateLimitLayer::new(failing()), false),
    ] {
        let log = Log::start();
        assert_eq!(send(&layer.limit(CALLS.by(anyone)), request()).await, 200);
        let log = log.text();
        assert!(log.contains("no rate-limit decision"), "{log}");
        assert_eq!(
            (log.contains("layer=\"api\""), log.contains("layer=")),
            (is_named, is_named),
            "{log}"
        );
    }
}

#[tokio::test]
async fn uncounted_requests_count_by_layer() {
    let recorded = Recorded::start();
    let tenant = Header::new("x-tenant");
    let layer = RateLimitLayer::new(MemoryStore::new())
        .named("api")
        .limit(CALLS.by(anyone))
        .exempt(|request| request.uri.path() == "/health")
        .exempt(tenant.clone().one_of([tenant.key("monitor")]));
    for request in [
        to(Method::GET, "/health", &[]),
        to(Method::GET, "/health", &[]),
        to(Method::GET, "/", &[("x-tenant", "monitor")]),
        to(Method::GET, "/", &[]),
    ] {
        assert_eq!(send(&layer, request).await, 200);
    }
    let all = recorded.all();
    assert_eq!(count(&all, "rate_limit_uncounted_total layer=api"), 3);
    assert_eq!(
        count(
            &all,
            "rate_limit_decisions_total layer=api limit=calls outcome=allowed"
        ),
        1
    );
}

/// A handler is no layer. The layer around it has not rejected the request.
#[tokio::test]
async fn the_rejection_of_a_handler_counts_without_a_layer() {
    let recorded = Recorded::start();
    let refuse = || async {
        let limiter = Limiter::new(MemoryStore::new());
        Err::<(), _>(
            limiter
                .check(&CALLS, "ada", 4)
                .await
                .map(Rejection::Limited)
                .unwrap_or_else(Rejection::from),
        )
    };
    let layer = RateLimitLayer::new(MemoryStore::new())
        .named("api")
        .limit(CALLS.by(anyone));
    let response: Response<Body> = Router::new()
        .route("/", get(refuse))
        .layer(layer)
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!(response.status(), 429);
    let all = recorded.all();
    let rejections: Vec<_> = all
        .keys()
        .filter(|series| series.starts_with("rate_limit_rejections_total"))
        .collect();
    assert_eq!(
        rejections,
        ["rate_limit_rejections_total layer= kind=never_fits"]
    );
}

/// Remembers the names of the metrics that were described to it.
#[derive(Default)]
struct Described(Arc<Mutex<BTreeSet<String>>>);

impl Described {
    fn add(&self, name: &KeyName, unit: Option<Unit>, description: &SharedString) {
        assert!(unit.is_some() && !description.is_empty(), "{name:?}");
        assert!(
            self.0.lock().unwrap().insert(name.as_str().to_owned()),
            "{name:?} was described twice"
        );
    }
}

impl Recorder for Described {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.add(&name, unit, &description);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.add(&name, unit, &description);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, description: SharedString) {
        self.add(&name, unit, &description);
    }

    fn register_counter(&self, _: &metrics::Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &metrics::Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &metrics::Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// A recorder that comes late gets them as well.
#[tokio::test]
async fn every_metric_of_the_docs_is_described_with_the_first_value() {
    let docs = include_str!("../../../src/metrics.rs").lines();
    let kinds = [" | counter |", " | gauge |", " | histogram |"];
    let documented: BTreeSet<_> = docs
        .filter_map(|line| line.strip_prefix("//! | `rate_limit_")?.split_once('`'))
        .filter_map(|(name, columns)| {
            kinds
                .iter()
                .any(|kind| columns.starts_with(kind))
                .then_some(name)
        })
        .collect();
    assert!(documented.len() > 10, "{documented:?}");
    let limiter = Limiter::new(MemoryStore::new());
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    let described = Arc::default();
    let _recorder =
        metrics::set_default_local_recorder(Box::leak(Box::new(Described(Arc::clone(&described)))));
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    let described = described.lock().unwrap();
    let described: BTreeSet<_> = described
        .iter()
        .filter_map(|name| name.strip_prefix("rate_limit_"))
        .collect();
    assert_eq!(described, documented);
}
