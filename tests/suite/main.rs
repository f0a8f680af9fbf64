//! All tests of the public API, in folders by what they test. `bash tests/run.sh` installs what
//! they need and runs them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests say what they expect by panicking"
)]

mod configuration;
mod decision;
mod docs;
mod examples;
mod extract;
mod faults;
mod fuzz;
mod layers;
mod limiter;
mod middleware;
mod pairs;
mod redis;
mod stores;
mod support;
mod testing;
