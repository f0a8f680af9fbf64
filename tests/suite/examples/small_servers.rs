//! The examples `login` and `llm_tokens`, run as programs.

use std::{
    io::{BufRead, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use tower_sliding_window::{ApiKey, Limit, Limiter, RedisStore, Secret};

use crate::support::{
    TEST_TIMEOUT,
    example::{SECRET, Server},
    redis_server::RedisServer,
};

#[tokio::test]
async fn only_failed_logins_count() {
    let server = Server::start("login", &[]);
    let log_in = async |account: &str, password: &str| {
        let answer = server
            .post("/login", &[("x-account", account)], password)
            .await;
        (
            answer.status.as_u16(),
            answer.number("x-ratelimit-remaining"),
            answer.number("x-ratelimit-limit"),
        )
    };
    for _ in 0..20 {
        assert_eq!(
            log_in("ada", "correct horse").await,
            (200, Some(5), Some(5))
        );
    }
    for remaining in (0..5).rev() {
        assert_eq!(
            log_in("ada", "wrong").await,
            (401, Some(remaining), Some(5))
        );
        if remaining > 0 {
            assert_eq!(
                log_in("bob", "correct horse").await,
                (200, Some(remaining), Some(5))
            );
        }
    }
    assert_eq!(
        log_in("ada", "correct horse").await,
        (429, Some(0), Some(5))
    );
}

#[tokio::test]
async fn guesses_that_arrive_together_are_counted_together() {
    let server = Server::start("login", &[]);
    let mut guesses = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let (client, url) = (server.client.clone(), format!("{}/login", server.url));
        guesses.spawn(async move {
            client
                .send_with("POST", &url, &[("x-account", "ada")], "wrong")
                .await
                .status
                .as_u16()
        });
    }
    let mut statuses = guesses.join_all().await;
    statuses.sort_unstable();
    assert_eq!(
        (
            &statuses[..5],
            statuses.iter().filter(|status| **status == 429).count()
        ),
        (&[401; 5][..], 35)
    );
}

#[tokio::test]
async fn tokens_count_as_the_response_says() {
    let server = Server::start("llm_tokens", &[]);
    let complete = async |prompt: &str, headers: &[(&str, &str)]| {
        server
            .post(
                "/complete",
                &[&[("x-api-key", "ada")], headers].concat(),
                prompt,
            )
            .await
    };
    // An estimate of a hundred tokens each would admit only three of them.
    for _ in 0..10 {
        let answer = complete("one two three", &[]).await;
        assert_eq!(
            (
                answer.status.as_u16(),
                answer.number("x-tokens-used"),
                &*answer.body
            ),
            (200, Some(6), "one two three\n")
        );
    }
    let answer = complete(&"long ".repeat(170), &[("x-max-tokens", "0")]).await;
    assert_eq!(
        (answer.status.as_u16(), answer.number("x-tokens-used")),
        (200, Some(170))
    );
    // 230 tokens are used, and the request limit is not the tightest any more.
    let answer = complete(&"long ".repeat(70), &[("x-max-tokens", "80")]).await;
    assert_eq!(
        (
            answer.number("x-tokens-used"),
            answer.number("x-ratelimit-remaining")
        ),
        (Some(140), Some(30))
    );
    assert_eq!(answer.number("x-ratelimit-limit"), Some(400));
    let refused = complete("one", &[]).await;
    assert_eq!(
        (refused.status.as_u16(), refused.number("x-ratelimit-limit")),
        (429, Some(400))
    );
    // A short response still fits.
    assert_eq!(complete("one", &[("x-max-tokens", "5")]).await.status, 200);
    assert_eq!(server.send("POST", "/complete", &[]).await.status, 401);
}

#[tokio::test]
async fn a_client_has_four_streams_at_once() {
    let server = Server::start("llm_tokens", &[]);
    let prompt = "word ".repeat(30);
    let head = format!(
        "POST /stream HTTP/1.1\r\nhost: localhost\r\nx-api-key: ada\r\nx-max-tokens: 30\r\ncontent-length: {}\r\n\r\n",
        prompt.len()
    );
    let open = || {
        let mut client = TcpStream::connect(server.url.trim_start_matches("http://")).unwrap();
        client
            .write_all((head.clone() + &prompt).as_bytes())
            .unwrap();
        assert!(
            client.read(&mut [0; 12]).unwrap() > 0,
            "the response begins"
        );
        client
    };
    let mut open: Vec<TcpStream> = (0..4).map(|_| open()).collect();
    let another = async || {
        server
            .post(
                "/stream",
                &[("x-api-key", "ada"), ("x-max-tokens", "1")],
                "one",
            )
            .await
    };
    let refused = another().await;
    assert_eq!(
        (refused.status.as_u16(), refused.number("x-ratelimit-limit")),
        (429, Some(4))
    );
    open.pop();
    let left = Instant::now();
    while another().await.status != 200 {
        assert!(left.elapsed() < TEST_TIMEOUT, "no place is freed");
        sleep(Duration::from_millis(20)).await;
    }
}

/// A stream counts as reserved until its body has ended or its client has disconnected.
#[tokio::test]
async fn streamed_tokens_count_when_the_stream_ends() {
    let redis = RedisServer::start();
    let server = Server::start("llm_tokens", &[("REDIS_URL", &redis.url())]);
    let store = RedisStore::builder(redis.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let tokens = Limit::per_minute("tokens", 400);
    let api_key = ApiKey::header("x-api-key", &Secret::new(SECRET).unwrap());
    let used = async |name: &str| {
        limiter
            .peek(&tokens, api_key.key(name))
            .await
            .unwrap()
            .binding()
            .used
    };

    let answer = server
        .post("/stream", &[("x-api-key", "ada")], "one two three")
        .await;
    assert_eq!(
        (answer.status.as_u16(), &*answer.body),
        (200, "one two three ")
    );
    assert_eq!(
        answer.number("x-ratelimit-limit"),
        Some(60),
        "the requests, which the layer counts"
    );
    assert_eq!(used("ada").await, 6);
    let answer = server
        .post("/stream", &[("x-api-key", "ada")], &"long ".repeat(240))
        .await;
    assert_eq!(
        (answer.status.as_u16(), answer.number("x-ratelimit-limit")),
        (429, Some(400)),
        "the tokens"
    );
    assert!(answer.number("retry-after").is_some());

    let mut client = TcpStream::connect(server.url.trim_start_matches("http://")).unwrap();
    let head =
        "POST /stream HTTP/1.1\r\nhost: localhost\r\nx-api-key: bob\r\ncontent-length: 500\r\n\r\n";
    client
        .write_all((head.to_owned() + &"word ".repeat(100)).as_bytes())
        .unwrap();
    assert!(
        client.read(&mut [0; 100]).unwrap() > 0,
        "the response begins"
    );
    assert_eq!(
        used("bob").await,
        225,
        "a quarter of the bytes, and the longest response"
    );
    drop(client);
    let left = Instant::now();
    let settled = loop {
        match used("bob").await {
            225 => assert!(left.elapsed() < TEST_TIMEOUT, "nothing is settled"),
            settled => break settled,
        }
        sleep(Duration::from_millis(5)).await;
    };
    assert!(
        (101..200).contains(&settled),
        "the prompt, and the part that was written: {settled}"
    );
}

#[test]
fn the_servers_print_a_command_to_try() {
    for name in ["login", "llm_tokens"] {
        let mut server = Server::start(name, &[]);
        let mut line = String::new();
        server.output.read_line(&mut line).unwrap();
        assert!(
            line.starts_with("try: curl -i ") && line.contains(&server.url),
            "{line}"
        );
    }
}
