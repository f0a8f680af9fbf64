//! The ways to reach Redis: by a URL, or through a client, pool or connections that the application
//! already has.

use std::{fmt, future::Future};

use redis::{Client, ConnectionInfo, RedisError, RedisResult, aio::ConnectionLike};

use super::connect::{Topology, given, node};
use crate::error::ConfigError;

/// How a [`RedisStore`](super::RedisStore) reaches Redis.
/// [`RedisStore::builder`](super::RedisStore::builder) takes a source, or any value that converts
/// into one.
///
/// | from | the store is on |
/// |---|---|
/// | a URL | the server at the URL, or the [cluster or sentinels](super::super::from_url) at it |
/// | a [`redis::Client`] | the server of the client, with the client's TLS, user, password, database and protocol. The store opens its own connections. A client does not include a credentials provider: give it to [`credentials`](super::RedisStoreBuilder::credentials) |
/// | a [`bb8::Pool`], such as one of `bb8_redis::RedisConnectionManager` | connections from the application's pool: see [below](#pools) |
/// | [`connections`](Self::connections) | connections that a closure opens |
/// | [`sentinels`](Self::sentinels) | the primary that sentinels know |
/// | `cluster`, with the feature `cluster` | the Redis Cluster that has the given nodes |
///
/// A user and password that are not in a URL go into a client:
///
/// ```no_run
/// # fn store() -> Result<(), Box<dyn std::error::Error>> {
/// use redis::{Client, IntoConnectionInfo, RedisConnectionInfo};
/// use tower_sliding_window::RedisStore;
///
/// let login = RedisConnectionInfo::default()
///     .set_username("limiter")
///     .set_password(std::env::var("REDIS_PASSWORD")?);
/// let server = "redis://10.0.0.1:6379".into_connection_info()?.set_redis_settings(login);
/// let store = RedisStore::builder(Client::open(server)?).build()?;
/// # Ok(()) }
/// ```
///
/// The client and the pool come from the crates `redis` 1 and `bb8` 0.9. For a `url::Url`, pass its
/// `as_str()`. For a `ConnectionManager`, give [`connections`](Self::connections) a closure that
/// clones it.
///
/// # Pools
///
/// Create the `RedisSource` in the pool's runtime. In other runtimes, the store opens connections
/// that the pool does not count.
/// [`guide::existing_connections`](crate::guide::existing_connections) has an example, and explains
/// how the pool's settings affect limits.
///
/// The store takes a connection out of the pool, clones it, and gives it back at once. So the pool
/// has as many connections for the application as before. The builder's
/// [`connections`](super::RedisStoreBuilder::connections) is the most connections that the store
/// shares with the application. When a shared connection fails, the store asks the pool for another
/// one. If the pool does not hand out a working one within a third of the [connect
/// timeout](super::RedisStoreBuilder::connect_timeout), the store opens a connection that the pool
/// does not count.
#[derive(Clone)]
#[must_use]
pub struct RedisSource(pub(super) Result<(Topology, Vec<ConnectionInfo>), ConfigError>);

impl RedisSource {
    /// A source that uses the connections that this closure opens, such as clones of a
    /// `ConnectionManager`, or connections through a tunnel. The store calls it once for each of
    /// its [connections](super::RedisStoreBuilder::connections), and again when one has failed. A
    /// call may take up to the [connect timeout](super::RedisStoreBuilder::connect_timeout).
    ///
    /// The closure chooses the login, database and TLS. All connections must lead to one server,
    /// and none may be subscribed or in a transaction.
    ///
    /// ```no_run
    /// # async fn store() -> Result<(), Box<dyn std::error::Error>> {
    /// # async fn token() -> Result<String, redis::RedisError> { unimplemented!() }
    /// use redis::{Client, IntoConnectionInfo};
    /// use tower_sliding_window::{RedisStore, store::RedisSource};
    ///
    /// let connections = RedisSource::connections(|| async {
    ///     let server = "redis://limits@10.0.0.1:6379".into_connection_info()?;
    ///     let login = server.redis_settings().clone().set_password(token().await?);
    ///     Client::open(server.set_redis_settings(login))?.get_multiplexed_async_connection().await
    /// });
    /// let store = RedisStore::builder(connections).connect().await?;
    /// # Ok(()) }
    /// ```
    pub fn connections<F, C>(open: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = RedisResult<C>> + Send + 'static,
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let open = given::by_closure(move |_| open());
        Self(Ok((Topology::Given(open), Vec::new())))
    }

    /// A source that uses the primary that sentinels know. For each new connection, the store asks
    /// the sentinels again, so it survives a failover. Units that the old primary had not
    /// replicated are lost.
    ///
    /// The `primary`'s host is the name that the sentinels know. The scheme, user, password and
    /// database in this URL are for the primary. Each sentinel's URL has its own:
    ///
    /// ```
    /// use tower_sliding_window::store::RedisSource;
    ///
    /// let sentinels = ["redis://:sentinel@10.0.0.1:26379", "redis://:sentinel@10.0.0.2:26379"];
    /// let source = RedisSource::sentinels(sentinels, "redis://limiter:s3cret@mymaster/5");
    /// # let _ = source;
    /// ```
    pub fn sentinels<S: Into<Self>>(
        sentinels: impl IntoIterator<Item = S>,
        primary: impl Into<Self>,
    ) -> Self {
        match primary.into().into_server() {
            Ok(primary) => Self::servers(Topology::Sentinels(primary.into()), sentinels),
            Err(error) => Self(Err(error)),
        }
    }

