//! A service and a redis-server of one test, both ended with it.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant, SystemTime},
};

use reqwest::{Client, Method, RequestBuilder};
use serde_json::Value;
use tempfile::TempDir;

/// Long enough that no test fails because the machine is busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Service {
    process: Child,
    dir: TempDir,
    pub(crate) http: String,
    pub(crate) grpc: String,
    client: Client,
}

pub(crate) struct Redis {
    process: Child,
    pub(crate) url: String,
    _dir: TempDir,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    pub(crate) fn is_allowed(&self) -> bool {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()["allowed"].as_bool().unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }
}

pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sliding-window-service"));
    command
        .env_remove("REDIS_URL")
        .env("RATE_LIMIT_SECRET", "a1b2c3d4e5f60718293a4b5c");
    command.env("SERVICE_TOKEN", "t0ken-0f-the-tests-7a3");
    command
}

/// What `--check` says of these rules.
pub(crate) fn checked(rules: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rules.toml");
    fs::write(&path, rules).unwrap();
    command().arg("--check").arg(path).output().unwrap()
}

impl Service {
    /// On free ports, with these rules behind the settings.
    pub(crate) fn start(rules: &str) -> Self {
        Self::listening(
            "listen = \"127.0.0.1:0\"\ngrpc_listen = \"127.0.0.1:0\"",
            rules,
        )
    }

    pub(crate) fn listening(listen: &str, rules: &str) -> Self {
        Self::run(command(), listen, rules)
    }

    pub(crate) fn run(mut command: Command, listen: &str, rules: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rules.toml");
        fs::write(&path, format!("{listen}\n{rules}")).unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        let mut process = command
            .arg(&path)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut addresses = (0..listen.lines().count()).map(|_| {
            let line = lines.next().unwrap_or_else(|| {
                panic!("{}", fs::read_to_string(dir.path().join("log")).unwrap())
            });
            line.unwrap()
                .strip_prefix("listening on ")
                .unwrap()
                .replace("0.0.0.0", "127.0.0.1")
        });
        let (http, grpc) = (
            addresses.next().unwrap(),
            addresses.next().unwrap_or_default(),
        );
        Self {
            process,
            http: format!("http://{http}"),
            grpc: format!("http://{grpc}"),
            client: Client::new(),
            dir,
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("rules.toml")
    }

    /// Writes other rules, with the settings of the start.
    pub(crate) fn rewrite(&self, rules: &str) {
        self.rewrite_at(rules, None);
    }

    pub(crate) fn rewrite_at(&self, rules: &str, modified: Option<SystemTime>) {
        let text = format!("listen = \"127.0.0.1:0\"\ngrpc_listen = \"127.0.0.1:0\"\n{rules}");
        let mut next = File::create(self.dir.path().join("next")).unwrap();
        next.write_all(text.as_bytes()).unwrap();
        next.set_modified(modified.unwrap_or_else(SystemTime::now))
            .unwrap();
        fs::rename(self.dir.path().join("next"), self.path()).unwrap();
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// Waits until the log has these words so often.
    pub(crate) async fn logs(&self, words: &str, times: usize) {
        let begun = Instant::now();
        while self.log().matches(words).count() < times {
            assert!(begun.elapsed() < PATIENCE, "no {words:?} in {}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn signal(&self, signal: &str) {
        signal_to(&self.process, signal);
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> i32 {
        self.process.wait().unwrap().code().unwrap()
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.http))
    }

    pub(crate) async fn send(&self, request: RequestBuilder) -> Answer {
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Answer {
            status,
            headers,
            text: response.text().await.unwrap(),
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl ToString) -> Answer {
        let request = self
            .request(Method::POST, path)
            .header("content-type", "application/json");
        self.send(request.body(body.to_string())).await
    }

    /// A question of Caddy or Traefik.
    pub(crate) async fn ask(&self, method: &str, uri: &str, headers: &[(&str, &str)]) -> Answer {
        let mut request = self.request(Method::GET, "/auth");
        request = request
            .header("x-forwarded-method", method)
            .header("x-forwarded-uri", uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request).await
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Redis {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(arguments: &[&str]) -> Self {
        // Another process may take the port before the server starts.
        for _ in 0..10 {
            let port = free_port();
            let dir = tempfile::tempdir().unwrap();
            let program =
                std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
            let mut command = Command::new(program);
            command
                .args([
                    "--port",
                    &port.to_string(),
                    "--save",
                    "",
                    "--bind",
                    "127.0.0.1",
                    "--dir",
                ])
                .arg(dir.path());
            let mut process = command
                .args(arguments)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let begun = Instant::now();
            while begun.elapsed() < PATIENCE && process.try_wait().unwrap().is_none() {
                if is_up(port) {
                    return Self {
                        process,
                        url: format!("redis://127.0.0.1:{port}"),
                        _dir: dir,
                    };
                }
                sleep(Duration::from_millis(10));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        panic!("redis-server does not start");
    }

    /// It answers no more, and keeps its connections.
    pub(crate) fn pause(&self) {
        signal_to(&self.process, "STOP");
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn is_up(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
        return false;
    };
    let mut reply = [0; 5];
    stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut reply).is_ok()
        && reply == *b"+PONG"
}

fn signal_to(process: &Child, signal: &str) {
    let sent = Command::new("kill")
        .args([&format!("-{signal}"), &process.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// Both stores: the URL, and the server that must live as long.
pub(crate) fn stores() -> [(String, Option<Redis>); 2] {
    let redis = Redis::start();
    [
        ("memory:".to_owned(), None),
        (redis.url.clone(), Some(redis)),
    ]
}
