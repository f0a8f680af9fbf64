//! TLS: the certificates to trust, and to present.
//!
//! 1. Certificates are always verified, against the root certificate of the settings or else the system's roots.
//! 2. The cryptography is the provider that the process has installed for rustls, or else `ring`.

use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, TlsCertificates};
use rustls::crypto::{CryptoProvider, ring};

use super::invalid::InvalidRedisConfig;

/// The certificates of the settings, in PEM.
#[derive(Clone, Default)]
pub(crate) struct Certificates {
    /// The authority that signs the servers' certificates, instead of the system's roots.
    pub(crate) root: Option<Vec<u8>>,
    /// The client's certificate and its key.
    pub(crate) client: Option<(Vec<u8>, Vec<u8>)>,
}

impl Certificates {
    /// Adds these certificates, if the server is reached over TLS.
    pub(super) fn apply(&self, info: ConnectionInfo) -> Result<ConnectionInfo, InvalidRedisConfig> {
        let ConnectionAddr::TcpTls { insecure, tls_params, .. } = info.addr() else { return Ok(info) };
        if *insecure {
            return Err(InvalidRedisConfig::new(
                "a rediss:// URL with #insecure is not supported: give the root certificate",
            ));
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
        let client = Client::build_with_tls(info, self.for_client()).map_err(|_| {
            InvalidRedisConfig::new("a certificate, or its key, is not PEM, or has lost its line breaks")
        })?;
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
