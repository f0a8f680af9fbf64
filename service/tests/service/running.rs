//! Who may ask, and the end.

use std::{
    convert::Infallible,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use http::{Request, Response};
use reqwest::Method;
use serde_json::json;
use tokio::task::JoinSet;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{ClientIp, Limit, Limiter, RateLimitLayer, RedisStore};

use crate::{
    envoy::{ask, connect, descriptor},
    support::{PATIENCE, Redis, Service, command, free_port},
};

const RULES: &str = "[[rule]]\nname = \"a\"\nlimits = [\"a=5/min\"]\n[[rule]]\nname = \"jobs\"\nlimits = [\"jobs=1/1h concurrent\"]\n";

#[tokio::test]
async fn a_token_is_needed_for_decisions_and_for_nothing_else() {
    let listen = "listen = \"0.0.0.0:0\"\ngrpc_listen = \"0.0.0.0:0\"";
    let service = Service::listening(
        listen,
        &format!("token = {{ env = \"SERVICE_TOKEN\" }}\n{RULES}"),
    );
    for path in ["/check", "/peek", "/reset", "/settle"] {
        let answer = service
            .post(path, json!({ "limit": "a", "key": "ada" }))
            .await;
        assert_eq!(
            (answer.status, answer.header("www-authenticate")),
            (401, "Bearer"),
            "{path}"
        );
    }
    for (token, status) in [
        ("t0ken-0f-the-tests-7a3", 200),
        ("t0ken-0f-the-tests-7a4", 401),
        ("", 401),
    ] {
        let request = service
            .request(Method::POST, "/check")
            .header("content-type", "application/json");
        let request = request
            .header("authorization", format!("Bearer {token}"))
            .body(r#"{"limit": "a", "key": "ada"}"#);
        assert_eq!(service.send(request).await.status, status);
    }
    let refused = ask(&connect(&service).await, &[descriptor(&[("a", "b")])], 1)
        .await
        .unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unauthenticated);
    for path in ["/health", "/metrics", "/openapi.yaml"] {
        assert_eq!(service.get(path).await.status, 200);
    }
    assert!(
        service
            .get("/openapi.yaml")
            .await
            .text
            .starts_with("openapi: 3")
    );
}

#[test]
fn a_unix_socket_is_served_and_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("http.sock");
    let rules = format!("[proxy]\naddresses = [\"127.0.0.1\"]\n{RULES}");
    for _ in 0..2 {
        // The first is killed, and leaves its socket behind.
        let _service = Service::listening(&format!("listen = \"unix:{}\"", path.display()), &rules);
        let send = |text: String| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            let mut reply = String::new();
            stream.read_to_string(&mut reply).unwrap();
            reply
        };
        let body = r#"{"limit": "a", "key": "ada"}"#;
        let head = "host: a\r\nconnection: close\r\ncontent-type: application/json";
        let reply = send(format!(
            "POST /check HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ));
        assert!(reply.contains(r#""allowed":true"#), "{reply}");
        let reply = send(format!(
            "GET /auth HTTP/1.1\r\n{head}\r\nx-forwarded-method: GET\r\nx-forwarded-uri: /\r\n\r\n"
        ));
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    }
    // A second process does not take the socket of a living one.
    let settings = format!("listen = \"unix:{}\"", path.display());
    let living = Service::listening(&settings, &rules);
    let second = dir.path().join("second.toml");
    std::fs::write(&second, format!("{settings}\n{rules}")).unwrap();
    let refused = command().arg(&second).output().unwrap();
    let told = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && told.contains("another process listens there"),
        "{told}"
    );
    UnixStream::connect(&path).unwrap();
    drop(living);

    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let rules = dir.path().join("rules.toml");
    std::fs::write(&rules, format!("listen = \"unix:{}\"", file.display())).unwrap();
    assert!(!command().arg(&rules).output().unwrap().status.success());
    assert_eq!(std::fs::read_to_string(file).unwrap(), "precious");
}

#[tokio::test]
async fn the_end_is_in_order_and_gives_places_back() {
    let redis = Redis::start();
    let rules = format!("store = {:?}\n{RULES}", redis.url);
    let (first, second) = (Service::start(&rules), Service::start(&rules));
    let job = json!({ "limit": "jobs", "key": "ada", "lease": 3600 });
    assert!(first.post("/check", &job).await.is_allowed());
    assert!(!second.post("/check", &job).await.is_allowed());
    first.signal("TERM");
    assert_eq!(first.end(), 0);
    // The second remembers its refusal for a second.
    let begun = Instant::now();
    while !second.post("/check", &job).await.is_allowed() {
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The system's certificates are trusted, or those of this variable.
#[tokio::test]
async fn redis_may_speak_tls() {
    let dir = tempfile::tempdir().unwrap();
    let [key, certificate] =
        ["key.pem", "certificate.pem"].map(|name| dir.path().join(name).display().to_string());
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=redis",
        ])
        .args([
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ])
        .args(["-keyout", &key, "-out", &certificate])
        .output();
    assert!(made.unwrap().status.success());
    let port = free_port();
    let tls = [
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &key,
        "--tls-auth-clients",
        "no",
        "--tls-port",
    ];
    let _redis = Redis::start_with(&[&tls[..], &[&port.to_string()]].concat());
    let rules = format!("store = \"rediss://127.0.0.1:{port}\"\n{RULES}");
    for is_decided in [true, false] {
        let mut command = command();
        if is_decided {
            command.env("SSL_CERT_FILE", &certificate);
        }
        let service = Service::run(command, "listen = \"127.0.0.1:0\"", &rules);
        let begun = Instant::now();
        loop {
            let answer = service
                .post("/check", json!({ "limit": "a", "key": "ada" }))
                .await
                .json();
            if answer["undecided"].is_null() == is_decided {
                break;
            }
            assert!(is_decided && begun.elapsed() < PATIENCE, "{answer}");
        }
    }
}

/// The rest of a body may never come.
#[test]
fn a_request_that_does_not_arrive_ends() {
    let service = Service::start(RULES);
    let mut stream = TcpStream::connect(service.http.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
        .write_all(b"POST /check HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
        .unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 408");
    service.signal("TERM");
    assert_eq!(service.end(), 0);
}

#[test]
fn without_a_file_an_example_runs_and_says_what_to_try() {
    let begun = Instant::now();
    loop {
        let mut process = command()
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said: Vec<_> = BufReader::new(process.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok)
            .take(7)
            .collect();
        let _ = process.kill();
        let output = process.wait_with_output().unwrap();
        if said.len() == 7 {
            assert_eq!(said[0], "listening on 127.0.0.1:8090");
            assert!(
                said[3].contains("curl") && said[3].contains("http://127.0.0.1:8090/check"),
                "{said:?}"
            );
            return;
        }
        // Another program may have its port.
        assert!(
            begun.elapsed() < PATIENCE,
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The app counts its own requests by the layer, one service is asked by programs, and another by a
/// proxy.
#[tokio::test]
async fn two_services_and_an_app_with_the_layer_share_a_limit_exactly() {
    const CLIENT: &str = "203.0.113.7";
    let redis = Redis::start();
    let rules = format!(
        "store = {:?}\n[proxy]\naddresses = [\"127.0.0.1\"]\n[[rule]]\nname = \"a\"\npath = \"/a\"\nlimits = [\"a=100/h\"]\non_failure = \"closed\"",
        redis.url
    );
    let services = Arc::new([Service::start(&rules), Service::start(&rules)]);
    let limiter = Limiter::new(RedisStore::connect(&redis.url).await.unwrap()).deadline(PATIENCE);
    let limits = Limit::per_hour("a", 100).by(ClientIp::behind(["127.0.0.1"]).unwrap());
    let app = RateLimitLayer::new(limiter).fail_closed().limit(limits);
    let app = app.layer(service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    let mut tasks = JoinSet::new();
    for task in 0..20 {
        let (services, app) = (Arc::clone(&services), app.clone());
        tasks.spawn(async move {
            let mut admitted = 0;
            for turn in 0..24 {
                let status = match (task + turn) % 3 {
                    0 => {
                        let answer = services[0]
                            .post("/check", json!({ "limit": "a", "key": CLIENT }))
                            .await;
                        if answer.status == 200 && !answer.is_allowed() {
                            429
                        } else {
                            answer.status
                        }
                    }
                    1 => {
                        services[1]
                            .ask("GET", "/a", &[("x-forwarded-for", CLIENT)])
                            .await
                            .status
                    }
                    _ => {
                        let proxy = SocketAddr::from(([127, 0, 0, 1], 50_000));
                        let request = Request::get("/a")
                            .header("x-forwarded-for", CLIENT)
                            .extension(proxy);
                        app.clone()
                            .oneshot(request.body(()).unwrap())
                            .await
                            .unwrap()
                            .status()
                            .as_u16()
                    }
                };
                assert!([200, 429].contains(&status), "{status}");
                admitted += u32::from(status == 200);
            }
            admitted
        });
    }
    assert_eq!(tasks.join_all().await.into_iter().sum::<u32>(), 100);
}
