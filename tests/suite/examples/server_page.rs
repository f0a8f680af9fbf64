//! The page of the example `server`, as far as no browser is needed. `tests/page.sh` drives it in
//! Chromium.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::support::{
    TEST_TIMEOUT,
    example::{PATIENT, Server},
    http_client::HttpClient,
    redis_server::RedisServer,
};

fn start(settings: &[(&str, &str)]) -> Server {
    Server::start("server", settings)
}

/// The header by which the page shows that no other web site has sent the request.
const FROM_PAGE: &[(&str, &str)] = &[("x-page", "1")];

async fn send(server: &Server, client: u8, path: &str, count: usize) -> Value {
    let answer = server
        .send(
            "POST",
            &format!("/send?client={client}&path={path}&count={count}"),
            FROM_PAGE,
        )
        .await;
    assert_eq!(answer.status, 200);
    serde_json::from_str(&answer.body).unwrap()
}

async fn stop_store(server: &Server, stopped: bool) {
    assert_eq!(
        server
            .send("POST", &format!("/store?stopped={stopped}"), FROM_PAGE)
            .await
            .status,
        204
    );
}

async fn state(server: &Server, client: u8) -> Value {
    let answer = server.get(&format!("/state?client={client}")).await;
    serde_json::from_str(&answer.body).unwrap()
}

/// The dots of a lane as the page draws them: units and kind.
fn dots(state: &Value, lane: usize) -> Vec<(u64, &str)> {
    let of_lane = state["dots"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|dot| dot[0] == lane);
    of_lane
        .map(|dot| (dot[2].as_u64().unwrap(), dot[3].as_str().unwrap()))
        .collect()
}

const HELLO: usize = 0;
const FIXED: usize = 1;
const COUNTER: usize = 2;
const LOGIN: usize = 3;
const BURST: usize = 4;
const STEADY: usize = 5;

#[tokio::test]
async fn the_page_needs_nothing_from_other_servers() {
    let server = start(&[]);
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
    ] {
        let answer = server.get(path).await;
        assert_eq!(
            (
                answer.status.as_u16(),
                answer.headers["content-type"].to_str().unwrap()
            ),
            (200, kind)
        );
        let text = answer.body.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !text.contains("://") && !text.contains("@import") && !text.contains("url("),
            "{path}"
        );
    }
}

#[tokio::test]
async fn requests_of_a_terminal_are_dots_of_client_1() {
    // A boundary of the fixed window comes only once an hour.
    let server = start(&[("HELLO", "5/h")]);
    for _ in 0..6 {
        server.get("/hello").await;
    }
    let shown = state(&server, 1).await;
    let mut expected = vec![(1, "admitted"); 5];
    expected.push((1, "refused"));
    for lane in [HELLO, FIXED, COUNTER] {
        assert_eq!(dots(&shown, lane), expected, "lane {lane}");
        let figures = &shown["lanes"][lane];
        assert_eq!(
            (&figures[0], &figures[1]),
            (&json!(5), &json!(0)),
            "used and left, lane {lane}"
        );
    }
    assert_eq!(shown["store"]["requests"], 6);
    assert!(dots(&state(&server, 2).await, HELLO).is_empty());
}

#[tokio::test]
async fn requests_of_the_page_have_the_address_and_the_key_of_their_client() {
    let server = start(&[]);
    for client in [2, 9] {
        assert_eq!(
            send(&server, client, "/hello", 20).await,
            json!({"200": 5, "429": 15})
        );
        assert_eq!(
            send(&server, client, "/login", 5).await,
            json!({"200": 3, "429": 2})
        );
        assert_eq!(
            send(&server, client, "/api/search", 2).await,
            json!({"200": 1, "429": 1})
        );
        let shown = state(&server, client).await;
        assert_eq!(dots(&shown, LOGIN)[..3], [(1, "admitted"); 3]);
        assert_eq!(dots(&shown, BURST), [(10, "admitted"), (1, "refused")]);
        assert_eq!(
            dots(&shown, STEADY),
            [(10, "admitted")],
            "only the burst limit has refused"
        );
    }
}

