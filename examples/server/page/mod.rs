//! The page at `/`, which shows the limits at work. A server of your own needs nothing of it:
//! `main.rs` is the example. `history.rs` has its dots, `switch.rs` the store that it can stop.
//!
//! | path | content |
//! |---|---|
//! | `GET /events?client=1` | what a client has spent, as server-sent events: first everything, then what is new |
//! | `GET /state?client=1` | the first of these events, for browsers without server-sent events |
//! | `POST /send?client=1&path=/hello&count=5` | requests as this client, all at once |
//! | `POST /store?stopped=true` | stops the store, as if Redis were down |
//!
//! `/send` lets any caller pose as any client, and `/store` switches all limits off. They exist
//! because a browser cannot change its address, and opens six connections at most. This server
//! listens on 127.0.0.1 alone; a public one must not have them. They need the header `x-page: 1`,
//! since other web sites in the same browser could send to them otherwise. All paths above need a
//! `Host` of this machine: a web site whose name has been pointed at 127.0.0.1 could read them
//! otherwise.

mod history;
mod switch;

use std::{
    convert::Infallible,
    future::pending,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::Body,
    extract::{ConnectInfo, Query, Request, State},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
    routing::{get, post},
};
use futures_util::{
    future::join_all,
    stream::{Stream, unfold},
};
use http::{
    HeaderName, Method, StatusCode,
    header::{CONTENT_TYPE, HOST},
    uri::Authority,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    join, select,
    time::{Interval, MissedTickBehavior, interval},
};
use tower::ServiceExt;
use tower_sliding_window::{
    Algorithm, ApiKey, Charge, Check, ClientIp, ConfigError, Decision, Error, Key, KeyExtractor,
    Limit, Limiter, PeerIp, Rejection, Store,
    decision::LimitStatus,
    error::{StoreError, StoreErrorKind},
    limiter::FailureMode,
    middleware::Degraded,
};

use self::{
    history::{CLIENTS, Dot, History, Kind, Lane, address},
    switch::Switch,
};
use crate::{API_BURST, API_STEADY, LOGIN, Settings, serve};

/// New dots reach the page this often with the figures of the store; the figures alone every fifth
/// time.
const TICK: Duration = Duration::from_millis(50);
const TICKS_BETWEEN_FIGURES: u32 = 5;

/// The most requests of one `/send`.
const MOST_AT_ONCE: usize = 500;

/// The routes of the page, beside those of `app`. The page shows the decisions of the store, and
/// can stop it.
pub(crate) fn beside(
    store: Arc<dyn Store>,
    settings: &Settings,
    app: fn(&Limiter, &Settings) -> Router,
) -> Result<Router, ConfigError> {
    let Settings {
        hello,
        client_ip,
        api_key,
        deadline,
    } = settings;
    let switch = Switch::new(store, History::new(limits(hello)?, api_key));
    let mut limiter = Limiter::new(switch.clone());
    if let Some(deadline) = deadline {
        limiter = limiter.deadline(*deadline);
    }
    let app = app(&limiter, settings);
    let (client_ip, api_key) = (client_ip.clone(), api_key.clone());
    let page = Page(Arc::new(Shared {
        limiter,
        switch,
        client_ip,
        api_key,
        requests: AtomicU64::new(0),
    }));

    let app = app.layer(from_fn_with_state(page.clone(), watch));
    let text = |kind: &'static str, text: &'static str| {
        get(move || async move { ([(CONTENT_TYPE, kind)], text) })
    };
    let routes = Router::new()
        .route(
            "/",
            text("text/html; charset=utf-8", include_str!("page.html")),
        )
        .route("/page.css", text("text/css", include_str!("page.css")))
        .route("/page.js", text("text/javascript", include_str!("page.js")))
        .route("/events", get(events))
        .route("/state", get(state))
        .route("/send", post(send))
        .route("/store", post(stop_store))
        .route_layer(from_fn(only_for_this_page))
        .with_state((page, app.clone()));
    Ok(app.merge(routes))
}

