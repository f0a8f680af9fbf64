//! The time until decisions are back, and the responses until then.

use std::time::{Duration, Instant};

use tokio::{task::spawn_blocking, time::sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{Limit, RateLimitLayer, middleware::Degraded};

use crate::support::{
    TEST_TIMEOUT,
    load::Load,
    outage::{millis, row},
    redis_server::{RedisServer, store_at},
    requests::{anyone, hello, request},
};

/// On a fail-open route, clients see no error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_dies_and_is_restarted() {
    const LIVES: usize = 3;

    let mut server = RedisServer::start();
    let store = store_at(&server.url()).build().unwrap();
    let limit = Limit::per_hour("calls", 1_000_000_000).by(anyone);
    let app = RateLimitLayer::new(store)
        .limit(limit)
        .fail_open()
        .layer(service_fn(hello));
    let load = Load::start(move |_| {
        let answer = app.clone().oneshot(request());
        async {
            let response = answer.await.unwrap();
            assert_eq!(response.status(), 200);
            response
                .extensions()
                .get::<Degraded>()
                .is_none()
                .then_some(true)
        }
    });
    let (mut after, mut answers, mut slowest) = (Duration::ZERO, 0, Duration::ZERO);
    for _ in 0..LIVES {
        load.goes_on().await;
        load.report();
        server.kill();
        sleep(Duration::from_secs(2)).await;
        let restarted = spawn_blocking(move || {
            server.restart();
            server
        });
        server = restarted.await.unwrap();
        let back = Instant::now();
        load.goes_on().await;
        sleep(Duration::from_millis(500)).await;
        let report = load.report();
        assert!(
            report.failed > 0 && report.failed_after(back) < TEST_TIMEOUT,
            "{report:?}"
        );
        after = after.max(report.failed_after(back));
        (answers, slowest) = (
            answers + report.decided + report.failed,
            slowest.max(report.slowest),
        );
    }
    load.end().await;
    row(
        &format!("`kill -9`, restart after 2 s, {LIVES} times"),
        format!(
            "all decided again {} after Redis was back; {answers} answers, each a 200, the slowest after {}",
            millis(after),
            millis(slowest)
        ),
        "decisions back within 1 s of Redis being back; no error shown on fail-open routes",
    );
}
