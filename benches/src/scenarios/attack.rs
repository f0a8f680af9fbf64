//! The effect of an attack on honest clients: one key makes many small requests and then expensive
//! ones that are refused, while others log in and call an API on the same Redis.
//!
//! * **dear requests**: a limit of a million an hour. No unit leaves meanwhile, so refusals are
//!   repeated without asking Redis.
//! * **moving window**: a limit of a million in two seconds, with an entry leaving every 100 us, so
//!   that each check asks Redis.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, Response};
use tokio::{task::JoinSet, time::interval};
use tower::{Layer, Service};
use tower_sliding_window::{
    Header, Limit, RateLimitLayer, RedisStore,
    middleware::{Degraded, RateLimit},
};

use super::Outcome;
use crate::{contenders::Inner, load::two_threads, measure::Effort, server::Server};

const ATTACKERS: usize = 64;
/// The pause between two requests of one attacker: more than a thousand a second in total.
const PAUSE: Duration = Duration::from_millis(50);
const SMALL: usize = 20_000;
const LOGINS: usize = 10_000;

type App = RateLimit<Inner>;

pub(crate) fn run(effort: Effort) -> Outcome {
    let lasting = effort.round * 15;
    println!(
        "\n{ATTACKERS} attackers for {lasting:?}; times of an honest client that asks every 5 ms"
    );
    println!(
        "| attack | refused | asked of Redis | logins admitted | without a decision | p99 without | p99 with | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, window) in [
        ("dear requests", Duration::from_secs(3_600)),
        ("moving window", Duration::from_secs(2)),
    ] {
        two_threads().block_on(attack(name, window, lasting));
    }
    Ok(Vec::new())
}

async fn attack(name: &str, window: Duration, lasting: Duration) {
    let server = Server::start();
    let store = RedisStore::connect(&server.url())
        .await
        .expect("the server is up");
    let app = |limit: Limit| {
        RateLimitLayer::new(store.clone())
            .limit(limit.by(Header::new("x-key")))
            .cost(|request| {
                request
                    .headers
                    .get("x-cost")
                    .and_then(|cost| cost.to_str().ok()?.parse().ok())
                    .unwrap_or(1)
            })
    };
    let undecided = Arc::new(AtomicU32::new(0));
    let attacked = app(Limit::per("units", 1_000_000, window)).layer(Inner);
    let honest = app(Limit::per_hour("calls", 1_000_000_000)).layer(Inner);
    let login = app(Limit::per_minute("login", 5)).layer(Inner);

    let quiet = p99(honest.clone(), lasting / 3, &undecided).await;
    let (ended, refused) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU32::new(0)),
    );
    let mut attackers = JoinSet::new();
    for attacker in 0..ATTACKERS {
        let (mut app, ended, refused, undecided) = (
            attacked.clone(),
            Arc::clone(&ended),
            Arc::clone(&refused),
            Arc::clone(&undecided),
        );
        attackers.spawn(async move {
            for _ in 0..SMALL / ATTACKERS {
                ask(&mut app, "mallory", 1 + attacker as u64 % 2, &undecided).await;
            }
            let (mut pause, mut cost) = (interval(PAUSE), 999_000 - attacker as u64);
            while !ended.load(Relaxed) {
                pause.tick().await;
                cost = if cost > 970_000 {
                    cost - ATTACKERS as u64
                } else {
                    999_000
                };
                // In the moving window the small requests continue, so that there are always some
                // that leave.
                if window < Duration::from_secs(60) {
                    for _ in 0..8 {
                        ask(&mut app, "mallory", 1 + attacker as u64 % 2, &undecided).await;
                    }
                }
                let answer = ask(&mut app, "mallory", cost, &undecided).await;
                refused.fetch_add(u32::from(answer.status() == 429), Relaxed);
            }
        });
    }
    // The small requests come first.
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.run::<()>("CONFIG RESETSTAT");
    let logins = tokio::spawn({
        let (mut app, undecided) = (login, Arc::clone(&undecided));
        async move {
            let mut admitted = 0;
            let mut pause = interval(lasting / LOGINS as u32);
            for _ in 0..LOGINS {
                pause.tick().await;
                admitted += u32::from(ask(&mut app, "ada", 1, &undecided).await.status() == 200);
            }
            admitted
        }
    });
    let attacked = p99(honest, lasting, &undecided).await;
    let admitted = logins.await.expect("the logins end");
    ended.store(true, Relaxed);
    attackers.join_all().await;
    println!(
        "| {name} | {} | {} scripts | {admitted} of {LOGINS} | {} | {quiet:.2?} | {attacked:.2?} | {:.2} |",
        refused.load(Relaxed),
        server.script_calls(),
        undecided.load(Relaxed),
        attacked.as_secs_f64() / quiet.as_secs_f64(),
    );
}

/// The responses to an honest client.
async fn p99(mut app: App, lasting: Duration, undecided: &AtomicU32) -> Duration {
    let (mut times, mut pause, begun) = (
        Vec::new(),
        interval(Duration::from_millis(5)),
        Instant::now(),
    );
    while begun.elapsed() < lasting {
        pause.tick().await;
        let asked = Instant::now();
        let answer = ask(&mut app, "grace", 1, undecided).await;
        times.push(asked.elapsed());
        assert_eq!(answer.status(), 200);
    }
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

async fn ask(app: &mut App, key: &str, cost: u64, undecided: &AtomicU32) -> Response<Body> {
    let request = Request::get("/")
        .header("x-key", key)
        .header("x-cost", cost)
        .body(())
        .expect("a request");
    let answer = app.call(request).await.expect("it never fails");
    undecided.fetch_add(
        u32::from(answer.extensions().get::<Degraded>().is_some()),
        Relaxed,
    );
    answer
}
