//! The examples, run as programs.

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
};

use super::http_client::{Answer, HttpClient};

/// What examples hash API keys under, unless a test says otherwise.
pub(crate) const SECRET: &str = "a secret that only the tests know";

/// For what Redis decides: a busy machine may not run it, or the example, for longer than the
/// default deadline.
pub(crate) const PATIENT: (&str, &str) = ("DEADLINE", "5000");

/// All settings that examples read. The tests remove them from the environment.
const SETTINGS: [&str; 16] = [
    "HOST",
    "PORT",
    "REDIS_URL",
    "TRUSTED_PROXIES",
    "RATE_LIMIT_SECRET",
    "HELLO",
    "DEADLINE",
    "CALLS",
    "WINDOW",
    "WORKERS",
    "PAGES",
    "MAX_WAIT",
    "TOKEN",
    "LISTS",
    "SEARCHES",
    "CALL_MILLIS",
];

/// An example with only these settings. Cargo builds the examples together with the tests, into a
/// folder next to them.
pub(crate) fn example(name: &str, settings: &[(&str, &str)]) -> Command {
    let folder = env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .join("examples");
    let program = folder.join(format!("{name}{}", env::consts::EXE_SUFFIX));
    assert!(
        program.exists(),
        "the example {name} is not built: run `cargo build --examples --all-features`"
    );
    let mut command = Command::new(program);
    SETTINGS.iter().for_each(|setting| {
        command.env_remove(setting);
    });
    command
        .env("RATE_LIMIT_SECRET", SECRET)
        .envs(settings.iter().copied());
    command
}

/// An example that is a server, on its own port, until it is dropped.
pub(crate) struct Server {
    pub(crate) process: Child,
    pub(crate) url: String,
    /// Its output after the line with the address.
    pub(crate) output: BufReader<ChildStdout>,
    pub(crate) client: HttpClient,
}

impl Server {
    pub(crate) fn start(name: &str, settings: &[(&str, &str)]) -> Self {
        let mut command = example(name, &[&[("PORT", "0")], settings].concat());
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let url = line
            .trim()
            .strip_prefix("listening on ")
            .unwrap()
            .to_owned();
        Self {
            process,
            url,
            output,
            client: HttpClient::new(),
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[]).await
    }

    pub(crate) async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.client
            .send(method, &format!("{}{path}", self.url), headers)
            .await
    }

    pub(crate) async fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.client
            .send_with("POST", &format!("{}{path}", self.url), headers, body)
            .await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
