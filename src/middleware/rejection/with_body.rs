//! Rejections with a body of any type.

use std::fmt;

use http::{Response, request::Parts};

use super::{reason::Rejection, response::RejectionResponse};

/// The responses of `R`, with a body that a closure makes of their text: see
/// [`RateLimitLayer::rejection_body`](crate::RateLimitLayer::rejection_body).
#[derive(Clone, Copy)]
pub struct WithBody<R, F> {
    responder: R,
    body: F,
}

impl<R, F> WithBody<R, F> {
    pub(crate) fn new(responder: R, body: F) -> Self {
        Self { responder, body }
    }
}

impl<R, F, B> RejectionResponse<B> for WithBody<R, F>
where
    R: RejectionResponse<String>,
    F: Fn(String) -> B,
{
    fn respond(&self, rejection: &Rejection, request: &Parts, head: Response<()>) -> Response<B> {
        self.responder.respond(rejection, request, head).map(&self.body)
    }
}

// Not derived, since a closure is not `Debug`.
impl<R: fmt::Debug, F> fmt::Debug for WithBody<R, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WithBody").field("responder", &self.responder).finish_non_exhaustive()
    }
}
