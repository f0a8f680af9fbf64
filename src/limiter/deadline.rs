//! A future with a deadline.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::time::{Sleep, sleep};

use crate::error::Error;

pin_project! {
    /// Gives up on a future that is not ready in time.
    ///
    /// The timer is armed only once the future has made somebody wait: a store that answers at once costs no timer and
    /// needs no runtime.
    pub(crate) struct Deadline<F> {
        #[pin]
        future: F,
        deadline: Duration,
        // In a box, so that what needs none is not the larger for it.
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F> Deadline<F> {
    #[inline]
    pub(super) fn new(future: F, deadline: Duration) -> Self {
        Self { future, deadline, timer: None }
    }
}

impl<F: Future> Future for Deadline<F> {
    type Output = Result<F::Output, Error>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Ok(output));
        }
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(*this.deadline)));
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(Error::TimedOut { deadline: *this.deadline })),
            Poll::Pending => Poll::Pending,
        }
    }
}
