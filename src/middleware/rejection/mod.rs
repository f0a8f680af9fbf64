//! The response that a client gets instead of the service's.
//!
//! | rejection | status | headers |
//! |---|---|---|
//! | over a limit | 429 | `Retry-After`, and the [sets](super::HeaderSets) that the layer sends |
//! | cost above the limit | 429 | none of these, since waiting does not help |
//! | no key | 400; 401 with `WWW-Authenticate` for API keys; 500 if the server does not know its peers | |
//! | key on a list of [denied](super::RateLimitLayer::deny) keys | 403 | |
//! | no decision, or no limit could be chosen, while failing closed; or a cost above the [share](crate::Share), while failing local | 503 | `Retry-After` of 1 to 5 s, at random so that clients do not all return at once |
//!
//! All have `Cache-Control: no-store`, [problem details](JsonResponse) as their body, and the [`Rejection`] in the response's extensions, so that outer
//! layers see the reason. If the store has not decided, [`Degraded`](super::Degraded) is there as well.
//!
//! Two refusals have no figures: one by [hidden](super::KeyedLimit::hidden) limits alone, and one by a layer
//! that [does not send them](super::RateLimitLayer::headers). Both have `Retry-After`.
//!
//! For clients that speak gRPC, there is `GrpcResponse`: see [`guide::grpc`](crate::guide::grpc).
//! For plain text, use [`respond_with(TextResponse)`](super::RateLimitLayer::respond_with). To send any other response, give a
//! closure to [`RateLimitLayer::on_rejection`](super::RateLimitLayer::on_rejection). It gets the status and all headers but
//! `Content-Type`. [`Rejection::detail`] is a sentence for clients. The closure's rejection includes hidden limits;
//! [`Decision::visible`](crate::Decision::visible) is the limit that clients may see.
//!
//! [`JsonResponse`] and [`TextResponse`] need a body that can be made of a `String`. For other bodies, use
//! [`RateLimitLayer::rejection_body`](super::RateLimitLayer::rejection_body) after `respond_with`.
//!
//! ```
//! use axum::body::Body;
//! use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, Rejection};
//!
//! let layer = RateLimitLayer::new(MemoryStore::new())
//!     .limit(Limit::per_minute("login", 5).by(PeerIp::new()))
//!     .on_rejection(|rejection, head| match rejection {
//!         Rejection::Limited(_) => head.map(|()| Body::from("Slow down, please.")),
//!         _ => head.map(|()| Body::empty()),
//!     });
//! ```
//!
//! With axum, a head and a responder make a response: `(head, Json(..)).into_response()`.
//!
//! # In a handler
//!
//! With axum, a [`Rejection`] is a response. So a handler that calls a [`Limiter`](crate::Limiter) can return it, and responds
//! as a layer that fails closed does. To go on without a decision, handle the error of the limiter instead of passing it on
//! with `?`. [`write_headers`](crate::Decision::write_headers) writes the figures of an admission. A layer around the handler
//! leaves the figures of its rejection as they are: its reset is in seconds from now.
//! With tonic, a [`Rejection`] becomes a `Status`: see [`guide::grpc`](crate::guide::grpc#in-a-method).
//!
//! ```
//! use axum::extract::State;
//! use tower_sliding_window::{Limit, Limiter, MemoryStore, Rejection};
//!
//! const REPORTS: Limit = Limit::per_hour("reports", 100);
//!
//! async fn report(State(limiter): State<Limiter>, rows: String) -> Result<&'static str, Rejection> {
//!     // The body is needed to know the cost.
//!     let cost = rows.lines().count() as u64;
//!     match limiter.check(&REPORTS, "everybody", cost).await? {
//!         decision if decision.is_allowed() => Ok("done"),
//!         refusal => Err(Rejection::Limited(refusal)),
//!     }
//! }
//! # use axum::{Router, body::Body, routing::post};
//! # use http::Request;
//! # use tower::ServiceExt;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let app = Router::new().route("/", post(report)).with_state(Limiter::new(MemoryStore::new()));
//! # let send = |rows: usize| app.clone().oneshot(Request::post("/").body(Body::from("\n".repeat(rows))).unwrap());
//! # assert_eq!(send(60).await?.status(), 200);
//! # let refused = send(60).await?;
//! # assert_eq!((refused.status().as_u16(), &refused.headers()["x-ratelimit-remaining"]), (429, &"40".parse()?));
//! # assert!(!send(101).await?.headers().contains_key("retry-after"));
//! # Ok(()) }
//! ```

#[cfg(feature = "grpc")]
mod grpc;
mod reason;
mod response;
pub(super) mod shadow;
mod with_body;

#[cfg(feature = "grpc")]
pub use self::grpc::{GrpcOr, GrpcResponse};
pub use self::{
    reason::Rejection,
    response::{JsonResponse, RejectionResponse, TextResponse},
    with_body::WithBody,
};
