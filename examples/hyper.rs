//! The layer around a plain hyper service, without axum.
//!
//! ```sh
//! cargo run --example hyper
//! ```

use std::{convert::Infallible, error::Error};

use http::{Request, Response};
use http_body_util::Full;
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::net::TcpListener;
use tower::{ServiceBuilder, service_fn};
use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limit = Limit::per_minute("requests", 5).by(PeerIp::new());
    let guarded = ServiceBuilder::new()
        .layer(RateLimitLayer::new(MemoryStore::new()).limit(limit))
        .service_fn(answer);

    let listener = TcpListener::bind("127.0.0.1:3001").await?;
    println!("try: curl -i http://{}/", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().await?;
        let guarded = guarded.clone();
        // Only the server knows the client's address. `PeerIp` finds it in the extensions.
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            tower::ServiceExt::oneshot(guarded.clone(), request)
        });
        tokio::spawn(async move {
            if let Err(error) = http1::Builder::new()
                .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
                .await
            {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

async fn answer(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello\n")))
}
