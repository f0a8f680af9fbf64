//! Requests while a server hangs or is too slow: none waits longer than its deadline.

use std::{
    future::{Future, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Response, StatusCode};
use tokio::{task::JoinSet, time::sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Error, Limiter, RateLimitLayer, RedisStore, Rejection,
    limiter::{Breaker, FailureMode, Share},
    middleware::Degraded,
};

use super::{CALLS, INTERVAL, SLACK, at_once};
use crate::support::{
    TEST_TIMEOUT, in_mode,
    outage::{CLIENTS, DEADLINE, millis, row},
    redis_server::RedisServer,
    requests::{anyone, hello, request},
    stores::failing,
};

#[tokio::test]
async fn a_layer_follows_its_failure_mode_while_the_breaker_is_open() {
    for mode in [
        FailureMode::Open,
        FailureMode::Closed,
        FailureMode::Local(Share::one_of(2)),
    ] {
        let layer = in_mode(RateLimitLayer::new(failing()).limit(CALLS.by(anyone)), mode);
        let app = layer.layer(service_fn(hello));
        for number in 0..100 {
            let response = at_once(app.clone().oneshot(request())).unwrap();
            assert_mode(&response, mode);
            let degraded: &Degraded = response.extensions().get().unwrap();
            assert_eq!(
                matches!(&degraded.error, Error::BreakerOpen(_)),
                number >= 5
            );
        }
    }
}

fn assert_mode(response: &Response<Body>, mode: FailureMode) {
    assert_eq!(response.extensions().get::<Degraded>().unwrap().mode, mode);
    let expected = if mode == FailureMode::Closed {
        StatusCode::SERVICE_UNAVAILABLE
    } else {
        StatusCode::OK
    };
    assert_eq!(response.status(), expected);
    assert_eq!(
        response.extensions().get::<Rejection>().is_some(),
        mode == FailureMode::Closed
    );
}

/// 200 clients meet a hanging server. Each gets a response in the route's failure mode: at the
/// deadline at first, and then without waiting, until the server continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_server_delays_no_request_beyond_the_deadline() {
    let server = RedisServer::start();
    let (mut until_open, mut when_open, mut answers) = (Duration::ZERO, Vec::new(), 0);
    for mode in [
        FailureMode::Closed,
        FailureMode::Open,
        FailureMode::Local(Share::one_of(2)),
    ] {
        let store = RedisStore::builder(server.url()).build().unwrap();
        let layer =
            in_mode(RateLimitLayer::new(store).limit(CALLS.by(anyone)), mode).deadline(DEADLINE);
        let app = layer.layer(service_fn(hello));
        let degraded = |response: &Response<Body>| response.extensions().get::<Degraded>().cloned();
        let is_degraded = |response: &Response<Body>| degraded(response).is_some();
        let has_open_breaker = |response: &Response<Body>| {
            degraded(response).is_some_and(|it| matches!(it.error, Error::BreakerOpen(_)))
        };
        while is_degraded(&app.clone().oneshot(request()).await.unwrap()) {}

        server.pause();
        let hangs = Instant::now();
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let app = app.clone();
            clients.spawn(async move {
                let asked = Instant::now();
                let response = app.oneshot(request()).await.unwrap();
                (response, asked.elapsed())
            });
        }
        for (response, waited) in clients.join_all().await {
            assert_mode(&response, mode);
            assert!(waited <= DEADLINE + SLACK, "{waited:?}");
            (until_open, answers) = (until_open.max(waited), answers + 1);
        }
        // By now the breaker is open, unless the machine was too busy for the timeouts to count. A
        // hanging server answers no probe.
        while !has_open_breaker(&app.clone().oneshot(request()).await.unwrap()) {}
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let app = app.clone();
            clients.spawn(async move {
                let mut waited = Vec::new();
                for _ in 0..100 {
                    let (asked, mut answer) =
                        (Instant::now(), Box::pin(app.clone().oneshot(request())));
                    let response = match poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx))).await {
                        Poll::Ready(response) => {
                            waited.push(asked.elapsed());
                            response
                        }
                        // A probe, because the task of the probes was held up for twice the
                        // interval and the deadline.
                        Poll::Pending => answer.await,
                    };
                    assert_mode(&response.unwrap(), mode);
                    sleep(Duration::from_millis(1)).await;
                }
                waited
            });
        }
        let waited: Vec<_> = clients.join_all().await.into_iter().flatten().collect();
        let (probes, overdue) = (CLIENTS * 100 - waited.len(), 2 * (INTERVAL + DEADLINE));
        assert!(
            overdue * u32::try_from(probes).unwrap() <= hangs.elapsed(),
            "{probes} requests were probes"
        );
        when_open.extend(waited);

        server.resume();
        let resumed = Instant::now();
        while is_degraded(&app.clone().oneshot(request()).await.unwrap()) {
            assert!(resumed.elapsed() < TEST_TIMEOUT);
            sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
    when_open.sort();
    let at = |share: usize| millis(when_open[(when_open.len() - 1) * share / 1_000]);
    row(
        "Redis hangs (`SIGSTOP`), with a deadline of 50 ms",
        format!(
            "worst answer {} until the breaker opened, then {} ({} for 99.9 %); the mode honoured in all of {} answers",
            millis(until_open),
            at(1_000),
            at(999),
            answers + when_open.len()
        ),
        "worst answer at most deadline + 20 ms until the breaker opens, then below 1 ms; the mode honoured in 100 %",
    );
}

/// Each script takes most of the deadline, and requests come faster than that. They finish or time
/// out, and never pile up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_server_does_not_pile_up_requests() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(DEADLINE);
    let _ = limiter.peek(&CALLS, "ada").await;

    let waiting = Arc::new(AtomicUsize::new(0));
    let (mut worst, mut checks, slow_until) =
        (0, JoinSet::new(), Instant::now() + Duration::from_secs(1));
    while Instant::now() < slow_until {
        server.pause();
        for _ in 0..40 {
            for _ in 0..5 {
                let (limiter, waiting) = (limiter.clone(), Arc::clone(&waiting));
                waiting.fetch_add(1, Ordering::SeqCst);
                checks.spawn(async move {
                    let asked = Instant::now();
                    let _ = limiter.check(&CALLS, "ada", 1).await;
                    waiting.fetch_sub(1, Ordering::SeqCst);
                    asked.elapsed()
                });
            }
            worst = worst.max(waiting.load(Ordering::SeqCst));
            sleep(Duration::from_millis(1)).await;
        }
        server.resume();
        sleep(Duration::from_millis(2)).await;
    }
    let spawned = checks.len();
    let longest = checks.join_all().await.into_iter().max().unwrap();
    assert!(longest <= DEADLINE + SLACK, "{longest:?}");
    assert!(worst < spawned / 2, "{worst} of {spawned} waited at once");

    // Abandoned checks are not counted later.
    let used = limiter
        .clone()
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
        .peek(&CALLS, "ada")
        .await
        .unwrap()
        .binding()
        .used;
    assert!(used <= spawned as u64, "{used} of {spawned}");
}