/// The limits on the page. Two more are shown beside the one of `/hello`, and count the same
/// requests.
fn limits(hello: &Limit) -> Result<Vec<Lane>, ConfigError> {
    let lane = |limit, path, by_api_key| Lane {
        limit,
        path,
        by_api_key,
    };
    let beside = |name, algorithm| {
        Ok(lane(
            Limit::new(name, hello.units(), hello.window())?.with_algorithm(algorithm),
            None,
            false,
        ))
    };
    Ok(vec![
        lane(hello.clone(), Some("/hello"), false),
        beside("hello-fixed", Algorithm::FIXED_WINDOW)?,
        beside("hello-counter", Algorithm::SLIDING_WINDOW_COUNTER)?,
        lane(LOGIN, Some("/login"), false),
        lane(API_BURST, Some("/api/"), true),
        lane(API_STEADY, Some("/api/"), true),
    ])
}

#[derive(Clone)]
struct Page(Arc<Shared>);

struct Shared {
    limiter: Limiter,
    switch: Switch,
    client_ip: ClientIp,
    api_key: ApiKey,
    requests: AtomicU64,
}

impl Page {
    fn lanes(&self) -> &[Lane] {
        self.0.switch.history.lanes()
    }

    /// All lanes at no cost, in one call of the store.
    async fn figures(&self, client: u8) -> Result<Decision, Error> {
        let quiet = self.0.switch.history.quiet();
        let (by_address, by_api_key) = self.keys(client);
        let mut charges = self.lanes().iter().filter_map(|lane| {
            let key = if lane.by_api_key {
                &by_api_key
            } else {
                &by_address
            };
            Charge::new(lane.limit.clone(), key.clone(), 0).ok()
        });
        let Some(first) = charges.next() else {
            return Err(no_lanes());
        };
        let check = charges.fold(Check::new(first), |check, charge| {
            check.clone().and(charge).unwrap_or(check)
        });
        let figures = match self.0.limiter.check_all(check.clone()).await {
            // A single late reply is no outage.
            Err(Error::TimedOut { .. }) => self.0.limiter.check_all(check).await?,
            figures => figures?,
        };
        self.0.switch.history.compare(client, &figures, quiet);
        Ok(figures)
    }

    fn keys(&self, client: u8) -> (Key, Key) {
        (
            PeerIp::new().key(address(client)),
            self.0.api_key.key(&format!("client-{client}")),
        )
    }
}

fn no_lanes() -> Error {
    StoreError::new("showing limits", StoreErrorKind::Other, "there are none").into()
}

/// Shows responses to the page, also those for which the store was not asked. Requests to a limit
/// beside which others are shown spend from those, too.
async fn watch(State(page): State<Page>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let Some(lane) = page.lanes().iter().find(|lane| lane.is_spent_by(&path)) else {
        return next.run(request).await;
    };
    page.0.requests.fetch_add(1, Relaxed);

    let (parts, body) = request.into_parts();
    let extractor: &dyn KeyExtractor = if lane.by_api_key {
        &page.0.api_key
    } else {
        &page.0.client_ip
    };
    let key = extractor.extract(&parts).ok();
    let client = key
        .as_ref()
        .and_then(|key| page.0.switch.history.client(key));
    let beside = page.lanes().iter().filter(|other| {
        other.path.is_none()
            && other
                .limit
                .name()
                .starts_with(&format!("{}-", lane.limit.name()))
    });
    let spent_beside =
        beside.filter_map(|other| Some(page.0.limiter.check(&other.limit, key.clone()?, 1)));
    let (response, spent_beside) = join!(
        next.run(Request::from_parts(parts, body)),
        join_all(spent_beside)
    );

    let Some(client) = client else {
        return response;
    };
    let history = &page.0.switch.history;
    for decision in spent_beside.into_iter().flatten() {
        history.refused(client, &decision);
    }
    let lanes = (0..)
        .zip(page.lanes())
        .filter(|(_, lane)| lane.is_spent_by(&path))
        .map(|(number, _)| number);
    let mode = response
        .extensions()
        .get()
        .map(|degraded: &Degraded| degraded.mode);
    match (response.extensions().get(), mode) {
        (Some(Rejection::Limited(decision)), _) => history.refused(client, decision),
        (Some(Rejection::Unavailable(_)), _) => history.mark(client, lanes, Kind::Unavailable),
        (None, Some(FailureMode::Local(_))) => history.mark(client, lanes, Kind::Local),
        (None, Some(_)) => history.mark(client, lanes, Kind::Uncounted),
        _ => {}
    }
    response
}

