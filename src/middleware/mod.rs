//! The tower middleware: layer, service, and what they answer.
//!
//! 1. A request may be [denied](RateLimitLayer::deny), or let through [uncounted](RateLimitLayer::skip).
//! 2. Its keys are extracted, its cost is computed, its limits are [chosen](KeyedLimit::chosen) where they depend
//!    on it, and all of them are decided in one atomic step.
//! 3. Admitted, it goes to the inner service, with the [`Decision`](crate::Decision) in its extensions; the response
//!    gets `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
//! 4. Rejected, it is answered in the service's place, and the service is not called: see [`rejection`].
//! 5. If the store cannot decide within the deadline, the layer's failure mode does. Fail-open lets the request through
//!    without rate-limit headers, fail-closed answers 503, fail-local decides in this process under a
//!    [share](crate::Share) of each limit. Where only a limit could not be [chosen](KeyedLimit::chosen), fail-open leaves it
//!    to the others to decide. The response has [`Degraded`] in its extensions. The deadline is the request's:
//!    what it has waited for a choice, and for the decisions of layers further out, counts. So a request waits for at most
//!    the longest deadline of all layers that it passes. With nothing left of it, a layer waits for 5 ms.
//! 6. The response may say what its request has really cost: a limit [settles](KeyedLimit::settle) what it has reserved, or
//!    [counts afterwards](KeyedLimit::count_afterwards). A limit may be tried in the [shadow](KeyedLimit::in_shadow) first,
//!    where it refuses nothing.
//! 7. A limit may be [hidden](KeyedLimit::hidden) from clients, and a layer says which [headers](RateLimitLayer::headers) it
//!    sends. Where layers are stacked, the response shows the figures of the visible limit with the least left, and a
//!    rejection those of the layer that has made it, if they are visible. The reset has the
//!    [format](RateLimitLayer::reset_format) of the outermost layer that sends figures.
//! 8. The error type and the body type of the service stay what they are.
//! 9. What is decided [without waiting](crate::Store::decide_now) is charged, and the service called, when the layer's
//!    service is called. What the store makes wait for is charged once the response future is polled.
//!
//! Around a client, for calls to others, the layer can [wait](RateLimitLayer::wait_up_to) for room instead of refusing,
//! and [heed](RateLimitLayer::heed_upstream) an upstream that says to stay away.
//!
//! Order matters. Put the layer outside of `Buffer` and `ConcurrencyLimit`, whose permit would otherwise be held while
//! the store decides, and inside of CORS: a browser cannot read a 429 without CORS headers, and needs
//! [`EXPOSED_HEADERS`] exposed to see the figures. Behind `Router::layer`, 404s are charged as well, and behind `layer` on
//! a route's methods 405s; behind `route_layer` they are not. Within `Router::nest`, a request has lost the prefix of its
//! path: costs, keys and [`skip`](RateLimitLayer::skip) see what is left.
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

mod afterwards;
mod asking;
mod claim;
mod degraded;
mod draft;
mod dropped;
mod errand;
mod events;
mod exchange;
pub mod extract;
mod future;
mod gate;
mod headers;
mod keyed_limit;
mod layer;
mod limits;
mod note;
mod number;
mod options;
mod policy;
mod preflight;
pub mod rejection;
mod reset;
mod service;
mod settings;
mod settling;
mod shadow;
mod upstream;
mod waited;

pub use self::{
    degraded::Degraded,
    exchange::Exchange,
    future::ResponseFuture,
    headers::{EXPOSED_HEADERS, HeaderSets},
    keyed_limit::KeyedLimit,
    layer::RateLimitLayer,
    limits::{InvalidLimits, Limits},
    rejection::{JsonResponse, Rejection, RejectionResponse},
    reset::ResetFormat,
    service::RateLimit,
    shadow::{LeftOut, ShadowRefusals},
};
