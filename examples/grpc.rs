//! A gRPC server of tonic: its health service, with a limit on one method.
//!
//! ```sh
//! cargo run --example grpc --features grpc
//! REDIS_URL=redis://127.0.0.1:6379/ PORT=0 cargo run --example grpc --features grpc
//! ```
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `PORT` | the port on 127.0.0.1; 0 picks a free one | 50051 |
//! | `REDIS_URL` | the Redis through which servers share the limit; it may still be down | the in-process store |

use std::{
    env,
    error::Error,
    io::{self, Write, stderr, stdout},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use http::request::Parts;
use tokio::{net::TcpListener, sync::Notify, time::sleep};
use tonic::transport::{Server, server::TcpIncoming};
use tower_sliding_window::{
    Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer, RedisStore, Store,
    middleware::GrpcResponse,
};

const CHECKS: Limit = Limit::per("checks", 5, Duration::from_secs(10));

/// The time that open calls have at shutdown.
const GRACE: Duration = Duration::from_secs(3);

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(stderr).init();
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    match env::var("REDIS_URL") {
        Ok(url) => serve(RedisStore::builder(&url).build()?, "Redis, shared").await,
        Err(_) => serve(MemoryStore::new(), "in this process; REDIS_URL shares it").await,
    }
}

/// `Watch` is a stream that stays open, so its one call is let through uncounted.
fn is_watch(request: &Parts) -> bool {
    request.uri.path() == "/grpc.health.v1.Health/Watch"
}

async fn serve(store: impl Store, store_name: &str) -> Result<(), Box<dyn Error>> {
    let limiter = Limiter::new(store);
    let limits = RateLimitLayer::new(limiter.clone())
        .limit(CHECKS.by(PeerIp::new()))
        .exempt(is_watch)
        .respond_with(GrpcResponse)
        .fail_open();

    let port = env::var("PORT").unwrap_or_else(|_| "50051".to_owned());
    let port: u16 = port
        .parse()
        .map_err(|error| format!("PORT={port:?} is not a port: {error}"))?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener
        .map_err(|error| format!("cannot listen on port {port}; PORT sets another: {error}"))?;
    let address = listener.local_addr()?;
    // Before the text that says the server is up, so that no signal after it is missed.
    let shutdown = shutdown_signal()?;
    writeln!(
        stdout(),
        "\
listening on http://{address}
store: {store_name}

method                         limit       counted by       without a store
grpc.health.v1.Health/Check    5 in 10 s   peer address     open
grpc.health.v1.Health/Watch    none

try: grpc_health_probe -addr={address}"
    )?;

    let (mut reporter, health) = tonic_health::server::health_reporter();
    let signalled = Arc::new(Notify::new());
    let grace = Arc::clone(&signalled);
    let shutdown = async move {
        shutdown.await;
        // Ends the streams of `Watch`, which would keep the server open.
        reporter.clear_service_status("").await;
        signalled.notify_one();
    };
    let served = Server::builder().layer(limits).add_service(health);
    tokio::select! {
        ended = served.serve_with_incoming_shutdown(TcpIncoming::from(listener), shutdown) => ended?,
        // A client that answers nothing does not keep the server up.
        () = async { grace.notified().await; sleep(GRACE).await } => {}
    }
    // Gives back what this process holds, and completes what is on its way.
    limiter.shutdown(GRACE).await?;
    writeln!(stdout(), "shut down")?;
    Ok(())
}

/// Ctrl-C, and on Unix SIGTERM.
#[cfg(unix)]
fn shutdown_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};

    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

#[cfg(not(unix))]
fn shutdown_signal() -> io::Result<impl Future<Output = ()>> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}
