//! The tower middleware: layer, service, and response future.
//!
//! 1. The layer first checks whether it [denies](RateLimitLayer::deny) the request, or lets the
//!    request through [uncounted](RateLimitLayer::exempt).
//! 2. For any other request, the layer computes the cost, extracts the keys,
//!    [chooses](KeyedLimit::chosen) the limits that depend on the request, and decides all limits
//!    in one atomic step.
//! 3. An admitted request goes to the inner service with the [`Decision`](crate::Decision) in its
//!    extensions. The service's response gets `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
//! 4. A rejected request gets a response in the service's place, and the service is not called: see
//!    [`rejection`].
//! 5. If the store cannot decide within the [deadline](RateLimitLayer::deadline), the layer's
//!    failure mode decides: [fail-open](RateLimitLayer::fail_open) lets the request through without
//!    rate-limit headers, [fail-closed](RateLimitLayer::fail_closed) responds with 503, and
//!    [fail-local](RateLimitLayer::fail_local) decides in this process. Then the response has
//!    [`Degraded`] in its extensions. A refusal that this process
//!    [remembers](crate::Limiter::refusal_cache) stands in each of these modes.
//! 6. After the response, a limit can [settle](KeyedLimit::settle) what the request has really
//!    cost, or [count the cost only then](KeyedLimit::count_afterwards). A limit can be tried in
//!    the [shadow](KeyedLimit::in_shadow), where the limit refuses nothing. A limit can be
//!    [hidden](KeyedLimit::hidden) from clients.
//! 7. If layers are stacked, each layer adds to the extensions that the layers further out have
//!    left on a request, and overwrites nothing. The decision in the request's extensions has the
//!    statuses of all layers, and [holds](crate::Decision::holds_place) the places that all layers
//!    have taken. Each layer settles its own admission only. The response shows the visible limit
//!    with the least left. The extensions of the response have the reports of all layers, such as
//!    [`Degraded`]. A rejection shows only a limit that has refused.
//! 8. The error type and the body type of the service stay the same. The body type has to implement
//!    `http_body::Body`.
//! 9. The store charges the request when the response future is polled. A store that [decides at
//!    once](crate::Store::decide_now) charges the request in `Service::call` already, except if the
//!    layer [waits](RateLimitLayer::wait_up_to) for capacity, or if one of its limits
//!    [bans](KeyedLimit::ban) keys.
//!
//! Around a client, the layer can [wait](RateLimitLayer::wait_up_to) for capacity instead of
//! refusing. A limit can [heed](KeyedLimit::heed_upstream) an upstream that asks the client to stay
//! away.
//!
//! # The place of the layer
//!
//! | other layer | outside of the limits | inside of the limits |
//! |---|---|---|
//! | `CorsLayer` | **Recommended.** `CorsLayer` answers preflights itself, and lets browsers read a 429. Expose [`exposed_headers`] | a browser cannot read a 429, since the 429 has no CORS headers. Preflights are counted, and need a key, unless you [`exempt`](RateLimitLayer::exempt) `OPTIONS` |
//! | `TraceLayer` | reports rejections too | reports only requests that the limits let through, and wraps the body: see below |
//! | `TimeoutLayer` | its time includes the wait for the decision. A request that `TimeoutLayer` drops no longer waits in line | its time is the time of the service alone. A request that ends as a 408 or 504 is charged, and its response has figures |
//! | `CompressionLayer` | compresses rejections too | compresses only responses of the service, and wraps the body: see below |
//! | authentication | needed if the key of a limit is the user that the authentication finds | attempts to log in are charged |
//! | `ConcurrencyLimit` | a request holds its permit while the store decides and settles | **Recommended.** A request holds its permit while the store decides, but not while the store settles |
//! | `Buffer` | one task calls the layer for all requests | **Recommended**, and needed for a service that is not `Clone`. A request holds its slot while the store decides |
//!
//! * In a `ServiceBuilder`, and in tonic's `Server::builder()`, the first layer is the outermost.
//!   On an axum `Router`, the last layer is the outermost.
//! * On an axum `Router`, every order compiles if each layer has a call of `Router::layer` of its
//!   own.
//! * In a `ServiceBuilder`, the following order compiles without further code:
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
//! * The limits make the body of a rejection themselves, and cannot make a body in the wrapper of
//!   another layer. `CorsLayer` and `TimeoutLayer` of tower-http 0.7 make bodies, too, and need a
//!   body type with a `Default`. The wrapper of `TraceLayer` has no `Default`, so put `TraceLayer`
//!   outside of `CorsLayer`, of `TimeoutLayer` and of the limits. If a layer that wraps the body
//!   has to be inside of the limits, put the line `.map_response(..)` between the limits and that
//!   layer:
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
//! * On the methods of a route, write two layers as one tuple, the outermost first. With two calls
//!   of `layer`, the compiler cannot infer the error type between the two layers (E0283).
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
//! * If the body of the service cannot be made of a `String`, a closure makes the body of a
//!   rejection: see [`Rejection::problem`].
//! * A layer that is added by `Router::layer` also charges requests that end as a 404 or a 405. A
//!   layer that is added by `Router::route_layer`, or by `layer` on the methods of a route, also
//!   charges requests that end as a 405, but none that end as a 404. A layer that is added by
//!   `route_layer` on the methods of a route charges neither.
//! * Within `Router::nest`, costs, keys and [`exempt`](RateLimitLayer::exempt) see the path without
//!   the prefix of the nest.
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
