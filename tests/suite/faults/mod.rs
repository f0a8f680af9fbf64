//! What goes wrong between a limiter and its server, under load: one file a kind of fault.
//!
//! Every run counts what was admitted against what the rules allow, and prints what the fault did. `bash tests/outage.sh`
//! makes the table of the worst of them, and lets the random faults go on for longer, as `FAULT_SECONDS=600` does.

mod clock;
mod connections;
mod delays;
mod load;
mod lost_replies;
mod random;
mod recovery;
mod servers;

use std::{fmt::Display, thread, time::Duration};

use tokio::time::sleep;

use crate::support::{outage::CLIENTS, redis_server::RedisServer};

/// One line of what faults did.
fn reached(fault: &str, clients: usize, reached: impl Display) {
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
