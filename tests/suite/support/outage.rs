//! The lines of the table that `bash tests/outage.sh` makes: each fault, its measured effect, and
//! the goal.

use std::{fmt::Display, time::Duration};

/// The number of clients.
pub(crate) const CLIENTS: usize = 200;

/// The deadline of each client, which is the default next to Redis.
pub(crate) const DEADLINE: Duration = Duration::from_millis(50);

/// Prints one line of the table.
pub(crate) fn row(fault: &str, seen: impl Display, to_reach: &str) {
    // On its own line, after the name of the test.
    println!("\n| {fault} | {seen} | {to_reach} |");
}

pub(crate) fn millis(time: Duration) -> String {
    let millis = time.as_secs_f64() * 1e3;
    if millis < 1.0 {
        format!("{millis:.2} ms")
    } else {
        format!("{millis:.0} ms")
    }
}
