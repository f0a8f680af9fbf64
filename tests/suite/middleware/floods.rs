//! Many clients at once over HTTP/2 and two processes, while Redis stands still now and then.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use axum::{Extension, Router, routing::get};
use http::{HeaderMap, StatusCode};
use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{Decision, Everyone, Header, Limit, Limiter, RateLimitLayer, limiter::Share};

use crate::support::{
    TEST_TIMEOUT, http_client::HttpClient, http_server::serve, ms, redis_server::RedisServer, seconds,
};

const LOGIN: Limit = Limit::per_minute("login", 5);
const BAN: Limit = Limit::per_day("login.ban", 1);

fn by_user() -> Header {
    Header::new("x-user")
}

fn login(limiter: Limiter) -> RateLimitLayer {
    let failures = LOGIN
        .by(by_user())
        .settle(|exchange| u64::from(exchange.response.status == StatusCode::UNAUTHORIZED))
        .ban(BAN, seconds(900))
        .ban_status(StatusCode::FORBIDDEN);
    RateLimitLayer::new(limiter).limit(failures)
}

fn modes(layer: &RateLimitLayer) -> [(&'static str, RateLimitLayer); 3] {
    let layer = || layer.clone();
    [("open", layer().fail_open()), ("closed", layer().fail_closed()), ("local", layer().fail_local(Share::one_of(2)))]
}

/// Counts how many are inside, and the most so far.
#[derive(Clone, Default)]
struct Inside(Arc<(AtomicU64, AtomicU64, AtomicU64)>);

struct Entered(Inside);

impl Inside {
    fn enter(&self) -> Entered {
        let now = self.0.0.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.1.fetch_max(now, Ordering::SeqCst);
        self.0.2.fetch_add(1, Ordering::SeqCst);
        Entered(self.clone())
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// 64 connections with 16 streams each send in turn to these servers, until `meanwhile` is over. `user` names the user of a connection,
/// stream and turn. How many responses had each status.
async fn flood(
    urls: &[String],
    user: impl Fn(u32, u32, u64) -> String + Clone + Send + 'static,
    meanwhile: impl Future<Output = ()>,
) -> std::collections::BTreeMap<u16, u64> {
    let is_over = Arc::<AtomicBool>::default();
    let mut clients = JoinSet::new();
    for connection in 0..64 {
        let client = HttpClient::http2();
        for stream in 0..16 {
            let (client, is_over, user) = (client.clone(), Arc::clone(&is_over), user.clone());
            let url = urls[connection as usize % urls.len()].clone();
            clients.spawn(async move {
                let mut seen = Vec::new();
                for turn in 0.. {
                    if is_over.load(Ordering::SeqCst) {
                        break;
                    }
                    let user = user(connection, stream, turn);
                    seen.push(client.send("GET", &url, &[("x-user", &user)]).await.status.as_u16());
                }
                seen
            });
        }
    }
    meanwhile.await;
    is_over.store(true, Ordering::SeqCst);
    let mut all = std::collections::BTreeMap::new();
    while let Some(seen) = clients.join_next().await {
        seen.unwrap().into_iter().for_each(|status| *all.entry(status).or_default() += 1);
    }
    all
}

async fn pauses(server: &RedisServer) {
    for _ in 0..3 {
        sleep(ms(400)).await;
        server.pause();
        sleep(ms(250)).await;
        server.resume();
    }
    sleep(ms(300)).await;
}

/// (a) A banned client at two processes, beside others that log in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_banned_client_reaches_no_handler_of_two_processes_in_any_mode() {
    let mut results = Vec::new();
    for mode in 0..3 {
        let server = RedisServer::start();
        let tried = Arc::new(AtomicU64::new(0));
        let mut urls = Vec::new();
        for _ in 0..2 {
            let (name, layer) = modes(&login(Limiter::new(server.store().build().unwrap())))[mode].clone();
            let count = Arc::clone(&tried);
            let handler = move |headers: HeaderMap| async move {
                let is_ada = headers["x-user"] == "ada";
                count.fetch_add(u64::from(is_ada), Ordering::SeqCst);
                if is_ada { StatusCode::UNAUTHORIZED } else { StatusCode::OK }
            };
            urls.push(serve(Router::new().route("/", get(handler)).layer(layer)).await);
            results.push(name.to_owned());
        }
        for url in &urls {
            let begun = Instant::now();
            while HttpClient::http2().send("GET", url, &[("x-user", "ada")]).await.status != 403 {
                assert!(begun.elapsed() < TEST_TIMEOUT);
            }
        }
        let before = tried.swap(0, Ordering::SeqCst);
        let user = |connection, stream, turn| {
            if connection < 48 { "ada".into() } else { format!("{connection}-{stream}-{turn}") }
        };
        let statuses = flood(&urls, user, pauses(&server)).await;
        results.push(format!("tried before {before}, {} reached, {statuses:?}", tried.load(Ordering::SeqCst)));
        assert_eq!(tried.load(Ordering::SeqCst), 0, "{results:#?}");
    }
    println!("{results:#?}");
}

/// (b) One ban of an address that honest users share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ban_of_a_shared_key_holds_for_all_and_for_no_other() {
    let server = RedisServer::start();
    let (tried, mut urls) = (Arc::new(AtomicU64::new(0)), Vec::new());
    for _ in 0..2 {
        let limiter = Limiter::new(server.store().build().unwrap());
        let failures = LOGIN.by(Everyone).ban(BAN, seconds(900)).ban_status(StatusCode::FORBIDDEN);
        let banning = RateLimitLayer::new(limiter.clone()).limit(failures);
        let places = RateLimitLayer::new(limiter).limit(Limit::concurrent("all", 500).by(Everyone));
        let count = Arc::clone(&tried);
        let handler = move || async move { _ = count.fetch_add(1, Ordering::SeqCst) };
        urls.push(serve(Router::new().route("/", get(handler)).layer(banning).layer(places)).await);
    }
    for url in &urls {
        while HttpClient::http2().send("GET", url, &[("x-user", "ada")]).await.status != 403 {}
    }
    assert_eq!(tried.swap(0, Ordering::SeqCst), 5);
    let statuses = flood(&urls, |connection, _, _| connection.to_string(), pauses(&server)).await;
    println!("{statuses:?}, {} reached", tried.load(Ordering::SeqCst));
    assert_eq!(tried.load(Ordering::SeqCst), 0);
    let store = server.store().build().unwrap();
    let key = tower_sliding_window::KeyExtractor::extract(&Everyone, &http::Request::new(()).into_parts().0).unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    sleep(ms(500)).await;
    assert_eq!(limiter.peek(&Limit::concurrent("all", 500), key).await.unwrap().used(), 0);
}

/// (c) A window that is used up beside places.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_up_window_beside_places_admits_nobody() {
    for mode in 0..3 {
        let server = RedisServer::start();
        let (tried, mut urls) = (Arc::new(AtomicU64::new(0)), Vec::new());
        for _ in 0..2 {
            let layer = RateLimitLayer::new(server.store().build().unwrap())
                .limit(Limit::concurrent("places", 50).by(by_user()))
                .limit(Limit::per_hour("calls", 7).by(by_user()));
            let count = Arc::clone(&tried);
            let handler = move || async move { _ = count.fetch_add(1, Ordering::SeqCst) };
            urls.push(serve(Router::new().route("/", get(handler)).layer(modes(&layer)[mode].1.clone())).await);
        }
        for url in &urls {
            while HttpClient::http2().send("GET", url, &[("x-user", "ada")]).await.status != 429 {}
        }
        assert_eq!(tried.swap(0, Ordering::SeqCst), 7);
        let statuses = flood(&urls, |_, _, _| "ada".into(), pauses(&server)).await;
        println!("mode {mode}: {statuses:?}, {} reached", tried.load(Ordering::SeqCst));
        assert_eq!(tried.load(Ordering::SeqCst), 0);
        let key = tower_sliding_window::KeyExtractor::extract(
            &by_user(),
            &http::Request::get("/").header("x-user", "ada").body(()).unwrap().into_parts().0,
        );
        let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
        sleep(ms(500)).await;
        assert_eq!(limiter.peek(&Limit::concurrent("places", 50), key.unwrap()).await.unwrap().used(), 0);
    }
}

