//! The example `server`, run as a program: alone, beside another, and while Redis fails.

use std::{
    io::{BufRead, Read},
    process::Command,
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep};

use crate::support::{
    TEST_TIMEOUT,
    example::{PATIENT, Server, example},
    http_client::{Answer, HttpClient},
    redis_server::RedisServer,
};

fn command(variables: &[(&str, &str)]) -> Command {
    example("server", &[&[("PORT", "0")], variables].concat())
}

fn start(variables: &[(&str, &str)]) -> Server {
    Server::start("server", variables)
}

async fn log_in(server: &Server) -> Answer {
    server.send("POST", "/login", &[]).await
}

async fn api(server: &Server, path: &str, key: &str) -> Answer {
    server
        .send("GET", &format!("/api/{path}"), &[("x-api-key", key)])
        .await
}

#[tokio::test]
async fn hello_admits_five_and_more_after_exactly_retry_after() {
    let server = start(&[]);
    for remaining in (0..5).rev() {
        let answer = server.get("/hello").await;
        assert_eq!(
            (
                answer.status.as_u16(),
                answer.number("x-ratelimit-remaining")
            ),
            (200, Some(remaining))
        );
    }
    let refused = server.get("/hello").await;
    assert_eq!(refused.status, 429);
    sleep(Duration::from_secs(refused.number("retry-after").unwrap())).await;
    assert_eq!(server.get("/hello").await.status, 200);
    for _ in 0..100 {
        assert_eq!(server.get("/health").await.status, 200);
    }
}

#[tokio::test]
async fn two_servers_on_one_redis_admit_exactly_five_of_a_hundred_at_once() {
    let redis = RedisServer::start();
    let servers = [(); 2].map(|()| start(&[("REDIS_URL", &redis.url()), PATIENT]));
    // A request that timed out on a slow machine is forwarded without headers, and may have been
    // counted. Such a try shows nothing, so the next one must.
    for _ in 0..5 {
        redis.run::<()>("FLUSHALL");
        let mut requests = JoinSet::new();
        for number in 0..100 {
            let (client, url) = (
                servers[number % 2].client.clone(),
                format!("{}/hello", servers[number % 2].url),
            );
            requests.spawn(async move { client.get(&url).await });
        }
        let answers = requests.join_all().await;
        if answers
            .iter()
            .all(|answer| answer.headers.contains_key("x-ratelimit-remaining"))
        {
            let admitted = answers.iter().filter(|answer| answer.status == 200);
            let mut remaining: Vec<u64> = admitted
                .filter_map(|answer| answer.number("x-ratelimit-remaining"))
                .collect();
            remaining.sort_unstable();
            assert_eq!(remaining, [0, 1, 2, 3, 4]);
            return;
        }
        // The servers do not know that Redis was flushed, and repeat cached refusals for a second.
        sleep(Duration::from_millis(1_100)).await;
    }
    panic!("the machine is too slow to decide 100 requests in time, five times in a row");
}

#[tokio::test]
async fn items_and_search_spend_from_the_same_two_limits() {
    let server = start(&[]);
    assert_eq!(
        api(&server, "search", "ada")
            .await
            .number("x-ratelimit-remaining"),
        Some(0)
    );
    let refused = api(&server, "items", "ada").await;
    assert_eq!(
        (refused.status.as_u16(), refused.number("x-ratelimit-limit")),
        (429, Some(10))
    );
    assert_eq!(
        api(&server, "items", "bob")
            .await
            .number("x-ratelimit-remaining"),
        Some(9)
    );
    assert_eq!(server.get("/api/items").await.status, 401);
    assert_eq!(server.get("/api/nowhere").await.status, 404);

    // Ten searches fit into a minute, one into a second.
    for _ in 0..9 {
        while api(&server, "search", "ada").await.status == 429 {
            sleep(Duration::from_millis(100)).await;
        }
    }
    sleep(Duration::from_millis(1_100)).await;
    let refused = api(&server, "items", "ada").await;
    assert_eq!(
        (refused.status.as_u16(), refused.number("x-ratelimit-limit")),
        (429, Some(100))
    );
}

#[tokio::test]
async fn behind_a_proxy_the_forwarded_address_counts() {
    let server = start(&[("TRUSTED_PROXIES", "127.0.0.0/8, 10.0.0.0/8")]);
    let url = format!("{}/login", server.url);
    let mut statuses = Vec::new();
    for chain in [
        "198.51.100.1, 192.0.2.1",
        "198.51.100.2, 192.0.2.1, 10.0.0.1",
        "192.0.2.1",
        "192.0.2.1",
        "192.0.2.2",
    ] {
        statuses.push(
            server
                .client
                .send("POST", &url, &[("x-forwarded-for", chain)])
                .await
                .status
                .as_u16(),
        );
    }
    assert_eq!(statuses, [200, 200, 200, 429, 200]);

    let direct = start(&[]);
    let url = format!("{}/login", direct.url);
    let mut statuses = Vec::new();
    for chain in ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"] {
        statuses.push(
            direct
                .client
                .send("POST", &url, &[("x-forwarded-for", chain)])
                .await
                .status
                .as_u16(),
        );
    }
    assert_eq!(
        statuses,
        [200, 200, 200, 429],
        "without trusted proxies the header is not believed"
    );
}

