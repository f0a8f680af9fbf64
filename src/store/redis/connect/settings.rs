//! The settings of a connection, whichever server it leads to.

use std::time::Duration;

use redis::{ConnectionInfo, IntoConnectionInfo, io::tcp::TcpSettings, io::tcp::socket2::TcpKeepalive};

use super::{invalid::InvalidRedisConfig, url::is_ambiguous};

/// How long sent data may stay unacknowledged, and an idle peer silent, before the kernel ends the connection.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);

/// The builder's settings of connections. A `None` leaves the setting to the URL.
#[derive(Clone, Default)]
pub(crate) struct ConnectionSettings {
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: Option<u32>,
    #[cfg(feature = "tls")]
    pub(crate) certificates: super::tls::Certificates,
    pub(crate) client_name: Option<String>,
    /// The most connections that a runtime opens, and the most batches of each queue that are in flight.
    pub(crate) connections: u32,
    pub(crate) connect_timeout: Duration,
    pub(crate) reply_timeout: Duration,
}

impl ConnectionSettings {
    /// The server at `url`, with these settings.
    pub(super) fn server(&self, url: &str) -> Result<ConnectionInfo, InvalidRedisConfig> {
        Ok(self.sign_in(self.endpoint(url)?))
    }

    /// The server at `url`, with the user, password and database of the URL.
    pub(super) fn endpoint(&self, url: &str) -> Result<ConnectionInfo, InvalidRedisConfig> {
        #[cfg(not(feature = "tls"))]
        if url.starts_with("rediss:") || url.starts_with("valkeys:") {
            return Err(InvalidRedisConfig::new("rediss:// URLs, for TLS, need this crate's feature `tls`"));
        }
        let info = url.into_connection_info().map_err(|cause| InvalidRedisConfig::url(url, cause))?;
        if is_ambiguous(url) {
            return Err(InvalidRedisConfig::new(
                "a URL, not shown since it may hold a password, has an @ behind its host: in a user name or password write \
                 / as %2F, ? as %3F and # as %23",
            ));
        }
        self.transport(info)
    }

    /// The server of an application's client, with these settings.
    pub(super) fn client(&self, info: ConnectionInfo) -> Result<ConnectionInfo, InvalidRedisConfig> {
        #[cfg(not(feature = "tls"))]
        if matches!(info.addr(), redis::ConnectionAddr::TcpTls { .. }) {
            return Err(InvalidRedisConfig::new("a client for TLS needs this crate's feature `tls`"));
        }
        Ok(self.sign_in(self.transport(info)?))
    }

    /// Sets TLS and TCP up.
    fn transport(&self, info: ConnectionInfo) -> Result<ConnectionInfo, InvalidRedisConfig> {
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
