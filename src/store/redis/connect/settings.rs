//! The settings of a connection, whichever server it leads to.

use std::time::Duration;

#[cfg(feature = "tls")]
use redis::{Client, ClientTlsConfig, ConnectionAddr, TlsCertificates};
use redis::{ConnectionInfo, IntoConnectionInfo, io::tcp::TcpSettings, io::tcp::socket2::TcpKeepalive};
#[cfg(feature = "tls")]
use rustls::crypto::{CryptoProvider, ring};

use super::errors;
use crate::error::ConfigError;

/// How long sent data may stay unacknowledged, and an idle peer silent, before the kernel ends the connection.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);

/// The builder's settings of connections. A `None` leaves the setting to the URL.
#[derive(Clone, Default)]
pub(crate) struct ConnectionSettings {
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: Option<u32>,
    #[cfg(feature = "tls")]
    pub(crate) certificates: Certificates,
    /// The most connections that a runtime opens, and the most batches of each queue that are in flight.
    pub(crate) connections: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) reply_timeout: Duration,
}

impl ConnectionSettings {
    /// The server at `url`, with these settings.
    pub(super) fn server(&self, url: &str) -> Result<ConnectionInfo, ConfigError> {
        Ok(self.sign_in(self.endpoint(url)?))
    }

    /// The server at `url`, with the user, password and database of the URL.
    pub(super) fn endpoint(&self, url: &str) -> Result<ConnectionInfo, ConfigError> {
        #[cfg(not(feature = "tls"))]
        if url.starts_with("rediss:") || url.starts_with("valkeys:") {
            return Err(errors::setting("rediss:// URLs, for TLS, need this crate's feature `tls`"));
        }
        let info = url.into_connection_info().map_err(|cause| errors::url(url, &cause))?;
        if errors::is_ambiguous(url) {
            return Err(errors::setting(
                "a URL, not shown since it may hold a password, has an @ behind its host: in a user name or password write \
                 / as %2F, ? as %3F and # as %23",
            ));
        }
        self.transport(info)
    }

    /// The server of an application's client, with these settings.
    pub(super) fn client(&self, info: ConnectionInfo) -> Result<ConnectionInfo, ConfigError> {
        #[cfg(not(feature = "tls"))]
        if matches!(info.addr(), redis::ConnectionAddr::TcpTls { .. }) {
            return Err(errors::setting("a client for TLS needs this crate's feature `tls`"));
        }
        Ok(self.sign_in(self.transport(info)?))
    }

    /// Sets TLS and TCP up.
    fn transport(&self, info: ConnectionInfo) -> Result<ConnectionInfo, ConfigError> {
        #[cfg(feature = "tls")]
        let info = self.certificates.apply(info)?;
        Ok(info.set_tcp_settings(tcp_settings()))
    }

    /// Sets the user, the password and the database.
    pub(super) fn sign_in(&self, info: ConnectionInfo) -> ConnectionInfo {
        let mut redis = info.redis_settings().clone();
        if let Some(username) = &self.username {
            redis = redis.set_username(username);
        }
        if let Some(password) = &self.password {
            redis = redis.set_password(password);
        }
        if let Some(database) = self.database {
            redis = redis.set_db(database.into());
        }
        info.set_redis_settings(redis)
    }
}

pub(super) fn tcp_settings() -> TcpSettings {
    let tcp = TcpSettings::default()
        .set_nodelay(true)
        .set_keepalive(TcpKeepalive::new().with_time(PEER_TIMEOUT).with_interval(PEER_TIMEOUT));
    #[cfg(target_os = "linux")]
    let tcp = tcp.set_user_timeout(PEER_TIMEOUT);
    tcp
}

/// The certificates of the settings, in PEM.
///
/// 1. Certificates are always verified, against the root certificate of the settings or else the system's roots.
/// 2. The cryptography is the provider that the process has installed for rustls, or else `ring`.
#[cfg(feature = "tls")]
#[derive(Clone, Default)]
pub(crate) struct Certificates {
    /// The authority that signs the servers' certificates, instead of the system's roots.
    pub(crate) root: Option<Vec<u8>>,
    /// The client's certificate and its key.
    pub(crate) client: Option<(Vec<u8>, Vec<u8>)>,
}

#[cfg(feature = "tls")]
impl Certificates {
    /// Adds these certificates, if the server is reached over TLS.
    pub(super) fn apply(&self, info: ConnectionInfo) -> Result<ConnectionInfo, ConfigError> {
        let ConnectionAddr::TcpTls { insecure, tls_params, .. } = info.addr() else { return Ok(info) };
        if *insecure {
            return Err(errors::setting("a rediss:// URL with #insecure is not supported: give the root certificate"));
        }
        // rustls panics if two crates of one process bring different providers and none is installed.
        if CryptoProvider::get_default().is_none() {
            // It fails if another thread has just installed one, which will do.
            let _ = ring::default_provider().install_default();
        }
        // A client of the application has certificates already.
        if tls_params.is_some() && !self.are_given() {
            return Ok(info);
        }
        // Without the cause: if the PEM lost its line breaks, the cause repeats the key.
        let client = Client::build_with_tls(info, self.for_client())
            .map_err(|_| errors::setting("a certificate, or its key, is not PEM, or has lost its line breaks"))?;
        Ok(client.get_connection_info().clone())
    }

    pub(super) fn are_given(&self) -> bool {
        self.root.is_some() || self.client.is_some()
    }

    /// In the form that the Redis client takes.
    pub(super) fn for_client(&self) -> TlsCertificates {
        TlsCertificates {
            client_tls: self
                .client
                .clone()
                .map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key }),
            root_cert: self.root.clone(),
        }
    }
}
