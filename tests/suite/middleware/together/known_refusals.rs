//! What is known of a key stands until its own time has passed, also while Redis cannot decide: a
//! client gains nothing by failing its own check, or by having it fail.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use axum::body::Body;
use futures_util::future::join_all;
use http::Request;
use tokio::{task::JoinSet, time::sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{Everyone, Limit, Limiter, RateLimitLayer, Rejection};

use super::{BAN, LOGIN, ask, by_user, login, modes, serve_logins, start, until_refused};
use crate::support::{
    TEST_TIMEOUT, http_client::HttpClient, ms, redis_server::RedisServer, seconds,
};

const CALLS: Limit = Limit::per_minute("calls", 3);

#[tokio::test]
async fn a_known_refusal_stands_in_every_failure_mode_while_redis_is_gone() {
    let (mut server, clock, store) = start();
    let layer =
        RateLimitLayer::new(Limiter::new(store).deadline(TEST_TIMEOUT)).limit(CALLS.by(by_user()));
    for _ in 0..4 {
        ask(&layer, "ada").await;
    }
    clock.advance(seconds(2));
    server.kill();
    for (layer, otherwise) in modes(&layer) {
        let statuses = join_all((0..50).map(|_| ask(&layer, "ada"))).await;
        assert_eq!(statuses, [429; 50], "{layer:?}");
        assert_eq!(
            ask(&layer, "bob").await,
            otherwise,
            "what is not known meets the mode"
        );
        clock.advance(seconds(2));
    }
    // Its own time has passed.
    clock.advance(seconds(60));
    assert_eq!(ask(&layer.fail_closed(), "ada").await, 503);
}

#[tokio::test]
async fn a_known_ban_stands_in_every_failure_mode_while_redis_does_not_answer() {
    let (server, clock, store) = start();
    let layer = login(Limiter::new(store).deadline(TEST_TIMEOUT));
    for _ in 0..5 {
        assert_eq!(ask(&layer, "ada").await, 401);
    }
    assert_eq!(ask(&layer, "ada").await, 403);
    server.pause();
    // The window of the limit is over, and the ban is not.
    clock.advance(seconds(120));
    let hasty = layer.clone().deadline(ms(50));
    for (layer, otherwise) in modes(&hasty) {
        for _ in 0..12 {
            assert_eq!(
                join_all((0..20).map(|_| ask(&layer, "ada"))).await,
                [403; 20],
                "{layer:?}"
            );
            clock.advance(seconds(5));
        }
        assert_eq!(
            ask(&layer, "bob").await,
            otherwise,
            "what is not known meets the mode"
        );
    }
    server.resume();
    clock.advance(seconds(600));
    // As long as checks from before are not answered, five of them may take all units.
    let begun = Instant::now();
    let mut status = ask(&layer, "ada").await;
    while status == 429 && begun.elapsed() < TEST_TIMEOUT {
        sleep(ms(5)).await;
        status = ask(&layer, "ada").await;
    }
    assert_eq!(status, 401, "the ban is over");
}

/// One key for all clients, and three layers of which the middle one refuses.
#[tokio::test]
async fn a_known_ban_of_a_shared_key_stands_between_other_layers() {
    let (mut server, clock, store) = start();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let layer = |limit| {
        RateLimitLayer::new(limiter.clone())
            .limit(limit)
            .fail_open()
    };
    let outer = layer(Limit::per_minute("outer", 1_000).by(Everyone));
    let middle = layer(LOGIN.by(Everyone).ban(BAN, seconds(900)));
    let inner = layer(Limit::concurrent("inner", 100).by(Everyone));
    let reached = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&reached);
    let service = service_fn(move |_: Request<Body>| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok::<_, Infallible>(http::Response::new(Body::empty())) }
    });
    let app = outer.layer(middle.layer(inner.layer(service)));
    let ask = || {
        let app = app.clone();
        async move { app.oneshot(Request::new(Body::empty())).await.unwrap() }
    };
    for _ in 0..6 {
        ask().await;
    }
    assert_eq!(reached.swap(0, Ordering::SeqCst), 5);
    server.kill();
    for _ in 0..20 {
        let responses = join_all((0..20).map(|_| ask())).await;
        assert!(
            responses
                .iter()
                .all(|response| matches!(response.extensions().get(), Some(Rejection::Banned(_))))
        );
        clock.advance(seconds(30));
    }
    assert_eq!(reached.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn an_application_far_from_its_limit_stays_open_before_a_slow_redis() {
    let (server, _clock, store) = start();
    let total = Limit::per_minute("total", 1_000_000).by(Everyone);
    let layer = RateLimitLayer::new(Limiter::new(store).deadline(TEST_TIMEOUT))
        .limit(total)
        .fail_open();
    assert_eq!(ask(&layer, "bob").await, 200);
    server.pause();
    let hasty = layer.deadline(ms(50));
    assert_eq!(
        join_all((0..2_000).map(|_| ask(&hasty, "bob"))).await,
        [200; 2_000]
    );
    server.resume();
}

/// The login layer of the docs with the default failure mode, over HTTP/2. One client is banned,
/// others log in, and Redis stands still for moments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_banned_flooder_reaches_no_handler_while_others_log_in() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let tried = Arc::new(AtomicU64::new(0));
    let url = &serve_logins([login(store)], &tried).await;
    until_refused(url, 403).await;
    tried.store(0, Ordering::SeqCst);

    let (is_over, refused) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    let mut clients = JoinSet::new();
    for connection in 0..9 {
        let client = HttpClient::http2();
        for stream in 0..128 {
            let (client, url, is_over, refused) = (
                client.clone(),
                url.clone(),
                Arc::clone(&is_over),
                Arc::clone(&refused),
            );
            clients.spawn(async move {
                for turn in 0.. {
                    if is_over.load(Ordering::SeqCst) {
                        return;
                    }
                    let other = format!("{stream}-{turn}");
                    let user = if connection < 8 { "ada" } else { &other };
                    let answer = client.send("GET", &url, &[("x-user", user)]).await;
                    refused.fetch_add(u64::from(answer.status == 403), Ordering::SeqCst);
                }
            });
        }
    }
    for _ in 0..4 {
        sleep(ms(350)).await;
        server.pause();
        sleep(ms(150)).await;
        server.resume();
    }
    is_over.store(true, Ordering::SeqCst);
    while clients.join_next().await.is_some() {}
    println!(
        "{} tries, {} refused, {} script calls",
        tried.load(Ordering::SeqCst),
        refused.load(Ordering::SeqCst),
        server.script_calls()
    );
    assert_eq!(tried.load(Ordering::SeqCst), 0);
    assert!(refused.load(Ordering::SeqCst) > 0);
}
