//! The table of what was seen while something was wrong, and of what must be reached: `bash tests/outage.sh` puts together
//! the lines that tests print.

use std::{fmt::Display, time::Duration};

/// How many clients ask at once.
pub(crate) const CLIENTS: usize = 200;

/// How long each of them waits: as long as it does unless it is told otherwise.
pub(crate) const DEADLINE: Duration = Duration::from_millis(50);

/// One line of the table.
pub(crate) fn row(fault: &str, seen: impl Display, to_reach: &str) {
    // On a line of its own, behind the test's name.
    println!("\n| {fault} | {seen} | {to_reach} |");
}

pub(crate) fn millis(time: Duration) -> String {
    let millis = time.as_secs_f64() * 1e3;
    if millis < 1.0 { format!("{millis:.2} ms") } else { format!("{millis:.0} ms") }
}
