//! The layer under axum and under plain hyper, over real sockets.

use std::convert::Infallible;

use axum::{Extension, Router, routing::get};
use http::{Request, Response, request::Parts};
use http_body_util::Full;
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::net::TcpListener;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Decision, Header, Key, Limit, MemoryStore, PeerIp, RateLimitLayer, extract::KeyError,
};

use crate::support::{http_client::HttpClient, http_server::serve, stores::failing};

const CALLS: Limit = Limit::per_hour("calls", 2);

#[tokio::test]
async fn axum_counts_by_peer_address() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(PeerIp::new()));
    let hello =
        |Extension(decision): Extension<Decision>| async move { decision.remaining().to_string() };
    let url = serve(Router::new().route("/", get(hello)).layer(layer)).await;
    for (status, remaining, body) in [(200, 1, "1"), (200, 0, "0"), (429, 0, "{")] {
        // Each request has its own connection: the address counts, not the port.
        let answer = HttpClient::new().get(&url).await;
        assert_eq!(
            (
                answer.status.as_u16(),
                answer.number("x-ratelimit-remaining")
            ),
            (status, Some(remaining))
        );
        assert!(answer.body.starts_with(body), "{}", answer.body);
    }
}

/// As nginx forwards to `proxy_pass http://unix:/run/app.sock`. A Unix socket has no address, so
/// the app says what its peer is.
#[cfg(unix)]
#[tokio::test]
async fn a_peer_without_an_address_is_the_one_that_the_app_names() {
    use std::{
        net::{Ipv4Addr, SocketAddr},
        path::Path,
    };

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{UnixListener, UnixStream},
        task::JoinSet,
    };
    use tower_sliding_window::ClientIp;

    async fn get_over(socket: &Path, client: &str) -> String {
        let mut stream = UnixStream::connect(socket).await.unwrap();
        let head = format!(
            "GET / HTTP/1.1\r\nhost: app\r\nx-forwarded-for: {client}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        format!(
            "{} {}",
            &answer[9..12],
            answer.rsplit("\r\n").next().unwrap()
        )
    }

    let client_ip = ClientIp::behind(["127.0.0.1"]).unwrap();
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(client_ip.clone()));
    let hello =
        move |request: Parts| async move { client_ip.address(&request).unwrap().to_string() };
    let app = Router::new().route("/", get(hello)).layer(layer);
    let named = app
        .clone()
        .layer(Extension(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    let folder = tempfile::tempdir().unwrap();
    let (unnamed_socket, socket) = (folder.path().join("unnamed"), folder.path().join("named"));
    let mut servers = JoinSet::new();
    for (app, socket) in [(app, &unnamed_socket), (named, &socket)] {
        let listener = UnixListener::bind(socket).unwrap();
        servers.spawn(async move { axum::serve(listener, app).await });
    }
    assert!(
        get_over(&unnamed_socket, "203.0.113.7")
            .await
            .starts_with("500 ")
    );
    for answer in ["200 203.0.113.7", "200 203.0.113.7"] {
        assert_eq!(get_over(&socket, "203.0.113.7").await, answer);
    }
    assert!(get_over(&socket, "203.0.113.7").await.starts_with("429 "));
    assert_eq!(get_over(&socket, "203.0.113.8").await, "200 203.0.113.8");
}

#[tokio::test]
async fn layer_charges_not_found_and_route_layer_does_not() {
    let layer =
        |store: &MemoryStore| RateLimitLayer::new(store.clone()).limit(CALLS.by(PeerIp::new()));
    let routes = || Router::new().route("/", get(|| async {}));
    let (outer, inner) = (MemoryStore::new(), MemoryStore::new());
    let everything = serve(routes().layer(layer(&outer))).await;
    let matched = serve(routes().route_layer(layer(&inner))).await;

    let client = HttpClient::new();
    let mut statuses = Vec::new();
    for url in [&everything, &matched] {
        for _ in 0..3 {
            statuses.push(client.get(&format!("{url}/nowhere")).await.status.as_u16());
        }
    }
    assert_eq!(statuses, [404, 404, 429, 404, 404, 404]);
    assert_eq!(inner.keys(), 0);
}

#[tokio::test]
async fn each_route_may_have_its_own_limits_and_failure_mode() {
    let layer = || RateLimitLayer::new(failing()).limit(CALLS.by(PeerIp::new()));
    let nested = Router::new()
        .route("/items", get(|| async {}))
        .route_layer(layer().fail_open());
    let app = Router::new()
        .route("/login", get(|| async {}).layer(layer().fail_closed()))
        .nest("/api", nested)
        .route("/health", get(|| async {}));
    let (url, client) = (serve(app).await, HttpClient::new());
    for (path, status) in [("login", 503), ("api/items", 200), ("health", 200)] {
        assert_eq!(
            client.get(&format!("{url}/{path}")).await.status,
            status,
            "{path}"
        );
    }
}

/// The user that an authentication layer has found is a key like any other.
#[tokio::test]
async fn a_key_can_come_from_an_outer_layer() {
    #[derive(Clone)]
    struct User(String);

    let by_user = |parts: &Parts| match parts.extensions.get::<User>() {
        Some(User(name)) => Ok(Key::new("user", name)),
        None => Err(KeyError::missing("user")),
    };
    let authenticate = axum::middleware::from_fn(
        |mut request: axum::extract::Request, next: axum::middleware::Next| {
            if let Some(name) = request
                .headers()
                .get("x-user")
                .and_then(|name| name.to_str().ok())
            {
                let user = User(name.to_owned());
                request.extensions_mut().insert(user);
            }
            next.run(request)
        },
    );
    let limit = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(by_user));
    let url = serve(
        Router::new()
            .route("/", get(|| async {}))
            .layer(limit)
            .layer(authenticate),
    )
    .await;
    let client = HttpClient::new();
    let mut statuses = Vec::new();
    for user in ["ada", "ada", "ada", "bob"] {
        statuses.push(
            client
                .send("GET", &url, &[("x-user", user)])
                .await
                .status
                .as_u16(),
        );
    }
    assert_eq!(statuses, [200, 200, 429, 200]);
    assert_eq!(client.get(&url).await.status, 400);
}

