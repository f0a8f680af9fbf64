//! TLS: whom to trust, and what to show.
//!
//! 1. Certificates are verified, against the system's roots or the one that was given; nothing turns that off.
//! 2. The cryptography is what the process has chosen for rustls, or else `ring`.

use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, TlsCertificates};
use rustls::crypto::{CryptoProvider, ring};

use super::invalid::InvalidRedisConfig;

/// Certificates in PEM that the settings have given.
#[derive(Clone, Default)]
pub(super) struct Trust {
    /// The authority that signs the servers' certificates, in the place of the system's roots.
    pub(super) root: Option<Vec<u8>>,
    /// Our own certificate, and its key.
    pub(super) own: Option<(Vec<u8>, Vec<u8>)>,
}

impl Trust {
    /// With these certificates, if it is reached over TLS.
    pub(super) fn apply(&self, info: ConnectionInfo) -> Result<ConnectionInfo, InvalidRedisConfig> {
        let ConnectionAddr::TcpTls { insecure, tls_params, .. } = info.addr() else { return Ok(info) };
        if *insecure {
            return Err(InvalidRedisConfig::new(
                "a rediss:// URL with #insecure is not supported: give the root certificate",
            ));
        }
        // rustls panics where two crates of one process bring different cryptography along and nobody has chosen.
        if CryptoProvider::get_default().is_none() {
            // It fails if somebody has just chosen, which is as good.
            let _ = ring::default_provider().install_default();
        }
        // A client of the application's brings its own along.
        if tls_params.is_some() && !self.is_given() {
            return Ok(info);
        }
        // The cause is left out: where the line breaks are lost, it repeats the key.
        let client = Client::build_with_tls(info, self.certificates()).map_err(|_| {
            InvalidRedisConfig::new("a certificate, or its key, is not PEM, or has lost its line breaks")
        })?;
        Ok(client.get_connection_info().clone())
    }

    /// Whether there are any.
    pub(super) fn is_given(&self) -> bool {
        self.root.is_some() || self.own.is_some()
    }

    pub(super) fn certificates(&self) -> TlsCertificates {
        TlsCertificates {
            client_tls: self.own.clone().map(|(client_cert, client_key)| ClientTlsConfig { client_cert, client_key }),
            root_cert: self.root.clone(),
        }
    }
}
