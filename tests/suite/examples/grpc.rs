//! The example `grpc`, run as a program.

use std::{io::Read, process::Command, time::Instant};

use tokio::time::sleep;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_types::StatusExt;

use crate::support::{
    example::{Server, example},
    grpc::{check, connect, text},
    redis_server::RedisServer,
    seconds,
};

#[tokio::test]
async fn check_is_limited_and_watch_is_not() {
    let server = Server::start("grpc", &[]);
    let mut client = connect(&server.url).await;
    for remaining in ["4", "3", "2", "1", "0"] {
        assert_eq!(
            text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
            Some(remaining)
        );
    }
    let refused = check(&mut client).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    for _ in 0..10 {
        client.watch(HealthCheckRequest::default()).await.unwrap();
    }
    sleep(
        refused
            .get_details_retry_info()
            .unwrap()
            .retry_delay
            .unwrap(),
    )
    .await;
    check(&mut client).await.unwrap();
}

#[tokio::test]
async fn two_servers_share_the_limit_on_redis() {
    let redis = RedisServer::start();
    let servers = [(); 2].map(|()| Server::start("grpc", &[("REDIS_URL", &redis.url())]));
    let (begun, mut admitted) = (Instant::now(), 0);
    for server in servers {
        let mut client = connect(&server.url).await;
        while let Ok(metadata) = check(&mut client).await {
            // A call that timed out on a slow machine is let through without figures.
            admitted += usize::from(text(&metadata, "x-ratelimit-remaining").is_some());
            assert!(
                admitted <= 5 || begun.elapsed() > seconds(10),
                "the limit is 5 in 10 s"
            );
        }
    }
    assert_eq!(redis.keys().len(), 1);
}

#[cfg(unix)]
#[tokio::test]
async fn it_shuts_down_while_a_client_watches() {
    let mut server = Server::start("grpc", &[]);
    let mut client = connect(&server.url).await;
    let mut watch = client
        .watch(HealthCheckRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(watch.message().await.unwrap().is_some());
    Command::new("kill")
        .args(["-TERM", &server.process.id().to_string()])
        .status()
        .unwrap();
    assert!(watch.message().await.unwrap().is_none(), "the stream ends");
    // The client answers meanwhile, as HTTP/2 wants before a connection ends.
    tokio::task::spawn_blocking(move || assert_shuts_down(&mut server))
        .await
        .unwrap();
}

/// The server asks an HTTP/2 client for an answer before it ends the connection.
#[cfg(unix)]
#[tokio::test]
async fn a_client_that_answers_nothing_keeps_no_server_from_shutting_down() {
    let mut server = Server::start("grpc", &[]);
    let mut client = connect(&server.url).await;
    check(&mut client).await.unwrap();
    Command::new("kill")
        .args(["-TERM", &server.process.id().to_string()])
        .status()
        .unwrap();
    // It blocks the thread on which the client would answer.
    assert_shuts_down(&mut server);
    drop(client);
}

#[cfg(unix)]
fn assert_shuts_down(server: &mut Server) {
    let mut text = String::new();
    server.output.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("shut down\n"), "{text}");
    assert!(server.process.wait().unwrap().success());
}

#[test]
fn invalid_settings_are_named() {
    for (name, value, said) in [
        ("PORT", "many", "many"),
        ("REDIS_URL", "http://localhost", "is not a Redis URL"),
    ] {
        let output = example("grpc", &[("PORT", "0"), (name, value)])
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert!(String::from_utf8(output.stderr).unwrap().contains(said));
    }
}
