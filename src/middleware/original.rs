//! Replaces the question of a proxy by the request that the proxy asks about.
//!
//! 1. Only a proxy may ask. The peer is found as [`ClientIp`] finds it.
//! 2. The method and the path are read from exactly one source. A proxy passes on the headers that
//!    it does not overwrite, so a client could write a path of its own choice into any other
//!    source.
//! 3. All other known headers with paths and methods are removed from the question, and so is the
//!    body of the question.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode, Uri, request::Parts, uri::PathAndQuery};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    HeaderSets, Rejection,
    events::Events,
    extract::{ClientIp, KeyError, header_name},
    rejection::{JsonResponse, RejectionResponse},
};
use crate::error::ConfigError;

/// The headers that are removed: those from which proxies and applications take a method or a path,
/// and those of a body.
const REMOVED: [&str; 9] = [
    "x-forwarded-method",
    "x-forwarded-uri",
    "x-original-method",
    "x-original-uri",
    "x-original-url",
    "x-rewrite-url",
    "content-length",
    "transfer-encoding",
    "expect",
];

/// Turns a proxy's question into the request that the proxy asks about. Such questions are those of
/// nginx's `auth_request`, Caddy's `forward_auth`, Traefik's `ForwardAuth`, and Envoy's
/// `ext_authz`.
///
/// The service gets the method, the path and the query of the request that the proxy asks about. So
/// keys, costs, [`skip`](crate::RateLimitLayer::skip) and routes work as in front of the
/// application. Wrap the whole router, since `Router::layer` acts after routing:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::net::SocketAddr;
/// use axum::{Router, body::Body, routing};
/// use http::Request;
/// use tower::{Layer, ServiceExt};
/// use tower_sliding_window::{ClientIp, Limit, MemoryStore, RateLimitLayer, middleware::OriginalRequestLayer};
///
/// let proxies = ["127.0.0.1"];
/// let login = RateLimitLayer::new(MemoryStore::new())
///     .limit(Limit::per_minute("login", 5).by(ClientIp::behind(proxies)?));
/// // An answer of 200 lets the request pass; Envoy takes no other for it. `/login` alone is limited.
/// let routes = Router::new()
///     .route("/login", routing::post(|| async {}).layer(login))
///     .fallback(|| async {});
/// let answers = OriginalRequestLayer::behind(proxies)?.layer(routes);
///
/// // axum::serve(listener, axum::ServiceExt::into_make_service_with_connect_info::<SocketAddr>(answers)).await?;
/// let question = || {
///     Request::get("/auth")
///         .header("x-forwarded-method", "POST")
///         .header("x-forwarded-uri", "/login?from=home")
///         .header("x-forwarded-for", "203.0.113.7")
///         .extension(SocketAddr::from(([127, 0, 0, 1], 50_000)))
///         .body(Body::empty())
/// };
/// for status in [200, 200, 200, 200, 200, 429] {
///     assert_eq!(answers.clone().oneshot(question()?).await?.status(), status);
/// }
/// # Ok(()) }
/// ```
///
/// * A peer that is none of the proxies gets a 403. A question gets a 400 if one of the two headers
///   is missing, is repeated, or is no method or no path. In both cases the service is not called,
///   so nothing is charged. The body of a 400 or 403 is [problem details](JsonResponse).
/// * All other headers that are known to carry a path or a method are removed, and so are the body,
///   `Content-Length`, `Transfer-Encoding` and `Expect`.
/// * A peer without an address, as over a [Unix
///   socket](crate::guide::behind_a_proxy#a-unix-socket), gets a 500 until you say what the peer
///   is.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct OriginalRequestLayer {
    proxies: ClientIp,
    /// The headers that the method and the path are read from. `None` if the question's own method
    /// and path are read.
    pair: Option<[HeaderName; 2]>,
    /// The prefix that the proxy puts before the path, and that the layer removes.
    prefix: String,
}

impl OriginalRequestLayer {
    /// Reads `X-Forwarded-Method` and `X-Forwarded-Uri`, as Caddy and Traefik write them, from
    /// peers at these addresses or in these ranges.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if a text is neither a range nor an address.
    pub fn behind<R: AsRef<str>>(proxies: impl IntoIterator<Item = R>) -> Result<Self, ConfigError> {
        let layer = Self { proxies: ClientIp::behind(proxies)?, pair: None, prefix: String::new() };
        Ok(layer.headers("x-forwarded-method", "x-forwarded-uri"))
    }

    /// Reads these two headers instead, such as `x-original-method` and `x-original-uri`. The proxy
    /// must overwrite both.
    ///
    /// # Panics
    ///
    /// If `method` or `uri` is a text that is not a header name. A call with [`HeaderName`]s never
    /// panics.
    #[track_caller]
    pub fn headers(mut self, method: impl TryInto<HeaderName>, uri: impl TryInto<HeaderName>) -> Self {
        self.pair = Some([header_name(method), header_name(uri)]);
        self
    }

