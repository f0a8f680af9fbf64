//! Connections that the application opens: from its own pool, or by any closure.
//!
//! 1. Whenever the store opens a connection, it asks the application for one, and keeps a clone. So
//!    the pool gets its connection back at once, and is never empty because batches wait.
//! 2. The store gives up an application's connection by the same rules as its own connections, and
//!    asks the application for another one.
//! 3. The application chooses the login, database and TLS.

use std::{
    any::Any,
    future::Future,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bb8::{ManageConnection, Pool};
use redis::{
    RedisError, RedisFuture, RedisResult, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cmd, from_redis_value,
};
use tokio::{runtime::Handle, time::timeout};

use super::{
    connection::{ServerConnection, shared},
    settings::ConnectionSettings,
};

/// Opens an application's connection, within the timeouts in the settings.
pub(crate) type Open =
    Arc<dyn Fn(&ConnectionSettings) -> RedisFuture<'static, ServerConnection> + Send + Sync>;

/// Opens connections by calling a closure. The closure's argument is the time after which it should
/// try another way to get a connection.
pub(crate) fn by_closure<F, C>(open: impl Fn(Duration) -> F + Send + Sync + 'static) -> Open
where
    F: Future<Output = RedisResult<C>> + Send + 'static,
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    Arc::new(move |settings| {
        // A third of the time is for getting a connection, a third for its first reply, and a third
        // for the other way.
        let opening = open(settings.connect_timeout / 3);
        let reply_timeout = settings.reply_timeout;
        Box::pin(async move {
            let mut connection = opening.await?;
            if let Some(connection) =
                (&mut connection as &mut dyn Any).downcast_mut::<MultiplexedConnection>()
            {
                connection.set_response_timeout(reply_timeout);
            }
            Ok(shared(connection))
        })
    })
}

/// Takes connections from a pool.
///
/// A pool opens a connection in the runtime that asks for it, and the connection works only as long
/// as that runtime is driven. So only one runtime asks the pool: the one that calls this function
/// or, outside any runtime, the first that needs a connection. Other runtimes open connections that
/// the pool does not count. The asking runtime also does so if the pool does not hand out a working
/// connection in time. This happens while the application is using all of them, or while Redis is
/// down and the pool backs off between its tries.
pub(crate) fn by_pool<M>(pool: Pool<M>) -> Open
where
    M: ManageConnection<Error = RedisError>,
    M::Connection: ConnectionLike + Clone + Sync,
{
    let home =
        Arc::new(Handle::try_current().map_or_else(|_| OnceLock::new(), |home| home.id().into()));
    by_closure(move |patience| {
        let pool = pool.clone();
        let home = Arc::clone(&home);
        async move {
            let runtime = Handle::current().id();
            if *home.get_or_init(|| runtime) == runtime
                && let Some(connection) = handed_out(&pool, patience).await
            {
                return Ok(connection);
            }
            pool.dedicated_connection().await
        }
    })
}

/// Returns a working connection from the pool that does not lead to a replica. Returns `None` if
/// the pool does not hand one out in time.
async fn handed_out<M>(pool: &Pool<M>, patience: Duration) -> Option<M::Connection>
where
    M: ManageConnection<Error = RedisError>,
    M::Connection: ConnectionLike + Clone,
{
    let pooled = timeout(patience, pool.get()).await.ok()?.ok()?;
    let mut connection = M::Connection::clone(&pooled);
    drop(pooled);
    let mut command = cmd("INFO");
    let info = connection.req_packed_command(command.arg("REPLICATION"));
    let info = timeout(patience, info).await.ok()?;
    let info = info.and_then(Value::extract_error);
    let is_of_use = match info.and_then(|info| Ok(from_redis_value::<String>(info)?)) {
        Ok(info) => !info.contains("role:slave"),
        // The user may lack `INFO`. Any other error means that the connection is useless, for
        // example because it is subscribed.
        Err(error) => error.code() == Some("NOPERM"),
    };
    is_of_use.then_some(connection)
}
