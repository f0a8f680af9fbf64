//! The machine that the figures are from.

use std::{fs, process::Command, thread};

/// Comment lines for the head of a file.
pub(crate) fn describe() -> String {
    let cores = thread::available_parallelism().map_or_else(|_| "unknown".to_owned(), |cores| cores.to_string());
    format!(
        "# processor: {}\n# cores: {cores}\n# redis: {}\n# rustc: {}\n",
        processor().unwrap_or_else(unknown),
        version("redis-server").unwrap_or_else(unknown),
        version("rustc").unwrap_or_else(unknown),
    )
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn processor() -> Option<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The version that a program reports.
fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned())
}
