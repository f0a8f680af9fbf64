//! How a Redis server is reached.
//!
//! Each runtime has a [`Pool`] of [`Connection`]s to one [`Server`]: a single node, the primary that sentinels name, or a
//! cluster.

#[cfg(feature = "cluster")]
mod cluster;
#[cfg(not(feature = "cluster"))]
#[path = "no_cluster.rs"]
mod cluster;
mod connection;
mod invalid;
mod pool;
mod sentinel;
mod server;
mod settings;
#[cfg(feature = "tls")]
mod tls;
mod url;

pub use self::invalid::InvalidRedisConfig;
pub(super) use self::{
    cluster::was_not_run,
    connection::{Connection, needs_new_connection},
    pool::Pool,
    server::{Server, ServerAddress},
    settings::ConnectionSettings,
};
