//! TLS: the certificate authorities that a store trusts, and the certificate that it shows.

use std::process::Command;

use redis::{Client, ClientTlsConfig, TlsCertificates};
use rustls::crypto::{CryptoProvider, ring};
use tower_sliding_window::{
    Error, Limit, Limiter, RedisStore,
    error::StoreErrorKind,
    store::{RedisSource, RedisStoreBuilder},
};

use super::opening::sentinel;
use crate::support::{
    TEST_TIMEOUT,
    certificates::Certificates,
    ms,
    redis_server::{RedisServer, free_port},
    with_causes,
};

const CALLS: Limit = Limit::per_hour("calls", 3);

async fn used(builder: RedisStoreBuilder) -> Result<u64, Error> {
    let limiter =
        Limiter::new(builder.connect_timeout(TEST_TIMEOUT).build().unwrap()).deadline(TEST_TIMEOUT);
    limiter
        .check(&CALLS, "ada", 1)
        .await
        .map(|decision| decision.binding().used)
}

impl Certificates {
    /// A server that speaks TLS on its own port, and its URL. `clients` says whether clients must
    /// show a certificate.
    fn server(&self, clients: &str) -> (RedisServer, String) {
        // Another test may have done so.
        let _ = ring::default_provider().install_default();
        let port = free_port();
        let (cert, key, ca) = (
            self.path("server.pem"),
            self.path("server.key"),
            self.path("ca.pem"),
        );
        let server = RedisServer::start_with(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &cert,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &ca,
            "--tls-auth-clients",
            clients,
        ]);
        (server, format!("rediss://127.0.0.1:{port}/"))
    }
}

#[tokio::test]
async fn only_the_given_certificate_authority_is_trusted() {
    let certificates = Certificates::make();
    let (_server, url) = certificates.server("no");
    let builder = RedisStore::builder(&url);
    assert_eq!(
        used(
            builder
                .clone()
                .root_certificate(certificates.read("ca.pem"))
        )
        .await
        .unwrap(),
        1
    );

    let other = Certificates::make();
    let others = builder.clone().root_certificate(other.read("ca.pem"));
    for (untrusting, cause) in [
        (builder.clone(), "set `root_certificate`"),
        (others, "certificate"),
    ] {
        let Error::Unavailable(error) = used(untrusting).await.unwrap_err() else {
            panic!("the error is not Unavailable")
        };
        assert!(format!("{error:?}").contains(cause), "{error:?}");
    }
    for (builder, problem) in [
        (
            builder.clone().root_certificate("no PEM"),
            "the root certificate is not PEM",
        ),
        (
            RedisStore::builder("redis://127.0.0.1").root_certificate(certificates.read("ca.pem")),
            "with rediss://",
        ),
    ] {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    let error = builder
        .root_certificate("-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----")
        .build();
    assert!(error.unwrap_err().to_string().contains("certificate"));
    assert!(
        RedisStore::builder(format!("{url}#insecure"))
            .build()
            .is_err()
    );
}

/// Only one side speaks TLS.
#[tokio::test]
async fn the_wrong_scheme_has_a_hint() {
    let certificates = Certificates::make();
    let (server, url) = certificates.server("no");
    let tls = RedisStore::builder(server.url().replace("redis://", "rediss://"));
    let plain = RedisStore::builder(url.replace("rediss://", "redis://"));
    for builder in [tls.root_certificate(certificates.read("ca.pem")), plain] {
        let error = builder
            .connect_timeout(ms(500))
            .connect()
            .await
            .unwrap_err();
        assert!(
            with_causes(&error).contains("Is only one side set to TLS"),
            "{}",
            with_causes(&error)
        );
        assert_eq!(error.kind, StoreErrorKind::Unreachable);
    }
}

#[tokio::test]
async fn an_existing_client_keeps_its_certificates() {
    let certificates = Certificates::make();
    let (_server, url) = certificates.server("yes");
    let root_cert = Some(certificates.read("ca.pem"));
    let (client_cert, client_key) = (
        certificates.read("client.pem"),
        certificates.read("client.key"),
    );
    let client_tls = Some(ClientTlsConfig {
        client_cert,
        client_key,
    });
    let with_both = Client::build_with_tls(
        &*url,
        TlsCertificates {
            client_tls,
            root_cert,
        },
    )
    .unwrap();
    assert_eq!(
        used(RedisStore::builder(with_both.clone())).await.unwrap(),
        1
    );

    let without = Client::open(&*url).unwrap();
    assert!(used(RedisStore::builder(without.clone())).await.is_err());
    let builder =
        RedisStore::builder(without.clone()).root_certificate(certificates.read("ca.pem"));
    let (own, key) = (
        certificates.read("client.pem"),
        certificates.read("client.key"),
    );
    assert_eq!(used(builder.client_certificate(own, key)).await.unwrap(), 2);
    let insecure = Client::open(format!("{url}#insecure")).unwrap();
    assert!(RedisStore::builder(insecure.clone()).build().is_err());
}

#[tokio::test]
async fn a_server_may_require_a_client_certificate() {
    let certificates = Certificates::make();
    let (_server, url) = certificates.server("yes");
    let builder = RedisStore::builder(&url).root_certificate(certificates.read("ca.pem"));
    assert!(used(builder.clone()).await.is_err());
    let (own, key) = (
        certificates.read("client.pem"),
        certificates.read("client.key"),
    );
    assert_eq!(used(builder.client_certificate(own, key)).await.unwrap(), 1);
}

/// In a process of its own, since a provider is installed for a whole process.
#[test]
fn without_a_provider_of_cryptography_an_error_says_the_line_to_write() {
    let process = [
        "--exact",
        "redis::tls::process_without_a_provider",
        "--ignored",
    ];
    let output = Command::new(std::env::current_exe().unwrap())
        .args(process)
        .output()
        .unwrap();
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed"),
        "{output:?}"
    );
}

