//! Many clients at once over HTTP/2 and two processes, while Redis stands still now and then.

use std::{
    array,
    collections::BTreeMap,
    future::Future,
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use axum::{Extension, Router, routing::get};
use http::{HeaderMap, Request};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_sliding_window::{
    Decision, Everyone, Key, KeyExtractor, Limit, Limiter, RateLimitLayer, store::RedisStoreBuilder,
};

use super::{BAN, LOGIN, by_user, login, modes, serve_logins, until_refused, user};
use crate::support::{
    TEST_TIMEOUT, http_client::HttpClient, http_server::serve, ms, redis_cluster::RedisCluster,
    redis_server::RedisServer, seconds,
};

/// Counts how many are inside now, and the most so far.
#[derive(Default)]
struct Inside {
    now: AtomicU64,
    most: AtomicU64,
}

struct Entered(Arc<Inside>);

impl Entered {
    fn new(inside: &Arc<Inside>) -> Self {
        let now = inside.now.fetch_add(1, Ordering::SeqCst) + 1;
        inside.most.fetch_max(now, Ordering::SeqCst);
        Self(Arc::clone(inside))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// 64 connections with 16 streams each send in turn to these servers, until `meanwhile` is over.
/// `user` names the user of a connection, stream and turn. How many responses had each status.
async fn flood(
    urls: &[String],
    user: impl Fn(u32, u32, u64) -> String + Clone + Send + 'static,
    meanwhile: impl Future<Output = ()>,
) -> BTreeMap<u16, u64> {
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
                    seen.push(
                        client
                            .send("GET", &url, &[("x-user", &user)])
                            .await
                            .status
                            .as_u16(),
                    );
                }
                seen
            });
        }
    }
    meanwhile.await;
    is_over.store(true, Ordering::SeqCst);
    let mut all = BTreeMap::new();
    while let Some(seen) = clients.join_next().await {
        seen.unwrap()
            .into_iter()
            .for_each(|status| *all.entry(status).or_default() += 1);
    }
    all
}

/// Three times, one of the servers stands still.
async fn pauses(servers: &[RedisServer]) {
    for server in servers.iter().cycle().take(3) {
        sleep(ms(400)).await;
        server.pause();
        sleep(ms(250)).await;
        server.resume();
    }
    sleep(ms(300)).await;
}

/// Waits until no place of this key is held. A place that is never given back would be free after
/// its life, which is longer.
async fn until_quiet(server: &RedisServer, limit: &Limit, key: Key) {
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    let is_free = async {
        while limiter
            .peek(limit, key.clone())
            .await
            .unwrap()
            .binding()
            .used
            > 0
        {
            sleep(ms(20)).await;
        }
    };
    timeout(seconds(5), is_free).await.expect("a place is held");
}

/// A banned client at two processes, beside others that log in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_banned_client_reaches_no_handler_of_two_processes_in_any_mode() {
    for mode in 0..3 {
        let server = RedisServer::start();
        let (tried, mut urls) = (Arc::new(AtomicU64::new(0)), Vec::new());
        for _ in 0..2 {
            let layer = &modes(&login(Limiter::new(server.store().build().unwrap())))[mode].0;
            urls.push(serve_logins([layer.clone()], &tried).await);
        }
        for url in &urls {
            until_refused(url, 403).await;
        }
        tried.store(0, Ordering::SeqCst);
        let user = |connection, stream, turn| {
            if connection < 48 {
                "ada".into()
            } else {
                format!("{connection}-{stream}-{turn}")
            }
        };
        let statuses = flood(&urls, user, pauses(slice::from_ref(&server))).await;
        assert_eq!(tried.load(Ordering::SeqCst), 0, "mode {mode}: {statuses:?}");
    }
}

/// One ban of an address that honest users share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ban_of_a_shared_key_holds_for_all_and_for_no_other() {
    let server = RedisServer::start();
    let (tried, mut urls) = (Arc::new(AtomicU64::new(0)), Vec::new());
    for _ in 0..2 {
        let limiter = Limiter::new(server.store().build().unwrap());
        let failures = LOGIN.by(Everyone).ban(BAN, seconds(900));
        let banning = RateLimitLayer::new(limiter.clone()).limit(failures);
        let places = RateLimitLayer::new(limiter).limit(Limit::concurrent("all", 500).by(Everyone));
        urls.push(serve_logins([banning, places], &tried).await);
    }
    for url in &urls {
        until_refused(url, 403).await;
    }
    assert_eq!(tried.swap(0, Ordering::SeqCst), 5);
    let statuses = flood(
        &urls,
        |_, _, _| "ada".into(),
        pauses(slice::from_ref(&server)),
    )
    .await;
    assert_eq!(tried.load(Ordering::SeqCst), 0, "{statuses:?}");
    let key = Everyone.extract(&Request::new(()).into_parts().0).unwrap();
    until_quiet(&server, &Limit::concurrent("all", 500), key).await;
}

