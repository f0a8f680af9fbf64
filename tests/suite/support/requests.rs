//! Requests and responses without a server.

use std::convert::Infallible;

use axum::body::Body;
use http::{HeaderMap, HeaderName, Request, Response, request::Parts};
use http_body_util::BodyExt;
use tower_sliding_window::{Key, extract::KeyError};

/// All requests have the same key.
pub(crate) fn anyone(_: &Parts) -> Result<Key, KeyError> {
    Ok(Key::new("test", "anyone"))
}

pub(crate) fn request() -> Request<Body> {
    Request::new(Body::empty())
}

pub(crate) async fn hello(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::from("hello")))
}

pub(crate) async fn json(response: Response<Body>) -> String {
    String::from_utf8(
        response
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes()
            .into(),
    )
    .unwrap()
}

/// The default body of a refusal by this limit. A hidden limit has no name.
pub(crate) fn refusal_body(limit: Option<&str>, seconds: u64) -> String {
    let (subject, violated) = match limit {
        Some(name) => (
            format!("The limit '{name}'"),
            format!(r#","violated-policies":["{name}"]"#),
        ),
        None => ("A limit".to_owned(), String::new()),
    };
    let plural = if seconds == 1 { "" } else { "s" };
    let detail = format!("{subject} is used up. Retry in {seconds} second{plural}.");
    format!(r#"{{{QUOTA_EXCEEDED},"detail":"{detail}"{violated},"retry-after":{seconds}}}"#)
}

/// The begin of the default body of a 429.
pub(crate) const QUOTA_EXCEEDED: &str = concat!(
    r#""type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
    r#""title":"Quota Exceeded","status":429"#
);

/// The default body of a 503.
pub(crate) fn unavailable_body(seconds: &str) -> String {
    let problem = concat!(
        r#""type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","#,
        r#""title":"Temporary Reduced Capacity","status":503,"#,
        r#""detail":"The server cannot count requests at the moment.""#
    );
    format!(r#"{{{problem},"retry-after":{seconds}}}"#)
}

/// The rate-limit headers: limit, remaining, reset, retry-after.
pub(crate) fn figures(headers: &HeaderMap) -> [Option<&str>; 4] {
    [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "retry-after",
    ]
    .map(|name| headers.get(name).map(|value| value.to_str().unwrap()))
}

/// A response as the headers of its request describe it: `answer` is the status, and `answer-x: y`
/// becomes `x: y`.
pub(crate) fn scripted_response(headers: &HeaderMap) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    for (name, value) in headers {
        match name.as_str().strip_prefix("answer") {
            Some("") => *response.status_mut() = value.to_str().unwrap().parse().unwrap(),
            Some(name) => {
                let name = HeaderName::try_from(&name[1..]).unwrap();
                response.headers_mut().insert(name, value.clone());
            }
            None => {}
        }
    }
    response
}
