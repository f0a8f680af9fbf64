//! All tests that go through the public face. `bash tests/run.sh` installs what they need and runs them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests say what they expect by panicking")]

mod conformance;
mod properties;
mod support;
