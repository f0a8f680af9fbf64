//! Limits that are chosen for each request, such as by the plan of a customer.

mod chosen_limits;
mod chosen_now;
mod duplicate_limits;
mod failed_choices;
mod fallbacks;

use std::{
    convert::Infallible,
    future::{Ready, ready},
};

use axum::body::Body;
use http::{Request, request::Parts};
use tower_sliding_window::{KeyedLimit, Limit};

use crate::support::requests::anyone;

const FREE: Limit = Limit::per_hour("calls", 1);
const PRO: Limit = Limit::per_hour("calls", 3);
const BURST: Limit = Limit::per_second("burst", 10);

/// A choice that always yields the same limit.
fn always(limit: Limit) -> impl Fn(&Parts) -> Ready<Result<Limit, Infallible>> {
    move |_| ready(Ok(limit.clone()))
}

/// A limit whose choice takes no time. `None` chooses no limit.
fn chosen(limit: impl Into<Option<Limit>>) -> KeyedLimit {
    let limit = limit.into();
    KeyedLimit::chosen(anyone, move |_: &Parts| ready(Ok::<_, Infallible>(limit.clone())))
}

fn request_of_plan(plan: &str) -> Request<Body> {
    Request::get("/").header("x-plan", plan).body(Body::empty()).unwrap()
}
