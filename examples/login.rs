//! Only failed logins count: five a minute from one address, and ten an hour for one account, from wherever they come.
//!
//! ```sh
//! cargo run --example login
//! REDIS_URL=redis://127.0.0.1:6379/ PORT=0 cargo run --example login
//! ```

use std::{env, error::Error, net::SocketAddr};

use axum::{Router, extract::Path, routing::post};
use http::{StatusCode, request::Parts};
use tokio::net::TcpListener;
use tower_sliding_window::{Key, KeyError, Limit, MemoryStore, Outcome, PeerIp, RateLimitLayer, RedisStore, Store};

const BY_ADDRESS: Limit = Limit::per_minute("failed-logins-address", 5);
const BY_ACCOUNT: Limit = Limit::per_hour("failed-logins-account", 10);

fn app<S: Store>(store: S) -> Router {
    // Each attempt reserves one unit of both, so that guesses sent at the same time are counted, too.
    let failures = |outcome: &Outcome<'_>| u64::from(outcome.status() == StatusCode::UNAUTHORIZED);
    let limits = RateLimitLayer::new(store)
        .limit(BY_ADDRESS.by(PeerIp::new()).settle(failures))
        .limit(BY_ACCOUNT.by(account).settle(failures))
        .fail_closed();
    Router::new().route("/login/{account}", post(log_in).layer(limits))
}

fn account(request: &Parts) -> Result<Key, KeyError> {
    let account = request.uri.path().rsplit('/').next().unwrap_or_default();
    Ok(Key::new("account", account))
}

/// A login that takes one password for all.
async fn log_in(Path(account): Path<String>, password: String) -> (StatusCode, String) {
    if password == "correct horse" {
        (StatusCode::OK, format!("welcome, {account}\n"))
    } else {
        (StatusCode::UNAUTHORIZED, "no\n".to_owned())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = match env::var("REDIS_URL") {
        Ok(url) => app(RedisStore::builder(&url).build()?),
        Err(_) => app(MemoryStore::new()),
    };
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("try: curl -i -d wrong {url}/login/ada");
    println!("and: curl -i -d 'correct horse' {url}/login/ada");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
