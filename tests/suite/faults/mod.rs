//! What goes wrong between a limiter and its server, under load: one file a kind of fault.
//!
//! Every run counts what was admitted against what the rules allow. The table of what each fault did comes with
//!
//! ```sh
//! cargo test --all-features --test suite faults -- --nocapture --test-threads 1 | grep ' | '
//! ```
//!
//! `FAULT_SECONDS=600` in front of it makes the random faults go on for so long.

mod clock;
mod connections;
mod delays;
mod load;
mod lost_replies;
mod random;
mod servers;

use std::{fmt::Display, thread, time::Duration};

use tokio::time::sleep;

use crate::support::redis_server::RedisServer;

/// How many clients ask at once.
const CLIENTS: usize = 200;

/// One line of the table.
fn row(fault: &str, clients: usize, reached: impl Display) {
    // On a line of its own, behind the test's name.
    println!("\n{fault:<32} | {clients:>5} clients | {reached}");
}

/// Somebody else's script runs for so long, and is killed.
async fn keep_busy(server: &RedisServer, lasting: Duration) {
    let (mut other, mut killer) = (server.connect(), server.connect());
    let spinning = thread::spawn(move || redis::cmd("EVAL").arg("while true do end").arg(0).exec(&mut other));
    sleep(lasting).await;
    while !spinning.is_finished() {
        // It may not have begun yet.
        let _ = redis::cmd("SCRIPT").arg("KILL").exec(&mut killer);
        sleep(Duration::from_millis(5)).await;
    }
    assert!(spinning.join().unwrap().is_err(), "it was killed");
}
