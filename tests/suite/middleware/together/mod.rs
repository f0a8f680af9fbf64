//! Where parts meet: known refusals and bans, places, settlements, stacked layers, and a Redis that
//! stands still or is gone.

mod floods;
mod known_refusals;
mod meeting_points;

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use axum::{Router, body::Body, middleware::map_response, routing::get};
use http::{HeaderMap, Request, Response, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Header, Key, KeyExtractor, Limit, Limiter, RateLimitLayer, RedisStore, Rejection,
    limiter::Share, store::ManualClock,
};

use crate::support::{
    TEST_TIMEOUT, http_client::HttpClient, http_server::serve, redis_server::RedisServer, seconds,
};

const LOGIN: Limit = Limit::per_minute("login", 5);
const BAN: Limit = Limit::per_day("login.ban", 1);

fn by_user() -> Header {
    Header::new("x-user")
}

/// The key of a user.
fn user(name: &str) -> Key {
    by_user()
        .extract(
            &Request::get("/")
                .header("x-user", name)
                .body(())
                .unwrap()
                .into_parts()
                .0,
        )
        .unwrap()
}

/// The login layer of the docs of `ban`.
fn login(limiter: impl Into<Limiter>) -> RateLimitLayer {
    let failures = LOGIN
        .by(by_user())
        .settle(|exchange| u64::from(exchange.response.status == StatusCode::UNAUTHORIZED))
        .ban(BAN, seconds(900));
    RateLimitLayer::new(limiter).limit(failures)
}

/// Shows a rejection by a ban as a 403.
fn show_bans(mut response: Response<Body>) -> Response<Body> {
    if let Some(Rejection::Banned(_)) = response.extensions().get() {
        *response.status_mut() = StatusCode::FORBIDDEN;
    }
    response
}

/// The layer in each failure mode, and the status of a request that the mode decides.
fn modes(layer: &RateLimitLayer) -> [(RateLimitLayer, u16); 3] {
    let layer = || layer.clone();
    [
        (layer().fail_open(), 200),
        (layer().fail_closed(), 503),
        (layer().fail_local(Share::one_of(2)), 200),
    ]
}

fn start() -> (RedisServer, ManualClock, RedisStore) {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    (server, clock, store)
}

/// The status of the response to a user whom the service answers with 401 if it is `ada`.
async fn ask(layer: &RateLimitLayer, user: &str) -> u16 {
    let service = service_fn(|request: Request<Body>| async move {
        let status = if request.headers()["x-user"] == "ada" {
            401
        } else {
            200
        };
        Ok::<_, Infallible>(
            http::Response::builder()
                .status(status)
                .body(Body::empty())
                .unwrap(),
        )
    });
    let request = Request::get("/")
        .header("x-user", user)
        .body(Body::empty())
        .unwrap();
    show_bans(layer.clone().layer(service).oneshot(request).await.unwrap())
        .status()
        .as_u16()
}

/// A server behind these layers, the inner one first. Its handler refuses the user `ada`, and
/// counts how often that user has `tried`.
async fn serve_logins<const N: usize>(
    layers: [RateLimitLayer; N],
    tried: &Arc<AtomicU64>,
) -> String {
    let count = Arc::clone(tried);
    let handler = move |headers: HeaderMap| async move {
        let is_ada = headers.get("x-user").is_some_and(|user| user == "ada");
        count.fetch_add(u64::from(is_ada), Ordering::SeqCst);
        if is_ada {
            StatusCode::UNAUTHORIZED
        } else {
            StatusCode::OK
        }
    };
    let router = Router::new().route("/", get(handler));
    let limited = layers.into_iter().fold(router, Router::layer);
    serve(limited.layer(map_response(async |response| show_bans(response)))).await
}

/// Sends requests of the user `ada` until one is refused with this status.
async fn until_refused(url: &str, status: u16) {
    let (client, begun) = (HttpClient::http2(), Instant::now());
    while client.send("GET", url, &[("x-user", "ada")]).await.status != status {
        assert!(begun.elapsed() < TEST_TIMEOUT);
    }
}
