//! Connection settings, for any kind of server.

#[cfg(all(feature = "cluster", feature = "credentials"))]
use std::sync::Arc;
use std::time::Duration;

#[cfg(all(feature = "cluster", feature = "credentials"))]
use redis::cluster::ClusterClientBuilder;
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo,
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
#[cfg(feature = "tls")]
use redis::{Client, TlsCertificates};
#[cfg(feature = "tls")]
use rustls::crypto::CryptoProvider;

use super::errors;
use crate::error::ConfigError;

/// The kernel ends a connection whose sent data is not acknowledged within this time. The kernel
/// sends keepalive probes once a peer has been idle for this long, and repeats them at the same
/// interval.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);

/// The builder's connection settings.
///
/// 1. Certificates are always verified, against the configured root certificate or else the
///    system's roots.
/// 2. TLS uses the cryptography provider that the application has installed for rustls.
#[derive(Clone)]
pub(crate) struct ConnectionSettings {
    /// How the store signs in at a node, with the credentials provider if there is one. This does
    /// not include timeouts, since the connect timeout covers all steps.
    pub(crate) signing_in: AsyncConnectionConfig,
    /// Passes the credentials provider to a cluster's client.
    #[cfg(all(feature = "cluster", feature = "credentials"))]
    pub(crate) credentials:
        Option<Arc<dyn Fn(ClusterClientBuilder) -> ClusterClientBuilder + Send + Sync>>,
    #[cfg(feature = "tls")]
    pub(crate) certificates: TlsCertificates,
    /// The most connections that a runtime opens. This is also the most batches in flight per
    /// queue, unless the server is far away.
    pub(crate) connections: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) reply_timeout: Duration,
}

/// The server at `url`, with the URL's user, password and database.
pub(crate) fn node(url: &str) -> Result<ConnectionInfo, ConfigError> {
    let info = url
        .into_connection_info()
        .map_err(|cause| errors::url(url, &cause))?;
    // The Redis client ignores parts of a URL that it does not know.
    let Some(parts) = redis::parse_redis_url(url) else {
        return Ok(info);
    };
    let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
    let is_socket = matches!(info.addr(), ConnectionAddr::Unix(_));
    let redis = info.redis_settings();
    let mut is_read = (is_tls || parts.fragment().is_none())
        && (!is_socket || matches!(parts.authority(), "" | "localhost"))
        && (redis.username().is_none() || redis.password().is_some());
    let mut unused = vec!["protocol"];
    if is_socket {
        unused.extend(["db", "user", "pass"]);
    }
    for (name, _) in parts.query_pairs() {
        let before = unused.len();
        unused.retain(|option| *option != name);
        is_read &= unused.len() < before;
    }
    if !is_read {
        return Err(errors::url(url, &"a part of it would be ignored"));
    }
    Ok(info)
}

/// True if both have the same user, password, database and protocol.
pub(super) fn are_equal(one: &RedisConnectionInfo, other: &RedisConnectionInfo) -> bool {
    (one.username(), one.password()) == (other.username(), other.password())
        && (one.db(), one.protocol()) == (other.db(), other.protocol())
}

impl Default for ConnectionSettings {
    fn default() -> Self {
        Self {
            signing_in: without_timeouts(),
            #[cfg(all(feature = "cluster", feature = "credentials"))]
            credentials: None,
            #[cfg(feature = "tls")]
            certificates: TlsCertificates {
                client_tls: None,
                root_cert: None,
            },
            connections: 4,
            connect_timeout: Duration::from_secs(1),
            reply_timeout: Duration::from_secs(1),
        }
    }
}

impl ConnectionSettings {
    /// Sets up TCP and TLS.
    pub(super) fn transport(&self, node: ConnectionInfo) -> Result<ConnectionInfo, ConfigError> {
        let node = node.set_tcp_settings(tcp_settings());
        // Without the feature `tls`, connections use the TLS that the application chose for the
        // Redis client.
        #[cfg(feature = "tls")]
        if matches!(node.addr(), ConnectionAddr::TcpTls { .. }) {
            return self.tls(node);
        }
        Ok(node)
    }

    /// Sets up TLS. An application's client may already have certificates. If there are
    /// certificates in the settings, they replace the client's.
    #[cfg(feature = "tls")]
    fn tls(&self, node: ConnectionInfo) -> Result<ConnectionInfo, ConfigError> {
        if matches!(node.addr(), ConnectionAddr::TcpTls { insecure: true, .. }) {
            return Err(ConfigError::new(
                "a rediss:// URL with #insecure is not supported: set `root_certificate`",
            ));
        }
        // If no provider is installed, the Redis client would panic in a program that was built
        // with none or with two.
        if CryptoProvider::get_default().is_none() {
            return Err(ConfigError::new(
                "TLS needs a provider of cryptography: begin the program with \
                 `rustls::crypto::ring::default_provider().install_default()`, or another provider of rustls 0.23",
            ));
        }
        if let ConnectionAddr::TcpTls { tls_params, .. } = node.addr()
            && tls_params.is_some()
            && !self.has_certificates()
        {
            return Ok(node);
        }
        let root = self.certificates.root_cert.as_deref();
        // The Redis client takes any other text for an empty list of certificates.
        if root.is_some_and(|pem| {
            !String::from_utf8_lossy(pem).contains("-----BEGIN CERTIFICATE-----")
        }) {
            return Err(ConfigError::new("the root certificate is not PEM"));
        }
        // The cause is not shown: if the PEM has lost its line breaks, it repeats the key.
        let client = Client::build_with_tls(node, self.certificates.clone()).map_err(|_| {
            ConfigError::new("a certificate, or its key, is not PEM, or has lost its line breaks")
        })?;
        Ok(client.get_connection_info().clone())
    }

    #[cfg(feature = "tls")]
    pub(super) fn has_certificates(&self) -> bool {
        self.certificates.root_cert.is_some() || self.certificates.client_tls.is_some()
    }
}

/// Sets the user, the password, the database and the protocol.
pub(super) fn sign_in(node: ConnectionInfo, mut redis: RedisConnectionInfo) -> ConnectionInfo {
    // With a password, the Redis client also tells the server its name. If it sent only the
    // password, it would take any server error for a wrong password. Without a password, it does
    // not send its name, since that would hide why a server hangs up.
    if redis.password().is_none() {
        redis = redis.set_skip_set_lib_name();
    }
    node.set_redis_settings(redis)
}

pub(super) fn without_timeouts() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
}

pub(super) fn tcp_settings() -> TcpSettings {
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(
        TcpKeepalive::new()
            .with_time(PEER_TIMEOUT)
            .with_interval(PEER_TIMEOUT),
    );
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(PEER_TIMEOUT);
    tcp
}
