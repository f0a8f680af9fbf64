//! Only failed logins count: five a minute from one address, and ten an hour for one account from
//! any address.
//!
//! ```sh
//! cargo run --example login
//! REDIS_URL=redis://127.0.0.1:6379/ PORT=0 cargo run --example login
//! ```

use std::{env, error::Error, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, routing::post};
use http::{HeaderMap, StatusCode};
use tokio::{net::TcpListener, signal::ctrl_c};
use tower_sliding_window::{
    Header, Limit, Limiter, PeerIp, RateLimitLayer, Store, middleware::Exchange, store,
};

const BY_ADDRESS: Limit = Limit::per_minute("failed-logins-address", 5);
/// An attacker who uses it up locks out the owner, too. So it is the larger one.
const BY_ACCOUNT: Limit = Limit::per_hour("failed-logins-account", 10);

fn app(store: impl Store) -> Router {
    // Each attempt reserves one unit of both limits, so that guesses that arrive together cannot
    // exceed them.
    let failures =
        |exchange: &Exchange<'_>| u64::from(exchange.response.status == StatusCode::UNAUTHORIZED);
    let limits = RateLimitLayer::new(store)
        // A guess whose client hangs up counts as failed: it stays reserved for the whole window.
        .limit(
            BY_ADDRESS
                .by(PeerIp::new())
                .settle(failures)
                .lease(BY_ADDRESS.window()),
        )
        .limit(
            BY_ACCOUNT
                .by(Header::new("x-account"))
                .settle(failures)
                .lease(BY_ACCOUNT.window()),
        )
        .fail_closed();
    Router::new().route("/login", post(log_in).layer(limits))
}

/// All accounts have the same password.
async fn log_in(headers: HeaderMap, password: String) -> (StatusCode, String) {
    match headers
        .get("x-account")
        .and_then(|account| account.to_str().ok())
    {
        Some(account) if password == "correct horse" => {
            (StatusCode::OK, format!("welcome, {account}\n"))
        }
        _ => (StatusCode::UNAUTHORIZED, "no\n".to_owned()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = store::from_url(&env::var("REDIS_URL").unwrap_or_else(|_| "memory:".to_owned()))?;
    let app = app(Arc::clone(&store));
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("try: curl -i -H 'x-account: ada' -d wrong {url}/login");
    println!("and: curl -i -H 'x-account: ada' -d 'correct horse' {url}/login");
    let served = axum::serve(
        listener,
        app.into_make_service_with_connect_info::<SocketAddr>(),
    );
    served
        .with_graceful_shutdown(async { drop(ctrl_c().await) })
        .await?;
    // Completes the settlements that are on their way. In a container, wait for SIGTERM as well, as
    // `server/serve.rs` does.
    Ok(Limiter::new(store).shutdown(Duration::from_secs(5)).await?)
}
