//! Requests that no gRPC client sends.

use std::time::Duration;

use axum::{Router, routing::post};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tonic::transport::Server;
use tower_sliding_window::middleware::{GrpcOr, JsonResponse};

use super::by_peer;
use crate::support::{
    TEST_TIMEOUT,
    grpc::{check, connect, health, listen, serve, text},
    http_client::{Answer, HttpClient},
    http_server,
};

/// A server that has refused everything since its first call.
async fn exhausted() -> String {
    let layer = by_peer().cost(|_| 2).respond_with(GrpcOr(JsonResponse));
    let url = http_server::serve(Router::new().route("/", post(|| async {})).layer(layer)).await;
    assert_eq!(HttpClient::new().send("POST", &url, &[]).await.status, 200);
    url
}

fn assert_refused_in_grpc(answer: &Answer, content_type: &str) {
    assert_eq!(
        (answer.status.as_u16(), answer.number("grpc-status")),
        (200, Some(8))
    );
    assert_eq!(answer.headers["content-type"], content_type);
    for name in [
        "grpc-message",
        "grpc-status-details-bin",
        "grpc-retry-pushback-ms",
        "retry-after",
    ] {
        assert!(answer.headers.contains_key(name), "{name}");
    }
    assert_eq!(answer.body, "");
}

#[tokio::test]
async fn the_content_type_chooses_the_language() {
    let url = exhausted().await;
    let web = "application/grpc-web+proto";
    let web_text = "application/grpc-web-text+proto";
    let grpc = [
        ("application/grpc", "application/grpc"),
        ("application/grpc+proto", "application/grpc"),
        ("Application/GRPC+json", "application/grpc"),
        ("application/grpc; charset=utf-8", "application/grpc"),
        ("application/grpc-web", web),
        ("application/grpc-web+proto", web),
        ("application/grpc-web-text", web_text),
        ("application/grpc-web-text+proto", web_text),
    ];
    let too_long = "application/grpc".repeat(400);
    let junk = [
        "",
        "+",
        ";",
        "grpc",
        "application/grpcs",
        "application/grpc-",
        "application/grpc-web-",
        "application/grpc, application/grpc",
        "application /grpc",
        "application/gr\u{e9}c",
        "text/plain; x=application/grpc",
        "application/json",
        &too_long,
    ];
    for client in [HttpClient::new(), HttpClient::http2()] {
        let send = async |content_type| {
            client
                .send("POST", &url, &[("content-type", content_type)])
                .await
        };
        for (content_type, of_response) in grpc {
            assert_refused_in_grpc(&send(content_type).await, of_response);
        }
        for content_type in junk {
            let answer = send(content_type).await;
            assert_eq!(
                (answer.status.as_u16(), answer.number("grpc-status")),
                (429, None),
                "{content_type:?}"
            );
            assert_eq!(answer.headers["content-type"], "application/problem+json");
        }
        assert_eq!(client.send("POST", &url, &[]).await.status, 429);
    }
}

/// `te: trailers` is what gRPC demands. tonic does not, and neither does the layer.
#[tokio::test]
async fn a_broken_te_header_makes_no_difference() {
    let url = exhausted().await;
    for client in [HttpClient::new(), HttpClient::http2()] {
        for te in [
            &[][..],
            &[("te", "trailers")],
            &[("te", "gzip;q=x, \u{e9}")],
            &[("te", ""), ("te", "trailers")],
        ] {
            let headers = [&[("content-type", "application/grpc")], te].concat();
            assert_refused_in_grpc(
                &client.send("POST", &url, &headers).await,
                "application/grpc",
            );
        }
    }
}

#[tokio::test]
async fn a_server_of_grpc_alone_answers_everything_in_grpc() {
    let url = serve(by_peer().cost(|_| 3)).await;
    for (content_type, of_response) in [
        ("application/grpc", "application/grpc"),
        ("application/grpc-web", "application/grpc-web+proto"),
        ("text/html", "application/grpc"),
    ] {
        let answer = HttpClient::http2()
            .send("POST", &url, &[("content-type", content_type)])
            .await;
        assert_eq!(
            (answer.status.as_u16(), answer.number("grpc-status")),
            (200, Some(8))
        );
        assert_eq!(answer.headers["content-type"], of_response);
    }
}

#[tokio::test]
async fn an_http_1_client_ends_its_own_connection_only() {
    let url = serve(by_peer()).await;
    let mut client = connect(&url).await;
    for junk in [
        "GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "\r\n\r\n\0\0\0",
        "PRI * HTTP/2.0\r\n\r\nxx",
    ] {
        let mut stream = TcpStream::connect(url.trim_start_matches("http://"))
            .await
            .unwrap();
        stream.write_all(junk.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut reply = Vec::new();
        // A reset is an error, and also an end.
        let _ = timeout(TEST_TIMEOUT, stream.read_to_end(&mut reply))
            .await
            .expect("the server holds the connection");
    }
    assert_eq!(
        text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
        Some("1"),
        "nothing was counted"
    );
}

#[tokio::test]
async fn a_server_that_accepts_http_1_refuses_it_in_grpc() {
    let (incoming, url) = listen().await;
    let server = Server::builder()
        .accept_http1(true)
        .layer(by_peer().cost(|_| 2))
        .add_service(health());
    tokio::spawn(server.serve_with_incoming(incoming));
    let client = HttpClient::new();
    for _ in 0..2 {
        // The first one is admitted, and reaches no service.
        timeout(Duration::from_secs(20), client.get(&url))
            .await
            .unwrap();
    }
    assert_refused_in_grpc(&client.get(&url).await, "application/grpc");
}
