//! Bodies that hold places of concurrent limits, over real sockets.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use axum::{Extension, Router, body::Body, extract::ws::WebSocketUpgrade, routing::get};
use futures_util::stream;
use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::Bytes;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc::{UnboundedSender, unbounded_channel},
    time::{Instant, sleep},
};
use tower_http::compression::CompressionLayer;
use tower_sliding_window::{Decision, Limit, Limiter, MemoryStore, RateLimitLayer};

use crate::support::{
    TEST_TIMEOUT,
    http_client::HttpClient,
    http_server::serve,
    ms,
    requests::{anyone, request},
};

const STREAMS: Limit = Limit::concurrent("streams", 2);

type Stack = fn(Router, RateLimitLayer) -> Router;

struct App {
    limiter: Limiter,
    url: String,
    /// Of the bodies that have not ended.
    bodies: Arc<Mutex<Vec<UnboundedSender<Bytes>>>>,
}

impl App {
    async fn serve(stack: impl FnOnce(Router, RateLimitLayer) -> Router) -> Self {
        let (limiter, bodies) = (
            Limiter::new(MemoryStore::new()),
            Arc::new(Mutex::new(Vec::new())),
        );
        let begun = Arc::clone(&bodies);
        let stream = async move || {
            let (sender, mut data) = unbounded_channel();
            begun.lock().unwrap().push(sender);
            Body::from_stream(stream::poll_fn(move |cx| {
                data.poll_recv(cx)
                    .map(|data| data.map(Ok::<Bytes, Infallible>))
            }))
        };
        let socket = async |upgrade: WebSocketUpgrade, place: Extension<Decision>| {
            upgrade.on_upgrade(async move |mut socket| {
                while let Some(Ok(_)) = socket.recv().await {}
                drop(place);
            })
        };
        let routes = Router::new()
            .route("/", get(stream))
            .route("/none", get(async || StatusCode::NO_CONTENT))
            .route("/socket", get(socket))
            .route(
                "/forgetful",
                get(async |upgrade: WebSocketUpgrade| {
                    upgrade.on_upgrade(async |_| sleep(TEST_TIMEOUT).await)
                }),
            );
        let url = serve(stack(
            routes,
            RateLimitLayer::new(limiter.clone()).limit(STREAMS.by(anyone)),
        ))
        .await;
        Self {
            limiter,
            url,
            bodies,
        }
    }

    async fn held(&self) -> u64 {
        self.limiter
            .peek(&STREAMS, anyone(&request().into_parts().0).unwrap())
            .await
            .unwrap()
            .binding()
            .used
    }

    async fn until_all_are_free(&self, what: &str) {
        let begun = Instant::now();
        while self.held().await > 0 {
            assert!(
                begun.elapsed() < TEST_TIMEOUT,
                "{what}: the place is never free"
            );
            sleep(ms(5)).await;
        }
    }
}

fn alone(routes: Router, limits: RateLimitLayer) -> Router {
    routes.layer(limits)
}

#[tokio::test]
async fn a_place_is_held_until_the_body_has_ended_or_the_client_has_left() {
    let stacks: [(&str, bool, Stack); 3] = [
        ("alone", false, alone),
        ("inside of compression", true, |routes, limits| {
            routes.layer(limits).layer(CompressionLayer::new())
        }),
        ("outside of compression", true, |routes, limits| {
            routes.layer(CompressionLayer::new()).layer(limits)
        }),
    ];
    for (stack, is_compressed, layers) in stacks {
        let app = App::serve(layers).await;
        for (version, client) in [
            ("HTTP/1", HttpClient::new()),
            ("HTTP/2", HttpClient::http2()),
        ] {
            let what = format!("{stack}, {version}");
            let response = client
                .open("GET", &app.url, &[("accept-encoding", "gzip")], "")
                .await;
            assert_eq!(
                response.headers().contains_key("content-encoding"),
                is_compressed,
                "{what}"
            );
            let body = app.bodies.lock().unwrap().remove(0);
            body.send("data".into()).unwrap();
            sleep(ms(20)).await;
            assert_eq!(app.held().await, 1, "{what}");
            drop(body);
            assert!(
                !response
                    .into_body()
                    .collect()
                    .await
                    .unwrap()
                    .to_bytes()
                    .is_empty(),
                "{what}"
            );
            app.until_all_are_free(&what).await;

            let left = client.open("GET", &app.url, &[], "").await;
            assert_eq!(app.held().await, 1, "{what}");
            drop((left, client));
            app.until_all_are_free(&format!("{what}, the client has left"))
                .await;
            app.bodies.lock().unwrap().clear();
        }
    }
}

#[tokio::test]
async fn a_response_without_a_body_holds_no_place() {
    let app = App::serve(alone).await;
    for client in [HttpClient::new(), HttpClient::http2()] {
        // The body of the route never ends.
        assert_eq!(
            client.send("HEAD", &app.url, &[]).await.status,
            StatusCode::OK
        );
        app.until_all_are_free("HEAD").await;
        assert_eq!(
            client.get(&format!("{}/none", app.url)).await.status,
            StatusCode::NO_CONTENT
        );
        app.until_all_are_free("204").await;
    }
}

#[tokio::test]
async fn after_an_upgrade_the_task_of_the_socket_holds_the_place() {
    let app = App::serve(alone).await;
    let connect = async |path: &str| {
        let mut socket = TcpStream::connect(app.url.trim_start_matches("http://"))
            .await
            .unwrap();
        let fields = "host: app\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
            sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==";
        socket
            .write_all(format!("GET {path} HTTP/1.1\r\n{fields}\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
        assert!(
            head.starts_with(b"HTTP/1.1 101 "),
            "{}",
            String::from_utf8_lossy(&head)
        );
        socket
    };
    let _open = connect("/forgetful").await;
    app.until_all_are_free("a socket whose task has not kept the decision")
        .await;
    let socket = connect("/socket").await;
    sleep(ms(50)).await;
    assert_eq!(app.held().await, 1);
    drop(socket);
    app.until_all_are_free("a socket that is closed").await;
}
