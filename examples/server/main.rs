//! An axum server with limits of its own on each route: the file to copy.
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
//! | `RATE_LIMIT_SECRET` | the secret that API keys are hashed under, the same for all servers on one Redis: `openssl rand -hex 32` | one of this process alone |
//! | `HELLO` | the limit of `/hello` | `5/10s` |
//! | `DEADLINE` | the most milliseconds of a decision; a busy machine may need more than the default | 50, or more if Redis is far away |
//!
//! `serve.rs` listens, and shuts down. `page/` is the page at `/`, which shows the limits at work.

mod page;
mod serve;

use std::{
    env,
    error::Error,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use axum::{
    Router,
    extract::Extension,
    routing::{get, post},
};
use http::request::Parts;
use tower_sliding_window::{
    ApiKey, ClientIp, Decision, HeaderSets, Limit, Limiter, RateLimitLayer, Secret, limiter::Share,
    store,
};

const LOGIN: Limit = Limit::per_minute("login", 3);
const API_BURST: Limit = Limit::per_second("api-burst", 10);
const API_STEADY: Limit = Limit::per_minute("api-steady", 100);

struct Settings {
    hello: Limit,
    client_ip: ClientIp,
    api_key: ApiKey,
    deadline: Option<Duration>,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let store = store::from_url(&setting("REDIS_URL", "memory:"))?;
    let proxies = setting("TRUSTED_PROXIES", "");
    // A server of its own needs no other secret than two random numbers. Servers that share a Redis
    // need the same one.
    let own = format!(
        "{:?}",
        [1, 2].map(|number| RandomState::new().hash_one(number))
    );
    let secret = Secret::new(setting("RATE_LIMIT_SECRET", &own))?;
    let settings = Settings {
        hello: Limit::parse("hello", &setting("HELLO", "5/10s"))?,
        client_ip: ClientIp::behind(proxies.split(',').filter(|range| !range.is_empty()))?,
        api_key: ApiKey::header("x-api-key", &secret),
        deadline: deadline()?,
    };
    // A server without the page: `let app = app(&Limiter::new(store), &settings);`
    let app = page::beside(store.clone(), &settings, app)?;
    serve::serve(app, &settings.hello).await?;
    // Gives back what this process holds, and completes what is on its way.
    Ok(Limiter::new(store).shutdown(Duration::from_secs(3)).await?)
}

fn setting(name: &str, default: &str) -> String {
    env::var(name).unwrap_or_else(|_| default.to_owned())
}

/// Without one, the deadline follows the round trip to Redis.
fn deadline() -> Result<Option<Duration>, String> {
    let Ok(text) = env::var("DEADLINE") else {
        return Ok(None);
    };
    let millis = text
        .parse()
        .map_err(|error| format!("DEADLINE={text:?} is no number of milliseconds: {error}"))?;
    Ok(Some(Duration::from_millis(millis)))
}

/// Layers on one limiter share its breaker.
fn app(limiter: &Limiter, settings: &Settings) -> Router {
    let Settings {
        hello,
        client_ip,
        api_key,
        ..
    } = settings;
    let layer = || RateLimitLayer::new(limiter.clone());

    let hello = layer()
        .limit(hello.clone().by(client_ip.clone()))
        .fail_open();
    let login = layer().limit(LOGIN.by(client_ip.clone())).fail_closed();
    // Both limits are decided together, and both routes of the API spend from them. `RateLimit`
    // shows both to the client. Without the store, each of two servers admits half of them.
    let api = layer()
        .limit(API_BURST.by(api_key.clone()))
        .limit(API_STEADY.by(api_key.clone()))
        .cost(|request: &Parts| {
            if request.uri.path() == "/search" {
                10
            } else {
                1
            }
        })
        .headers(HeaderSets::BOTH)
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

/// Handlers find the decision in the request, unless the store could not decide.
async fn say_hello(decision: Option<Extension<Decision>>) -> String {
    match decision {
        Some(Extension(decision)) => {
            format!(
                "hello; {} more in {:?}\n",
                decision.remaining(),
                decision.binding().limit.window()
            )
        }
        None => "hello; not counted, since the store did not decide\n".to_owned(),
    }
}
