//! Assertions on responses: what a client was told.

use std::time::Duration;

use http::{
    HeaderMap, HeaderValue, Response, StatusCode,
    header::{CACHE_CONTROL, RETRY_AFTER},
};

/// Asserts that a request has passed the limits, and returns the number of units left that the
/// client was told. Returns `None` if the response has no `X-RateLimit-Remaining`, since the layer
/// sends no figures, or since the store has not decided.
///
/// The assertion fails on every response of the layer in the service's place:
///
/// 1. 429 and 503. A service that sends these statuses itself needs another assertion.
/// 2. 400, 401, 403 and 500 with `Cache-Control: no-store` and without figures: the request had no
///    key, such as a peer or an API key, or its key is denied. A service may send these statuses
///    itself. Its response passes if the response has `X-RateLimit-Limit` or `RateLimit`, or if it
///    has no `no-store`.
/// 3. A `grpc-status` of 8 or 14 in the headers, with which [`GrpcResponse`](crate::guide::grpc)
///    rejects calls.
///
/// ```
/// # use axum::{Router, body::Body, http::Request, routing::get};
/// # use tower::ServiceExt;
/// # use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer};
/// use tower_sliding_window::testing::{assert_admitted, assert_refused};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let limits = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_minute("requests", 1).by(Everyone));
/// let app = Router::new().route("/", get(|| async { "hello" })).layer(limits);
/// let call = async || app.clone().oneshot(Request::new(Body::empty())).await.unwrap();
///
/// assert_eq!(assert_admitted(&call().await), Some(0));
/// assert_eq!(assert_refused(&call().await).as_secs(), 60);
/// # }
/// ```
///
/// # Panics
///
/// If the response is one of the three kinds above, or if the figures contradict each other. The
/// message shows the status and the headers. Most often, a 500 means that the request has no peer.
#[track_caller]
pub fn assert_admitted<B>(response: &Response<B>) -> Option<u64> {
    let status = response.status();
    let headers = response.headers();
    let hint = match status {
        StatusCode::INTERNAL_SERVER_ERROR => "; see \"Give requests a peer\" in `guide::testing_your_limits`",
        _ => "",
    };
    assert!(
        !is_rejection(status, headers),
        "expected an admitted request, but the layer rejected it: {status} with {headers:?}{hint}"
    );
    remaining(headers)
}

/// Whether the layer has sent a response in the service's place.
fn is_rejection(status: StatusCode, headers: &HeaderMap) -> bool {
    let grpc_status = headers.get("grpc-status").map(HeaderValue::as_bytes);
    let has_figures = ["x-ratelimit-limit", "ratelimit"].iter().any(|name| headers.contains_key(*name));
    match (status.as_u16(), grpc_status) {
        (429 | 503, _) | (_, Some(b"8" | b"14")) => true,
        (400 | 401 | 403 | 500, _) => forbids_storing(headers) && !has_figures,
        _ => false,
    }
}

/// Whether a line of `Cache-Control` has the directive `no-store`. Another middleware may add
/// directives of its own (RFC 9111, section 5.2).
fn forbids_storing(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(CACHE_CONTROL).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).any(|directive| directive.trim().eq_ignore_ascii_case("no-store"))
}

/// Asserts that a limit has refused a request, and returns the retry time that the client was told.
///
/// 1. The status is 429.
/// 2. `Retry-After` is a number of seconds, at least 1.
/// 3. No cache may store the response.
/// 4. If the layer sends figures, `X-RateLimit-Remaining` is at most `X-RateLimit-Limit`, and an
///    `X-RateLimit-Reset` in seconds is at most `Retry-After`.
///
/// # Panics
///
/// If one of the four statements does not hold. The refusal of a cost above the limit panics, too:
/// it has no `Retry-After`, since waiting does not help.
#[track_caller]
pub fn assert_refused<B>(response: &Response<B>) -> Duration {
    let headers = response.headers();
    let wait = rejected(response, StatusCode::TOO_MANY_REQUESTS);
    remaining(headers);
    // From a billion on, the reset is a Unix time.
    if let Some(reset) = number(headers, "x-ratelimit-reset").filter(|reset| *reset < 1_000_000_000) {
        assert!(reset <= wait.as_secs(), "Retry-After is before X-RateLimit-Reset: {headers:?}");
    }
    wait
}

/// Asserts that a request was rejected because the store could not decide, and returns the retry
/// time that the client was told. The response is a 503 with `Retry-After` that no cache may store,
/// as a layer that fails closed sends it.
///
/// # Panics
///
/// If the response is not such a 503.
#[track_caller]
pub fn assert_unavailable<B>(response: &Response<B>) -> Duration {
    rejected(response, StatusCode::SERVICE_UNAVAILABLE)
}

/// Asserts the status of a rejection, and returns its retry time.
#[track_caller]
fn rejected<B>(response: &Response<B>, expected: StatusCode) -> Duration {
    let status = response.status();
    let headers = response.headers();
    assert_eq!(status, expected, "expected {expected}, got {status} with {headers:?}");
    let Some(seconds) = number(headers, RETRY_AFTER.as_str()) else {
        panic!("{status} without Retry-After: {headers:?}")
    };
    assert!(seconds > 0, "Retry-After: 0 makes clients come back at once");
    assert!(forbids_storing(headers), "a cache may store the {status}: {headers:?}");
    Duration::from_secs(seconds)
}

/// The number of units left that the response shows.
#[track_caller]
fn remaining(headers: &HeaderMap) -> Option<u64> {
    let [limit, remaining] = ["x-ratelimit-limit", "x-ratelimit-remaining"].map(|name| number(headers, name));
    assert!(remaining <= limit, "more units are left than the limit has: {headers:?}");
    remaining
}

#[track_caller]
fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    let value = headers.get(name)?;
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    Some(number.unwrap_or_else(|| panic!("{name} is not a number: {value:?}")))
}
