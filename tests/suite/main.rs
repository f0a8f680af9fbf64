//! All tests that go through the public face. `bash tests/run.sh` installs what they need and runs them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests say what they expect by panicking")]

mod acquiring;
mod afterwards;
mod algorithms;
mod at_once;
mod attack;
mod batching;
mod bounded_work;
mod breaker;
#[cfg(feature = "cluster")]
mod cluster;
mod concurrency;
mod conformance;
mod deny_cache;
mod dynamic_limits;
mod example_http;
mod example_server;
mod examples;
mod extractors;
mod fail_local;
mod failed_choices;
mod faults;
mod fuzz;
mod hanging_up;
mod headers;
mod hostile;
mod idle_runtimes;
mod keyed_identities;
mod layer;
mod memory;
#[cfg(feature = "metrics")]
mod metrics;
mod outbound;
mod own_outcomes;
mod passwords;
mod paused_time;
mod pausing;
mod properties;
mod reaching;
mod redis_errors;
mod redis_state;
mod reserved_units;
mod secrets;
mod sent_again;
mod sentinel;
mod server_time;
mod servers;
mod settlement;
mod settlement_faults;
mod settling;
mod shadow;
mod skipping;
mod split;
mod stacked;
mod steps_back;
mod support;
#[cfg(feature = "tls")]
mod tls;
mod visibility;
