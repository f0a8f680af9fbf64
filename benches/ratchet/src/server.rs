//! The redis-server of a measurement.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::paths::MAX_WAIT;

/// A redis-server that does nothing by itself but what it must.
pub(crate) struct Server {
    process: Child,
    port: u16,
}

impl Server {
    pub(crate) fn start(mut command: Command, dir: &Path) -> Result<Self, String> {
        let failed = |error| format!("redis-server does not start: {error}");
        let port = TcpListener::bind(("127.0.0.1", 0))
            .and_then(|free| free.local_addr())
            .map_err(failed)?
            .port();
        command.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        command.args([
            "--io-threads",
            "1",
            "--hz",
            "1",
            "--dynamic-hz",
            "no",
            "--activerehashing",
            "no",
            "--dir",
        ]);
        let process = command
            .arg(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let server = Self { process, port };
        let started = Instant::now();
        while server.say("PING", &mut [0; 7]).is_err() {
            if started.elapsed() > MAX_WAIT {
                return Err("redis-server does not answer".to_owned());
            }
            sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// All its figures.
    pub(crate) fn info(&self) -> Result<String, String> {
        let mut figures = String::new();
        let mut connection = TcpStream::connect(("127.0.0.1", self.port)).map_err(no_figures)?;
        // It ends the connection, and so the text.
        connection
            .write_all(b"INFO everything\r\nQUIT\r\n")
            .map_err(no_figures)?;
        connection
            .read_to_string(&mut figures)
            .map_err(no_figures)?;
        Ok(figures)
    }

    /// Sends a command, and waits for a reply of this length.
    fn say(&self, command: &str, reply: &mut [u8]) -> io::Result<()> {
        let mut connection = TcpStream::connect(("127.0.0.1", self.port))?;
        connection.write_all(format!("{command}\r\n").as_bytes())?;
        connection.read_exact(reply)
    }

    /// So that valgrind writes its counts.
    pub(crate) fn shut_down(&mut self) -> Result<(), String> {
        let ended = self
            .say("SHUTDOWN NOSAVE", &mut [])
            .and_then(|()| self.process.wait());
        ended
            .map(drop)
            .map_err(|error| format!("redis-server does not end: {error}"))
    }
}

fn no_figures(error: io::Error) -> String {
    format!("redis-server tells no figures: {error}")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
