//! The redis-server of the benchmark.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use tempfile::TempDir;

pub(crate) struct Server {
    port: u16,
    /// The process that this one has started, and its folder.
    _own: Option<(Own, TempDir)>,
}

/// Ends when it is dropped.
struct Own(Child);

impl Server {
    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let port = TcpListener::bind(("127.0.0.1", 0))
            .and_then(|listener| listener.local_addr())
            .expect("a port")
            .port();
        let process = Command::new("redis-server")
            .args([
                "--port",
                &port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
            ])
            .arg(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is not installed: run `bash tests/run.sh`, which installs it");
        let server = Self {
            port,
            _own: Some((Own(process), dir)),
        };
        for _ in 0..500 {
            if redis::Client::open(server.url())
                .and_then(|client| client.get_connection())
                .is_ok()
            {
                return server;
            }
            sleep(Duration::from_millis(10));
        }
        panic!("redis-server does not start");
    }

    /// The one that another process has started on this port.
    pub(crate) fn at(port: u16) -> Self {
        Self { port, _own: None }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.address())
    }

    pub(crate) async fn multiplexed(&self) -> redis::aio::MultiplexedConnection {
        let client = redis::Client::open(self.url()).expect("a URL");
        client
            .get_multiplexed_async_connection()
            .await
            .expect("the server is up")
    }

    pub(crate) fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url())
            .and_then(|client| client.get_connection())
            .expect("the server is up")
    }

    /// Runs a command, written as in redis-cli.
    pub(crate) fn run<T: redis::FromRedisValue>(&self, command: &str) -> T {
        let mut words = command.split_whitespace();
        let mut command = redis::cmd(words.next().expect("a command"));
        words.for_each(|word| {
            command.arg(word);
        });
        command.query(&mut self.connection()).expect("an answer")
    }

    /// The bytes of all keys, including their names.
    pub(crate) fn memory(&self) -> f64 {
        let keys: Vec<String> = self.run("KEYS *");
        keys.iter()
            .map(|key| self.run::<f64>(&format!("MEMORY USAGE {key} SAMPLES 0")))
            .sum()
    }

    /// Processor time of the main thread since the server started, in microseconds.
    pub(crate) fn processor_micros(&self) -> f64 {
        let info: String = self.run("INFO cpu");
        let seconds = info
            .lines()
            .filter(|line| line.contains("_main_thread:"))
            .filter_map(|line| line.split(':').nth(1));
        1e6 * seconds
            .map(|seconds| seconds.trim().parse::<f64>().expect("a number"))
            .sum::<f64>()
    }

    /// Server time per script call since the last `CONFIG RESETSTAT`, in microseconds.
    pub(crate) fn script_micros(&self) -> f64 {
        self.script_stat("usec") / self.script_calls()
    }

    /// Script calls since the last `CONFIG RESETSTAT`.
    pub(crate) fn script_calls(&self) -> f64 {
        self.script_stat("calls")
    }

    /// Commands since the last `CONFIG RESETSTAT`, and those that scripts have run.
    pub(crate) fn commands(&self) -> f64 {
        self.stat("total_commands_processed")
    }

    /// A figure of `INFO everything`.
    pub(crate) fn stat(&self, name: &str) -> f64 {
        let stats: String = self.run("INFO everything");
        let line = stats
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.expect("a figure of Redis")
            .trim()
            .parse()
            .expect("a number")
    }

    /// The sum of a figure over all script calls. A script that the server does not know yet is
    /// sent as EVAL.
    fn script_stat(&self, name: &str) -> f64 {
        let stats: String = self.run("INFO commandstats");
        let lines = stats.lines().filter_map(|line| {
            line.strip_prefix("cmdstat_evalsha:")
                .or_else(|| line.strip_prefix("cmdstat_eval:"))
        });
        let fields = lines
            .flat_map(|line| line.split(','))
            .filter_map(|field| field.split_once('='));
        fields
            .filter(|(field, _)| *field == name)
            .map(|(_, figure)| figure.parse::<f64>().expect("a number"))
            .fold(0.0, |sum, figure| sum + figure)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
