//! An axum server with a limit of its own on each route, and a page at `/` that shows the limits at work.
//!
//! ```sh
//! cargo run --example server   # then open http://127.0.0.1:3000/
//! REDIS_URL=redis://127.0.0.1:6379/ PORT=0 cargo run --example server
//! ```
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `PORT` | the port on 127.0.0.1; 0 picks a free one | 3000 |
//! | `REDIS_URL` | the Redis through which servers share the limits; it may still be down | the in-process store |
//! | `TRUSTED_PROXIES` | address ranges of proxies, separated by commas, whose `X-Forwarded-For` is believed | none: the peer's address counts |
//! | `API_KEY_SECRET` | the secret that API keys are hashed under, the same for all servers on one Redis | a public one |
//! | `HELLO` | the limit of `/hello` | `5/10s` |
//!
//! This file is the server. `page.rs`, `history.rs` and `switch.rs` are for the page alone: `RateLimitLayer::new(store)` is all
//! that a server without a page needs.

mod history;
mod page;
mod switch;

use std::{
    env,
    error::Error,
    io::{self, Write, stderr, stdout},
    net::SocketAddr,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    extract::Extension,
    routing::{get, post},
};
use http::request::Parts;
use tokio::{net::TcpListener, sync::Notify, time::sleep};
use tower_sliding_window::{
    Algorithm, ApiKey, ClientIp, Decision, HeaderSets, InvalidLimit, Key, KeyError, KeyExtractor, Limit, Limiter,
    MemoryStore, PeerIp, RateLimitLayer, RedisStore, Secret, Share, Store,
};

use crate::{
    history::{History, Lane},
    page::Page,
    switch::Switch,
};

const HELLO: &str = "5/10s";
const LOGIN: Limit = Limit::per_minute("login", 3);
const API_BURST: Limit = Limit::per_second("api-burst", 10);
const API_STEADY: Limit = Limit::per_minute("api-steady", 100);

/// The time that open requests have at shutdown.
const GRACE: Duration = Duration::from_secs(3);

/// For a first try only. A real server sets `API_KEY_SECRET`.
const EXAMPLE_SECRET: &str = "everybody can read this secret";

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
    let addresses = match env::var("TRUSTED_PROXIES") {
        Ok(proxies) => Addresses::Behind(ClientIp::behind(proxies.split(','))?),
        Err(_) => Addresses::Peer(PeerIp::new()),
    };
    let secret = Secret::new(env::var("API_KEY_SECRET").unwrap_or_else(|_| EXAMPLE_SECRET.to_owned()))?;
    let (store, place): (Arc<dyn Store>, _) = match env::var("REDIS_URL") {
        Ok(url) => (Arc::new(RedisStore::builder(&url).build()?), "Redis, shared"),
        Err(_) => (Arc::new(MemoryStore::new()), "in this process; REDIS_URL shares it"),
    };
    let hello = Limit::parse("hello", &env::var("HELLO").unwrap_or_else(|_| HELLO.to_owned()))?;
    let api_key = ApiKey::header("x-api-key", &secret);

    let switch = Switch::new(store, History::new(lanes(&hello)?, &api_key));
    let limiter = Limiter::new(switch.clone());
    let page = Page::new(&limiter, &switch, &addresses, &api_key, place);
    let app = page.beside(app(&limiter, &hello, &addresses, &api_key));
    serve(app, &page, &hello, place).await
}

/// The source of client addresses.
#[derive(Clone)]
enum Addresses {
    Peer(PeerIp),
    Behind(ClientIp),
}

impl KeyExtractor for Addresses {
    fn extract(&self, request: &Parts) -> Result<Key, KeyError> {
        match self {
            Self::Peer(peer) => peer.extract(request),
            Self::Behind(proxies) => proxies.extract(request),
        }
    }
}