#[tokio::test]
async fn malformed_requests_to_the_page_are_a_400() {
    let server = start(&[]);
    for query in [
        "client=0&path=/hello&count=1",
        "client=10&path=/hello&count=1",
        "client=1&path=/hello&count=0",
    ] {
        assert_eq!(
            server
                .send("POST", &format!("/send?{query}"), FROM_PAGE)
                .await
                .status,
            400,
            "{query}"
        );
    }
    for query in [
        "client=1&path=/hello&count=501",
        "client=1&path=/health&count=1",
        "client=1&path=/send&count=1",
        "",
    ] {
        assert_eq!(
            server
                .send("POST", &format!("/send?{query}"), FROM_PAGE)
                .await
                .status,
            400,
            "{query}"
        );
    }
    for path in [
        "/state?client=0",
        "/state?client=999",
        "/events?client=10",
        "/events",
        "/state?client=one",
    ] {
        assert_eq!(server.get(path).await.status, 400, "{path}");
    }
    assert_eq!(
        server
            .send("POST", "/store?stopped=perhaps", FROM_PAGE)
            .await
            .status,
        400
    );
    assert_eq!(
        server.get("/hello").await.number("x-ratelimit-remaining"),
        Some(4),
        "none was charged"
    );
}

#[tokio::test]
async fn other_web_sites_can_neither_send_requests_nor_stop_the_store_nor_read() {
    let server = start(&[]);
    let refused: [&[(&str, &str)]; 6] = [
        &[],
        &[("x-page", "0")],
        &[
            ("content-type", "application/x-www-form-urlencoded"),
            ("origin", "http://example.com"),
        ],
        &[("x-page", "1"), ("host", "example.com")],
        &[("x-page", "1"), ("host", "127.0.0.1.example.com:3000")],
        &[("x-page", "1"), ("host", "127.0.0.1@example.com")],
    ];
    for path in ["/send?client=1&path=/hello&count=1", "/store?stopped=true"] {
        for headers in refused {
            let answer = server.send("POST", path, headers).await;
            assert_eq!(
                (answer.status.as_u16(), answer.body.lines().count()),
                (403, 1),
                "{path} {headers:?}"
            );
        }
    }
    for path in ["/state?client=1", "/events?client=1", "/"] {
        for host in ["example.com", "127.0.0.1.example.com:3000"] {
            assert_eq!(
                server.send("GET", path, &[("host", host)]).await.status,
                403,
                "{path} {host}"
            );
        }
    }
    let shown = state(&server, 1).await;
    assert_eq!(
        (&shown["store"]["requests"], &shown["store"]["stopped"]),
        (&json!(0), &json!(false))
    );
    for host in [
        "127.0.0.1:3000",
        "127.0.0.1",
        "localhost:8080",
        "localhost",
        "[::1]:3000",
        "[::1]",
    ] {
        let headers = &[("x-page", "1"), ("host", host)];
        assert_eq!(
            server
                .send("POST", "/store?stopped=false", headers)
                .await
                .status,
            204,
            "{host}"
        );
        assert_eq!(
            server
                .send("GET", "/state?client=1", &headers[1..])
                .await
                .status,
            200,
            "{host}"
        );
    }
}