#[test]
#[ignore = "a process of without_a_provider_of_cryptography_an_error_says_the_line_to_write"]
fn process_without_a_provider() {
    let build = || RedisStore::builder("rediss://127.0.0.1:1").build();
    let error = build().unwrap_err().to_string();
    assert!(
        error.contains("`rustls::crypto::ring::default_provider().install_default()`"),
        "{error}"
    );
    assert!(
        CryptoProvider::get_default().is_none(),
        "the choice stays with the program"
    );
    ring::default_provider().install_default().unwrap();
    build().unwrap();
}

#[tokio::test]
async fn certificates_are_for_the_servers_with_tls() {
    let certificates = Certificates::make();
    let (_server, url) = certificates.server("no");
    let port = url.trim_end_matches('/').rsplit(':').next().unwrap();
    let sentinel = sentinel(port.parse().unwrap(), 0).await;
    let source = RedisSource::sentinels([sentinel], "rediss://main");
    let builder = RedisStore::builder(source).root_certificate(certificates.read("ca.pem"));
    assert_eq!(used(builder).await.unwrap(), 1);
}

/// The Redis client has no way to add a certificate to those of a client, and none to use those of
/// a client in a cluster.
#[test]
fn certificates_of_a_client_are_not_lost() {
    let _ = ring::default_provider().install_default();
    let certificates = Certificates::make();
    let tls = TlsCertificates {
        client_tls: None,
        root_cert: Some(certificates.read("ca.pem")),
    };
    let client = Client::build_with_tls("rediss://127.0.0.1:1/", tls).unwrap();
    let (cert, key) = (
        certificates.read("client.pem"),
        certificates.read("client.key"),
    );
    let error = RedisStore::builder(client.clone())
        .client_certificate(cert, key)
        .build()
        .unwrap_err();
    assert!(error.to_string().contains("set `root_certificate` as well"));
    #[cfg(feature = "cluster")]
    {
        let builder = RedisStore::builder(RedisSource::cluster([client]));
        let error = builder.clone().build().unwrap_err().to_string();
        assert!(
            error.contains("does not use the certificates of a client"),
            "{error}"
        );
        builder
            .root_certificate(certificates.read("ca.pem"))
            .build()
            .unwrap();
    }
}
