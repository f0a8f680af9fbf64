//! The layer around a server of tonic, one of its services, a server that answers HTTP as well, and
//! a channel.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{Router, routing::get};
use tokio::task::JoinSet;
use tonic::{
    Code, Request, Status,
    metadata::MetadataValue,
    service::{Routes, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Identity, Server, ServerTlsConfig},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tower::Layer;
use tower_sliding_window::{
    ClientIp, Everyone, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer,
    middleware::{GrpcOr, GrpcResponse, JsonResponse},
};

use super::{CALLS, by_peer};
use crate::support::{
    TEST_TIMEOUT,
    certificates::Certificates,
    grpc::{check, connect, health, listen, serve, text},
    http_client::HttpClient,
    http_server,
    redis_server::RedisServer,
};

#[tokio::test]
async fn a_load_of_50_clients_is_admitted_exactly_the_limit() {
    let redis = RedisServer::start();
    let store = redis.store().build().unwrap();
    let limit = Limit::per_hour("calls", 300);
    let layer = RateLimitLayer::new(store)
        .limit(limit.by(PeerIp::new()))
        .fail_closed()
        .deadline(TEST_TIMEOUT);
    let url = serve(layer.respond_with(GrpcResponse)).await;
    let mut clients = JoinSet::new();
    for _ in 0..50 {
        let mut client = connect(&url).await;
        clients.spawn(async move {
            let mut admitted = 0;
            for _ in 0..20 {
                match check(&mut client).await {
                    Ok(_) => admitted += 1,
                    Err(refused) => {
                        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
                    }
                }
            }
            admitted
        });
    }
    assert_eq!(clients.join_all().await.into_iter().sum::<u32>(), 300);
}

/// Turns away every second call, and counts the calls.
fn every_second(
    seen: &Arc<AtomicU64>,
) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
    let seen = Arc::clone(seen);
    move |request| {
        if seen.fetch_add(1, Ordering::SeqCst) % 2 == 1 {
            Err(Status::aborted("not now"))
        } else {
            Ok(request)
        }
    }
}

#[tokio::test]
async fn one_service_may_be_guarded_inside_of_its_interceptor() {
    let seen = Arc::default();
    let guarded = InterceptedService::new(by_peer().layer(health()), every_second(&seen));
    let (incoming, url) = listen().await;
    tokio::spawn(
        Server::builder()
            .add_service(guarded)
            .serve_with_incoming(incoming),
    );

    // A method of no service is not guarded.
    let unknown = HttpClient::http2()
        .send("POST", &format!("{url}/shop.Shop/Search"), &[])
        .await;
    assert_eq!(
        (
            unknown.number("grpc-status"),
            unknown.number("x-ratelimit-limit")
        ),
        (Some(12), None)
    );

    let mut client = connect(&url).await;
    let mut codes = Vec::new();
    for _ in 0..5 {
        codes.push(
            check(&mut client)
                .await
                .map_or_else(|status| status.code(), |_| Code::Ok),
        );
    }
    assert_eq!(
        codes,
        [
            Code::Ok,
            Code::Aborted,
            Code::Ok,
            Code::Aborted,
            Code::ResourceExhausted
        ]
    );
    assert_eq!(seen.load(Ordering::SeqCst), 5);
}

#[tokio::test]
async fn the_layer_of_the_server_counts_before_an_interceptor() {
    let seen = Arc::default();
    let (incoming, url) = listen().await;
    let intercepted = InterceptedService::new(health(), every_second(&seen));
    tokio::spawn(
        Server::builder()
            .layer(by_peer())
            .add_service(intercepted)
            .serve_with_incoming(incoming),
    );

    let mut client = connect(&url).await;
    assert_eq!(
        text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
        Some("1")
    );
    let aborted = check(&mut client).await.unwrap_err();
    assert_eq!(
        (
            aborted.code(),
            text(aborted.metadata(), "x-ratelimit-remaining")
        ),
        (Code::Aborted, Some("0"))
    );
    assert_eq!(
        check(&mut client).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    assert_eq!(
        seen.load(Ordering::SeqCst),
        2,
        "the interceptor does not see a refused call"
    );
}

#[tokio::test]
async fn http_and_grpc_share_a_server_and_its_limits() {
    let layer = by_peer().respond_with(GrpcOr(JsonResponse));
    let grpc = Routes::new(health()).into_axum_router();
    let url = http_server::serve(
        Router::new()
            .route("/", get(|| async { "hello" }))
            .merge(grpc)
            .layer(layer),
    )
    .await;
    let (http, mut client) = (HttpClient::new(), connect(&url).await);

    assert_eq!(http.get(&url).await.body, "hello");
    assert_eq!(
        text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
        Some("0")
    );
    assert_eq!(
        check(&mut client).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    let refused = http.get(&url).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.headers["content-type"]),
        (429, &"application/problem+json".parse().unwrap())
    );
}

