//! The metrics that a recorder gets, by the names in the docs.

use std::{collections::BTreeMap, convert::Infallible, time::Duration};

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::{
    task::{JoinSet, yield_now},
    time::sleep,
};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Breaker, DenyCache, Error, FailureMode, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore, Share,
};

use crate::support::{
    TEST_TIMEOUT,
    redis_server::RedisServer,
    requests::{anyone, hello, request},
    stores::{Failing, Silent},
    switched::{State, Switched},
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
        Self { snapshotter: recorder.snapshotter(), _recorder: metrics::set_default_local_recorder(recorder) }
    }

    /// All values by name and labels since the last call.
    fn all(&self) -> BTreeMap<String, DebugValue> {
        let series = self.snapshotter.snapshot().into_vec().into_iter().map(|(key, _, _, value)| {
            let labels = key.key().labels().map(|label| format!(" {}={}", label.key(), label.value()));
            (format!("{}{}", key.key().name(), labels.collect::<String>()), value)
        });
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
        Some(DebugValue::Histogram(values)) => values.iter().map(|value| value.into_inner()).collect(),
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
        count(&all, &format!("rate_limit_decisions_total limit={limit} outcome={outcome}"))
    };
    assert_eq!(["allowed", "refused"].map(|outcome| decisions("calls", outcome)), [3, 2]);
    assert_eq!(["allowed", "refused"].map(|outcome| decisions("wide", outcome)), [3, 0], "this limit had capacity");
    assert_eq!(["allowed", "refused", "shadow_refused"].map(|outcome| decisions("trial", outcome)), [1, 0, 4]);
    assert!(all.keys().all(|series| series.starts_with("rate_limit_decisions_total")), "{all:?}");
}

