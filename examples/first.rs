//! The first program of README.md.

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let limits = RateLimitLayer::new(MemoryStore::new())
        .limit(Limit::per_second("burst", 10).by(PeerIp::new()))
        .limit(Limit::per_hour("hourly", 1_000).by(PeerIp::new()));
    let app = Router::new()
        .route("/", get(|| async { "hello" }))
        .layer(limits);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    // `PeerIp` needs the address of each connection.
    axum::serve(
        listener,
        app.into_make_service_with_connect_info::<SocketAddr>(),
    )
    .await
}
