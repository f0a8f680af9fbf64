//! Sentinels, which know the address of the primary.
//!
//! 1. Each new connection asks them. A failover ends the connections to the old primary, so the next connection leads to
//!    the new one.
//! 2. All are asked at once, and the first that names a working primary is believed. A sentinel that is down or behind delays
//!    nothing.
//! 3. No connection to them stays open, because connections are made rarely.

use std::{fmt, iter};

use redis::{
    Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cmd, from_redis_value,
};
use tokio::task::JoinSet;

use super::{errors, settings::ConnectionSettings};
use crate::error::ConfigError;

pub(super) struct Sentinels {
    sentinels: Vec<Client>,
    primary: String,
    /// The transport to the primary, which is that of the first sentinel. The address is not the primary's.
    transport: ConnectionInfo,
}

impl Sentinels {
    /// Signs in at the sentinels with the users of their URLs.
    pub(super) fn new(urls: &[String], primary: String, settings: &ConnectionSettings) -> Result<Self, ConfigError> {
        let infos = urls.iter().map(|url| settings.endpoint(url)).collect::<Result<Vec<_>, _>>()?;
        let Some(first) = infos.first().cloned() else {
            return Err(errors::setting("there must be 1 sentinel or more, not 0"));
        };
        if primary.is_empty() {
            return Err(errors::setting("the name of the primary must not be empty"));
        }
        let transport = first.set_redis_settings(Default::default());
        let open = |(url, info): (&String, _)| Client::open(info).map_err(|cause| errors::url(url, &cause));
        let sentinels = iter::zip(urls, infos).map(open).collect::<Result<_, _>>()?;
        Ok(Self { sentinels, primary, transport })
    }

    /// A connection to the primary, signed in with the `settings`.
    pub(super) async fn connect(&self, settings: &ConnectionSettings) -> RedisResult<MultiplexedConnection> {
        let mut replies = JoinSet::new();
        for sentinel in &self.sentinels {
            replies.spawn(ask(sentinel.clone(), self.primary.clone()));
        }
        let (mut tried, mut failure) = (Vec::new(), None);
        while let Some(reply) = replies.join_next().await {
            let address = match reply {
                Ok(Ok(address)) if tried.contains(&address) => continue,
                Ok(Ok(address)) => address,
                Ok(Err(error)) => {
                    failure = Some(failure.unwrap_or(error));
                    continue;
                }
                // The runtime shuts down.
                Err(_) => continue,
            };
            match self.connect_to(&address, settings).await {
                Ok(connection) => return Ok(connection),
                // It tells more than the error of a sentinel that is down.
                Err(error) => failure = Some(error),
            }
            tried.push(address);
        }
        Err(failure.unwrap_or_else(unknown))
    }

    async fn connect_to(
        &self,
        (host, port): &(String, u16),
        settings: &ConnectionSettings,
    ) -> RedisResult<MultiplexedConnection> {
        let (host, port) = (host.clone(), *port);
        let address = match self.transport.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let client = Client::open(settings.sign_in(self.transport.clone().set_addr(address)))?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        // A sentinel may be behind. A user without the permission for ROLE learns it from the first write.
        match connection.req_packed_command(&cmd("ROLE")).await? {
            Value::Array(role) if role.first() == Some(&Value::BulkString(b"slave".to_vec())) => {
                Err(RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, "the sentinels name a replica")))
            }
            _ => Ok(connection),
        }
    }
}

/// The address of the primary, according to one sentinel.
async fn ask(sentinel: Client, primary: String) -> RedisResult<(String, u16)> {
    let mut connection = sentinel.get_multiplexed_async_connection().await?;
    let command = cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(primary).take();
    match connection.req_packed_command(&command).await?.extract_error()? {
        Value::Nil => Err(unknown()),
        address => Ok(from_redis_value(address)?),
    }
}

fn unknown() -> RedisError {
    RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, "no sentinel knows a primary of this name"))
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the primary {:?} of the sentinels", self.primary)?;
        for sentinel in &self.sentinels {
            write!(f, " {}", sentinel.get_connection_info().addr())?;
        }
        Ok(())
    }
}
