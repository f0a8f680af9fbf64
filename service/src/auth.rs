//! What proxies ask: may this request pass?

use std::sync::{Arc, atomic::Ordering};

use axum::{
    extract::{Request, State},
    http::{HeaderValue, StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use tower_sliding_window::{Charge, Check, HeaderSets, Rejection};
use tracing::warn;

use crate::{
    Service, decide,
    rule::{Route, Rule},
    rules::Rules,
};

/// The answer to a proxy. A request that no rule is about passes.
pub(crate) async fn ask(State(service): State<Arc<Service>>, request: Request) -> Response {
    let rules = service.rules();
    let Some(questions) = &rules.questions else {
        return (
            StatusCode::NOT_FOUND,
            "the rules have no [proxy], so nobody may ask\n",
        )
            .into_response();
    };
    let (mut parts, _) = request.into_parts();
    let answered = match questions.read(&mut parts) {
        Ok(()) => answer(&service, &rules, parts).await,
        Err(error) => Err(Rejection::NoKey(error)),
    };
    let mut response = answered.into_response();
    let status = response.status();
    if status == StatusCode::BAD_REQUEST
        && !rules.has_told_of_questions.swap(true, Ordering::Relaxed)
    {
        warn!(
            "a question of a proxy got a 400, which its client sees as a refusal: does `ask` fit the proxy, and has each request the key of its rule?"
        );
    }
    if let Some(refused) = rules.refusal_status.filter(|_| !status.is_success()) {
        response
            .headers_mut()
            .insert("x-auth-status", HeaderValue::from(status.as_u16()));
        *response.status_mut() = refused;
    }
    response
}

/// Decides the limits of all rules that a reading of the path finds at once. A limit that several
/// of them have costs the most that one of them says.
async fn answer(service: &Service, rules: &Rules, mut parts: Parts) -> Result<Response, Rejection> {
    let mut charges = Vec::<Charge>::new();
    let mut charged = Vec::<&Rule>::new();
    for (rule, values) in rules.find(&parts.method, parts.uri.path()) {
        parts.extensions.insert(values);
        let cost = rule
            .route
            .as_ref()
            .map_or(Ok(1), |route: &Route| route.cost(&parts))?;
        charged.push(rule);
        for keyed in &rule.limits {
            let charge = keyed.charge(keyed.key.of_request(&parts)?, cost)?;
            match charges
                .iter_mut()
                .find(|other| (other.limit(), other.key()) == (charge.limit(), charge.key()))
            {
                Some(other) if other.cost() >= charge.cost() => {}
                Some(other) => *other = charge,
                None => charges.push(charge),
            }
        }
    }
    let mut response = StatusCode::OK.into_response();
    let mut charges = charges.into_iter();
    let Some(first) = charges.next() else {
        return Ok(response);
    };
    let check = charges
        .try_fold(Check::new(first), Check::and)
        .map_err(Rejection::NotSetUp)?;
    match decide(&charged, &service.limiter, check).await? {
        Ok(decision) if decision.is_allowed() => {
            decision.write_headers(HeaderSets::X_RATE_LIMIT, response.headers_mut());
            Ok(response)
        }
        Ok(decision) => Err(Rejection::Limited(decision)),
        Err(_) => Ok(response),
    }
}