/// (d) Three layers, and a task that keeps the decision of the request for longer than its response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_layers_hold_no_more_than_any_limit_and_nothing_when_quiet() {
    const FOR_ALL: Limit = Limit::concurrent("for-all", 40);
    const OF_CLIENT: Limit = Limit::concurrent("of-client", 3);
    let server = RedisServer::start();
    let (all, clients, mut urls) =
        (Inside::default(), std::array::from_fn::<_, 32, _>(|_| Inside::default()), Vec::new());
    for _ in 0..2 {
        let limiter = Limiter::new(server.store().build().unwrap());
        let outer = RateLimitLayer::new(limiter.clone()).limit(FOR_ALL.by(Everyone)).fail_closed();
        let middle = login(limiter.clone()).fail_closed();
        let inner = RateLimitLayer::new(limiter)
            .limit(OF_CLIENT.by(by_user()))
            .limit(Limit::per_hour("calls", 1_000_000).by(by_user()))
            .fail_closed();
        let (all, clients) = (all.clone(), clients.clone());
        let handler = move |headers: HeaderMap, place: Extension<Decision>| async move {
            let user: usize = headers["x-user"].to_str().unwrap().parse().unwrap();
            let inside = (all.enter(), clients[user].enter());
            tokio::spawn(async move {
                sleep(ms(5 + user as u64)).await;
                // It has ended before the place is free.
                drop(inside);
                drop(place);
            });
        };
        let router = Router::new().route("/", get(handler)).layer(inner).layer(middle).layer(outer);
        urls.push(serve(router).await);
    }
    let user = |connection: u32, stream: u32, _| (connection * stream % 32).to_string();
    let statuses = flood(&urls, user, pauses(&server)).await;
    sleep(ms(800)).await;
    let most = clients.iter().map(|client| client.0.1.load(Ordering::SeqCst)).max().unwrap();
    println!(
        "{statuses:?}: {} admitted, at most {} of all and {most} of a client",
        all.0.2.load(Ordering::SeqCst),
        all.0.1.load(Ordering::SeqCst)
    );
    assert!(all.0.1.load(Ordering::SeqCst) <= 40 && most <= 3);
    let held: Vec<String> =
        server.keys().into_iter().filter(|key| key.contains("for-all") || key.contains("of-client")).collect();
    for key in held {
        assert_eq!(server.run::<u64>(&format!("ZCARD {key}")), 0, "{key}");
    }
    assert_eq!(all.0.0.load(Ordering::SeqCst), 0);
}
