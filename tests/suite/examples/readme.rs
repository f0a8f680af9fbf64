//! The programs of README.md stand there as they stand in `examples`, and do what it says.

use std::{
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use tokio::{net::TcpStream, time::sleep};

use crate::support::{
    TEST_TIMEOUT, example::example, http_client::HttpClient, redis_server::RedisServer,
};

const ADDRESS: &str = "127.0.0.1:3000";

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn the_programs_of_the_readme_are_examples() {
    let readme = read("README.md");
    let blocks = readme
        .split("```rust,no_run\n")
        .skip(1)
        .map(|block| block.split("```").next().unwrap());
    let programs = ["first", "routes"].map(|name| read(&format!("examples/{name}.rs")));
    // The files begin with a comment and an empty line.
    let programs = programs
        .iter()
        .map(|program| program.split_once("\n\n").unwrap().1);
    assert_eq!(blocks.collect::<Vec<_>>(), programs.collect::<Vec<_>>());
    assert_eq!(
        readme.matches("```rust").count(),
        2,
        "a program of README.md is not among the examples"
    );
}

/// Both listen on the port that README.md names, so one test runs them.
#[tokio::test]
async fn the_programs_of_the_readme_do_what_it_says() {
    let redis = RedisServer::start();
    let client = HttpClient::new();
    let send = async |method: &str, path: &str, headers: &[(&str, &str)]| {
        client
            .send(method, &format!("http://{ADDRESS}{path}"), headers)
            .await
    };

    let mut first = run("first", &[]).await;
    let mut statuses = Vec::new();
    let began = Instant::now();
    while statuses.last() != Some(&429) {
        let answer = send("GET", "/", &[]).await;
        statuses.push(answer.status.as_u16());
        assert_eq!(
            answer.number("retry-after"),
            (answer.status == 429).then_some(1)
        );
    }
    // On a machine that takes longer than a second, a unit may have left the window.
    assert!(
        statuses.len() == 11 || began.elapsed() > Duration::from_secs(1),
        "{statuses:?}"
    );
    first.kill().await.unwrap();

    let secret = "5f1c0a7e92d84b3f9a6c3d7e8b1f0a2c";
    let settings = [
        ("REDIS_URL", redis.url()),
        ("RATE_LIMIT_SECRET", secret.to_owned()),
    ];
    let _routes = run(
        "routes",
        &settings.each_ref().map(|(name, value)| (*name, &**value)),
    )
    .await;
    for _ in 0..5 {
        assert_eq!(send("POST", "/login", &[]).await.status, 200);
    }
    let refused = send("POST", "/login", &[]).await;
    assert!(
        refused.status == 429 && refused.number("retry-after") > Some(50),
        "{}",
        refused.body
    );
    assert_eq!(send("GET", "/api/search", &[]).await.status, 401);
    let answer = send("GET", "/api/search", &[("x-api-key", "key-1")]).await;
    assert_eq!(
        (
            answer.status.as_u16(),
            answer.number("x-ratelimit-remaining")
        ),
        (200, Some(0))
    );
    // Nobody behind this address may say who it is.
    let elsewhere = [("x-forwarded-for", "203.0.113.7")];
    assert_eq!(send("POST", "/login", &elsewhere).await.status, 429);
}

/// A program that listens, until it is dropped.
async fn run(name: &str, settings: &[(&str, &str)]) -> tokio::process::Child {
    let is_free = TcpStream::connect(ADDRESS).await.is_err();
    assert!(
        is_free,
        "another program listens on {ADDRESS}, where those of README.md do: stop it"
    );
    let mut command = tokio::process::Command::from(example(name, settings));
    let mut process = command
        .kill_on_drop(true)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while TcpStream::connect(ADDRESS).await.is_err() {
        assert!(process.try_wait().unwrap().is_none(), "{name} has ended");
        assert!(began.elapsed() < TEST_TIMEOUT, "{name} does not listen");
        sleep(Duration::from_millis(10)).await;
    }
    process
}
