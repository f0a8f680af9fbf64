//! Ratios between two things that are measured in one run, in alternating rounds, on a redis-server of its own.
//!
//! ```sh
//! cargo run --release -p benches
//! ```

#![allow(clippy::expect_used, reason = "a benchmark that cannot go on has nothing better to do")]

mod server;

use std::time::Duration;

use tower_sliding_window::{Limit, Limiter, RedisStore};

use crate::server::Server;

const ROUNDS: usize = 9;
const CHECKS: usize = 5_000;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let server = Server::start();
    weighted_cost(&server).await;
}

/// What a decision costs Redis: cost 10,000 against cost 1.
async fn weighted_cost(server: &Server) {
    let store = RedisStore::connect(&server.url()).await.expect("the server is up");
    let limiter = Limiter::new(store).deadline(Duration::from_secs(10));
    let limit = Limit::per_hour("quota", 1_000_000_000);

    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let mut micros = [0.0; 2];
        for (cost, micros) in [1, 10_000].into_iter().zip(&mut micros) {
            server.run::<()>("CONFIG RESETSTAT");
            for check in 0..CHECKS {
                let key = format!("{round}-{cost}-{}", check % 100);
                let decision = limiter.check(&limit, key, cost).await.expect("the server is up");
                assert!(decision.is_allowed());
            }
            *micros = server.script_micros();
        }
        println!("round {round}: {:.2} us with cost 1, {:.2} us with cost 10,000", micros[0], micros[1]);
        ratios.push(micros[1] / micros[0]);
    }
    ratios.sort_by(f64::total_cmp);
    println!("cost 10,000 / cost 1: {:.2} ({:.2} to {:.2})", ratios[ROUNDS / 2], ratios[0], ratios[ROUNDS - 1]);
}
