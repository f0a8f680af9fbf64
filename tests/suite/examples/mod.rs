//! The examples, run as programs.

mod command_line;
mod server;
mod small_servers;
