//! Bodies that hold the places of concurrent limits until they have ended.

use std::{
    any::Any,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::decision::Decision;

pin_project! {
    /// A body, and the decision that holds the places until its end.
    struct Holding<B> {
        #[pin]
        body: B,
        decision: Option<Decision>,
    }
}

impl<B: Body> Body for Holding<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let frame = ready!(this.body.poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            *this.decision = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Lets a body of axum or tonic hold the places of a decision until it has ended or is dropped. Another body does not.
#[cold]
pub(super) fn hold<B: 'static>(body: B, decision: &Decision) -> B {
    let mut held = Some(body);
    #[cfg(feature = "axum")]
    hold_in(&mut held, decision, axum::body::Body::new);
    #[cfg(feature = "grpc")]
    hold_in(&mut held, decision, tonic::body::Body::new);
    held.unwrap_or_else(|| unreachable!("only replaced"))
}

/// The same body, holding the places if it is of the type `T`.
fn hold_in<B: 'static, T: 'static>(body: &mut Option<B>, decision: &Decision, new: fn(Holding<T>) -> T) {
    if let Some(body) = (body as &mut dyn Any).downcast_mut::<Option<T>>() {
        *body = body.take().map(|body| new(Holding { body, decision: Some(decision.clone()) }));
    }
}