    /// Reads the question's own method and path, for a proxy that sends them as they are, as Envoy
    /// does. `prefix` is a path that the proxy puts in front, such as `/auth`, and that the layer
    /// removes. An empty `prefix` removes nothing.
    ///
    /// # Panics
    ///
    /// If `prefix` is not empty, and does not begin with `/`.
    #[track_caller]
    pub fn as_sent(mut self, prefix: &str) -> Self {
        assert!(prefix.is_empty() || prefix.starts_with('/'), "a prefix must begin with `/`, or be empty");
        (self.pair, self.prefix) = (None, prefix.trim_end_matches('/').to_owned());
        self
    }

    /// Turns a question into the request that the proxy asks about.
    fn read(&self, parts: &mut Parts) -> Result<(), KeyError> {
        if !self.proxies.is_behind(parts)? {
            return Err(KeyError::invalid("peer", "no proxy of this service").with_status(StatusCode::FORBIDDEN));
        }
        if let Some([method, path]) = &self.pair {
            let read = Method::from_bytes(single_line(&parts.headers, method)?);
            parts.method = read.map_err(|_| KeyError::invalid(method.to_string(), "no method"))?;
            parts.uri = path_of(path.as_str(), single_line(&parts.headers, path)?)?;
        } else {
            let path = parts.uri.path_and_query().map_or("", PathAndQuery::as_str).strip_prefix(&self.prefix);
            parts.uri = path_of("path", path.unwrap_or_default().as_bytes())?;
        }
        self.pair.iter().flatten().for_each(|name| drop(parts.headers.remove(name)));
        REMOVED.iter().for_each(|name| drop(parts.headers.remove(*name)));
        Ok(())
    }
}

/// The value of a header that must be present exactly once. Its length is not bounded, since a path
/// may be long.
fn single_line<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a [u8], KeyError> {
    let mut lines = headers.get_all(name).into_iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => Ok(line.as_bytes()),
        (None, _) => Err(KeyError::missing(name.to_string())),
        _ => Err(KeyError::invalid(name.to_string(), "repeated")),
    }
}

/// A path with its query, as a request to an application has it.
fn path_of(name: &str, text: &[u8]) -> Result<Uri, KeyError> {
    // The parser of `http` accepts a path without a slash at its start, and drops a fragment.
    let path = PathAndQuery::try_from(text).ok().filter(|_| text.starts_with(b"/") && !text.contains(&b'#'));
    path.map(Uri::from).ok_or_else(|| KeyError::invalid(name.to_owned(), "no path"))
}

impl<S> Layer<S> for OriginalRequestLayer {
    type Service = OriginalRequest<S>;

    fn layer(&self, inner: S) -> Self::Service {
        OriginalRequest { inner, layer: Arc::new(self.clone()), events: Arc::default() }
    }
}

/// A service that gets the requests that a proxy asks about. See [`OriginalRequestLayer`].
#[derive(Clone, Debug)]
pub struct OriginalRequest<S> {
    inner: S,
    layer: Arc<OriginalRequestLayer>,
    events: Arc<Events>,
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for OriginalRequest<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    ReqBody: Default,
    ResBody: Body + From<String>,
{
    type Response = Response<ResBody>;
    type Error = S::Error;
    type Future = OriginalResponse<S::Future, ResBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, _) = request.into_parts();
        let Err(error) = self.layer.read(&mut parts) else {
            let response = self.inner.call(Request::from_parts(parts, ReqBody::default()));
            return OriginalResponse { asked: Some(response), rejected: None };
        };
        // The ready instance of the inner service may hold a permit, so a clone replaces it.
        self.inner = self.inner.clone();
        let rejection = Rejection::NoKey(error);
        self.events.rejected(&rejection);
        let mut response = JsonResponse.respond(&rejection, &parts, rejection.head(HeaderSets::NONE));
        response.extensions_mut().insert(rejection);
        OriginalResponse { asked: None, rejected: Some(response) }
    }
}

pin_project! {
    /// The response future of [`OriginalRequest`].
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub struct OriginalResponse<F, B> {
        // `None` after a rejection.
        #[pin]
        asked: Option<F>,
        rejected: Option<Response<B>>,
    }
}

impl<F, E, B> Future for OriginalResponse<F, B>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        match this.asked.as_pin_mut() {
            Some(asked) => asked.poll(cx),
            // Panics if the future is polled after it was ready. No request can cause this panic.
            None => Poll::Ready(Ok(this.rejected.take().unwrap_or_else(|| panic!("polled after completion")))),
        }
    }
}
