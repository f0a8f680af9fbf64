//! The known body types: how each holds the places of concurrent limits until it ends, and how it
//! is emptied.

use std::{
    any::{Any, type_name},
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{Response, header::CONTENT_LENGTH};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{
    Empty, Full,
    combinators::{BoxBody, UnsyncBoxBody},
};
use pin_project_lite::pin_project;

use crate::{decision::Decision, error::ConfigError, middleware::rejection::Rejection};

pin_project! {
    /// A body, and the decision that holds places until the body ends. A `body` of `None` is empty.
    struct Holding<B> {
        #[pin]
        body: Option<B>,
        decision: Option<Decision>,
    }
}

impl<B: Body> Body for Holding<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let Some(body) = this.body.as_pin_mut() else {
            return Poll::Ready(None);
        };
        let frame = ready!(body.poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            *this.decision = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl<B> Holding<B> {
    fn new(body: B, decision: Option<&Decision>) -> Self {
        Self {
            body: decision.map(|_| body),
            decision: decision.cloned(),
        }
    }
}

/// Removes the content from the response to a `HEAD` request. The headers stay as they would be for
/// a `GET`. If the content stayed too, hyper would send it over HTTP/2. An unknown body type keeps
/// its content.
pub(super) fn without_content<B: Body + 'static>(mut response: Response<B>) -> Response<B> {
    if let Some(length @ 1..) = response.body().size_hint().exact()
        && !response.headers().contains_key(CONTENT_LENGTH)
    {
        response.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
    response.map(|body| changed(body, None))
}

/// Makes a body hold a decision's places until it ends or is dropped. A fully buffered body does
/// not hold places, since a connection takes it at once. Without a decision, the body becomes
/// empty. An unknown body type stays as it is.
#[cold]
pub(super) fn changed<B: Body + 'static>(body: B, decision: Option<&Decision>) -> B {
    let mut body = Some(body);
    change(&mut body, decision);
    body.unwrap_or_else(|| unreachable!("only replaced"))
}

/// True if the body type is known: it can hold places, or it is fully buffered and does not need
/// to.
pub(super) fn is_known<B: Body + 'static>() -> bool {
    change::<B>(&mut None, None)
}

/// The rejection for a request with places that this body type cannot hold.
#[cold]
pub(super) fn unknown<B>() -> Rejection {
    let problem = format!(
        "the body {} cannot hold the place of a concurrent limit until it has ended: inside of the limits, box it by \
         `.map_response(|response: http::Response<_>| response.map(http_body_util::combinators::BoxBody::new))`, or with \
         `axum::body::Body::new`; or free places when the response begins, by `.free_with_head()` on the layer",
        type_name::<B>()
    );
    Rejection::NotSetUp(ConfigError::new(problem))
}

/// Changes a body if its type is known. Returns `false` otherwise.
fn change<B: Body + 'static>(body: &mut Option<B>, decision: Option<&Decision>) -> bool {
    let is_known = is_changed(body, |body| {
        BoxBody::<B::Data, B::Error>::new(Holding::new(body, decision))
    }) || is_changed(body, |body| {
        UnsyncBoxBody::<B::Data, B::Error>::new(Holding::new(body, decision))
    }) || is_changed(body, |body: Full<B::Data>| {
        decision.map_or_else(Full::default, |_| body)
    }) || is_changed(body, |body: String| {
        decision.map_or_else(String::new, |_| body)
    }) || is_changed(body, |body: Empty<B::Data>| body);
    #[cfg(feature = "axum")]
    let is_known = is_known
        || is_changed(body, |body| {
            axum::body::Body::new(Holding::new(body, decision))
        });
    #[cfg(feature = "grpc")]
    let is_known = is_known
        || is_changed(body, |body| {
            tonic::body::Body::new(Holding::new(body, decision))
        });
    is_known
}

/// Changes a body if its type is `T`. Returns `false` otherwise.
fn is_changed<B: 'static, T: 'static>(body: &mut Option<B>, change: impl FnOnce(T) -> T) -> bool {
    let Some(body) = (body as &mut dyn Any).downcast_mut::<Option<T>>() else {
        return false;
    };
    *body = body.take().map(change);
    true
}
