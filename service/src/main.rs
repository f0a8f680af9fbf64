//! Exact rate limits as a service: for proxies, for programs in any language, and for Envoy.
//!
//! `sliding-window-service [FILE]` serves the rules of a TOML file, or those of an example.
//! `sliding-window-service --check FILE` says what would run.
//!
//! `file.rs` has the fields of the rules. `rule.rs` and `key.rs` check them, `rules.rs` and
//! `path.rs` find the rule of a request, and `reload.rs` replaces the rules of a process. `auth.rs`
//! answers proxies (`question.rs` reads their questions), `check.rs` answers programs, and
//! `envoy.rs` answers Envoy.

mod auth;
mod check;
mod envoy;
mod file;
mod held;
mod key;
mod listen;
mod path;
mod question;
mod reload;
mod rule;
mod rules;

use std::{
    env, fs,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use axum::{
    Router, extract::DefaultBodyLimit, http::StatusCode, middleware::from_fn_with_state, routing,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitServiceServer;
use metrics::counter;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
    time::{interval, timeout},
};
use tower_http::timeout::TimeoutLayer;
use tower_sliding_window::{Charge, Check, Decision, Error, Limit, Limiter, store};

use crate::{
    file::{File, OnFailure},
    held::HeldPlaces,
    listen::{Listener, Token},
    rule::Rule,
    rules::Rules,
};

const EXAMPLE: &str = include_str!("../example.toml");
const MOST_BODY: usize = 64 * 1024;
const LONGEST_REQUEST: Duration = Duration::from_secs(5);
/// Docker and others kill a process 10 s after they asked it to end.
const LONGEST_END: Duration = Duration::from_secs(4);
const SECONDS: [f64; 10] = [
    0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0,
];

/// All questions share it.
struct Service {
    rules: watch::Receiver<Arc<Rules>>,
    limiter: Limiter,
    token: Option<Token>,
    held: HeldPlaces,
}

/// A file that was read, and all that is built of it. Nothing is open yet.
struct Prepared {
    file: File,
    rules: Rules,
    limiter: Limiter,
    token: Option<Token>,
}

impl Service {
    fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.borrow())
    }
}

/// Decides a check of charges of these rules. Without the store, it is an error if one of them is
/// closed. Otherwise the smallest share decides the charges of the rules that are local, if there
/// are any. Otherwise the request passes undecided, and the error tells why.
async fn decide(
    rules: &[&Rule],
    limiter: &Limiter,
    check: Check,
) -> Result<Result<Decision, Error>, Error> {
    let local = rules
        .iter()
        .filter(|rule| rule.on_failure.processes() > 0)
        .max_by_key(|rule| rule.on_failure.processes());
    let is = |mode| rules.iter().any(|rule| rule.on_failure == mode);
    let (is_closed, is_open) = (is(OnFailure::Closed), is(OnFailure::Open));
    let local = local.filter(|_| !is_closed);
    let limiter = local
        .filter(|_| !is_open)
        .map_or(limiter, |rule| &rule.limiter);
    let error = match limiter.check_all(check.clone()).await {
        Ok(decision) => return Ok(Ok(decision)),
        Err(error) => error,
    };
    match local {
        Some(rule) if is_open => {
            let check = without_open(rules, &check, rule.on_failure.processes());
            rule.limiter.check_all(check).await.map(Ok)
        }
        _ if is_closed || local.is_some() => Err(error),
        _ => {
            counter!("rate_limit_service_undecided_total").increment(1);
            Ok(Err(error))
        }
    }
}

/// The check for so many processes, with charges that cost nothing in the place of those whose rule
/// is open. Their share is the whole limit, since a share of no units could not be decided.
fn without_open(rules: &[&Rule], check: &Check, processes: u32) -> Check {
    let is_open = |charge: &Charge| {
        let mut open = rules
            .iter()
            .filter(|rule| rule.on_failure == OnFailure::Open)
            .flat_map(|rule| &rule.limits);
        open.any(|keyed| keyed.limit.name() == charge.limit().name())
    };
    let mut charges = check.charges().map(|charge| {
        let units = charge
            .limit()
            .units()
            .saturating_mul(processes.into())
            .min(Limit::MAX_UNITS);
        let free = || {
            Charge::new(
                charge.limit().clone().with_units(units),
                charge.key().clone(),
                0,
            )
            .ok()
        };
        if is_open(charge) {
            free().unwrap_or_else(|| charge.clone())
        } else {
            charge.clone()
        }
    });
    let first = charges.next().map(Check::new);
    charges
        .fold(first, |check, charge| check?.and(charge).ok())
        .unwrap_or_else(|| check.clone())
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        .init();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let arguments: Vec<_> = env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => run(None).await,
        ["--check", path] => say(path.as_ref()),
        [path] if !path.starts_with('-') => run(Some(path.into())).await,
        _ => Err(anyhow!(
            "usage: sliding-window-service [FILE], or sliding-window-service --check FILE"
        )),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem:#}");
            ExitCode::FAILURE
        }
    }
}

