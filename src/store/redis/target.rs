//! Where a connection leads, and how it is made.

use std::fmt;

use bb8::ManageConnection;
use bb8_redis::RedisConnectionManager;
use redis::{
    Cmd, ConnectionInfo, RedisFuture, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cmd,
};

use super::sentinel::Sentinels;

/// What a store's connections lead to.
pub(super) enum Target {
    /// One server.
    Node(RedisConnectionManager, String),
    /// Whichever server sentinels name as the primary.
    Sentinels(Sentinels),
}

/// A connection that has been made.
pub(super) enum Link {
    Node(MultiplexedConnection),
}

impl Target {
    pub(super) fn node(info: ConnectionInfo) -> RedisResult<Self> {
        let address = info.addr().to_string();
        Ok(Self::Node(RedisConnectionManager::new(info)?, address))
    }

    pub(super) async fn connect(&self, name: Option<&str>) -> RedisResult<Link> {
        let mut connection = match self {
            Self::Node(manager, _) => manager.connect().await?,
            Self::Sentinels(sentinels) => sentinels.connect().await?,
        };
        if let Some(name) = name {
            // A name is for who looks at the server. A user that may not set it loses nothing else.
            connection.req_packed_command(cmd("CLIENT").arg("SETNAME").arg(name)).await?;
        }
        Ok(Link::Node(connection))
    }
}

impl Link {
    pub(super) fn send<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::Node(connection) => connection.req_packed_command(command),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(_, address) => f.write_str(address),
            Self::Sentinels(sentinels) => sentinels.fmt(f),
        }
    }
}
