//! The server that a store's connections lead to.

use std::fmt;

use redis::{Client, ConnectionInfo, RedisError, RedisResult, Value, aio::ConnectionLike, cmd};

#[cfg(feature = "cluster")]
use super::cluster::Cluster;
use super::{
    connection::{Connection, ConnectionHealth},
    errors,
    sentinel::Sentinels,
    settings::ConnectionSettings,
};
use crate::error::ConfigError;

/// The address of a server, as the application gave it.
#[derive(Clone)]
pub(crate) enum ServerAddress {
    Url(String),
    Client(Box<ConnectionInfo>),
    Sentinels {
        urls: Vec<String>,
        primary: String,
    },
    #[cfg(feature = "cluster")]
    Cluster(Vec<String>),
}

pub(crate) struct Server {
    topology: Topology,
    pub(super) settings: ConnectionSettings,
}

enum Topology {
    Node(Client),
    Sentinels(Sentinels),
    #[cfg(feature = "cluster")]
    Cluster(Box<Cluster>),
}

impl Server {
    pub(crate) fn new(address: ServerAddress, settings: ConnectionSettings) -> Result<Self, ConfigError> {
        let topology = match address {
            ServerAddress::Url(url) => {
                let client = Client::open(settings.server(&url)?);
                Topology::Node(client.map_err(|cause| errors::url(&url, &cause))?)
            }
            ServerAddress::Client(info) => {
                let client = Client::open(settings.client(*info)?);
                Topology::Node(client.map_err(|cause| errors::setting(format!("the client leads nowhere: {cause}")))?)
            }
            ServerAddress::Sentinels { urls, primary } => {
                Topology::Sentinels(Sentinels::new(&urls, primary, &settings)?)
            }
            #[cfg(feature = "cluster")]
            ServerAddress::Cluster(urls) => Topology::Cluster(Box::new(Cluster::new(&urls, &settings)?)),
        };
        Ok(Self { topology, settings })
    }

    pub(crate) fn is_cluster(&self) -> bool {
        !matches!(self.topology, Topology::Node(_) | Topology::Sentinels(_))
    }

    /// The most connections that a runtime opens.
    pub(crate) fn connections(&self) -> u32 {
        self.settings.connections
    }

    pub(super) async fn connect(&self, health: ConnectionHealth) -> RedisResult<Connection> {
        self.sign_in(health).await.map_err(without_arguments)
    }

    async fn sign_in(&self, health: ConnectionHealth) -> RedisResult<Connection> {
        let mut connection = match &self.topology {
            Topology::Node(client) => client.get_multiplexed_async_connection().await?,
            Topology::Sentinels(sentinels) => sentinels.connect(&self.settings).await?,
            #[cfg(feature = "cluster")]
            Topology::Cluster(cluster) => return Ok(Connection::to_cluster(cluster.connect().await?)),
        };
        connection.set_response_timeout(self.settings.reply_timeout);
        // A server that asks for a password replies to a whole script with a protocol error, or hangs up. Any other
        // error comes again with the first batch, which may then be sent again.
        match connection.req_packed_command(&cmd("PING")).await.and_then(Value::extract_error) {
            Err(error) if error.code() == Some("NOAUTH") => return Err(error),
            _ => {}
        }
        Ok(Connection::to_server(connection, health))
    }
}

/// Removes the arguments of an unknown command, which the server repeats. Those of a sign-in hold the password.
fn without_arguments(error: RedisError) -> RedisError {
    match error.detail() {
        Some(text) if text.contains("unknown command") => {
            let command = text.split_once(',').map_or("", |(command, _)| command).to_owned();
            RedisError::from((error.kind(), "the server refuses", command))
        }
        _ => error,
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topology {
            Topology::Node(client) => client.get_connection_info().addr().fmt(f),
            Topology::Sentinels(sentinels) => sentinels.fmt(f),
            #[cfg(feature = "cluster")]
            Topology::Cluster(cluster) => cluster.fmt(f),
        }
    }
}
