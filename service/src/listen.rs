//! Where the service listens, and which callers it answers.

use std::{
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::{
        fs::{FileTypeExt, PermissionsExt},
        net::UnixStream,
    },
    sync::Arc,
};

use anyhow::{Context, Result, bail, ensure};
use axum::{
    Extension, Router,
    extract::{Request, State, connect_info::ConnectInfo},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
    serve::ListenerExt,
};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};
use tonic::Status;
use tower_sliding_window::{Key, Secret};

use crate::{Service, check::Problem, file::File};

const TOKEN: &str = "service-token";

pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// The digest of the token that callers must send.
pub(crate) struct Token {
    secret: Secret,
    digest: Key,
}

impl Token {
    /// The token of the file, which each address needs that other machines reach.
    pub(crate) fn read(file: &File) -> Result<Option<Self>> {
        for listen in file
            .listeners()
            .filter(|listen| !listen.starts_with("unix:"))
        {
            let address: SocketAddr = listen.parse().with_context(|| {
                format!("{listen:?} is neither an address with a port, such as 127.0.0.1:8090, nor unix:/path")
            })?;
            if file.token.is_none() && !address.ip().is_loopback() {
                bail!(
                    "{listen} is open to other machines, and anyone there could spend and reset limits: \
                     set token = {{ env = \"SERVICE_TOKEN\" }}, or listen on 127.0.0.1 or unix:/path"
                );
            }
        }
        let Some(variable) = &file.token else {
            return Ok(None);
        };
        let (secret, token) = variable.secret()?;
        let digest = secret.key(TOKEN, &token);
        Ok(Some(Self { secret, digest }))
    }

    fn is_of(&self, request: &Request) -> bool {
        let sent = request
            .headers()
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok());
        sent.and_then(|sent| sent.split_once(' '))
            .is_some_and(|(scheme, token)| {
                scheme.eq_ignore_ascii_case("bearer")
                    && self.secret.key(TOKEN, token) == self.digest
            })
    }
}

impl Listener {
    pub(crate) async fn bind(listen: &str) -> Result<Self> {
        let Some(path) = listen.strip_prefix("unix:") else {
            return Ok(Self::Tcp(TcpListener::bind(listen).await?));
        };
        // A process that was killed leaves its socket.
        if fs::symlink_metadata(path).is_ok_and(|known| known.file_type().is_socket()) {
            ensure!(
                UnixStream::connect(path).is_err(),
                "another process listens there"
            );
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        // The folder says who may reach it.
        fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
        Ok(Self::Unix(listener))
    }

    /// Its address as callers reach it.
    pub(crate) fn address(&self, listen: &str) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr()?.to_string()),
            Self::Unix(_) => Ok(listen.to_owned()),
        }
    }

    pub(crate) async fn serve(self, app: Router, mut end: watch::Receiver<bool>) -> io::Result<()> {
        let ended = async move { drop(end.wait_for(|is_over| *is_over).await) };
        match self {
            Self::Tcp(listener) => {
                // Otherwise an answer may wait for the client's acknowledgement of the one before.
                let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
                let app = app.into_make_service_with_connect_info::<SocketAddr>();
                axum::serve(listener, app)
                    .with_graceful_shutdown(ended)
                    .await
            }
            Self::Unix(listener) => {
                // The other end of a Unix socket is on this host.
                let app = app.layer(Extension(ConnectInfo(SocketAddr::from((
                    Ipv4Addr::LOCALHOST,
                    0,
                )))));
                axum::serve(listener, app)
                    .with_graceful_shutdown(ended)
                    .await
            }
        }
    }
}

pub(crate) async fn authorize(
    State(service): State<Arc<Service>>,
    request: Request,
    next: Next,
) -> Response {
    if service
        .token
        .as_ref()
        .is_none_or(|token| token.is_of(&request))
    {
        return next.run(request).await;
    }
    let detail = "this needs the token of the service";
    let kind = request
        .headers()
        .get(header::CONTENT_TYPE)
        .map_or(&[][..], HeaderValue::as_bytes);
    if kind.starts_with(b"application/grpc") {
        return Status::unauthenticated(detail).into_http();
    }
    let problem = Problem(StatusCode::UNAUTHORIZED, detail.to_owned());
    ([(header::WWW_AUTHENTICATE, "Bearer")], problem).into_response()
}