#[tokio::test]
async fn a_stopped_store_leaves_each_route_in_its_mode() {
    let redis = RedisServer::start();
    for settings in [&[][..], &[("REDIS_URL", &*redis.url())]] {
        let server = start(settings);
        stop_store(&server, true).await;
        for _ in 0..3 {
            assert_eq!(send(&server, 1, "/hello", 7).await, json!({"uncounted": 7}));
            assert_eq!(send(&server, 1, "/login", 2).await, json!({"503": 2}));
        }
        assert_eq!(
            send(&server, 1, "/api/items", 8).await,
            json!({"local": 5, "429": 3}),
            "half of 10 a second"
        );
        assert_eq!(
            send(&server, 1, "/api/search", 1).await,
            json!({"503": 1}),
            "10 is more than half of 10"
        );
        let shown = state(&server, 1).await;
        assert_eq!(
            (&shown["store"]["decides"], &shown["lanes"]),
            (&json!(false), &Value::Null)
        );
        assert_eq!(dots(&shown, HELLO), [(1, "uncounted"); 21]);
        assert_eq!(dots(&shown, LOGIN)[0], (1, "unavailable"));
        assert_eq!(dots(&shown, BURST)[..5], [(1, "local"); 5]);

        stop_store(&server, false).await;
        let back = Instant::now();
        while state(&server, 1).await["store"]["decides"] != true {
            assert!(
                back.elapsed() < TEST_TIMEOUT,
                "no decisions after {TEST_TIMEOUT:?}"
            );
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(
            send(&server, 1, "/hello", 7).await,
            json!({"200": 5, "429": 2})
        );
    }
}

#[tokio::test]
async fn the_dots_of_another_server_are_shown_and_leave_in_time() {
    let redis = RedisServer::start();
    let [one, two] =
        [(); 2].map(|()| start(&[("REDIS_URL", &redis.url()), ("HELLO", "5/3s"), PATIENT]));
    send(&one, 1, "/hello", 2).await;
    send(&two, 1, "/hello", 2).await;
    let shown = state(&two, 1).await;
    let mut kinds: Vec<_> = dots(&shown, HELLO)
        .into_iter()
        .map(|(_, kind)| kind)
        .collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["admitted", "admitted", "elsewhere", "elsewhere"]);
    assert_eq!(shown["lanes"][HELLO][0], 4);
    sleep(Duration::from_secs(3)).await;
    assert_eq!(state(&two, 1).await["lanes"][HELLO][0], 0);

    // The page forgets what Redis has lost.
    send(&one, 1, "/hello", 2).await;
    redis.run::<()>("FLUSHALL");
    let now = state(&one, 1).await;
    let recent = now["dots"].as_array().unwrap().iter().filter(|dot| {
        dot[0] == HELLO
            && dot[3] == "admitted"
            && dot[1].as_f64().unwrap() > now["now"].as_f64().unwrap() - 3_000.0
    });
    assert_eq!(recent.count(), 0);
}

#[tokio::test]
async fn no_dot_outlives_a_flush_of_redis() {
    let redis = RedisServer::start();
    let server = start(&[("REDIS_URL", &redis.url())]);
    let (lanes, begun) = ([HELLO, COUNTER], Instant::now());
    // A busy machine may be too late to decide some requests.
    loop {
        send(&server, 1, "/hello", 4).await;
        let shown = state(&server, 1).await;
        if lanes.iter().all(|lane| !dots(&shown, *lane).is_empty()) {
            break;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT, "{shown}");
    }
    redis.run::<()>("FLUSHALL");
    let flushed = Instant::now();
    loop {
        let now = state(&server, 1).await;
        if lanes.iter().all(|lane| dots(&now, *lane).is_empty()) {
            break;
        }
        // By itself, a dot would leave after ten seconds.
        assert!(flushed.elapsed() < Duration::from_secs(5), "{now}");
        sleep(Duration::from_millis(50)).await;
    }
}

#[cfg(unix)]
#[tokio::test]
async fn an_open_page_keeps_no_server_from_shutting_down() {
    let mut server = start(&[]);
    let url = format!("{}/events?client=1", server.url);
    let events = tokio::spawn(async move { HttpClient::new().get(&url).await });
    sleep(Duration::from_millis(300)).await;
    server.client = HttpClient::new();
    Command::new("kill")
        .arg(server.process.id().to_string())
        .status()
        .unwrap();
    let events = tokio::time::timeout(TEST_TIMEOUT, events)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(events.headers["content-type"], "text/event-stream");
    assert!(
        events.body.starts_with("data: {") && events.body.contains("\"setup\""),
        "{}",
        events.body
    );
    assert!(
        events.body.matches("data: ").count() >= 2,
        "figures are sent again and again"
    );
    let mut text = String::new();
    server.output.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("shut down\n") && server.process.wait().unwrap().success());
}

#[cfg(unix)]
#[tokio::test]
async fn a_client_that_never_ends_its_request_keeps_no_server_from_shutting_down() {
    let mut server = start(&[]);
    let mut half = TcpStream::connect(server.url.strip_prefix("http://").unwrap()).unwrap();
    half.write_all(b"GET /hello HTTP/1.1\r\nHost: ").unwrap();
    assert_eq!(server.get("/health").await.status, 200);
    server.client = HttpClient::new();
    let terminated = Command::new("kill")
        .arg(server.process.id().to_string())
        .status()
        .unwrap();
    assert!(terminated.success());

    let mut text = String::new();
    server.output.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("shut down\n") && server.process.wait().unwrap().success());
}
