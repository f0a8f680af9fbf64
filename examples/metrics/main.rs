//! A server that exports the metrics of its limits to Prometheus, with a dashboard and alerts in
//! the same folder.
//!
//! The server alone:
//!
//! ```sh
//! cargo run --example metrics --features metrics
//! curl -i -H 'x-tenant: ada' http://127.0.0.1:3000/api/items
//! curl http://127.0.0.1:3000/metrics
//! ```
//!
//! With Redis, Prometheus at <http://127.0.0.1:9090> and Grafana at <http://127.0.0.1:3001>, in
//! containers that reach the server on its host:
//!
//! ```sh
//! docker compose --file examples/metrics/compose.yaml up
//! HOST=0.0.0.0 cargo run --example metrics --features metrics
//! ```
//!
//! To see the failure modes, stop Redis with
//! `docker compose --file examples/metrics/compose.yaml pause redis`, and start it again with
//! `unblock`.
//!
//! | file | use in a server of your own |
//! |---|---|
//! | `dashboard.json` | import it into Grafana |
//! | `alerts.yml` | name it under `rule_files` of Prometheus |
//! | `prometheus.yml`, `compose.yaml` | only for this example |
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `HOST`, `PORT` | the address to listen on; port 0 picks a free one | 127.0.0.1, 3000 |
//! | `REDIS_URL` | the Redis of the limits; it may still be down | `redis://127.0.0.1:6379/` |

use std::{env, error::Error, net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::State,
    routing::{get, post},
};
use http::request::Parts;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::{net::TcpListener, task::JoinSet, time::interval};
use tower_sliding_window::{
    Everyone, Header, KeyExtractor, Limit, Limiter, PeerIp, RateLimitLayer, RedisStore,
    limiter::{Breaker, Share},
};

const API_BURST: Limit = Limit::per_second("api-burst", 20);
const API_STEADY: Limit = Limit::per_minute("api-steady", 300);
const LOGIN: Limit = Limit::per_minute("login", 5);
const SEARCH: Limit = Limit::per("search", 50, Duration::from_secs(10));
/// Busy and far from its limit, so the process takes units for a second at once.
const STATUS: Limit = Limit::per_minute("status", 60_000).prefetch(Duration::from_secs(1));
const MAILS: Limit = Limit::per_day("mails", 3);

const SECONDS: [f64; 10] = [
    0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0,
];
const BATCH: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
const QUEUE: [f64; 7] = [0.0, 16.0, 64.0, 256.0, 1_024.0, 8_192.0, 65_536.0];

/// Histograms get buckets that fit. Without buckets they are exported as summaries, and Prometheus
/// cannot combine the quantiles of several servers.
fn recorder() -> Result<PrometheusHandle, BuildError> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(
            Matcher::Full("rate_limit_script_seconds".to_owned()),
            &SECONDS,
        )?
        .set_buckets_for_metric(Matcher::Full("rate_limit_batch_checks".to_owned()), &BATCH)?
        .set_buckets_for_metric(Matcher::Full("rate_limit_queue_checks".to_owned()), &QUEUE)?
        .install_recorder()
}

/// Each layer has a name and a failure mode of its own, so the dashboard tells them apart.
fn app(store: RedisStore, prometheus: PrometheusHandle) -> Router {
    let tenant = Header::new("x-tenant");
    let api = RateLimitLayer::new(store.clone())
        .named("api")
        .limit(API_BURST.by(tenant.clone()))
        .limit(API_STEADY.by(tenant.clone()))
        // `nest` has removed the prefix.
        .exempt(|request: &Parts| request.uri.path() == "/health")
        .deny(tenant.clone().one_of([tenant.key("eve")]))
        .fail_open();
    let login = RateLimitLayer::new(store.clone())
        .named("login")
        .limit(LOGIN.by(PeerIp::new()))
        .fail_closed();
    let search = RateLimitLayer::new(store.clone())
        .named("search")
        .limit(SEARCH.by(tenant).cost(pages))
        .fail_local(Share::one_of(2));
    let status = RateLimitLayer::new(store.clone())
        .named("status")
        .limit(STATUS.by(Everyone));
    // Mails can wait, so Redis gets more time, and no breaker answers in its place.
    let mails = Limiter::new(store)
        .deadline(Duration::from_secs(10))
        .breaker(Breaker::OFF);

    let api = Router::new()
        .route("/items", get(|| async { "items\n" }))
        .route("/health", get(|| async { "ok\n" }))
        .route_layer(api);
    Router::new()
        .nest("/api", api)
        .route("/login", post(|| async { "welcome\n" }).layer(login))
        .route(
            "/search",
            get(|| async { "search results\n" }).layer(search),
        )
        .route("/status", get(|| async { "up\n" }).layer(status))
        .route("/newsletter", post(newsletter).with_state(mails))
        // Outside of all layers, so that Prometheus is never refused.
        .route("/metrics", get(async move || prometheus.render()))
}

/// The cost of a search: `/search?pages=3` costs 3.
fn pages(request: &Parts) -> u64 {
    let pages = request
        .uri
        .query()
        .and_then(|query| query.strip_prefix("pages="));
    pages.and_then(|pages| pages.parse().ok()).unwrap_or(1)
}

/// Asks for all readers at once whether they may get another mail today. The body is the number of
/// readers.
async fn newsletter(State(mails): State<Limiter>, readers: String) -> String {
    let mut checks = JoinSet::new();
    for reader in 0..readers.trim().parse().unwrap_or(100_u32).min(100_000) {
        let mails = mails.clone();
        checks.spawn(async move { mails.check(&MAILS, format!("reader-{reader}"), 1).await });
    }
    let mut sent = 0;
    while let Some(check) = checks.join_next().await {
        sent += u32::from(matches!(check, Ok(Ok(decision)) if decision.is_allowed()));
    }
    format!("{sent} mails\n")
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Before the first request, so that the gauge of open breakers counts from 0.
    let prometheus = recorder()?;
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379/".to_owned());
    let app = app(RedisStore::builder(&url).build()?, prometheus.clone());

    let host = env::var("HOST").unwrap_or_else(|_| "127.0.0.1".to_owned());
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind((host, port)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("try: curl -i -H 'x-tenant: ada' {url}/api/items");
    println!("and: curl {url}/metrics");

    let server = axum::serve(
        listener,
        app.into_make_service_with_connect_info::<SocketAddr>(),
    );
    tokio::select! {
        served = server => Ok(served?),
        () = upkeep(prometheus) => Ok(()),
    }
}

/// Moves recorded values into their buckets. Without it, they pile up in memory until Prometheus
/// asks.
async fn upkeep(prometheus: PrometheusHandle) {
    let mut ticks = interval(Duration::from_secs(5));
    loop {
        ticks.tick().await;
        prometheus.run_upkeep();
    }
}
