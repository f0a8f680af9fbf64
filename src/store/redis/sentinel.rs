//! Sentinels: who knows which server is the primary.
//!
//! 1. They are asked for each connection that is made, so after a failover, which ends the connections to the old
//!    primary, the next one leads to the new.
//! 2. All of them are asked at once, and the first to name a server that is a primary is believed: one that is down, or
//!    behind, holds nobody up.
//! 3. Nothing is kept open to them: connections are made rarely.

use std::{fmt, iter};

use redis::{
    Client, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cmd, from_redis_value,
};
use tokio::task::JoinSet;

use super::{access::Access, invalid::InvalidRedisConfig};

pub(super) struct Sentinels {
    sentinels: Vec<Client>,
    primary: String,
    access: Access,
    /// How to reach the primary, but for its address: as its sentinels are.
    like: ConnectionInfo,
}

impl Sentinels {
    /// Sentinels that are spoken to as their URLs say, and the primary as `access` says.
    pub(super) fn new(urls: &[String], primary: String, access: Access) -> Result<Self, InvalidRedisConfig> {
        let infos = urls.iter().map(|url| access.endpoint(url)).collect::<Result<Vec<_>, _>>()?;
        let Some(like) = infos.first().cloned() else {
            return Err(InvalidRedisConfig::new("there must be 1 sentinel or more, not 0"));
        };
        if primary.is_empty() {
            return Err(InvalidRedisConfig::new("the name of the primary must not be empty"));
        }
        let like = like.set_redis_settings(Default::default());
        let open = |(url, info): (&String, _)| Client::open(info).map_err(|cause| InvalidRedisConfig::url(url, cause));
        let sentinels = iter::zip(urls, infos).map(open).collect::<Result<_, _>>()?;
        Ok(Self { sentinels, primary, access, like })
    }

    /// A connection to the primary.
    pub(super) async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let mut asked = JoinSet::new();
        for sentinel in &self.sentinels {
            asked.spawn(ask(sentinel.clone(), self.primary.clone()));
        }
        let (mut tried, mut failure) = (Vec::new(), None);
        while let Some(answer) = asked.join_next().await {
            let address = match answer {
                Ok(Ok(address)) if tried.contains(&address) => continue,
                Ok(Ok(address)) => address,
                Ok(Err(error)) => {
                    failure = Some(failure.unwrap_or(error));
                    continue;
                }
                // A runtime that shuts down.
                Err(_) => continue,
            };
            match self.connect_to(&address).await {
                Ok(connection) => return Ok(connection),
                // It says more than that another sentinel is down.
                Err(error) => failure = Some(error),
            }
            tried.push(address);
        }
        Err(failure.unwrap_or_else(unknown))
    }

    async fn connect_to(&self, (host, port): &(String, u16)) -> RedisResult<MultiplexedConnection> {
        let (host, port) = (host.clone(), *port);
        let address = match self.like.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let client = Client::open(self.access.sign_in(self.like.clone().set_addr(address)))?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        // A sentinel may be behind. Who is not allowed to ask finds out from the first write.
        match connection.req_packed_command(&cmd("ROLE")).await? {
            Value::Array(role) if role.first() == Some(&Value::BulkString(b"slave".to_vec())) => {
                Err(RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, "the sentinels name a replica")))
            }
            _ => Ok(connection),
        }
    }
}

/// The address of the primary as this sentinel knows it.
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