/// A window that is used up beside places.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_up_window_beside_places_admits_nobody() {
    for mode in 0..3 {
        let server = RedisServer::start();
        let (tried, mut urls) = (Arc::new(AtomicU64::new(0)), Vec::new());
        for _ in 0..2 {
            let layer = RateLimitLayer::new(server.store().build().unwrap())
                .limit(Limit::concurrent("places", 50).by(by_user()))
                .limit(Limit::per_hour("calls", 7).by(by_user()));
            urls.push(serve_logins([modes(&layer)[mode].0.clone()], &tried).await);
        }
        for url in &urls {
            until_refused(url, 429).await;
        }
        assert_eq!(tried.swap(0, Ordering::SeqCst), 7);
        let statuses = flood(
            &urls,
            |_, _, _| "ada".into(),
            pauses(slice::from_ref(&server)),
        )
        .await;
        assert_eq!(tried.load(Ordering::SeqCst), 0, "mode {mode}: {statuses:?}");
        until_quiet(&server, &Limit::concurrent("places", 50), user("ada")).await;
    }
}

/// Three layers, and a task that keeps the decision of the request for longer than its response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_layers_hold_no_more_than_any_limit_and_nothing_when_quiet() {
    let server = RedisServer::start();
    three_layers(|| server.store(), slice::from_ref(&server)).await;
}

/// The keys of a request are in several slots, and each node stands still in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_layers_on_a_cluster_hold_no_more_than_any_limit() {
    let cluster = RedisCluster::start(3).await;
    three_layers(|| cluster.builder(), &cluster.0).await;
}

async fn three_layers(store: impl Fn() -> RedisStoreBuilder, servers: &[RedisServer]) {
    const FOR_ALL: Limit = Limit::concurrent("for-all", 40);
    const OF_CLIENT: Limit = Limit::concurrent("of-client", 3);
    let (all, clients, mut urls) = (
        Arc::<Inside>::default(),
        array::from_fn::<_, 32, _>(|_| Arc::<Inside>::default()),
        Vec::new(),
    );
    for _ in 0..2 {
        let limiter = Limiter::new(store().build().unwrap());
        let outer = RateLimitLayer::new(limiter.clone())
            .limit(FOR_ALL.by(Everyone))
            .fail_closed();
        let middle = login(limiter.clone()).fail_closed();
        let inner = RateLimitLayer::new(limiter)
            .limit(OF_CLIENT.by(by_user()))
            .limit(Limit::per_hour("calls", 1_000_000).by(by_user()))
            .fail_closed();
        let (all, clients) = (all.clone(), clients.clone());
        let handler = move |headers: HeaderMap, place: Extension<Decision>| async move {
            let user: usize = headers["x-user"].to_str().unwrap().parse().unwrap();
            let inside = (Entered::new(&all), Entered::new(&clients[user]));
            tokio::spawn(async move {
                sleep(ms(5 + user as u64)).await;
                // It has ended before the place is free.
                drop(inside);
                drop(place);
            });
        };
        let router = Router::new()
            .route("/", get(handler))
            .layer(inner)
            .layer(middle)
            .layer(outer);
        urls.push(serve(router).await);
    }
    let user = |connection: u32, stream: u32, _| (connection * stream % 32).to_string();
    let statuses = flood(&urls, user, pauses(servers)).await;
    let is_held = |key: &String| key.contains("for-all") || key.contains("of-client");
    // A place that is never given back would be free after its life, which is longer.
    let given_back = timeout(seconds(5), async {
        for server in servers {
            for key in server.keys().into_iter().filter(is_held) {
                while server.run::<u64>(&format!("ZCARD {key}")) > 0 {
                    sleep(ms(20)).await;
                }
            }
        }
    });
    assert!(given_back.await.is_ok(), "places are held: {statuses:?}");
    let most = clients
        .iter()
        .map(|client| client.most.load(Ordering::SeqCst))
        .max()
        .unwrap();
    assert!(
        all.most.load(Ordering::SeqCst) <= 40 && most <= 3,
        "{most} of a client: {statuses:?}"
    );
    assert!(statuses.contains_key(&200), "{statuses:?}");
    assert_eq!(all.now.load(Ordering::SeqCst), 0);
}

/// One client guesses passwords, over a layer whose limits go by different keys. Nothing is known
/// of it before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_guesses_passes_no_more_than_the_limit() {
    let (server, cluster) = (RedisServer::start(), RedisCluster::start(3).await);
    for builder in [server.store(), cluster.builder()] {
        let of_all = Limit::per_minute("all", 1_000_000).by(Everyone);
        let layer = login(Limiter::new(builder.build().unwrap())).limit(of_all);
        let tried = Arc::new(AtomicU64::new(0));
        let url = serve_logins([layer], &tried).await;
        let statuses = flood(&[url], |_, _, _| "ada".into(), sleep(ms(2_000))).await;
        let tried = tried.load(Ordering::SeqCst);
        assert!((1..=25).contains(&tried), "{tried} guesses: {statuses:?}");
    }
}
