//! Measures this crate against others in one run, in alternating rounds, on its own redis-server.
//!
//! ```sh
//! cargo run --release -p benches                 # all scenarios
//! cargo run --release -p benches -- hot-key      # one of them
//! cargo run --release -p benches -- --quick      # all of them, in short rounds
//! cargo run --release -p benches -- --out DIR    # writes the figures and the plots to DIR
//! ```
//!
//! Without `--out`, a full run writes to `benches/results`, and any other run to
//! `benches/results/partial`, so that a quick run does not replace the figures of a full one.

#![allow(
    clippy::expect_used,
    reason = "a benchmark that cannot continue must stop"
)]

mod arguments;
mod contenders;
mod dice;
mod load;
mod measure;
mod proxy;
mod report;
mod research;
mod scenarios;
mod server;

use std::{env, process::ExitCode};

use crate::{
    arguments::Arguments,
    report::{Finding, Report},
    scenarios::{CLIENT, run_client},
};

fn main() -> ExitCode {
    let client: Vec<String> = env::args()
        .skip(1)
        .skip_while(|argument| argument != CLIENT)
        .skip(1)
        .collect();
    if !client.is_empty() {
        run_client(&client);
        return ExitCode::SUCCESS;
    }
    let arguments = match Arguments::read() {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprintln!("{problem}");
            return ExitCode::FAILURE;
        }
    };
    let mut report = Report::default();
    let mut is_complete = true;
    println!("{}{}", report::machine(), report::HEADING);
    for scenario in &arguments.scenarios {
        match (scenario.run)(arguments.effort) {
            Ok(comparisons) => {
                for comparison in comparisons {
                    let finding = Finding {
                        scenario: scenario.name,
                        comparison,
                    };
                    print!("{finding}");
                    report.findings.push(finding);
                }
            }
            Err(problem) => {
                is_complete = false;
                eprintln!("{}: {problem}", scenario.name);
            }
        }
    }
    if cfg!(not(tower_rate_limiter)) {
        println!(
            "\nnot measured: tower-rate-limiter, which declares rustc 1.96; benches/Cargo.toml says how to include it"
        );
    }
    match report.write(&arguments.out) {
        Ok(files) => println!("written: {}", files.join(" ")),
        Err(error) => {
            eprintln!("cannot write to {}: {error}", arguments.out.display());
            is_complete = false;
        }
    }
    if is_complete {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
