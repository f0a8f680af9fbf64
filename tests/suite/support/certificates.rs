//! Certificates for servers and clients on this machine.

use std::process::Command;

use tempfile::TempDir;

/// A certificate authority, and the certificates that it has signed for a server and a client.
pub(crate) struct Certificates(TempDir);

impl Certificates {
    pub(crate) fn make() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let openssl = |arguments: &str| {
            let output = Command::new("openssl")
                .args(arguments.split(' '))
                .current_dir(dir.path())
                .output();
            let output = output.expect("openssl is not installed: install it");
            assert!(
                output.status.success(),
                "openssl {arguments}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        };
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        openssl(&format!(
            "req -x509 {key} -keyout ca.key -out ca.pem -subj /CN=authority -days 2"
        ));
        std::fs::write(
            dir.path().join("names"),
            "subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n",
        )
        .unwrap();
        for name in ["server", "client"] {
            openssl(&format!(
                "req {key} -keyout {name}.key -out {name}.csr -subj /CN={name}"
            ));
            let sign = "x509 -req -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names";
            openssl(&format!("{sign} -in {name}.csr -out {name}.pem"));
        }
        Self(dir)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }
}
