//! The machine that the figures are from.

use std::{fs, net::UdpSocket, process::Command, thread, time::Instant};

/// Comment lines for the head of a file.
pub(crate) fn describe() -> String {
    let cores = thread::available_parallelism()
        .map_or_else(|_| "unknown".to_owned(), |cores| cores.to_string());
    format!(
        "# processor: {}\n# cores: {cores}\n# a system call: {:.0} ns\n# a read of the clock: {:.0} ns\n# redis: {}\n# rustc: {}\n",
        processor().unwrap_or_else(unknown),
        nanos_of(&system_call()),
        nanos_of(&|| _ = Instant::now()),
        version("redis-server").unwrap_or_else(unknown),
        version("rustc").unwrap_or_else(unknown),
    )
}

/// The shortest of the library's: it asks for the address of a socket.
fn system_call() -> impl Fn() {
    let socket = UdpSocket::bind(("127.0.0.1", 0)).expect("a port");
    move || drop(socket.local_addr())
}

fn nanos_of(call: &dyn Fn()) -> f64 {
    const CALLS: u32 = 100_000;
    let started = Instant::now();
    (0..CALLS).for_each(|_| call());
    started.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn processor() -> Option<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The version that a program reports.
fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    Some(
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()?
            .to_owned(),
    )
}
