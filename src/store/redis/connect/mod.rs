//! How the store reaches a Redis server.
//!
//! Each runtime has a [`Pool`] with [`Connection`]s to one [`Server`]: a single node, the primary
//! that sentinels name, a cluster, or wherever the application's own connections lead.

#[cfg(feature = "cluster")]
mod cluster;
mod connection;
mod errors;
pub(super) mod given;
mod pool;
mod sentinels;
mod server;
mod settings;

pub(super) use self::{
    connection::Connection,
    errors::{ASKING, failure, kind_of_reply, needs_new_connection, was_not_run},
    pool::{Pool, Taken},
    server::{Server, Topology},
    settings::{ConnectionSettings, node},
};
