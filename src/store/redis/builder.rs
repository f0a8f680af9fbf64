//! The settings for a store on Redis.

use std::{
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

#[cfg(feature = "tls")]
use redis::ClientTlsConfig;
use tokio::sync::watch;

use super::{
    RedisStore,
    connect::{ConnectionSettings, Server},
    dispatch::Common,
    keys::{DEFAULT_PREFIX, Keys},
    source::RedisSource,
};
use crate::{
    clock::{Clock, ManualClock},
    error::{ConfigError, StoreError},
    limit::text::is_fixed_alphabet,
    local::{LONGEST_DEADLINE, LocalState},
    secret::Secret,
    store::invalid,
};

/// The settings for a [`RedisStore`].
#[derive(Clone)]
#[must_use]
pub struct RedisStoreBuilder {
    source: RedisSource,
    connection: ConnectionSettings,
    prefix: String,
    secret: Option<Secret>,
    /// A test's clock. `None` for the server's.
    clock: Option<ManualClock>,
}

impl RedisStoreBuilder {
    pub(super) fn new(source: RedisSource) -> Self {
        Self {
            source,
            connection: ConnectionSettings::default(),
            prefix: DEFAULT_PREFIX.to_owned(),
            secret: None,
            clock: None,
        }
    }

    /// The prefix for all keys in Redis: 1 to 64 characters from `A-Z a-z 0-9 _ . -`. Two
    /// applications on one Redis share limits with the same name, unless their prefixes differ.
    /// Default: `tsw1`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Hashes each [`Key`](crate::Key)'s value, such as an address or a user name, with this secret
    /// before it reaches Redis. So a reader of Redis learns only which entries belong to the same
    /// key. All instances that share limits need the same secret. If you change or remove the
    /// secret, every window starts anew.
    ///
    /// Default: none. Without a secret, the keys in Redis have a plain BLAKE3 hash. Anyone who sees
    /// these keys, through `MONITOR`, in a dump or on a replica, can try all possible values within
    /// minutes, such as every IPv4 address or every name on a list. An [`ApiKey`](crate::ApiKey) is
    /// always hashed with its own secret first.
    ///
    /// ```no_run
    /// # fn store() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_sliding_window::{RedisStore, Secret};
    ///
    /// let secret = Secret::new(std::env::var("RATE_LIMIT_SECRET")?)?;
    /// let store = RedisStore::builder("redis://127.0.0.1:6379").secret(&secret).build()?;
    /// # Ok(()) }
    /// ```
    pub fn secret(mut self, secret: &Secret) -> Self {
        self.secret = Some(secret.clone());
        self
    }

    /// Sets the most connections that each tokio runtime in the process opens. Default: 4. With
    /// several connections, Redis decides one batch while the process reads the reply to another.
    /// [`connect`](Self::connect) opens all of them in its runtime. Otherwise, they are opened when
    /// needed, so a process with little to do opens one or two. In a cluster, each of them is a
    /// pair of connections to every node.
    ///
    /// Usually, each connection has at most one batch in flight. If the server is far away, batches
    /// share connections: up to one batch per millisecond of the round trip may be in flight, and
    /// at most 64. In a cluster, batches always share connections.
    pub fn connections(mut self, connections: u32) -> Self {
        self.connection.connections = connections;
        self
    }

    /// Sets how long a check waits for a connection before it fails. The same timeout applies to
    /// opening a connection and signing in, taken together. A limiter's deadline usually ends a
    /// check's wait earlier. While a connection is being opened, checks use the open ones. In a
    /// cluster, connecting to all nodes may take up to 5 s. Default: 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connection.connect_timeout = timeout;
        self
    }

    /// Sets how long Redis may take to reply before a batch fails. A limiter's deadline usually
    /// ends a check's wait earlier. If you set a deadline above the reply timeout, increase the
    /// reply timeout as well. In a cluster, the reply timeout is per node, so a request that is
    /// repeated at several nodes may take twice as long. Default: 1 s.
    pub fn reply_timeout(mut self, timeout: Duration) -> Self {
        self.connection.reply_timeout = timeout;
        self
    }

    /// Signs in with the users and passwords that this [`redis::StreamingCredentialsProvider`]
    /// yields, for example a cloud's short-lived tokens. Each connection has its own stream. The
    /// connection signs in with the first credentials, and again whenever the stream yields new
    /// ones. Behind sentinels, the credentials are for the primary. Default: the credentials in the
    /// URL or client, which a provider replaces. The
    /// [guide](crate::guide::existing_connections#tokens-and-passwords-that-change) has an example.
    ///
    /// When a stream ends, its connection keeps the last credentials. A new connection fails if its
    /// stream yields nothing or an error.
    #[cfg(feature = "credentials")]
    pub fn credentials(
        mut self,
        provider: impl redis::StreamingCredentialsProvider + Clone + 'static,
    ) -> Self {
        let opening = self.opening();
        #[cfg(feature = "cluster")]
        {
            let provider = provider.clone();
            opening.credentials = Some(Arc::new(move |client| {
                client.set_credentials_provider(provider.clone())
            }));
        }
        let config = opening.signing_in.clone();
        opening.signing_in = config.set_credentials_provider(provider);
        self
    }

    /// Trusts only servers whose certificates this authority has signed. Takes one or more
    /// certificates from this authority, in PEM. Default: the authorities that the system trusts.
    #[cfg(feature = "tls")]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.opening().certificates.root_cert = Some(pem.into());
        self
    }

    /// Sets the client certificate that the store presents to servers, and the certificate's key,
    /// both in PEM. Default: none.
    #[cfg(feature = "tls")]
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.opening().certificates.client_tls = Some(ClientTlsConfig {
            client_cert: pem.into(),
            client_key: key.into(),
        });
        self
    }

    /// Makes the store decide by this clock instead of the server's, for tests. Keys still expire
    /// by the server's clock, even while the test's clock stands still. So keys live a minute
    /// longer, and a test may wait up to a minute before it moves its clock again.
    pub fn clock(mut self, clock: &ManualClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Returns the settings for opening connections. If the application opens the connections,
    /// building the store will fail.
    #[cfg(any(feature = "tls", feature = "credentials"))]
    fn opening(&mut self) -> &mut ConnectionSettings {
        if self.source.is_given() {
            let problem = "the application opens the connections: set their credentials and certificates there";
            self.source.0 = Err(ConfigError::new(problem));
        }
        &mut self.connection
    }

    /// Builds the store. It connects when the first check arrives, so Redis may be down, and no
    /// runtime is needed yet.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], which names the wrong setting: for example, a URL that is missing, is not a
    /// Redis URL or has a part that would be ignored, a certificate that is not in PEM, a prefix
    /// with characters that are not allowed, or zero connections or timeouts.
    pub fn build(self) -> Result<RedisStore, ConfigError> {
        if !is_fixed_alphabet(&self.prefix) {
            let rule = "the key prefix must be 1 to 64 characters of A-Z a-z 0-9 _ . -, not";
            return Err(ConfigError::new(format!("{rule} {:?}", self.prefix)));
        }
        if self.connection.connections == 0 {
            return Err(ConfigError::new(
                "the number of connections must be 1 or more, not 0",
            ));
        }
        if self.connection.connect_timeout.is_zero() || self.connection.reply_timeout.is_zero() {
            return Err(ConfigError::new(
                "the connect timeout and the reply timeout must be longer than 0 s",
            ));
        }
        // The local state uses a clock that never steps, or the test's clock.
        let local_clock = self
            .clock
            .clone()
            .map_or_else(Clock::monotonic, Clock::Manual);
        let (topology, nodes) = self.source.0?;
        let server = Server::new(topology, nodes, self.connection)?;
        let alive = watch::Sender::new(());
        let common = Common {
            is_by_slot: server.is_cluster().into(),
            server: Arc::new(server),
            keys: Keys::new(self.prefix, self.secret.as_ref()),
            clock: self.clock,
            dispatchers: Mutex::default(),
            store: alive.subscribe(),
            local_state: LocalState::on(local_clock, LONGEST_DEADLINE).with_prefetch(),
        };
        Ok(RedisStore {
            common: Arc::new(common),
            _alive: alive,
        })
    }

    /// Builds the store, and returns it once it works. By that time, the store has reached the
    /// server, run the script, run each command on a key that does not exist, and opened this
    /// runtime's [connections](Self::connections). So checks do not wait for a connection, and the
    /// [default deadline](crate::Limiter::deadline) adapts to the round trip from the first check
    /// on. This does not test whether the server has memory left: only the first check shows that.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if a setting is wrong, as for [`build`](Self::build), if the server cannot be
    /// reached, or if it is a replica that refuses writes. It is also returned if this user may not
    /// write keys with the prefix, or may not run a command that the script needs. The error names
    /// this command. In a cluster, the commands run on one node: give the user the same rights on
    /// all nodes. Print the error's [sources](std::error::Error::source) as well: they show the
    /// cause, and the address that could not be reached.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let store = self.build().map_err(invalid)?;
        let tried = async { store.common.dispatcher().await?.try_out().await };
        let tried = tried.await;
        tried.map_err(|error| error.when("connecting to Redis"))?;
        Ok(store)
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The address and the other settings are left out, since they may contain a password.
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}
