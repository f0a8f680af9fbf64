//! A redis-server of the benchmark's own.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use tempfile::TempDir;

pub(crate) struct Server {
    process: Child,
    port: u16,
    _dir: TempDir,
}

impl Server {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let port =
            TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr()).expect("a port").port();
        let process = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"])
            .arg(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is not installed: run `bash tests/run.sh`, which installs it");
        let server = Self { process, port, _dir: dir };
        for _ in 0..500 {
            if redis::Client::open(server.url()).and_then(|client| client.get_connection()).is_ok() {
                return server;
            }
            sleep(Duration::from_millis(10));
        }
        panic!("redis-server does not start");
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    pub(crate) async fn multiplexed(&self) -> redis::aio::MultiplexedConnection {
        let client = redis::Client::open(self.url()).expect("a URL");
        client.get_multiplexed_async_connection().await.expect("the server is up")
    }

    /// Runs a command, written as in redis-cli.
    pub(crate) fn run<T: redis::FromRedisValue>(&self, command: &str) -> T {
        let mut connection =
            redis::Client::open(self.url()).and_then(|client| client.get_connection()).expect("a connection");
        let mut words = command.split_whitespace();
        let mut command = redis::cmd(words.next().expect("a command"));
        words.for_each(|word| {
            command.arg(word);
        });
        command.query(&mut connection).expect("an answer")
    }

    /// Server time a script call since the last `CONFIG RESETSTAT`, in microseconds.
    pub(crate) fn script_micros(&self) -> f64 {
        let stats: String = self.run("INFO commandstats");
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).expect("scripts were run");
        let field = line.split(',').find_map(|field| field.strip_prefix("usec_per_call=")).expect("a mean");
        field.parse().expect("a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