/// HEAD is GET without a body, so its responses have none, refused or not.
#[tokio::test]
async fn head_requests_count_and_are_refused_without_a_body() {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(CALLS.by(PeerIp::new()));
    let url = serve(
        Router::new()
            .route("/", get(|| async { "hello" }))
            .layer(layer),
    )
    .await;
    let client = HttpClient::new();
    for status in [200, 200, 429] {
        let answer = client.send("HEAD", &url, &[]).await;
        assert_eq!((answer.status.as_u16(), answer.body.as_str()), (status, ""));
        assert!(answer.headers.contains_key("x-ratelimit-limit"));
    }
}

#[tokio::test]
async fn plain_hyper_serves_a_guarded_service() {
    let hello = service_fn(|_: Request<Incoming>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("hello")))
    });
    let limits = RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(PeerIp::new()))
        .limit(Limit::per_minute("tenant", 1).by(Header::new("x-tenant")));
    let guarded = limits.layer(hello);

    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (stream, peer) = listener.accept().await.unwrap();
            let guarded = guarded.clone();
            let service = service_fn(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(peer);
                guarded.clone().oneshot(request)
            });
            tokio::spawn(
                http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)),
            );
        }
    });

    let client = HttpClient::new();
    let mut statuses = Vec::new();
    for tenant in ["7", "7", "8", "9"] {
        statuses.push(
            client
                .send("GET", &url, &[("x-tenant", tenant)])
                .await
                .status
                .as_u16(),
        );
    }
    assert_eq!(statuses, [200, 429, 200, 429]);
    assert_eq!(client.get(&url).await.status, 400);
}
