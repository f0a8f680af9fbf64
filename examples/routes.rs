//! The second program of README.md: limits for each route, behind a proxy, on Redis.

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::{Router, routing};
use tokio::signal::unix::{SignalKind, signal};
use tower_sliding_window::{ApiKey, ClientIp, Limit, Limiter, RateLimitLayer, Secret, store};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // `redis://..`, or `memory:` for a single process.
    let limiter = Limiter::new(store::from_url(&env::var("REDIS_URL").expect("REDIS_URL"))?);
    // The addresses of your proxies, and of nothing else: their `X-Forwarded-For` is believed.
    let client = ClientIp::behind(["10.1.2.0/28"])?;
    // The same on all servers. `openssl rand -hex 32` makes one.
    let secret = Secret::new(env::var("RATE_LIMIT_SECRET").expect("RATE_LIMIT_SECRET"))?;

    let login = RateLimitLayer::new(limiter.clone())
        .limit(Limit::per_minute("login", 5).by(client.clone()))
        .fail_closed();
    let api = RateLimitLayer::new(limiter.clone())
        .limit(Limit::per_second("burst", 10).by(ApiKey::header("x-api-key", &secret)))
        .limit(Limit::per_minute("address", 600).by(client))
        // `nest` strips the prefix of the path.
        .cost(|request| {
            if request.uri.path() == "/search" {
                10
            } else {
                1
            }
        });
    let app = Router::new()
        .route("/login", routing::post(|| async { "welcome" }).layer(login))
        .nest(
            "/api",
            Router::new()
                .route("/search", routing::get(|| async { "found" }))
                .route_layer(api),
        );

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    // `ClientIp` begins with the address of the connection.
    let served = axum::serve(
        listener,
        app.into_make_service_with_connect_info::<SocketAddr>(),
    );
    let mut terminate = signal(SignalKind::terminate())?;
    served
        .with_graceful_shutdown(async move { _ = terminate.recv().await })
        .await?;
    // Gives back places and prefetches, and completes settlements.
    limiter.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}
