//! Where a connection leads, and how it is made.

use std::fmt;

use bb8::ManageConnection;
use bb8_redis::RedisConnectionManager;
use redis::{
    ConnectionInfo, RedisError, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cmd,
};

#[cfg(feature = "cluster")]
use super::cluster::{Cluster, ClusterLink};
use super::sentinel::Sentinels;

/// What a store's connections lead to.
pub(super) enum Target {
    /// One server.
    Node(RedisConnectionManager, String),
    /// Whichever server sentinels name as the primary.
    Sentinels(Sentinels),
    #[cfg(feature = "cluster")]
    Cluster(Box<Cluster>),
}

/// A connection that has been made.
pub(super) enum Link {
    Node(MultiplexedConnection),
    #[cfg(feature = "cluster")]
    Cluster(Box<ClusterLink>),
}

impl Target {
    pub(super) fn node(info: ConnectionInfo) -> RedisResult<Self> {
        let address = info.addr().to_string();
        Ok(Self::Node(RedisConnectionManager::new(info)?, address))
    }

    #[cfg(feature = "cluster")]
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }

    pub(super) async fn connect(&self, name: Option<&str>) -> RedisResult<Link> {
        self.sign_in(name).await.map_err(without_arguments)
    }

    async fn sign_in(&self, name: Option<&str>) -> RedisResult<Link> {
        let mut connection = match self {
            Self::Node(manager, _) => manager.connect().await?,
            Self::Sentinels(sentinels) => sentinels.connect().await?,
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => return Ok(Link::Cluster(Box::new(cluster.connect().await?))),
        };
        // A server that asks for a password answers a whole script without one with a protocol error, or hangs up. All
        // else that is wrong comes again with what is asked, which may then be sent once more.
        match connection.req_packed_command(&cmd("PING")).await.and_then(Value::extract_error) {
            Err(error) if error.code() == Some("NOAUTH") => return Err(error),
            _ => {}
        }
        if let Some(name) = name {
            // A name is for who looks at the server. A user that may not set it loses nothing else.
            connection.req_packed_command(cmd("CLIENT").arg("SETNAME").arg(name)).await?;
        }
        Ok(Link::Node(connection))
    }
}

/// A server that does not know a command repeats what it was sent with it. With a sign-in, that is the password.
fn without_arguments(error: RedisError) -> RedisError {
    match error.detail() {
        Some(text) if text.contains("unknown command") => {
            let command = text.split_once(',').map_or("", |(command, _)| command).to_owned();
            RedisError::from((error.kind(), "the server refuses", command))
        }
        _ => error,
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(_, address) => f.write_str(address),
            Self::Sentinels(sentinels) => sentinels.fmt(f),
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.fmt(f),
        }
    }
}