/// The refused caller has peeked at the limit at cost 0, which also counts.
#[tokio::test(start_paused = true)]
async fn a_refusal_in_line_counts_once() {
    let limiter = Limiter::new(MemoryStore::new());
    assert!(limiter.check(&CALLS, "ada", 3).await.unwrap().is_allowed());
    let waiter = limiter.clone();
    let waiting = tokio::spawn(async move { waiter.acquire(&CALLS, "ada", 1, Duration::MAX).await });
    yield_now().await;
    let recorded = Recorded::start();
    assert!(!limiter.acquire(&CALLS, "ada", 1, TEST_TIMEOUT).await.unwrap().is_allowed());
    let all = recorded.all();
    let decisions = |outcome| count(&all, &format!("rate_limit_decisions_total limit=calls outcome={outcome}"));
    assert_eq!(["allowed", "refused"].map(decisions), [1, 1]);
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn failures_count_by_cause_and_degraded_responses_by_mode() {
    let recorded = Recorded::start();
    let failing = Limiter::new(Failing);
    for mode in [FailureMode::Open, FailureMode::Closed, FailureMode::Local(Share::one_of(1))] {
        let layer = RateLimitLayer::on(failing.clone()).limit(CALLS.by(anyone)).failure_mode(mode);
        let app = layer.layer(service_fn(hello));
        for _ in 0..3 {
            app.clone().oneshot(request()).await.unwrap();
        }
    }
    let never = failing.check(&CALLS, "ada", 4).await;
    assert!(matches!(never, Err(Error::NeverFits(_))));
    Limiter::new(Silent).check(&CALLS, "ada", 1).await.unwrap_err();
    Limiter::new(Silent).reset(&CALLS, "ada").await.unwrap_err();
    let chosen = || KeyedLimit::chosen(anyone, |_| async { Err::<Limit, _>("no such tenant") });
    for limits in [vec![chosen()], vec![chosen(), chosen().fallback(CALLS)], vec![chosen().fallback(CALLS)]] {
        let layer = RateLimitLayer::new(MemoryStore::new()).limits(limits).unwrap();
        layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    }
    let chosen = KeyedLimit::chosen(anyone, |_| async { Ok::<_, Infallible>(None::<Limit>) });
    let app = RateLimitLayer::new(MemoryStore::new()).limit(chosen).layer(service_fn(hello));
    app.oneshot(request()).await.unwrap();

    let all = recorded.all();
    let failures = ["unavailable", "breaker_open", "timed_out", "no_limit"]
        .map(|cause| count(&all, &format!("rate_limit_failures_total cause={cause}")));
    assert_eq!(failures, [5, 4, 2, 3]);
    let degraded = ["open", "closed", "local", "fallback"]
        .map(|mode| count(&all, &format!("rate_limit_degraded_total mode={mode}")));
    assert_eq!(degraded, [5, 3, 3, 1]);
    let allowed = count(&all, "rate_limit_decisions_total limit=calls outcome=allowed");
    assert_eq!(allowed, 5, "three of this process, and two of a fallback");
}

#[tokio::test]
async fn the_gauge_shows_how_many_breakers_are_open() {
    let recorded = Recorded::start();
    let mut open = 0.0;
    let mut breakers = || {
        open += gauge(&recorded.all(), "rate_limit_breakers_open");
        open
    };
    let store = Switched::new(State::Fails);
    let [one, other] = [(); 2].map(|()| Limiter::new(store.clone()).breaker(Breaker::new().failures(1)));
    one.check(&CALLS, "ada", 1).await.unwrap_err();
    assert_eq!(breakers(), 1.0);
    other.check(&CALLS, "ada", 1).await.unwrap_err();
    assert_eq!(breakers(), 2.0);
    drop(other);
    assert_eq!(breakers(), 1.0);
    store.set(State::Works);
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
    let store = RedisStore::builder(&server.url()).connections(2).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for number in 0..5 {
        assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed(), number < 3);
    }
    let all = recorded.all();
    assert_eq!(values(&all, "rate_limit_batch_checks"), [1.0; 4], "the last refusal was repeated");
    assert_eq!(count(&all, "rate_limit_deny_cache_hits_total"), 1);
    assert_eq!(count(&all, "rate_limit_decisions_total limit=calls outcome=refused"), 2);
    let seconds = values(&all, "rate_limit_script_seconds");
    assert!(seconds.len() == 4 && seconds.iter().all(|seconds| (1e-6..20.0).contains(seconds)), "{seconds:?}");

    let limiter = limiter.deny_cache(DenyCache::off());
    let mut checks = JoinSet::new();
    for number in 0..500 {
        let limiter = limiter.clone();
        checks.spawn(async move { limiter.check(&CALLS, format!("key-{number}"), 1).await.unwrap() });
    }
    checks.join_all().await;
    let all = recorded.all();
    let (batches, waiting) = (values(&all, "rate_limit_batch_checks"), values(&all, "rate_limit_queue_checks"));
    assert_eq!((batches.iter().sum::<f64>(), batches.len()), (500.0, waiting.len()));
    assert!(batches.iter().any(|checks| *checks > 1.0) && batches.iter().all(|checks| *checks <= 128.0));
    assert!(waiting.iter().any(|checks| *checks > 0.0) && waiting.contains(&0.0));
    assert_eq!(values(&all, "rate_limit_script_seconds").len(), batches.len());
}

#[tokio::test]
async fn a_full_queue_is_counted() {
    let recorded = Recorded::start();
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).build().unwrap();
    let limiter = Limiter::new(store).breaker(Breaker::off());
    server.pause();
    let mut checks = JoinSet::new();
    for _ in 0..10_000 {
        let limiter = limiter.clone();
        checks.spawn(async move { limiter.check(&CALLS, "ada", 1).await.is_err() });
    }
    let failed = checks.join_all().await.into_iter().filter(|failed| *failed).count() as u64;
    server.resume();
    let all = recorded.all();
    let full = count(&all, "rate_limit_queue_full_total");
    assert!(full > 0);
    assert_eq!(count(&all, "rate_limit_failures_total cause=unavailable"), full);
    assert_eq!(count(&all, "rate_limit_failures_total cause=timed_out"), failed - full);
}