/// A web site whose name has been pointed at 127.0.0.1 has that name as its `Host`. A form of
/// another web site cannot set the header.
async fn only_for_this_page(request: Request, next: Next) -> Response {
    let headers = request.headers();
    let host = headers
        .get(HOST)
        .and_then(|host| Authority::try_from(host.as_bytes()).ok());
    let is_local =
        host.is_some_and(|host| ["127.0.0.1", "localhost", "[::1]"].contains(&host.host()));
    let is_safe =
        request.method() == Method::GET || headers.get("x-page").is_some_and(|value| value == "1");
    if is_local && is_safe {
        return next.run(request).await;
    }
    (
        StatusCode::FORBIDDEN,
        "only for the page at 127.0.0.1 or localhost, with the header x-page: 1\n",
    )
        .into_response()
}

#[derive(Deserialize)]
struct Viewer {
    client: u8,
}

async fn events(State((page, _)): State<(Page, Router)>, Query(viewer): Query<Viewer>) -> Response {
    if !(1..=CLIENTS).contains(&viewer.client) {
        return StatusCode::BAD_REQUEST.into_response();
    }
    Sse::new(View::new(page, viewer.client).into_stream()).into_response()
}

async fn state(State((page, _)): State<(Page, Router)>, Query(viewer): Query<Viewer>) -> Response {
    match View::new(page, viewer.client).next().await {
        Some(message) if (1..=CLIENTS).contains(&viewer.client) => Json(message).into_response(),
        _ => StatusCode::BAD_REQUEST.into_response(),
    }
}

