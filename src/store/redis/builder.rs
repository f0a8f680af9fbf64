//! The settings of a store on Redis.

use std::{fmt, time::Duration};

use redis::ConnectionInfo;

#[cfg(feature = "cluster")]
use super::cluster::Cluster;
use super::{
    RedisStore,
    access::Access,
    invalid::InvalidRedisConfig,
    keys::{DEFAULT_PREFIX, Keys},
    runtimes::Runtimes,
    script::{DECIDE, Script},
    sentinel::Sentinels,
    shared::Shared,
    target::Target,
    time::Time,
};
use crate::{error::StoreError, limit::is_fixed_alphabet, secret::Secret, store::clock::ManualClock};

/// How to build a [`RedisStore`].
#[derive(Clone)]
#[must_use]
pub struct RedisStoreBuilder {
    place: Place,
    access: Access,
    prefix: String,
    secret: Option<Secret>,
    connections: u32,
    connect_timeout: Duration,
    client_name: Option<String>,
    time: Time,
}

/// Where the store is.
#[derive(Clone)]
pub(super) enum Place {
    Node(String),
    Client(Box<ConnectionInfo>),
    Sentinels {
        urls: Vec<String>,
        primary: String,
    },
    #[cfg(feature = "cluster")]
    Cluster(Vec<String>),
}

impl RedisStoreBuilder {
    pub(super) fn new(place: Place) -> Self {
        Self {
            place,
            access: Access::default(),
            prefix: DEFAULT_PREFIX.to_owned(),
            secret: None,
            connections: 2,
            connect_timeout: Duration::from_secs(1),
            client_name: None,
            time: Time::Server,
        }
    }

    /// What every key begins with, so that two applications on one Redis do not share limits of the same name: 1 to 64
    /// characters of `A-Z a-z 0-9 _ . -`. Default: `tsw1`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Hashes all identities in Redis with this secret: addresses, user names, and whatever else a [`Key`](crate::Key) is made
    /// of. Whoever reads Redis then learns nothing about them but which entries are of one identity. It has to be the same
    /// on all instances that share limits. Another secret, or none, starts every window anew.
    ///
    /// Default: none. Then the keys hold a SHA-256 without a secret. Whoever sees them, by `MONITOR`, in a dump, or on a replica,
    /// can try all identities that there may be: every IPv4 address, or every name on a list, within minutes. An
    /// [`ApiKey`](crate::ApiKey) is hashed with a secret of its own before, with or without this one.
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

    /// How many connections each tokio runtime of the process opens at most, each for one batch of checks at a time.
    /// Default: 2, which is enough to keep one Redis busy: checks that arrive meanwhile form the next batch. In a cluster, how
    /// many to each node, which batches share.
    pub fn connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// How long to wait for a connection before a check fails. A limiter's deadline mostly ends the wait before.
    /// Default: 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// The ACL user to sign in as. Default: the URL's or the client's; the server's default user where it has none, and behind
    /// sentinels.
    pub fn username(mut self, username: impl Into<String>) -> Self {
        self.access.username = Some(username.into());
        self
    }

