//! Exact rate limits as a service: for proxies, for programs in any language, and for Envoy.
//!
//! `sliding-window-service [FILE]` serves the rules of a TOML file, or those of an example.
//! `sliding-window-service --check FILE` says what would run.

mod auth;
mod check;
mod envoy;
mod file;
mod key;
mod reload;
mod rules;

use std::{
    collections::HashMap,
    env, fs,
    io::{self, IsTerminal},
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Extension, Router,
    extract::{DefaultBodyLimit, Request, State, connect_info::ConnectInfo},
    http::{HeaderValue, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitServiceServer;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tokio::{
    net::{TcpListener, UnixListener},
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::{interval, timeout},
};
use tonic::Status;
use tower_sliding_window::{Decision, Key, Limiter, Secret, store};

use crate::{check::Problem, file::File, rules::Rules};

const EXAMPLE: &str = include_str!("../example.toml");
const MOST_BODY: usize = 64 * 1024;
const TOKEN: &str = "service-token";
const SECONDS: [f64; 10] = [0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0];

/// What all questions share.
struct Service {
    rules: watch::Receiver<Arc<Rules>>,
    limiter: Limiter,
    token: Option<(Secret, Key)>,
    /// The places of concurrent limits that programs hold, and for how long at most.
    held: Mutex<HashMap<u64, Held>>,
}

struct Held {
    _decision: Decision,
    until: Instant,
    /// What was asked, as a settlement has to repeat it.
    asked: String,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Service {
    fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.borrow())
    }

    fn hold(&self, id: u64, decision: Decision, until: Instant, asked: String) {
        let held = Held { _decision: decision, until, asked };
        self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(id, held);
    }

    /// Frees the places of an admission, if this was asked for it.
    fn free(&self, id: u64, asked: &str) -> bool {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.get(&id).is_some_and(|held| held.asked == asked) && held.remove(&id).is_some()
    }

    fn free_overdue(&self) {
        let now = Instant::now();
        self.held.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, held| held.until > now);
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_ansi(io::stderr().is_terminal()).with_writer(io::stderr).init();
    let arguments: Vec<_> = env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => run(None).await,
        ["--check", path] => say(path),
        [path] if !path.starts_with('-') => run(Some(path.into())).await,
        _ => Err("usage: sliding-window-service [FILE], or sliding-window-service --check FILE".to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn store_url(file: &File) -> String {
    file.store.clone().or_else(|| env::var("REDIS_URL").ok()).unwrap_or_else(|| "memory:".to_owned())
}

/// Reads and builds everything, and opens nothing.
fn prepare(text: &str) -> Result<(File, Rules, Limiter), String> {
    let file = File::read(text)?;
    let limiter = Limiter::new(store::from_url(&store_url(&file)).map_err(|error| format!("store: {error}"))?);
    let rules = Rules::build(text, &file, &limiter)?;
    for listen in [Some(&file.listen), file.grpc_listen.as_ref()].into_iter().flatten() {
        let address = address(listen)?;
        if file.token.is_none() && address.is_some_and(|address| !address.ip().is_loopback()) {
            return Err(format!(
                "{listen} is open to other machines, and anyone there could spend and reset limits: set token = {{ env = \"SERVICE_TOKEN\" }}, or listen on 127.0.0.1 or unix:/path"
            ));
        }
    }
    Ok((file, rules, limiter))
}

fn say(path: &str) -> Result<(), String> {
    let (file, rules, _) = prepare(&read(path.as_ref())?).map_err(|problem| format!("{path}: {problem}"))?;
    println!("HTTP on {}, gRPC on {}", file.listen, file.grpc_listen.as_deref().unwrap_or("no address"));
    println!("store {}", store_url(&file).split(':').next().unwrap_or_default());
    rules.all.iter().for_each(|rule| println!("{rule}"));
    println!("{path}: {} rules, no mistake", rules.all.len());
    Ok(())
}

/// `None` for a Unix socket.
fn address(listen: &str) -> Result<Option<SocketAddr>, String> {
    if listen.starts_with("unix:") {
        return Ok(None);
    }
    listen
        .parse()
        .map(Some)
        .map_err(|_| format!("{listen:?} is neither an address with a port, such as 127.0.0.1:8090, nor unix:/path"))
}

async fn bind(listen: &str) -> Result<Listener, String> {
    let bound = async {
        let Some(path) = listen.strip_prefix("unix:") else {
            return Ok(Listener::Tcp(TcpListener::bind(listen).await?));
        };
        if fs::symlink_metadata(path).is_ok_and(|known| known.file_type().is_socket()) {
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        // The folder says who may reach it.
        fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
        Ok::<_, io::Error>(Listener::Unix(listener))
    };
    bound.await.map_err(|error| format!("listening on {listen}: {error}"))
}

async fn serve(listener: Listener, app: Router, mut end: watch::Receiver<bool>) -> io::Result<()> {
    let ended = async move { drop(end.wait_for(|is_over| *is_over).await) };
    match listener {
        Listener::Tcp(listener) => {
            let app = app.into_make_service_with_connect_info::<SocketAddr>();
            axum::serve(listener, app).with_graceful_shutdown(ended).await
        }
        Listener::Unix(listener) => {
            // The other end of a Unix socket is on this host.
            let app = app.layer(Extension(ConnectInfo(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))));
            axum::serve(listener, app).with_graceful_shutdown(ended).await
        }
    }
}

async fn authorize(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    if let Some((secret, token)) = &service.token {
        let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let sent =
            sent.and_then(|sent| sent.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        if sent.is_none_or(|(_, sent)| secret.key(TOKEN, sent) != *token) {
            let kind = request.headers().get(header::CONTENT_TYPE).map_or(&[][..], HeaderValue::as_bytes);
            if kind.starts_with(b"application/grpc") {
                return Status::unauthenticated("this needs the token of the service").into_http();
            }
            let problem = Problem(StatusCode::UNAUTHORIZED, "this needs the token of the service".to_owned());
            return ([(header::WWW_AUTHENTICATE, "Bearer")], problem).into_response();
        }
    }
    next.run(request).await
}

async fn run(path: Option<PathBuf>) -> Result<(), String> {
    let prometheus = PrometheusBuilder::new().set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS);
    let prometheus = prometheus.and_then(PrometheusBuilder::install_recorder).map_err(|error| error.to_string())?;
    // Before it is read, so that no change is missed.
    let seen = path.as_deref().and_then(reload::stamp);
    let text = path.as_deref().map_or_else(|| Ok(EXAMPLE.to_owned()), read)?;
    let named =
        |problem| format!("{}: {problem}", path.as_deref().map_or_else(|| "the example".into(), Path::to_string_lossy));
    let (file, rules, limiter) = prepare(&text).map_err(named)?;
    let token = file.token.as_ref().map(file::Variable::secret).transpose()?;
    let token = token.map(|(secret, value)| (secret.clone(), secret.key(TOKEN, &value)));
    let (sender, receiver) = watch::channel(Arc::new(rules));
    let service = Arc::new(Service { rules: receiver, limiter: limiter.clone(), token, held: Mutex::default() });

    let authorized = from_fn_with_state(Arc::clone(&service), authorize);
    let rendered = prometheus.clone();
    let counted = Arc::clone(&service);
    let http = Router::new()
        .route("/check", routing::post(check::check))
        .route("/peek", routing::post(check::peek))
        .route("/settle", routing::post(check::settle))
        .route("/reset", routing::post(check::reset))
        .route_layer(authorized.clone())
        .route("/auth", routing::any(auth::ask))
        .route("/auth/", routing::any(auth::ask))
        .route("/auth/{*path}", routing::any(auth::ask))
        .layer(DefaultBodyLimit::max(MOST_BODY))
        .with_state(Arc::clone(&service))
        .route("/health", routing::get(async move || format!("{} rules\n", counted.rules().all.len())))
        .route("/metrics", routing::get(async move || rendered.render()))
        .route("/openapi.yaml", routing::get(|| async { include_str!("../openapi.yaml") }));
    let grpc = RateLimitServiceServer::new(envoy::Envoy(Arc::clone(&service)));
    let grpc = tonic::service::Routes::new(grpc).into_axum_router().layer(authorized);

    let (end, ended) = watch::channel(false);
    let mut servers = tokio::task::JoinSet::new();
    for (listen, app) in [(Some(&file.listen), http), (file.grpc_listen.as_ref(), grpc)] {
        let Some(listen) = listen else { continue };
        let listener = bind(listen).await?;
        match &listener {
            Listener::Tcp(tcp) => println!("listening on {}", tcp.local_addr().map_err(|error| error.to_string())?),
            Listener::Unix(_) => println!("listening on {listen}"),
        }
        servers.spawn(serve(listener, app, ended.clone()));
    }
    if path.is_none() {
        println!(
            "{}",
            EXAMPLE
                .lines()
                .take_while(|line| line.starts_with('#'))
                .map(|line| line.trim_start_matches(['#', ' ']))
                .collect::<Vec<_>>()
                .join("\n")
        );
    }
    let upkeep = async {
        let mut ticks = interval(Duration::from_secs(1));
        loop {
            ticks.tick().await;
            prometheus.run_upkeep();
            service.free_overdue();
        }
    };
    let watching = async {
        match path.clone() {
            Some(path) => reload::watch(path, seen, file, limiter.clone(), sender.clone()).await,
            None => std::future::pending().await,
        }
    };
    let stop = |kind| signal(kind).map_err(|error| error.to_string());
    let (mut terminate, mut interrupt) = (stop(SignalKind::terminate())?, stop(SignalKind::interrupt())?);
    tokio::select! {
        () = upkeep => {}
        outcome = watching => outcome.map_err(|error| error.to_string())?,
        served = servers.join_next() => return Err(format!("a listener has ended: {served:?}")),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    end.send_replace(true);
    let _ = timeout(Duration::from_secs(10), async { while servers.join_next().await.is_some() {} }).await;
    servers.shutdown().await;
    limiter.shutdown(Duration::from_secs(5)).await.map_err(|error| error.to_string())
}
