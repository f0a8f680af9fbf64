//! No API key leaves the process: not to Redis, not into a log line, an error or debug output.

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use axum::{Router, body::Body, routing::get};
use http::{Request, Response, request::Parts};
use tower::ServiceExt;
use tower_sliding_window::{
    ApiKey, Decision, KeyExtractor, Limit, Limiter, PeerIp, RateLimitLayer, Rejection, Secret,
    middleware::Degraded,
};

use crate::support::{TEST_TIMEOUT, log::Log, redis_server::RedisServer};

const API_KEY: &str = "sk-live-do-not-show-me-to-anybody";
const SECRET: &str = "the secret that api keys are hashed with";

/// All commands that the server gets until it stops.
fn monitor(server: &RedisServer) -> thread::JoinHandle<String> {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(b"MONITOR\r\n").unwrap();
    let mut lines = BufReader::new(stream);
    lines.read_line(&mut String::new()).unwrap();
    thread::spawn(move || {
        lines
            .lines()
            .map_while(Result::ok)
            .collect::<Vec<_>>()
            .join("\n")
    })
}

fn with_key(name: &str, value: &str) -> Request<Body> {
    let mut request = Request::get("/")
        .header(name, value)
        .body(Body::empty())
        .unwrap();
    request
        .extensions_mut()
        .insert(SocketAddr::from(([192, 0, 2, 1], 1)));
    request
}

fn debug_of(response: &Response<Body>) -> String {
    let extensions = response.extensions();
    format!(
        "{response:?} {:?} {:?}",
        extensions.get::<Rejection>(),
        extensions.get::<Degraded>()
    )
}

#[tokio::test]
async fn an_api_key_appears_nowhere_but_in_the_request() {
    let log = Log::start();
    let server = RedisServer::start();
    let monitored = monitor(&server);
    let secret = Secret::new(SECRET).unwrap();
    let store = server.store().build().unwrap();
    let layer_with = |name, refusal_cache| {
        RateLimitLayer::new(Limiter::new(store.clone()).refusal_cache(refusal_cache))
            .limit(
                Limit::per_minute(name, 2)
                    .by(ApiKey::header("x-api-key", &secret).or(ApiKey::bearer(&secret))),
            )
            .limit(
                Limit::per_minute("both", 9).by(ApiKey::header("x-api-key", &secret)
                    .or(PeerIp::new())
                    .and(PeerIp::new())),
            )
            .cost(|parts: &Parts| if parts.uri.path() == "/costly" { 5 } else { 1 })
            .deadline(TEST_TIMEOUT)
    };
    let layer = |name| layer_with(name, Duration::from_secs(1));
    let mut seen = format!(
        "{store:?} {:?} {:?} {secret:?}",
        layer("calls"),
        Limiter::new(store.clone())
    );

    // Admitted, refused, never fitting, without a valid key, and without a store.
    let app = Router::new()
        .route("/", get(|| async {}))
        .route("/costly", get(|| async {}))
        .layer(layer("calls"));
    for request in [
        with_key("x-api-key", API_KEY),
        with_key("x-api-key", API_KEY),
        with_key("x-api-key", API_KEY),
        with_key("authorization", &format!("Bearer {API_KEY}")),
        with_key("authorization", &format!("Bearer {API_KEY} {API_KEY}")),
        with_key("authorization", &format!("Digest {API_KEY}")),
    ] {
        let (parts, ()) = request.map(drop).into_parts();
        let key = ApiKey::header("x-api-key", &secret)
            .or(ApiKey::bearer(&secret))
            .extract(&parts);
        seen += &format!("{key:?}");
        let request = Request::from_parts(parts, Body::empty());
        seen += &debug_of(&app.clone().oneshot(request).await.unwrap());
    }
    let mut costly = with_key("x-api-key", API_KEY);
    *costly.uri_mut() = "/costly".parse().unwrap();
    seen += &debug_of(&app.clone().oneshot(costly).await.unwrap());
    let decision: Decision = Limiter::new(store.clone())
        .deadline(TEST_TIMEOUT)
        .check(&Limit::per_minute("calls", 2), API_KEY, 1)
        .await
        .unwrap();
    seen += &format!("{decision:?}");

    let keys = server.keys().join(" ");
    let stored: Vec<Vec<u8>> = server
        .keys()
        .iter()
        .flat_map(|key| server.run::<Vec<Vec<u8>>>(&format!("ZRANGE {key} 0 -1")))
        .collect();
    drop(server);
    // Of this limit, no refusal is known.
    let down = || layer_with("unknown", Duration::ZERO).deadline(Duration::from_millis(20));
    for down in [down().fail_closed(), down()] {
        let app = Router::new().route("/", get(|| async {})).layer(down);
        seen += &debug_of(&app.oneshot(with_key("x-api-key", API_KEY)).await.unwrap());
    }

    let monitored = monitored.join().unwrap();
    assert!(
        monitored.contains("evalsha") || monitored.contains("EVALSHA"),
        "something was monitored: {monitored}"
    );
    assert!(
        keys.contains("calls")
            && seen.contains("429")
            && log.text().contains("no rate-limit decision")
    );
    let stored = format!(
        "{:?}",
        stored
            .iter()
            .map(|member| String::from_utf8_lossy(member).into_owned())
            .collect::<Vec<_>>()
    );
    for place in [&monitored, &keys, &stored, &seen, &log.text()] {
        assert!(
            !place.contains(API_KEY) && !place.contains(SECRET),
            "{place}"
        );
    }
}
