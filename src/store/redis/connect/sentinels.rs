//! The primary that sentinels know.
//!
//! 1. Before each new connection, the store asks the sentinels. A failover ends the connections to
//!    the old primary, so the next one leads to the new primary.
//! 2. The store asks all sentinels at once, and believes the first that names a working primary. So
//!    a sentinel that is down, or still names the old primary, does not delay anything.
//! 3. If no primary is found, the store reports the most telling error: one from the server that a
//!    sentinel has named, or else one from a sentinel that has answered.
//! 4. The store does not keep connections to sentinels, because it seldom needs one.

use std::{
    collections::HashSet,
    io,
    time::{Duration, Instant},
};

use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult,
    Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cmd,
};
use tokio::task::JoinSet;

use super::{
    connection::{open, within},
    errors::{SENTINEL_REFUSES, kind},
    settings::{ConnectionSettings, without_timeouts},
};
use crate::error::StoreErrorKind::Denied;

const NO_PRIMARY: ErrorKind = ErrorKind::MasterNameNotFoundBySentinel;
const UNKNOWN: &str = "no sentinel knows a primary of this name";

type Address = (String, u16);

/// A step on the way to a primary.
enum Step {
    /// A sentinel has named the primary's address.
    Named(Address),
    Connected(MultiplexedConnection),
    Failed(Told, RedisError),
}

/// The source of the error if no primary is found. Errors from later variants are more telling.
#[derive(PartialEq, PartialOrd)]
enum Told {
    /// A sentinel that hangs.
    Silence,
    /// A sentinel that cannot be reached, or a server that is not a sentinel.
    Other,
    /// A sentinel that does not know the primary's name.
    Unknown,
    /// A sentinel that refuses the login or a command.
    Denied,
    /// The server that a sentinel has named: it cannot be reached, refuses the login, or is a
    /// replica.
    ByPrimary,
}

/// Connects to the primary. Each step times out early enough to report its error.
pub(super) async fn connect(
    sentinels: &[ConnectionInfo],
    primary: &ConnectionInfo,
    settings: &ConnectionSettings,
) -> RedisResult<MultiplexedConnection> {
    let (began, most) = (Instant::now(), settings.connect_timeout);
    let mut steps = JoinSet::new();
    for sentinel in sentinels {
        let name = name(primary).to_owned();
        steps.spawn(ask(sentinel.clone(), name, most / 2));
    }
    let mut named = HashSet::new();
    let (mut tells_most, mut failure) = (Told::Silence, no_primary(UNKNOWN));
    while let Some(step) = steps.join_next().await {
        let failed = |error| Step::Failed(Told::Other, io::Error::other(error).into());
        match step.unwrap_or_else(failed) {
            Step::Connected(connection) => return Ok(connection),
            Step::Named(address) => {
                let server = at(primary, &address);
                if named.insert(address) {
                    let left = (most / 8 * 7).saturating_sub(began.elapsed());
                    steps.spawn(connect_to(server, settings.signing_in.clone(), left));
                }
            }
            Step::Failed(told, error) if told >= tells_most => {
                (tells_most, failure) = (told, error);
            }
            Step::Failed(..) => {}
        }
    }
    Err(failure)
}

/// The name by which the sentinels know the primary. A socket does not have one.
pub(super) fn name(primary: &ConnectionInfo) -> &str {
    match primary.addr() {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
        _ => "",
    }
}

/// Returns the primary's settings, with the address that a sentinel has named.
fn at(primary: &ConnectionInfo, address: &Address) -> ConnectionInfo {
    let mut addr = primary.addr().clone();
    if let ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } = &mut addr {
        (*host, *port) = address.clone();
    }
    primary.clone().set_addr(addr)
}

/// Asks one sentinel for the primary's address.
async fn ask(sentinel: ConnectionInfo, primary: String, most: Duration) -> Step {
    let asked = within(most, async {
        let mut connection = open(sentinel, &without_timeouts()).await?;
        let mut command = cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(primary);
        command.query_async(&mut connection).await
    });
    match asked.await {
        Ok(Some(address)) => Step::Named(address),
        Ok(None) => Step::Failed(Told::Unknown, no_primary(UNKNOWN)),
        Err(error) if kind(&error) == Denied => {
            let refused = (error.kind(), SENTINEL_REFUSES, error.to_string());
            Step::Failed(Told::Denied, refused.into())
        }
        Err(error) if error.is_timeout() => Step::Failed(Told::Silence, error),
        Err(error) => Step::Failed(Told::Other, error),
    }
}

/// Connects to a primary that a sentinel has named.
async fn connect_to(
    primary: ConnectionInfo,
    config: AsyncConnectionConfig,
    most: Duration,
) -> Step {
    let address = primary.addr().to_string();
    match within(most, open_primary(primary, config)).await {
        Ok(connection) => Step::Connected(connection),
        Err(error) => Step::Failed(Told::ByPrimary, error_of_primary(&address, error)),
    }
}

/// Opens a connection, and checks the server's role, since a sentinel may still name the old
/// primary.
async fn open_primary(
    primary: ConnectionInfo,
    config: AsyncConnectionConfig,
) -> RedisResult<MultiplexedConnection> {
    let mut connection = open(primary, &config).await?;
    // If the user may not run ROLE, the first write shows whether this is a replica.
    match connection.req_packed_command(&cmd("ROLE")).await? {
        Value::ServerError(error) if error.code() == "NOAUTH" => Err(error.into()),
        Value::Array(role) if role.first() == Some(&Value::BulkString(b"slave".to_vec())) => {
            Err(no_primary("the sentinels name a replica"))
        }
        _ => Ok(connection),
    }
}

/// Marks an error as the primary's, and adds the primary's address if it cannot be reached.
fn error_of_primary(address: &str, error: RedisError) -> RedisError {
    let text = error.to_string();
    if kind(&error) == Denied {
        (error.kind(), "the primary refuses", text).into()
    } else if error.is_connection_refusal() || error.is_timeout() {
        let text = format!("{address}: {text}");
        (NO_PRIMARY, "the primary that the sentinels name", text).into()
    } else {
        error
    }
}

fn no_primary(problem: &'static str) -> RedisError {
    RedisError::from((NO_PRIMARY, problem))
}
