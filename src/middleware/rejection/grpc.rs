//! Responses to rejected gRPC calls.

use std::time::Duration;

use http::{
    HeaderMap, HeaderValue, Response, StatusCode,
    header::{CONTENT_TYPE, RETRY_AFTER},
    request::Parts,
};
use tonic::{Code, Status, metadata::MetadataMap};
use tonic_types::{ErrorDetails, StatusExt};

use super::{super::headers::number, Rejection, response::RejectionResponse};

/// Responds to rejected requests with a gRPC status, for services that speak gRPC. The response is
/// an HTTP 200 with the gRPC status in its headers ("trailers-only"), and no body.
///
/// | rejection | code |
/// |---|---|
/// | over a limit, cost above the limit | `RESOURCE_EXHAUSTED` (8) |
/// | no decision, while failing closed | `UNAVAILABLE` (14) |
/// | a key error with the HTTP status 401 | `UNAUTHENTICATED` (16) |
/// | a key error with 403, or a [denied](crate::RateLimitLayer::deny) request | `PERMISSION_DENIED` (7) |
/// | a key error with 429 | `RESOURCE_EXHAUSTED` (8) |
/// | a key error with 503 | `UNAVAILABLE` (14) |
/// | a key error with another 4xx | `INVALID_ARGUMENT` (3) |
/// | a key error with any other status, or a setup mistake | `INTERNAL` (13) |
///
/// * The message is [`Rejection::detail`]: a sentence for clients.
/// * `grpc-retry-pushback-ms` ([gRFC A6]) is the wait in milliseconds, rounded up. It is -1 if
///   waiting does not help, or if the wait is longer than 24.8 days, since the field is 32-bit.
///   After a -1, clients with a retry policy do not retry.
/// * `grpc-status-details-bin` has a `google.rpc.RetryInfo` with the same wait if waiting helps,
///   and a `google.rpc.QuotaFailure` with one violation per limit that has refused, except
///   [hidden](crate::KeyedLimit::hidden) limits. A violation's subject is the limit's name.
/// * The headers that other responders get, such as `retry-after` and the
///   [figures](crate::HeaderSets), become metadata of the gRPC status.
/// * A gRPC-Web request gets the same headers, with a gRPC-Web content type. Scripts in a browser
///   can read the status only if CORS exposes `grpc-status`, `grpc-message` and
///   `grpc-status-details-bin`.
///
/// `GrpcResponse` answers every request in gRPC, and works with every body that has a `Default`,
/// such as tonic's and axum's. If the server answers HTTP as well, use [`GrpcOr`].
///
/// ```
/// use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, middleware::GrpcResponse};
///
/// let layer = RateLimitLayer::new(MemoryStore::new())
///     .limit(Limit::per_minute("calls", 600).by(PeerIp::new()))
///     .respond_with(GrpcResponse);
/// ```
///
/// [gRFC A6]: https://github.com/grpc/proposal/blob/master/A6-client-retries.md#pushback
#[derive(Clone, Copy, Debug, Default)]
pub struct GrpcResponse;

/// Responds to gRPC requests with a [`GrpcResponse`], and to all others with the inner responder. A
/// request is gRPC if its `Content-Type` is `application/grpc`, `application/grpc-web` or
/// `application/grpc-web-text`, with or without a suffix such as `+proto`.
/// [`guide::grpc`](crate::guide::grpc#http-and-grpc-on-one-server) has complete servers.
///
/// ```
/// use axum::{Router, body::Body, extract::connect_info::MockConnectInfo, routing::get};
/// use http::Request;
/// use std::net::SocketAddr;
/// use tower::ServiceExt;
/// use tower_sliding_window::{
///     Limit, MemoryStore, PeerIp, RateLimitLayer, middleware::{GrpcOr, JsonResponse},
/// };
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = RateLimitLayer::new(MemoryStore::new())
///     .limit(Limit::per_minute("requests", 1).by(PeerIp::new()))
///     .respond_with(GrpcOr(JsonResponse));
///
/// let app = Router::new()
///     .route("/", get(|| async { "hello" }))
///     .layer(layer)
///     .layer(MockConnectInfo(SocketAddr::from(([203, 0, 113, 7], 50_000))));
/// app.clone().oneshot(Request::get("/").body(Body::empty())?).await?;
///
/// let http = app.clone().oneshot(Request::get("/").body(Body::empty())?).await?;
/// assert_eq!(http.status(), 429);
///
/// let call = Request::post("/").header("content-type", "application/grpc").body(Body::empty())?;
/// let grpc = app.oneshot(call).await?;
/// assert_eq!((grpc.status().as_u16(), &grpc.headers()["grpc-status"]), (200, &"8".parse()?));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct GrpcOr<R>(
    /// Responds to requests that are not gRPC.
    pub R,
);

