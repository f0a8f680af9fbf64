//! The cost of heeding an upstream for a client that has the same limit as the upstream: the calls
//! that succeed, and those that the upstream refuses. 20 callers wait in line, and the upstream is
//! a server on this machine. It refuses calls that arrive closer together than they were sent.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{Router, body::Body, routing::get};
use http::{Request, StatusCode};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{net::TcpListener, task::JoinSet};
use tower::{ServiceBuilder, ServiceExt};
use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer, Rejection};

use super::Outcome;
use crate::{
    load::two_threads,
    measure::{Contest, Effort, Unit},
};

const TEN: Limit = Limit::per_second("ten", 10);
const CALLERS: usize = 20;
/// Long enough for every caller's turn.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(effort: Effort) -> Outcome {
    heed(effort.calls)
}

/// A minute and a half for each side.
pub(crate) fn run_long(_: Effort) -> Outcome {
    heed(1_000)
}

fn heed(calls: usize) -> Outcome {
    let refused = RefCell::new(Vec::new());
    let measure = |label: &'static str, limit, heeds| {
        let Calls {
            per_second,
            refusals,
        } = two_threads().block_on(call(calls, limit, heeds));
        refused.borrow_mut().push((label, refusals));
        per_second
    };
    let contest = Contest::new(format!("{calls} calls, upstream of 10/s"), Unit::PerSecond)
        .side("heeding it", || measure("heeding it", TEN, true))
        .side("not heeding it", || measure("not heeding it", TEN, false))
        .measure(1);
    println!("\n| {calls} calls to an upstream of 10 a second | 429s | of these after the first |");
    println!("|---|---|---|");
    for (label, refusals) in refused.take() {
        println!("| {label} | {refusals} | {} |", refusals.saturating_sub(1));
    }
    Ok(vec![contest])
}

struct Calls {
    /// The calls that succeed.
    per_second: f64,
    /// The calls that the upstream refuses.
    refusals: usize,
}

async fn call(calls: usize, limit: Limit, heeds: bool) -> Calls {
    let url = serve().await;
    let limit = if heeds {
        limit.by(Everyone).heed_upstream()
    } else {
        limit.by(Everyone)
    };
    let limits = RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .wait_up_to(PATIENCE);
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let client = client.map_response(|response| response.map(Body::new));
    let client = ServiceBuilder::new().layer(limits).service(client);

    let (begun, refused, started) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicUsize::new(0)),
        Instant::now(),
    );
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let (client, url, begun, refused) = (
            client.clone(),
            url.clone(),
            Arc::clone(&begun),
            Arc::clone(&refused),
        );
        callers.spawn(async move {
            while begun.fetch_add(1, Relaxed) < calls {
                let request = Request::get(&url).body(Body::empty()).expect("a request");
                let response = client
                    .clone()
                    .oneshot(request)
                    .await
                    .expect("the upstream is up");
                assert!(
                    response.extensions().get::<Rejection>().is_none(),
                    "there is time enough"
                );
                match response.status() {
                    StatusCode::OK => {}
                    StatusCode::TOO_MANY_REQUESTS => _ = refused.fetch_add(1, Relaxed),
                    status => panic!("the upstream has answered {status}"),
                }
                // A connection is free again once the body is read.
                let _ = axum::body::to_bytes(response.into_body(), 1_000)
                    .await
                    .expect("a body");
            }
        });
    }
    callers.join_all().await;
    let refusals = refused.load(Relaxed);
    Calls {
        per_second: (calls - refusals) as f64 / started.elapsed().as_secs_f64(),
        refusals,
    }
}

/// An upstream that reports the status of its limit.
async fn serve() -> String {
    let limits = RateLimitLayer::new(MemoryStore::new()).limit(TEN.by(Everyone));
    let app = Router::new().route("/", get(|| async { "hello" }).layer(limits));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("a bound address");
    tokio::spawn(async { axum::serve(listener, app).await });
    format!("http://{address}/")
}