/// Reads the file, or the example.
fn prepare(path: Option<&Path>) -> Result<Prepared> {
    let prepared = || {
        let text = path.map_or_else(|| Ok(EXAMPLE.to_owned()), fs::read_to_string)?;
        let file = File::read(&text)?;
        let limiter = Limiter::new(store::from_url(&file.store_url()).context("store")?);
        let rules = Rules::build(&text, &file, &limiter)?;
        let token = Token::read(&file)?;
        anyhow::Ok(Prepared {
            file,
            rules,
            limiter,
            token,
        })
    };
    prepared().with_context(|| {
        path.map_or_else(|| "the example".into(), |path| path.display().to_string())
    })
}

fn say(path: &Path) -> Result<()> {
    let Prepared { file, rules, .. } = prepare(Some(path))?;
    println!(
        "HTTP on {}, gRPC on {}",
        file.listen,
        file.grpc_listen.as_deref().unwrap_or("no address")
    );
    println!(
        "store {}",
        file.store_url().split(':').next().unwrap_or_default()
    );
    rules.all.iter().for_each(|rule| println!("{rule}"));
    println!("{}: {} rules, no mistake", path.display(), rules.all.len());
    Ok(())
}

fn http(service: &Arc<Service>, metrics: PrometheusHandle) -> Router {
    let counted = Arc::clone(service);
    Router::new()
        .route("/check", routing::post(check::check))
        .route("/peek", routing::post(check::peek))
        .route("/settle", routing::post(check::settle))
        .route("/reset", routing::post(check::reset))
        .route_layer(from_fn_with_state(Arc::clone(service), listen::authorize))
        .route("/auth", routing::any(auth::ask))
        .route("/auth/", routing::any(auth::ask))
        .route("/auth/{*path}", routing::any(auth::ask))
        .layer(DefaultBodyLimit::max(MOST_BODY))
        .with_state(Arc::clone(service))
        .route(
            "/health",
            routing::get(async move || format!("{} rules\n", counted.rules().all.len())),
        )
        .route("/metrics", routing::get(async move || metrics.render()))
        .route(
            "/openapi.yaml",
            routing::get(|| async { include_str!("../openapi.yaml") }),
        )
        .layer(late())
}

/// Ends a request that does not arrive.
fn late() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, LONGEST_REQUEST)
}

fn grpc(service: &Arc<Service>) -> Router {
    let envoy = RateLimitServiceServer::new(envoy::Envoy(Arc::clone(service)));
    let authorized = from_fn_with_state(Arc::clone(service), listen::authorize);
    tonic::service::Routes::new(envoy)
        .into_axum_router()
        .layer(authorized)
        .layer(late())
}

async fn run(path: Option<PathBuf>) -> Result<()> {
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?;
    let metrics = metrics.install_recorder()?;
    // Before anyone can send one: a process without a handler ends.
    let hangup = signal(SignalKind::hangup())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Before it is read, so that no change is missed.
    let seen = path.as_deref().and_then(reload::stamp);
    let Prepared {
        file,
        rules,
        limiter,
        token,
    } = prepare(path.as_deref())?;
    let (sender, receiver) = watch::channel(Arc::new(rules));
    let service = Arc::new(Service {
        rules: receiver,
        limiter: limiter.clone(),
        token,
        held: HeldPlaces::default(),
    });

    let (end, ended) = watch::channel(false);
    let mut servers = JoinSet::new();
    for (listen, app) in file
        .listeners()
        .zip([http(&service, metrics.clone()), grpc(&service)])
    {
        let listener = Listener::bind(listen)
            .await
            .with_context(|| format!("listening on {listen}"))?;
        println!("listening on {}", listener.address(listen)?);
        servers.spawn(listener.serve(app, ended.clone()));
    }
    if path.is_none() {
        let opening = EXAMPLE.lines().map_while(|line| line.strip_prefix("# "));
        opening.for_each(|line| println!("{line}"));
    }
    let upkeep = async {
        let mut ticks = interval(Duration::from_secs(1));
        loop {
            ticks.tick().await;
            metrics.run_upkeep();
            service.held.free_overdue();
        }
    };
    let watching = async {
        match path.clone() {
            Some(path) => {
                reload::watch(path, seen, file, limiter.clone(), sender.clone(), hangup).await
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = upkeep => {}
        outcome = watching => outcome?,
        served = servers.join_next() => bail!("a listener has ended: {served:?}"),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    end.send_replace(true);
    let _ = timeout(LONGEST_END, async {
        while servers.join_next().await.is_some() {}
    })
    .await;
    servers.shutdown().await;
    Ok(limiter.shutdown(LONGEST_END).await?)
}
