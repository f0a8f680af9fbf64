//! The tower middleware: layer, service, and response future.
//!
//! 1. The layer first checks whether the request is [denied](RateLimitLayer::deny), or
//!    [exempt](RateLimitLayer::exempt) and thus passes uncounted.
//! 2. For any other request, it computes the cost, extracts the keys, [chooses](KeyedLimit::chosen)
//!    the limits that depend on the request, and decides all limits in one atomic step.
//! 3. An admitted request goes to the inner service with the [`Decision`](crate::Decision) in its
//!    extensions. The response gets `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
//! 4. A rejected request gets a response without the service being called: see [`rejection`].
//! 5. If the store cannot decide within the [deadline](RateLimitLayer::deadline), the failure mode
//!    decides: [fail-open](RateLimitLayer::fail_open) lets the request pass without rate-limit
//!    headers, [fail-closed](RateLimitLayer::fail_closed) responds with 503, and
//!    [fail-local](RateLimitLayer::fail_local) decides in this process. The response then has
//!    [`Degraded`] in its extensions. A refusal in the [refusal
//!    cache](crate::Limiter::refusal_cache) applies in every mode.
//! 6. After the response, a limit can [settle](KeyedLimit::settle) the actual cost, or [count the
//!    cost only then](KeyedLimit::count_afterwards). A limit can run in [shadow
//!    mode](KeyedLimit::in_shadow), where it does not refuse, or be [hidden](KeyedLimit::hidden)
//!    from clients.
//! 7. Stacked layers add to the extensions that outer layers have left on a request, and do not
//!    overwrite them. The decision in the request's extensions has the statuses of all layers, and
//!    [holds](crate::Decision::holds_place) the places of all layers. Each layer settles only its
//!    own admission. The response shows the visible limit with the least left, and its extensions
//!    have all layers' reports, such as [`Degraded`]. A rejection shows only a limit that has
//!    refused.
//! 8. The service's error and body types stay the same. The body must implement `http_body::Body`.
//! 9. The store charges the request when the response future is polled. A store that [decides at
//!    once](crate::Store::decide_now) charges the request already in `Service::call`, unless the
//!    layer [waits](RateLimitLayer::wait_up_to) for capacity or one of its limits
//!    [bans](KeyedLimit::ban) keys.
//!
//! Around a client, the layer can [wait](RateLimitLayer::wait_up_to) for capacity instead of
//! refusing, and a limit can [heed](KeyedLimit::heed_upstream) an upstream that asks the client to
//! back off.
//!
//! # The place of the layer
//!
//! | other layer | outside the limits | inside the limits |
//! |---|---|---|
//! | `CorsLayer` | **Recommended.** It answers preflights itself, and lets browsers read a 429. Expose [`exposed_headers`] | browsers cannot read a 429, which has no CORS headers. Preflights are counted, and need a key, unless you [`exempt`](RateLimitLayer::exempt) `OPTIONS` |
//! | `TraceLayer` | reports rejections too | reports only requests that pass the limits, and wraps the body: see below |
//! | `TimeoutLayer` | its time includes the wait for the decision. A request that it drops no longer waits in line | its time covers the service alone. A request that ends as a 408 or 504 is charged, and its response has figures |
//! | `CompressionLayer` | compresses rejections too | compresses only the service's responses, and wraps the body: see below |
//! | authentication | needed if a limit's key is the authenticated user | login attempts are charged |
//! | `ConcurrencyLimit` | a request holds its permit while the store decides and settles | **Recommended.** A request holds its permit while the store decides, but not while the store settles |
//! | `Buffer` | one task calls the layer for all requests | **Recommended**, and needed for a service that is not `Clone`. A request holds its slot while the store decides |
//!
//! * In a `ServiceBuilder`, and in tonic's `Server::builder()`, the first layer is the outermost.
//!   On an axum `Router`, the last layer is the outermost.
//! * On an axum `Router`, every order compiles if each layer has its own `Router::layer` call.
//! * In a `ServiceBuilder`, this order compiles as it is:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use std::time::Duration;
//! # use axum::{Router, body::Body, routing::get};
//! # use http::{Request, StatusCode};
//! # use tower::{ServiceBuilder, ServiceExt};
//! # use tower_http::{compression::CompressionLayer, cors::CorsLayer, timeout::TimeoutLayer, trace::TraceLayer};
//! # use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer, middleware::exposed_headers};
//! # let limits = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("calls", 1).by(Everyone));
//! let stack = ServiceBuilder::new()
//!     .layer(TraceLayer::new_for_http())
//!     .layer(CorsLayer::permissive().expose_headers(exposed_headers()))
//!     .layer(CompressionLayer::new())
//!     .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(10)))
//!     .layer(limits);
//! let app = Router::new().route("/", get(|| async { "hello" })).layer(stack);
//! # for status in [200, 429] {
//! #     let response = app.clone().oneshot(Request::new(Body::empty())).await?;
//! #     assert_eq!(response.status(), status);
//! # }
//! # Ok(()) }
//! ```
//!
//! * The limits make a rejection's body themselves, and cannot make one in another layer's wrapper
//!   type. `CorsLayer` and `TimeoutLayer` from tower-http 0.7 make bodies too, and need a body type
//!   with a `Default`. The wrapper from `TraceLayer` does not have one, so put it outside
//!   `CorsLayer`, `TimeoutLayer` and the limits. If a layer that wraps the body must be inside the
//!   limits, put `.map_response(..)` between the two:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use axum::{Router, body::Body, routing::get};
//! # use http::{Request, Response};
//! # use tower::{ServiceBuilder, ServiceExt};
//! # use tower_http::{compression::CompressionLayer, cors::CorsLayer, trace::TraceLayer};
//! # use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer, middleware::exposed_headers};
//! # let limits = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("calls", 1).by(Everyone));
//! let stack = ServiceBuilder::new()
//!     .layer(CorsLayer::permissive().expose_headers(exposed_headers()))
//!     .layer(limits)
//!     .map_response(|response: Response<_>| response.map(Body::new))
//!     .layer(TraceLayer::new_for_http())
//!     .layer(CompressionLayer::new());
//! # let app = Router::new().route("/", get(|| async { "hello" })).layer(stack);
//! # for status in [200, 429] {
//! #     let response = app.clone().oneshot(Request::new(Body::empty())).await?;
//! #     assert_eq!(response.status(), status);
//! # }
//! # Ok(()) }
//! ```
//!
//! * On a route's methods, write two layers as one tuple, the outermost first. With two calls to
//!   `layer`, the compiler cannot infer the error type between them (E0283).
//!
//! ```
//! # use axum::{Router, routing::get};
//! # use tower_http::cors::CorsLayer;
//! # use tower_sliding_window::{Everyone, Limit, MemoryStore, RateLimitLayer};
//! # let limits = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("calls", 1).by(Everyone));
//! let route = get(|| async { "hello" }).layer((CorsLayer::permissive(), limits));
//! # let _: Router = Router::new().route("/", route);
//! ```
//!
//! * If the service's body cannot be made from a `String`, a closure makes the rejection's body:
//!   see [`Rejection::problem`].
//! * A layer added by `Router::layer` also charges requests that end as a 404 or 405. One added by
//!   `Router::route_layer`, or by `layer` on a route's methods, also charges those that end as a
//!   405, but not a 404. One added by `route_layer` on a route's methods charges neither.
//! * Within `Router::nest`, costs, keys and [`exempt`](RateLimitLayer::exempt) see the path without
//!   the nest's prefix.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::net::SocketAddr;
//! use axum::{Router, body::Body, extract::connect_info::MockConnectInfo, routing::get};
//! use http::{Request, request::Parts};
//! use tower::ServiceExt;
//! use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer};
//!
//! let layer = RateLimitLayer::new(MemoryStore::new())
//!     .limit(Limit::per_second("burst", 10).by(PeerIp::new()))
//!     .limit(Limit::per_hour("hourly", 12).by(PeerIp::new()))
//!     .cost(|request: &Parts| if request.uri.path() == "/search" { 10 } else { 1 });
//!
//! let app = Router::new()
//!     .route("/search", get(|| async { "found" }))
//!     .layer(layer)
//!     .layer(MockConnectInfo(SocketAddr::from(([203, 0, 113, 7], 50_000))));
//!
//! let search = || Request::get("/search").body(Body::empty());
//! let found = app.clone().oneshot(search()?).await?;
//! assert_eq!(found.headers()["x-ratelimit-remaining"], "0");
//!
//! let refused = app.oneshot(search()?).await?;
//! assert_eq!(refused.status(), 429);
//! # Ok(()) }
//! ```

mod events;
pub mod extract;
mod headers;
mod layer;
mod options;
mod plan;
mod policy;
pub mod rejection;
mod response;
mod service;

#[cfg(feature = "grpc")]
pub use self::rejection::{GrpcOr, GrpcResponse};
pub use self::{
    events::Degraded,
    headers::{HeaderSets, exposed_headers},
    layer::RateLimitLayer,
    policy::{Exchange, KeyedLimit},
    rejection::{JsonResponse, Rejection, RejectionResponse, ShadowRefusals},
    service::{RateLimit, ResponseFuture},
};
