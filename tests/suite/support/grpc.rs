//! Servers and clients of tonic, with its health service.

use tokio::net::TcpListener;
use tonic::{
    Status,
    metadata::MetadataMap,
    transport::{Channel, Server, server::TcpIncoming},
};
use tonic_health::pb::{
    HealthCheckRequest,
    health_client::HealthClient,
    health_server::{Health, HealthServer},
};
use tower_sliding_window::{RateLimitLayer, middleware::GrpcResponse};

pub(crate) type Client = HealthClient<Channel>;

pub(crate) fn health() -> HealthServer<impl Health> {
    tonic_health::server::health_reporter().1
}

/// A free port, and its URL.
pub(crate) async fn listen() -> (TcpIncoming, String) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    (TcpIncoming::from(listener), url)
}

/// Serves the health service behind the layer until the test ends, and returns its URL.
pub(crate) async fn serve(layer: RateLimitLayer<GrpcResponse>) -> String {
    let (incoming, url) = listen().await;
    tokio::spawn(
        Server::builder()
            .layer(layer)
            .add_service(health())
            .serve_with_incoming(incoming),
    );
    url
}

pub(crate) async fn connect(url: &str) -> Client {
    HealthClient::new(
        Channel::from_shared(url.to_owned())
            .unwrap()
            .connect()
            .await
            .unwrap(),
    )
}

/// Calls `Check`, and returns the metadata of its response.
pub(crate) async fn check(client: &mut Client) -> Result<MetadataMap, Status> {
    Ok(client
        .check(HealthCheckRequest::default())
        .await?
        .metadata()
        .clone())
}

pub(crate) fn text<'a>(metadata: &'a MetadataMap, name: &str) -> Option<&'a str> {
    metadata.get(name).map(|value| value.to_str().unwrap())
}
