//! The real binary over sockets: on the in-process store, and on a real redis-server.

#![allow(
    clippy::unwrap_used,
    reason = "tests say what they expect by panicking"
)]

mod auth;
mod check;
mod envoy;
mod file;
mod hostile;
mod running;
mod support;
