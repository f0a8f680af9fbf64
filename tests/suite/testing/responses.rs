//! The assertions on responses let real ones pass, and no contradictory ones.

use std::{
    convert::Infallible,
    future::ready,
    panic::{AssertUnwindSafe, catch_unwind},
};

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    ApiKey, Header, Key, KeyedLimit, Limit, MemoryStore, PeerIp, RateLimitLayer, Secret,
    testing::{assert_admitted, assert_refused, assert_unavailable},
};

use crate::support::requests::{anyone, hello, request, scripted_response};

/// A response with this status and these headers, as lines `name: value`.
fn response(status: u16, headers: &str) -> Response<()> {
    let lines = headers.split(", ").filter_map(|line| line.split_once(": "));
    lines.fold(Response::builder().status(status), |head, (name, value)| head.header(name, value)).body(()).unwrap()
}

/// The message with which an assertion fails, or `None` if it passes.
fn failure<T>(assertion: impl Fn(&Response<()>) -> T, response: &Response<()>) -> Option<String> {
    let caught = catch_unwind(AssertUnwindSafe(|| drop(assertion(response)))).err()?;
    let text = caught.downcast_ref::<String>().cloned();
    Some(text.unwrap_or_else(|| (*caught.downcast_ref::<&str>().unwrap()).to_owned()))
}

const REFUSED: &str = "retry-after: 60, cache-control: no-store";

#[test]
fn an_admitted_request_has_any_other_status_and_says_how_many_units_are_left() {
    assert_eq!(assert_admitted(&response(200, "x-ratelimit-limit: 5, x-ratelimit-remaining: 4")), Some(4));
    assert_eq!(assert_admitted(&response(404, "")), None);
    for (status, headers, expected) in [
        (429, "", "429"),
        (503, "", "503"),
        (200, "grpc-status: 8", "\"grpc-status\": \"8\""),
        (200, "grpc-status: 14", "\"grpc-status\": \"14\""),
        (200, "x-ratelimit-limit: 5, x-ratelimit-remaining: 6", "more units are left"),
        (200, "x-ratelimit-limit: 5, x-ratelimit-remaining: many", "x-ratelimit-remaining is not a number"),
    ] {
        let failure = failure(assert_admitted, &response(status, headers)).unwrap();
        assert!(failure.contains(expected), "{failure}");
    }
}

/// The layer answers in the service's place.
#[tokio::test]
async fn a_request_without_a_key_is_not_admitted() {
    const LIMIT: Limit = Limit::per_minute("requests", 5);
    let layer = |limit: KeyedLimit| RateLimitLayer::new(MemoryStore::new()).limit(limit);
    let denied = layer(LIMIT.by(anyone)).deny(anyone, [Key::new("test", "anyone")]);
    let bearer = ApiKey::bearer(&Secret::new("a secret that only the tests know").unwrap());
    for (layer, rejection) in [
        (layer(LIMIT.by(PeerIp::new())), "the layer rejected it: 500"),
        (layer(LIMIT.by(Header::new("x-tenant"))), "the layer rejected it: 400"),
        (layer(LIMIT.by(bearer)), "the layer rejected it: 401"),
        (denied, "the layer rejected it: 403"),
    ] {
        let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
        let failure = failure(assert_admitted, &response.map(drop)).unwrap();
        assert!(failure.contains(rejection), "{failure}");
        assert_eq!(failure.contains("Give requests a peer"), rejection.ends_with("500"), "{failure}");
    }
}

/// Also with `Cache-Control: no-store`, since the layer adds its figures.
#[tokio::test]
async fn an_error_of_the_service_is_an_admitted_request() {
    let service = service_fn(|request: Request<Body>| ready(Ok::<_, Infallible>(scripted_response(request.headers()))));
    for status in ["400", "401", "403", "404", "500"] {
        let layer = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_minute("requests", 5).by(anyone));
        let mut request = request();
        request.headers_mut().insert("answer", status.parse().unwrap());
        request.headers_mut().insert("answer-cache-control", "no-store".parse().unwrap());
        let response = layer.layer(service).oneshot(request).await.unwrap();
        assert_eq!((response.status().as_str(), assert_admitted(&response)), (status, Some(4)));
        assert_eq!(assert_admitted(&self::response(status.parse().unwrap(), "cache-control: private")), None);
    }
}

#[test]
fn a_refused_request_says_when_to_retry_in_one_voice() {
    assert_eq!(assert_refused(&response(429, REFUSED)).as_secs(), 60);
    for reset in ["60", "1", "1790000000"] {
        let figures = format!("{REFUSED}, x-ratelimit-limit: 5, x-ratelimit-remaining: 0, x-ratelimit-reset: {reset}");
        assert_eq!(assert_refused(&response(429, &figures)).as_secs(), 60);
    }
    for (status, headers, expected) in [
        (200, REFUSED, "expected 429 Too Many Requests, got 200 OK"),
        (503, REFUSED, "got 503"),
        (429, "cache-control: no-store", "without Retry-After"),
        (429, "retry-after: 0, cache-control: no-store", "come back at once"),
        (429, "retry-after: soon, cache-control: no-store", "retry-after is not a number"),
        (429, "retry-after: 60", "a cache may store"),
        (429, "retry-after: 60, cache-control: no-store, x-ratelimit-reset: 61", "Retry-After is before"),
        (429, "retry-after: 60, cache-control: no-store, x-ratelimit-limit: 1, x-ratelimit-remaining: 2", "more units"),
    ] {
        let failure = failure(assert_refused, &response(status, headers)).unwrap();
        assert!(failure.contains(expected), "{failure}");
    }
}

#[test]
fn an_unavailable_route_says_when_to_retry() {
    assert_eq!(assert_unavailable(&response(503, "retry-after: 3, cache-control: no-store")).as_secs(), 3);
    for (status, headers, expected) in [(429, REFUSED, "expected 503"), (503, "", "without Retry-After")] {
        let failure = failure(assert_unavailable, &response(status, headers)).unwrap();
        assert!(failure.contains(expected), "{failure}");
    }
}

#[test]
fn other_middleware_may_add_directives_for_caches() {
    for cache_control in [
        "cache-control: private;no-store",
        "cache-control: No-Store",
        "cache-control: private, cache-control: no-store",
    ] {
        let refused = response(429, &format!("retry-after: 60, {cache_control}").replace(';', ","));
        assert_eq!(failure(assert_refused, &refused), None, "{cache_control}");
    }
    assert!(failure(assert_refused, &response(429, "retry-after: 60, cache-control: private")).is_some());
}
