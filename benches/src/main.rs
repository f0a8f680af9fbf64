//! Ratios between two things that are measured in one run, in alternating rounds, on a redis-server of its own.
//!
//! ```sh
//! cargo run --release -p benches                 # all scenarios
//! cargo run --release -p benches -- hot-key      # one of them
//! cargo run --release -p benches -- --quick      # all of them, in short rounds
//! ```

#![allow(clippy::expect_used, reason = "a benchmark that cannot go on has nothing better to do")]

mod contenders;
mod measure;
mod scenarios;
mod server;

use std::{env, process::ExitCode, time::Duration};

use crate::{measure::Effort, scenarios::SCENARIOS};

fn main() -> ExitCode {
    let mut effort = Effort { rounds: 7, round: Duration::from_secs(2) };
    let mut chosen = Vec::new();
    for argument in env::args().skip(1) {
        match SCENARIOS.iter().find(|scenario| scenario.name == argument) {
            Some(scenario) => chosen.push(scenario),
            None if argument == "--quick" => effort = Effort { rounds: 3, round: Duration::from_millis(400) },
            None => {
                let names: Vec<&str> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
                eprintln!("{argument:?} is neither --quick nor a scenario: {}", names.join(", "));
                return ExitCode::FAILURE;
            }
        }
    }
    if chosen.is_empty() {
        chosen.extend(SCENARIOS);
    }
    println!("{:<12} {:>12}  {:<28} {:>12}  {:<8} (spread)", "scenario", "us", "against", "them", "ratio");
    for scenario in chosen {
        for row in (scenario.run)(effort) {
            println!("{:<12} {row}", scenario.name);
        }
    }
    ExitCode::SUCCESS
}