/// The responses while Redis fails: each in the failure mode of its route, every time, and soon.
async fn assert_degraded(server: &Server) {
    for number in 0..10 {
        let asked = Instant::now();
        let hello = server.get("/hello").await;
        assert_eq!(
            (hello.status.as_u16(), hello.number("x-ratelimit-limit")),
            (200, None),
            "hello {number}"
        );
        let login = log_in(server).await;
        assert_eq!(
            (login.status.as_u16(), login.number("x-ratelimit-limit")),
            (503, None),
            "login {number}"
        );
        assert!((1..=5).contains(&login.number("retry-after").unwrap()));
        let items = api(server, "items", "ada").await;
        assert!(
            matches!(items.status.as_u16(), 200 | 429),
            "items {number}: {}",
            items.status
        );
        assert_eq!(
            items.number("x-ratelimit-limit"),
            Some(5),
            "half of the limit, items {number}"
        );
        // Three deadlines of 50 ms. Waiting for a connection or a reply would take more than a
        // second.
        assert!(
            asked.elapsed() < Duration::from_secs(1),
            "{:?}",
            asked.elapsed()
        );
    }
}

/// Redis decides again when a response has the figures of the whole limit.
async fn assert_recovers(server: &Server) {
    let back = Instant::now();
    while api(server, "items", "ada")
        .await
        .number("x-ratelimit-limit")
        != Some(10)
    {
        assert!(
            back.elapsed() < TEST_TIMEOUT,
            "no decisions after {TEST_TIMEOUT:?}"
        );
        sleep(Duration::from_millis(10)).await;
    }
    println!("decisions are back after {:?}", back.elapsed());
}

#[tokio::test]
async fn a_hanging_redis_leaves_each_route_in_its_mode() {
    let redis = RedisServer::start();
    let server = start(&[("REDIS_URL", &redis.url())]);
    assert_recovers(&server).await;
    redis.pause();
    assert_degraded(&server).await;
    redis.resume();
    assert_recovers(&server).await;
}

#[tokio::test]
async fn a_killed_redis_leaves_each_route_in_its_mode() {
    let mut redis = RedisServer::start();
    let server = start(&[("REDIS_URL", &redis.url())]);
    assert_recovers(&server).await;
    redis.kill();
    assert_degraded(&server).await;
    redis.restart();
    assert_recovers(&server).await;
}

#[tokio::test]
async fn redis_may_start_after_the_server() {
    let mut redis = RedisServer::start();
    redis.kill();
    let server = start(&[("REDIS_URL", &redis.url())]);
    assert_degraded(&server).await;
    redis.restart();
    assert_recovers(&server).await;
}

#[tokio::test]
async fn a_flushed_script_is_no_error() {
    let redis = RedisServer::start();
    let server = start(&[("REDIS_URL", &redis.url()), PATIENT]);
    assert_recovers(&server).await;
    for _ in 0..20 {
        redis.run::<()>("SCRIPT FLUSH");
        assert_eq!(
            api(&server, "items", "ada")
                .await
                .number("x-ratelimit-limit"),
            Some(10)
        );
    }
}

#[cfg(unix)]
#[tokio::test]
async fn it_shuts_down_gracefully() {
    for signal in ["-INT", "-TERM"] {
        let mut server = start(&[]);
        server.get("/health").await;
        // The client's connection would keep the server waiting.
        server.client = HttpClient::new();
        Command::new("kill")
            .args([signal, &server.process.id().to_string()])
            .status()
            .unwrap();
        let text: Vec<String> = server.output.by_ref().lines().map(Result::unwrap).collect();
        assert!(text.iter().any(|line| line.contains("curl -i")), "{text:?}");
        assert_eq!(text.last().unwrap(), "shut down");
        assert!(server.process.wait().unwrap().success());
    }
}

#[test]
fn invalid_settings_are_named() {
    for (name, value) in [
        ("PORT", "many"),
        ("TRUSTED_PROXIES", "10.0.0.0/99"),
        ("REDIS_URL", "http://localhost"),
        ("RATE_LIMIT_SECRET", "short"),
        ("HELLO", "5/fortnight"),
        ("DEADLINE", "a while"),
    ] {
        let output = command(&[(name, value)]).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success());
        let named = match name {
            "RATE_LIMIT_SECRET" => "16 bytes",
            // No more of the URL, since it may have a password.
            "REDIS_URL" => "is not a Redis URL",
            _ => value,
        };
        assert!(text.contains(named), "{text}");
    }
}

#[test]
fn a_second_server_on_a_port_says_so_in_one_line() {
    let server = start(&[]);
    let (_, port) = server.url.rsplit_once(':').unwrap();
    let output = command(&[("PORT", port)]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.lines().count() == 1 && text.contains(&format!("port {port}; PORT sets another")),
        "{text}"
    );
}
