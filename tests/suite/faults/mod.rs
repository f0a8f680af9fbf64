//! Faults between a limiter and its server under load, one file per kind of fault.
//!
//! Each run compares the admissions with the rules, and prints the effect of the fault.
//! `bash tests/outage.sh` makes a table of the worst faults, and runs the random faults for longer,
//! as `FAULT_SECONDS=600` does.

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

/// Prints the effect of a fault in one line.
fn reached(fault: &str, clients: usize, reached: impl Display) {
    // On its own line, after the name of the test.
    println!("\n{fault:<32} | {clients:>5} clients | {reached}");
}

/// Runs another script for so long, and kills it.
async fn keep_busy(server: &RedisServer, lasting: Duration) {
    let (mut other, mut killer) = (server.connect(), server.connect());
    let spinning = thread::spawn(move || {
        redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .exec(&mut other)
    });
    sleep(lasting).await;
    while !spinning.is_finished() {
        // The script may not run yet.
        let _ = redis::cmd("SCRIPT").arg("KILL").exec(&mut killer);
        sleep(Duration::from_millis(5)).await;
    }
    assert!(spinning.join().unwrap().is_err(), "it was killed");
}
