//! The examples, run as programs.

mod command_line;
mod dashboard;
#[cfg(feature = "grpc")]
mod grpc;
mod readme;
mod server;
mod server_page;
mod small_servers;