    /// A source that uses the Redis Cluster with these nodes. The store finds all nodes if one of
    /// the given ones is up. The first node's user and password are used for all nodes: write them
    /// into its URL alone, or into all URLs. Building the store fails if another node has a
    /// different user or password.
    ///
    /// All limits under one key are in one slot, and are decided as on one server. If a check has
    /// several keys, they are usually in several slots, and no single script can reach them all.
    /// For such a check, the store asks all slots at the same time, so a decision takes one round
    /// trip. If a slot refuses, the caller gets the refusal, and the store gives back the units
    /// that the other slots have counted. So no limit ever admits too much, and a refused check
    /// does not cost any units in the end. Such a check differs from one on a single server in four
    /// ways:
    ///
    /// * Until a refused check's units are given back, which takes another round trip, other checks
    ///   may be refused because of them. The [refusal cache](crate::Limiter::refusal_cache) keeps
    ///   this rare: a client over its own limit reaches the slots with only one check a second.
    /// * If a node fails in the middle of the check, units that it has counted without an id stay
    ///   counted until they leave the window. Units in an exact log, places and reservations have
    ///   ids, so they are given back.
    /// * If a key is [reset](crate::Limiter::reset) before a refused check's units are given back,
    ///   units that were counted after the reset may be given back instead. An exact log is not
    ///   affected.
    /// * If a refused check has an id from its caller, the units that other slots have counted are
    ///   not given back: the next try with the same id uses them.
    #[cfg(feature = "cluster")]
    pub fn cluster<S: Into<Self>>(nodes: impl IntoIterator<Item = S>) -> Self {
        Self::servers(Topology::Cluster, nodes)
    }

    fn servers<S: Into<Self>>(topology: Topology, servers: impl IntoIterator<Item = S>) -> Self {
        let servers = servers.into_iter();
        let nodes: Result<_, _> = servers.map(|server| server.into().into_server()).collect();
        Self(nodes.map(|nodes| (topology, nodes)))
    }

    /// True if the application, and not the store, opens the connections.
    #[cfg(any(feature = "tls", feature = "credentials"))]
    pub(super) fn is_given(&self) -> bool {
        matches!(self.0, Ok((Topology::Given(_), _)))
    }

    /// Returns the server, if the source is a single one.
    fn into_server(self) -> Result<ConnectionInfo, ConfigError> {
        const SEVERAL: &str = "a node of a cluster, a sentinel or its primary is one server each";
        match self.0? {
            (Topology::Node, mut nodes) => nodes.pop().ok_or_else(|| ConfigError::new(SEVERAL)),
            _ => Err(ConfigError::new(SEVERAL)),
        }
    }
}

impl From<&str> for RedisSource {
    fn from(url: &str) -> Self {
        const NO_CLUSTER: &str = "URLs of a cluster need this crate's feature `cluster`";
        const ONE_LOGIN: &str = "a URL of several servers has one login, in front of its first host: that of a cluster, or of the primary that sentinels name. For logins of sentinels use `RedisSource::sentinels`. In a user name or password write @ as %40, , as %2C and % as %25";
        const NO_PRIMARY: &str = "a URL of sentinels has the name of the primary behind their hosts, as in redis+sentinel://host:26379/mymaster";
        let (scheme, rest) = url.trim().split_once("://").unwrap_or_default();
        let scheme = scheme.to_ascii_lowercase();
        let Some((scheme, kind @ ("cluster" | "sentinel"))) = scheme.split_once('+') else {
            return Self(node(url).map(|node| (Topology::Node, vec![node])));
        };
        if kind == "cluster" && cfg!(not(feature = "cluster")) {
            return Self(Err(ConfigError::new(NO_CLUSTER)));
        }
        let (login, rest) = rest.split_at(rest.rfind('@').map_or(0, |at| at + 1));
        // If the login came after the first host, the hosts before it would become part of the user
        // name.
        if login.contains(',') || login.matches('@').count() > 1 {
            return Self(Err(ConfigError::new(ONE_LOGIN)));
        }
        let (hosts, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let hosts = hosts.split(',');
        if kind == "cluster" {
            let nodes = hosts.map(|host| format!("{scheme}://{login}{host}{tail}"));
            return Self::servers(Topology::Cluster, nodes);
        }
        let primary = tail.strip_prefix('/').unwrap_or(tail);
        if primary.is_empty() || primary.starts_with(['/', '?', '#']) {
            return Self(Err(ConfigError::new(NO_PRIMARY)));
        }
        let sentinels = hosts.map(|host| format!("{scheme}://{host}"));
        Self::sentinels(sentinels, format!("{scheme}://{login}{primary}"))
    }
}

impl From<&String> for RedisSource {
    fn from(url: &String) -> Self {
        url.as_str().into()
    }
}

impl From<String> for RedisSource {
    fn from(url: String) -> Self {
        url.as_str().into()
    }
}

impl From<Client> for RedisSource {
    fn from(client: Client) -> Self {
        const USER_ALONE: &str = "a client has a user without a password, and would sign in as the default user: set a password, or use `credentials` alone";
        let node = client.get_connection_info().clone();
        let login = node.redis_settings();
        if login.username().is_some() && login.password().is_none() {
            return Self(Err(ConfigError::new(USER_ALONE)));
        }
        Self(Ok((Topology::Node, vec![node])))
    }
}

impl<M> From<bb8::Pool<M>> for RedisSource
where
    M: bb8::ManageConnection<Error = RedisError>,
    M::Connection: ConnectionLike + Clone + Sync,
{
    fn from(pool: bb8::Pool<M>) -> Self {
        Self(Ok((Topology::Given(given::by_pool(pool)), Vec::new())))
    }
}

// Does not show URLs, which may contain a password.
impl fmt::Debug for RedisSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSource").finish_non_exhaustive()
    }
}
