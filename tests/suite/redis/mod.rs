//! The store on Redis: connections, batches, the data in Redis, and each kind of server.

mod batching;
mod bounded_work;
#[cfg(feature = "cluster")]
mod cluster;
mod connection_settings;
mod errors;
mod foreign_content;
mod hashed_keys;
mod passwords;
mod reconnecting;
mod resent_checks;
mod runtimes;
mod sentinel;
mod server_time;
mod settlements;
mod state;
#[cfg(feature = "tls")]
mod tls;
