//! Stacked layers around a gRPC server.

use std::sync::{Arc, Mutex};

use http::Request;
use tonic::{Code, transport::Server};
use tower::util::MapRequestLayer;
use tower_sliding_window::{
    Decision, Limit, Limiter, MemoryStore, RateLimitLayer, middleware::GrpcResponse,
};

use crate::support::{
    TEST_TIMEOUT,
    grpc::{check, connect, health, listen},
    ms,
    requests::{anyone, request},
};

const CALLS: Limit = Limit::concurrent("calls", 1);

/// A method that goes on longer than its call keeps the decision.
#[tokio::test]
async fn a_call_holds_the_places_of_all_layers() {
    let (limiter, kept) = (
        Limiter::new(MemoryStore::new()),
        Arc::new(Mutex::new(Vec::new())),
    );
    let layer = |limit: Limit| {
        RateLimitLayer::new(limiter.clone())
            .limit(limit.by(anyone))
            .respond_with(GrpcResponse)
    };
    let keeps = Arc::clone(&kept);
    let keep = MapRequestLayer::new(move |mut request: Request<tonic::body::Body>| {
        keeps
            .lock()
            .unwrap()
            .extend(request.extensions_mut().remove::<Decision>());
        request
    });
    let (incoming, url) = listen().await;
    let inner = layer(Limit::per_hour("hourly", 100));
    let server = Server::builder()
        .layer(layer(CALLS))
        .layer(inner)
        .layer(keep)
        .add_service(health());
    tokio::spawn(server.serve_with_incoming(incoming));
    let mut client = connect(&url).await;
    check(&mut client).await.unwrap();
    let used = async || {
        limiter
            .peek(&CALLS, anyone(&request().into_parts().0).unwrap())
            .await
            .unwrap()
            .binding()
            .used
    };
    assert_eq!(used().await, 1, "the method goes on");
    assert_eq!(
        check(&mut client).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    let decision = kept.lock().unwrap().pop().unwrap();
    assert_eq!(
        decision
            .statuses()
            .map(|status| status.limit.name())
            .collect::<Vec<_>>(),
        ["hourly", "calls"]
    );
    drop(decision);
    let free = async {
        while used().await > 0 {
            tokio::time::sleep(ms(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, free).await.unwrap();
    check(&mut client).await.unwrap();
}
