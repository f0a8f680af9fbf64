//! Limits that are chosen for each request, such as by the plan of a customer.

mod chosen;
mod chosen_limits;
mod duplicate_limits;
mod no_units;

use axum::body::Body;
use http::{Request, request::Parts};
use tower_sliding_window::{KeyedLimit, Limit};

use crate::support::requests::anyone;

const FREE: Limit = Limit::per_hour("calls", 1);
const PRO: Limit = Limit::per_hour("calls", 3);
const BURST: Limit = Limit::per_second("burst", 10);

/// Chooses by the header `x-plan`: `free`, `pro`, or no limit.
fn by_plan(parts: &Parts) -> Option<Limit> {
    match parts.headers.get("x-plan")?.as_bytes() {
        b"free" => Some(FREE),
        b"pro" => Some(PRO),
        _ => None,
    }
}

/// A choice that always yields the same limit.
fn always(limit: Limit) -> impl Fn(&Parts) -> Limit {
    move |_| limit.clone()
}

/// A limit that is chosen. `None` chooses no limit.
fn chosen(limit: impl Into<Option<Limit>>) -> KeyedLimit {
    let limit = limit.into();
    KeyedLimit::chosen(anyone, move |_: &Parts| limit.clone())
}

fn request_of_plan(plan: &str) -> Request<Body> {
    Request::get("/")
        .header("x-plan", plan)
        .body(Body::empty())
        .unwrap()
}
