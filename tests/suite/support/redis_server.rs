//! A redis-server for one test, on a free port, stopped when the test ends.
//!
//! `REDIS_SERVER` names the program, if it is not the installed redis-server.

use std::{
    env,
    ffi::OsString,
    net::TcpListener,
    process::{self, Child, Command, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use bb8_redis::{RedisConnectionManager, bb8::Pool};
use redis::{Client, Connection, FromRedisValue};
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};
use tower_sliding_window::{
    RedisStore,
    store::{RedisSource, RedisStoreBuilder},
};

use super::TEST_TIMEOUT;

pub(crate) struct RedisServer {
    process: Child,
    port: u16,
    options: Vec<String>,
    dir: TempDir,
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with these command-line options in addition to the standard ones.
    pub(crate) fn start_with(options: &[&str]) -> Self {
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        let dir = tempfile::tempdir().unwrap();
        // Another process may take the port before the server starts.
        for _ in 0..10 {
            let port = free_port();
            let mut process = spawn(port, &options, &dir);
            if wait_until_up(&mut process, port) {
                return Self {
                    process,
                    port,
                    options,
                    dir,
                };
            }
        }
        panic!(
            "redis-server does not start; its log is in {:?}",
            dir.keep()
        );
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// A store on this server. It waits long enough on a busy machine.
    pub(crate) fn store(&self) -> RedisStoreBuilder {
        store_at(&self.url())
            .connect_timeout(TEST_TIMEOUT)
            .reply_timeout(TEST_TIMEOUT)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Host and port.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// A connection that is separate from those of the store under test.
    pub(crate) fn connect(&self) -> Connection {
        redis::Client::open(self.url())
            .unwrap()
            .get_connection()
            .unwrap()
    }

    /// Runs a command, written as in redis-cli.
    pub(crate) fn run<T: FromRedisValue>(&self, command: &str) -> T {
        let mut words = command.split_whitespace();
        let mut command = redis::cmd(words.next().unwrap());
        words.for_each(|word| {
            command.arg(word);
        });
        command.query(&mut self.connect()).unwrap()
    }

    /// Before 7.0 a server cannot report when a key expires, and a script cannot read the version.
    pub(crate) fn is_before_7(&self) -> bool {
        let info: String = self.run("INFO server");
        let version = info
            .lines()
            .find_map(|line| line.strip_prefix("redis_version:"))
            .unwrap();
        version.split('.').next().unwrap().parse::<u32>().unwrap() < 7
    }

    /// `false` if the server closes the connection meanwhile, which it does while it is promoted.
    pub(crate) fn is_primary(&self) -> bool {
        let connection = redis::Client::open(self.url()).unwrap().get_connection();
        let info = connection
            .and_then(|mut connection| redis::cmd("INFO").query::<String>(&mut connection));
        match info {
            Err(error) if error.is_connection_dropped() => false,
            info => info.unwrap().contains("role:master"),
        }
    }

    /// The number of script calls since the last `CONFIG RESETSTAT`.
    pub(crate) fn script_calls(&self) -> u64 {
        self.calls("eval")
    }

    /// The same of the commands that begin with a name.
    pub(crate) fn calls(&self, name: &str) -> u64 {
        let stats: String = self.run("INFO commandstats");
        let calls = |line: &str| {
            line.split_once("calls=")?
                .1
                .split(',')
                .next()?
                .parse::<u64>()
                .ok()
        };
        stats
            .lines()
            .filter(|line| line.starts_with(&format!("cmdstat_{name}")))
            .filter_map(calls)
            .sum()
    }

    /// The number of open connections, without the one that asks.
    pub(crate) fn connections(&self) -> usize {
        self.run::<String>("CLIENT LIST TYPE normal")
            .lines()
            .count()
            - 1
    }

    /// The number of connections that were opened so far, with one for each of these questions.
    pub(crate) fn opened(&self) -> u64 {
        let info: String = self.run("INFO stats");
        info.lines()
            .find_map(|line| line.strip_prefix("total_connections_received:"))
            .unwrap()
            .parse()
            .unwrap()
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.run("KEYS *")
    }

    pub(crate) fn only_key(&self) -> String {
        let keys = self.keys();
        assert_eq!(keys.len(), 1, "{keys:?}");
        keys.into_iter().next().unwrap()
    }

    /// Stops the process: connections stay open, and the server does not reply.
    pub(crate) fn pause(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn resume(&self) {
        self.signal("-CONT");
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts it again on the same port, without data.
    pub(crate) fn restart(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            self.process = spawn(self.port, &self.options, &self.dir);
            if wait_until_up(&mut self.process, self.port) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "redis-server does not come back on its port"
            );
        }
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([signal, &self.process.id().to_string()])
            .status()
            .unwrap();
        assert!(status.success());
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A store on the server at this URL. `SOURCE` says who opens its connections: `pool` a pool of the
/// application, `closure` a closure. Otherwise the store does.
pub(crate) fn store_at(url: &str) -> RedisStoreBuilder {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

    match env::var("SOURCE").as_deref() {
        Ok("pool") => {
            // A pool is built in a runtime.
            let _entered = Handle::try_current().is_err().then(|| RUNTIME.enter());
            let manager = RedisConnectionManager::new(url).unwrap();
            RedisStore::builder(Pool::builder().max_size(4).build_unchecked(manager))
        }
        Ok("closure") => {
            let client = Client::open(url).unwrap();
            RedisStore::builder(RedisSource::connections(move || {
                let client = client.clone();
                async move { client.get_multiplexed_async_connection().await }
            }))
        }
        _ => RedisStore::builder(url),
    }
}

/// True if [`store_at`] makes stores on a pool of the application.
pub(crate) fn is_on_a_pool() -> bool {
    env::var("SOURCE").is_ok_and(|source| source == "pool")
}

/// A port that no other call of this process returns, also after a server of it was killed. It is
/// below those that systems give to clients, and so is the port of a cluster's nodes, 10,000 above.
pub(crate) fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = process::id()
            .wrapping_mul(7_919)
            .wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (number % 10_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// The server under test.
pub(crate) fn program() -> OsString {
    env::var_os("REDIS_SERVER").unwrap_or_else(|| "redis-server".into())
}

fn spawn(port: u16, options: &[String], dir: &TempDir) -> Child {
    Command::new(program())
        .args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ])
        .arg("--logfile")
        // Redis 6.2 would create its log file in the current folder.
        .arg(dir.path().join("redis.log"))
        .arg("--dir")
        .arg(dir.path())
        .args(options)
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server is not installed: run `bash tests/run.sh`, which installs it")
}

/// `false` if this process has ended, or another has its port.
pub(crate) fn wait_until_up(process: &mut Child, port: u16) -> bool {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap();
    let (deadline, second) = (
        Instant::now() + Duration::from_secs(10),
        Duration::from_secs(1),
    );
    while Instant::now() < deadline && process.try_wait().unwrap().is_none() {
        // A server that asks for a password also runs.
        let connection = client.get_connection_with_timeout(second);
        let answer = connection.and_then(|mut connection| {
            connection.set_read_timeout(Some(second))?;
            redis::cmd("INFO")
                .arg("server")
                .query::<String>(&mut connection)
        });
        match answer {
            Err(error) if error.is_io_error() => sleep(Duration::from_millis(5)),
            Ok(info) if !info.contains(&format!("process_id:{}\r", process.id())) => break,
            _ => return true,
        }
    }
    let _ = process.kill();
    let _ = process.wait();
    false
}

#[test]
fn only_its_own_process_is_taken_for_the_server_that_was_started() {
    let other = RedisServer::start();
    let dir = tempfile::tempdir().unwrap();
    assert!(
        !wait_until_up(&mut spawn(other.port, &[], &dir), other.port),
        "another server has this port"
    );
    assert_eq!(other.run::<String>("PING"), "PONG");
}