impl<B: Default> RejectionResponse<B> for GrpcResponse {
    fn respond(&self, rejection: &Rejection, request: &Parts, head: Response<()>) -> Response<B> {
        let content_type = content_type(request).unwrap_or(GRPC);
        let mut response = rejection.to_grpc(head.into_parts().0.headers).into_http();
        response
            .headers_mut()
            .insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        response
    }
}

impl<B: Default, R: RejectionResponse<B>> RejectionResponse<B> for GrpcOr<R> {
    fn respond(&self, rejection: &Rejection, request: &Parts, head: Response<()>) -> Response<B> {
        match content_type(request) {
            Some(_) => GrpcResponse.respond(rejection, request, head),
            None => self.0.respond(rejection, request, head),
        }
    }
}

const GRPC: &str = "application/grpc";

/// Pairs of content types: the request's content type without a suffix, and the response's.
const CONTENT_TYPES: [(&str, &str); 3] = [
    (GRPC, GRPC),
    ("application/grpc-web", "application/grpc-web+proto"),
    (
        "application/grpc-web-text",
        "application/grpc-web-text+proto",
    ),
];

/// The response's content type. `None` if the request is not gRPC.
fn content_type(request: &Parts) -> Option<&'static str> {
    let content_type = request.headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let without_suffix = content_type.split(['+', ';']).next()?.trim();
    let mut known = CONTENT_TYPES.into_iter();
    known.find_map(|(of_request, of_response)| {
        of_request
            .eq_ignore_ascii_case(without_suffix)
            .then_some(of_response)
    })
}

impl Rejection {
    /// The rejection as a gRPC status, with these headers as metadata.
    pub(crate) fn to_grpc(&self, headers: HeaderMap) -> Status {
        let wait = self.wait(&headers);
        let mut details = ErrorDetails::new();
        if let Some(wait) = wait {
            details.set_retry_info(Some(wait));
        }
        let violation = match self {
            Self::NeverFits(_) => "The call costs more than the limit ever admits.",
            _ => "The limit has too few units left.",
        };
        self.violated_limits(|limit| {
            details.add_quota_failure_violation(limit, violation);
        });
        let mut metadata = MetadataMap::from_headers(headers);
        let pushback = wait
            .and_then(|wait| i32::try_from(wait.as_millis()).ok())
            .unwrap_or(-1);
        metadata.insert("grpc-retry-pushback-ms", pushback.into());
        Status::with_error_details_and_metadata(self.grpc_code(), self.detail(), details, metadata)
    }

    fn grpc_code(&self) -> Code {
        match self.status() {
            StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
            StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
            StatusCode::UNAUTHORIZED => Code::Unauthenticated,
            StatusCode::FORBIDDEN => Code::PermissionDenied,
            status if status.is_client_error() => Code::InvalidArgument,
            _ => Code::Internal,
        }
    }

    /// How long the client should wait, in whole milliseconds; `None` if waiting does not help.
    fn wait(&self, headers: &HeaderMap) -> Option<Duration> {
        match self {
            Self::Limited(decision) | Self::Banned(decision) => {
                let millis = decision.retry_after()?.as_nanos().div_ceil(1_000_000);
                let millis = u64::try_from(millis).unwrap_or(u64::MAX);
                // A wait of 0 would let some clients come back at once.
                Some(Duration::from_millis(millis.max(1)))
            }
            Self::Unavailable(_) => number(headers.get(RETRY_AFTER)?).map(Duration::from_secs),
            Self::NeverFits(_) | Self::NoKey(_) | Self::Denied | Self::NotSetUp(_) => None,
        }
    }
}
