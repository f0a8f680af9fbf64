//! Services in layers, boxed, so that a test can stack any number of them.

use std::convert::Infallible;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, service_fn, util::BoxCloneService};
use tower_sliding_window::RateLimitLayer;

use super::requests::hello;

pub(crate) type App = BoxCloneService<Request<Body>, Response<Body>, Infallible>;

pub(crate) fn handler() -> App {
    BoxCloneService::new(service_fn(hello))
}

/// The layer around an app.
pub(crate) fn around(layer: &RateLimitLayer, app: App) -> App {
    BoxCloneService::new(layer.layer(app))
}