    /// The password to sign in with, so that it need not stand in a URL. Default: the URL's or the client's; behind
    /// sentinels, whose URLs hold their own, none.
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.access.password = Some(password.into());
        self
    }

    /// The number of the database. Default: the URL's or the client's; behind sentinels, 0.
    pub fn database(mut self, number: u32) -> Self {
        self.access.database = Some(number);
        self
    }

    /// The name that `CLIENT LIST` shows for each connection: 1 to 64 characters of `A-Z a-z 0-9 _ . -`. The user needs
    /// `CLIENT|SETNAME`, or stays nameless. A cluster's connections have none. Default: none.
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = Some(name.into());
        self
    }

    /// Trusts the servers whose certificates this authority has signed, and no others: one or more certificates in PEM.
    /// Default: the authorities that the system trusts.
    #[cfg(feature = "tls")]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.access.trust.root = Some(pem.into());
        self
    }

    /// Shows the servers this certificate, and proves it by its key, both in PEM. Default: none.
    #[cfg(feature = "tls")]
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.access.trust.own = Some((pem.into(), key.into()));
        self
    }

    /// Decides by the system clock of each process instead of the server's, for servers on which a script may not ask
    /// for the `TIME`.
    ///
    /// The clocks of all processes have to agree, as those that NTP keeps do: by as much as one is ahead of another, a
    /// window can end early in the one, and that much more be admitted, and late in the other. Default: the server's.
    pub fn client_clock(mut self) -> Self {
        self.time = Time::Client;
        self
    }

    /// Decides by this clock instead of the server's: for tests.
    pub fn clock(mut self, clock: &ManualClock) -> Self {
        self.time = Time::Manual(clock.clone());
        self
    }

    /// The store. It connects when the first check arrives, so Redis may be down, and no runtime is needed yet.
    ///
    /// # Errors
    ///
    /// [`InvalidRedisConfig`], naming the value, if a URL is not one that Redis has, if there is none, if a certificate
    /// is not one, if the prefix or a name has other characters or is not to be had, or if the number of connections or
    /// the timeout is zero.
    pub fn build(self) -> Result<RedisStore, InvalidRedisConfig> {
        for (what, text) in [("key prefix", Some(&self.prefix)), ("client name", self.client_name.as_ref())] {
            if let Some(text) = text.filter(|text| !is_fixed_alphabet(text)) {
                let rule = "must be 1 to 64 characters of A-Z a-z 0-9 _ . -, not";
                return Err(InvalidRedisConfig::new(format!("the {what} {rule} {text:?}")));
            }
        }
        if self.connections == 0 {
            return Err(InvalidRedisConfig::new("the number of connections must be 1 or more, not 0"));
        }
        if self.connect_timeout.is_zero() {
            return Err(InvalidRedisConfig::new("the connect timeout must be longer than 0 s"));
        }
        let target = self.place.target(self.access)?;
        #[cfg(feature = "cluster")]
        if target.is_cluster() && self.client_name.is_some() {
            return Err(InvalidRedisConfig::new("connections to a cluster cannot have a client name"));
        }
        let runtimes = Runtimes::new(Shared {
            target,
            client_name: self.client_name,
            connections: self.connections,
            connect_timeout: self.connect_timeout,
            keys: Keys::new(self.prefix, self.secret.as_ref()),
            script: Script::new(DECIDE),
            local_state: self.time.local_state(),
            time: self.time,
        });
        Ok(RedisStore { runtimes })
    }

    /// The store, once it has been reached, and has let us run the script and delete a key that is not there. That a
    /// server has no memory left shows at the first check.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if a setting is not valid, as for [`build`](Self::build), if the server cannot be reached, or if it is
    /// a replica, or does not let this user write at keys of the prefix.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        let store = self.build().map_err(|error| StoreError::new("setting up Redis", error))?;
        store.runtimes.dispatcher("connecting to Redis")?.try_out().await?;
        Ok(store)
    }
}

impl Place {
    fn target(self, access: Access) -> Result<Target, InvalidRedisConfig> {
        Ok(match self {
            Self::Node(url) => {
                Target::node(access.server(&url)?).map_err(|cause| InvalidRedisConfig::url(&url, cause))?
            }
            Self::Client(info) => Target::node(access.of_client(*info)?)
                .map_err(|cause| InvalidRedisConfig::caused("the client leads nowhere", cause))?,
            Self::Sentinels { urls, primary } => Target::Sentinels(Sentinels::new(&urls, primary, access)?),
            #[cfg(feature = "cluster")]
            Self::Cluster(urls) => Target::Cluster(Box::new(Cluster::new(&urls, &access)?)),
        })
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL and the access may hold a password.
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("connect_timeout", &self.connect_timeout)
            .finish_non_exhaustive()
    }
}