#[tokio::test]
async fn each_method_has_its_cost() {
    let layer = by_peer()
        .cost(|request| match request.uri.path() {
            "/grpc.health.v1.Health/Check" => 2,
            _ => 1,
        })
        .exempt(|request| request.uri.path() == "/grpc.health.v1.Health/Watch");
    let mut client = connect(&serve(layer).await).await;
    assert_eq!(
        text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
        Some("0")
    );
    assert_eq!(
        check(&mut client).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    let watch = client.watch(HealthCheckRequest::default()).await.unwrap();
    assert_eq!(text(watch.metadata(), "x-ratelimit-limit"), None);
    assert!(
        watch.into_inner().message().await.unwrap().is_some(),
        "the stream works"
    );
}

#[tokio::test]
async fn the_peer_is_found_behind_tls() {
    let certificates = Certificates::make();
    let identity = Identity::from_pem(
        certificates.read("server.pem"),
        certificates.read("server.key"),
    );
    let (incoming, url) = listen().await;
    let server = Server::builder()
        .tls_config(ServerTlsConfig::new().identity(identity))
        .unwrap();
    tokio::spawn(
        server
            .layer(by_peer())
            .add_service(health())
            .serve_with_incoming(incoming),
    );

    let tls =
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(certificates.read("ca.pem")));
    let channel = Channel::from_shared(url.replace("http:", "https:"))
        .unwrap()
        .tls_config(tls)
        .unwrap();
    let mut client = HealthClient::new(channel.connect().await.unwrap());
    for remaining in ["1", "0"] {
        assert_eq!(
            text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
            Some(remaining)
        );
    }
    assert_eq!(
        check(&mut client).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
}

#[tokio::test]
async fn behind_a_proxy_the_forwarded_address_counts() {
    let limit = CALLS.by(ClientIp::behind(["127.0.0.1"]).unwrap());
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .respond_with(GrpcResponse);
    let mut client = connect(&serve(layer).await).await;
    let mut codes = Vec::new();
    for address in ["192.0.2.1", "192.0.2.1", "192.0.2.1", "192.0.2.2"] {
        let mut request = Request::new(HealthCheckRequest::default());
        request
            .metadata_mut()
            .insert("x-forwarded-for", MetadataValue::from_static(address));
        codes.push(
            client
                .check(request)
                .await
                .map_or_else(|status| status.code(), |_| Code::Ok),
        );
    }
    assert_eq!(
        codes,
        [Code::Ok, Code::Ok, Code::ResourceExhausted, Code::Ok]
    );
}

#[tokio::test]
async fn around_a_channel_a_refused_call_is_not_sent() {
    let upstream = MemoryStore::new();
    let count = Limit::per_hour("received", 100);
    let counting = RateLimitLayer::new(upstream.clone())
        .limit(count.clone().by(PeerIp::new()))
        .respond_with(GrpcResponse);
    let url = serve(counting).await;
    let channel = Channel::from_shared(url).unwrap().connect().await.unwrap();
    let limits = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(Everyone))
        .respond_with(GrpcResponse);
    let mut client = HealthClient::new(limits.layer(channel));
    let mut call = async || client.check(HealthCheckRequest::default()).await;

    for _ in 0..2 {
        call().await.unwrap();
    }
    let refused = call().await.unwrap_err();
    assert_eq!(
        (
            refused.code(),
            text(refused.metadata(), "x-ratelimit-limit")
        ),
        (Code::ResourceExhausted, Some("2"))
    );
    let received = Limiter::new(upstream).peek(&count, PeerIp::new().key([127, 0, 0, 1].into()));
    assert_eq!(received.await.unwrap().binding().used, 2);
}
