//! Instructions a request, counted by valgrind: figures that a busy machine does not change.
//!
//! valgrind counts a whole process. So each figure is what a process with 2 N requests takes more than one with N, divided
//! by N. Redis runs outside of valgrind: what is counted is its client.

use std::{
    convert::Infallible,
    env,
    net::SocketAddr,
    process::{self, Command},
    time::Duration,
};

use axum::{body::Body, extract::ConnectInfo};
use http::{Request, Response, StatusCode};
use tokio::{runtime::Builder, task::JoinSet};
use tower::{Layer, Service};
use tower_sliding_window::{
    HeaderSets, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer, RedisStore, Store, middleware::RateLimit,
};

use super::Outcome;
use crate::{
    contenders::{Inner, spent, wide},
    load::{HOUR, TASKS},
    measure::{Effort, Spread},
    server::Server,
};

/// The paths that are counted, each with its N.
const PATHS: [(&str, usize); 8] = [
    ("no layer", 10_240),
    ("in process, admitted", 10_240),
    ("in process, refused", 10_240),
    ("Redis, one client", 2_560),
    ("Redis, 256 clients with a key each", 10_240),
    ("Redis, 256 clients with one key", 10_240),
    ("refused by the refusal cache", 10_240),
    ("in process, admitted, with both header sets", 10_240),
];

const RUNS: usize = 3;

/// No run takes as long, however slow valgrind makes it.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Tells a process under valgrind the number of a path, and how many requests to send.
const ASKED: &str = "BENCHES_INSTRUCTIONS";

pub(crate) fn run(_: Effort) -> Outcome {
    if let Ok(asked) = env::var(ASKED) {
        let (path, requests) = asked.split_once(' ').expect("two numbers");
        let (path, requests) = (path.parse().expect("a number"), requests.parse().expect("a number"));
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(send(path, requests));
        process::exit(0);
    }
    println!("\n| instructions a request, {RUNS} runs | median | least | most |\n|---|---|---|---|");
    for (path, (name, requests)) in PATHS.into_iter().enumerate() {
        let figure = |_| Ok((count(path, 2 * requests)? - count(path, requests)?) / requests as f64);
        let figures = (0..RUNS).map(figure).collect::<Result<Vec<_>, String>>()?;
        let Spread { least, median, most } = Spread::of(figures.into_iter());
        println!("| {name} | {median:.0} | {least:.0} | {most:.0} |");
    }
    Ok(Vec::new())
}

/// The instructions of a process that sends so many requests.
fn count(path: usize, requests: usize) -> Result<f64, String> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe().expect("this program"))
        .arg("instructions")
        .env(ASKED, format!("{path} {requests}"))
        .output()
        .map_err(|error| format!("needs valgrind: {error}"))?;
    let log = String::from_utf8_lossy(&output.stderr);
    let collected = log.lines().find_map(|line| line.split_once("Collected :")).filter(|_| output.status.success());
    collected.and_then(|(_, count)| count.trim().parse().ok()).ok_or_else(|| format!("valgrind failed: {log}"))
}

async fn send(path: usize, requests: usize) {
    match path {
        0 => one_client(Inner, requests, StatusCode::OK).await,
        1 => one_client(guarded(MemoryStore::new(), wide()), requests, StatusCode::OK).await,
        7 => one_client(with_headers(MemoryStore::new(), wide(), HeaderSets::BOTH), requests, StatusCode::OK).await,
        2 => one_client(guarded(MemoryStore::new(), spent()), requests, StatusCode::TOO_MANY_REQUESTS).await,
        _ => {
            let server = Server::start();
            let store = RedisStore::builder(&server.url()).connect_timeout(MAX_WAIT).reply_timeout(MAX_WAIT);
            let store = store.connect().await;
            let store = store.expect("the server is up");
            match path {
                3 => one_client(guarded(store, wide()), requests, StatusCode::OK).await,
                4 => many_clients(&guarded(store, wide()), requests, TASKS).await,
                5 => many_clients(&guarded(store, wide()), requests, 1).await,
                _ => one_client(guarded(store, spent()), requests, StatusCode::TOO_MANY_REQUESTS).await,
            }
        }
    }
}

fn guarded<S: Store>(store: S, limit: Limit) -> RateLimit<Inner> {
    with_headers(store, limit, HeaderSets::default())
}

fn with_headers<S: Store>(store: S, limit: Limit, sets: HeaderSets) -> RateLimit<Inner> {
    let limiter = Limiter::new(store).refusal_cache(HOUR);
    let layer = RateLimitLayer::new(limiter).limit(limit.by(PeerIp::new()));
    layer.fail_closed().deadline(MAX_WAIT).headers(sets).layer(Inner)
}

/// 256 tasks with this many keys, all admitted.
async fn many_clients(service: &RateLimit<Inner>, requests: usize, keys: usize) {
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let mut service = service.clone();
        tasks.spawn(async move {
            for _ in 0..requests / TASKS {
                assert_eq!(status(&mut service, task % keys).await, StatusCode::OK);
            }
        });
    }
    tasks.join_all().await;
}

/// One request after the other, all with this response but the first.
async fn one_client<S>(mut service: S, requests: usize, expected: StatusCode)
where
    S: Service<Request<()>, Response = Response<Body>, Error = Infallible>,
{
    status(&mut service, 0).await;
    for _ in 0..requests {
        assert_eq!(status(&mut service, 0).await, expected);
    }
}

async fn status<S>(service: &mut S, client: usize) -> StatusCode
where
    S: Service<Request<()>, Response = Response<Body>, Error = Infallible>,
{
    let mut request = Request::new(());
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([10, 0, 0, client as u8], 443))));
    let Ok(response) = service.call(request).await;
    response.status()
}