/// Layers on one limiter share its breaker.
fn app(limiter: &Limiter, hello: &Limit, addresses: &Addresses, api_key: &ApiKey) -> Router {
    let layer = || RateLimitLayer::on(limiter.clone());
    let hello = layer().limit(hello.clone().by(addresses.clone())).fail_open();
    let login = layer().limit(LOGIN.by(addresses.clone())).fail_closed();
    // Both limits are decided together, and both routes of the API spend from them. `RateLimit` shows both to the client.
    // Without the store, each of two servers admits half of them.
    let api = layer()
        .limit(API_BURST.by(api_key.clone()))
        .limit(API_STEADY.by(api_key.clone()))
        .cost(|request: &Parts| if request.uri.path() == "/search" { 10 } else { 1 })
        .headers(HeaderSets::both())
        .fail_local(Share::one_of(2));

    let api = Router::new()
        .route("/items", get(|| async { "items\n" }))
        .route("/search", get(|| async { "search results\n" }))
        .route_layer(api);
    Router::new()
        .route("/hello", get(say_hello).layer(hello))
        .route("/login", post(|| async { "welcome\n" }).layer(login))
        .nest("/api", api)
        .route("/health", get(|| async { "ok\n" }))
}

/// The limits on the page. Two more are shown beside the one of `/hello`, and count the same requests.
fn lanes(hello: &Limit) -> Result<Vec<Lane>, InvalidLimit> {
    let lane = |limit, path, by_api_key| Lane { limit, path, by_api_key };
    let beside = |name, algorithm| {
        Ok(lane(Limit::new(name, hello.units(), hello.window())?.with_algorithm(algorithm), None, false))
    };
    Ok(vec![
        lane(hello.clone(), Some("/hello"), false),
        beside("hello-fixed", Algorithm::fixed())?,
        beside("hello-counter", Algorithm::counter())?,
        lane(LOGIN, Some("/login"), false),
        lane(API_BURST, Some("/api/"), true),
        lane(API_STEADY, Some("/api/"), true),
    ])
}

/// Handlers find the decision in the request, unless the store could not decide.
async fn say_hello(decision: Option<Extension<Decision>>) -> String {
    match decision {
        Some(Extension(decision)) => {
            format!("hello; {} more in {:?}\n", decision.remaining(), decision.limit().window())
        }
        None => "hello; not counted, since the store did not decide\n".to_owned(),
    }
}

async fn serve(app: Router, page: &Page, hello: &Limit, store: &str) -> Result<(), Box<dyn Error>> {
    let port = env::var("PORT").unwrap_or_else(|_| "3000".to_owned());
    let port: u16 = port.parse().map_err(|error| format!("PORT={port:?} is not a port: {error}"))?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener.map_err(|error| format!("cannot listen on port {port}; PORT sets another: {error}"))?;
    let address = listener.local_addr()?;
    // Before the text that says the server is up, so that no signal after it is missed.
    let shutdown = shutdown_signal()?;
    writeln!(
        stdout(),
        "\
listening on http://{address}
store: {store}

route             limit                       counted by        without a store
GET  /hello       {hello:<27} client address    open
POST /login       3 in 60 s                   client address    closed (503)
GET  /api/items   10 in 1 s and 100 in 60 s   x-api-key         local: half of each limit
GET  /api/search  the same, at a cost of 10   x-api-key         closed (503): 10 is more than half of 10
GET  /health      none

watch: http://{address}/
try: curl -i http://{address}/hello",
        hello = format!("{} in {} s", hello.units(), hello.window().as_secs_f64()),
    )?;

    let (page, signalled) = (page.clone(), Arc::new(Notify::new()));
    let grace = Arc::clone(&signalled);
    let shutdown = async move {
        shutdown.await;
        page.close();
        signalled.notify_one();
    };
    let served = axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>());
    tokio::select! {
        ended = served.with_graceful_shutdown(shutdown) => ended?,
        // A client that never ends its request, or reads no response, does not keep the server up.
        () = async { grace.notified().await; sleep(GRACE).await } => {}
    }
    writeln!(stdout(), "shut down")?;
    Ok(())
}

/// Ctrl-C, and on Unix SIGTERM.
#[cfg(unix)]
fn shutdown_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};

    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
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
