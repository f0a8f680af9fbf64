//! The real binary over sockets: on the in-process store, and on a real redis-server.

mod auth;
mod check;
mod envoy;
mod file;
mod running;
mod support;
