//! What proxies ask: may this request pass?

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, StatusCode},
    response::{IntoResponse, Response},
};
use tower::{Layer, ServiceExt, service_fn};
use tracing::warn;

use crate::{Service, rules::Rules};

/// The answer to a proxy. A request that no rule is about passes.
pub(crate) async fn ask(State(service): State<Arc<Service>>, request: Request) -> Response {
    let rules = service.rules();
    let Some(questions) = rules.questions.clone() else {
        return (StatusCode::NOT_FOUND, "the rules have no [proxy], so nobody may ask\n").into_response();
    };
    let refusal_status = rules.refusal_status;
    let guarded = questions.layer(service_fn(|request| decide(Arc::clone(&rules), request)));
    let mut response = guarded.oneshot(request).await.unwrap_or_else(|error| match error {});
    let status = response.status();
    if status == StatusCode::BAD_REQUEST && !rules.has_told_of_questions.swap(true, Ordering::Relaxed) {
        warn!(
            "a question of a proxy got a 400, which its client sees as a refusal: does `ask` fit the proxy, and has each request the key of its rule?"
        );
    }
    if let Some(refused) = refusal_status.filter(|_| !status.is_success()) {
        response.headers_mut().insert("x-auth-status", HeaderValue::from(status.as_u16()));
        *response.status_mut() = refused;
    }
    response
}

/// The rules of both readings of the path decide, one after the other.
async fn decide(rules: Arc<Rules>, request: Request<Body>) -> Result<Response, Infallible> {
    let mut answer = StatusCode::OK.into_response();
    for (route, values) in rules.find(request.method(), request.uri().path()) {
        let mut asked = Request::new(Body::empty());
        *asked.method_mut() = request.method().clone();
        *asked.uri_mut() = request.uri().clone();
        *asked.headers_mut() = request.headers().clone();
        *asked.extensions_mut() = request.extensions().clone();
        asked.extensions_mut().insert(values);
        answer = route.guard.clone().oneshot(asked).await?;
        if !answer.status().is_success() {
            break;
        }
    }
    Ok(answer)
}