/// An open page. It works while a browser reads its stream, and ends with it.
struct View {
    page: Page,
    client: u8,
    ticks: Interval,
    ticks_until_figures: u32,
    /// The epoch and the number of the last dot.
    shown: Option<(u64, u64)>,
    /// Ends the stream, so that no open page keeps the server from shutting down.
    shutdown: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl View {
    fn new(page: Page, client: u8) -> Self {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let shutdown = async {
            match serve::shutdown_signal() {
                Ok(signal) => signal.await,
                Err(_) => pending().await,
            }
        };
        Self {
            page,
            client,
            ticks,
            ticks_until_figures: 0,
            shown: None,
            shutdown: Box::pin(shutdown),
        }
    }

    fn into_stream(self) -> impl Stream<Item = Result<Event, Infallible>> {
        unfold(self, |mut view| async {
            let message = view.next().await?;
            Some((Ok(Event::default().data(message.to_string())), view))
        })
    }

    /// The next message; `None` when the server shuts down.
    async fn next(&mut self) -> Option<Value> {
        loop {
            select! {
                _ = self.ticks.tick() => {}
                () = &mut self.shutdown => return None,
            }
            let history = &self.page.0.switch.history;
            self.ticks_until_figures = self.ticks_until_figures.saturating_sub(1);
            if self.ticks_until_figures > 0 && history.since(self.client, self.shown).2.is_empty() {
                continue;
            }
            self.ticks_until_figures = TICKS_BETWEEN_FIGURES;
            let figures = self.page.figures(self.client).await;
            let (now, shown, dots) = history.since(self.client, self.shown);
            let mut message = json!({
                "now": millis(now),
                "all": self.shown.is_none_or(|(epoch, _)| epoch != shown.0),
                "dots": dots.iter().map(dot).collect::<Value>(),
                "lanes": lanes(&figures),
                "store": store(&self.page, &figures),
            });
            if self.shown.is_none() {
                message["setup"] = setup(&self.page);
            }
            self.shown = Some(shown);
            return Some(message);
        }
    }
}

fn dot(dot: &Dot) -> Value {
    let kind = match dot.kind {
        Kind::Admitted => "admitted",
        Kind::Elsewhere => "elsewhere",
        Kind::Uncounted => "uncounted",
        Kind::Local => "local",
        Kind::Refused => "refused",
        Kind::Unavailable => "unavailable",
    };
    json!([dot.lane, millis(dot.at), dot.units, kind])
}

/// Used, remaining, and the time until more is left: for each lane, unless the store does not
/// decide.
fn lanes(figures: &Result<Decision, Error>) -> Value {
    figures.as_ref().map_or(Value::Null, |figures| {
        let lane = |status: &LimitStatus| {
            json!([
                status.used,
                status.remaining(),
                status.reset_after().as_secs_f64() * 1_000.0
            ])
        };
        figures.statuses().map(lane).collect()
    })
}

fn store(page: &Page, figures: &Result<Decision, Error>) -> Value {
    let (calls, mean) = page.0.switch.cost();
    json!({
        "decides": figures.is_ok(),
        "breaker": matches!(figures, Err(Error::BreakerOpen(_))),
        "stopped": page.0.switch.is_stopped(),
        "requests": page.0.requests.load(Relaxed),
        "calls": calls,
        "micros": mean.as_micros() as u64,
    })
}

fn setup(page: &Page) -> Value {
    let lane = |lane: &Lane| {
        let (limit, window) = (&lane.limit, lane.limit.window().as_secs_f64() * 1_000.0);
        json!({ "name": limit.name(), "units": limit.units(), "window": window })
    };
    json!({ "store": serve::place(), "clients": CLIENTS, "lanes": page.lanes().iter().map(lane).collect::<Value>() })
}

fn millis(micros: u64) -> f64 {
    micros as f64 / 1_000.0
}

#[derive(Deserialize)]
struct Requests {
    client: u8,
    path: String,
    count: usize,
}

/// Answers with the number of responses of each status. Requests that passed without the store
/// count as `uncounted` or `local`.
async fn send(
    State((page, app)): State<(Page, Router)>,
    Query(requests): Query<Requests>,
) -> Response {
    let Requests {
        client,
        path,
        count,
    } = requests;
    let is_limited = page.lanes().iter().any(|lane| lane.is_spent_by(&path));
    if !is_limited || !(1..=CLIENTS).contains(&client) || !(1..=MOST_AT_ONCE).contains(&count) {
        return StatusCode::BAD_REQUEST.into_response();
    }
    let request = || {
        Request::builder()
            .method(if path == "/login" {
                Method::POST
            } else {
                Method::GET
            })
            .uri(&path)
            .header(
                HeaderName::from_static("x-api-key"),
                format!("client-{client}"),
            )
            .extension(ConnectInfo(SocketAddr::from((address(client), 0))))
            .body(Body::empty())
    };
    let mut statuses = json!({});
    for response in
        join_all((0..count).filter_map(|_| Some(app.clone().oneshot(request().ok()?)))).await
    {
        let Ok(response) = response;
        let mode = response
            .extensions()
            .get()
            .map(|degraded: &Degraded| degraded.mode);
        let status = response.status();
        let status = match (status, mode) {
            (StatusCode::OK, Some(FailureMode::Local(_))) => "local",
            (StatusCode::OK, Some(_)) => "uncounted",
            _ => status.as_str(),
        };
        let count = &mut statuses[status];
        *count = json!(count.as_u64().unwrap_or_default() + 1);
    }
    Json(statuses).into_response()
}

#[derive(Deserialize)]
struct StopStore {
    stopped: bool,
}

async fn stop_store(
    State((page, _)): State<(Page, Router)>,
    Query(stop): Query<StopStore>,
) -> StatusCode {
    page.0.switch.stop(stop.stopped);
    StatusCode::NO_CONTENT
}
