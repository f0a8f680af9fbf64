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
        #[pin]
        timer: Option<Sleep>,
    }
}

impl<F> Deadline<F> {
    pub(super) fn new(future: F, deadline: Duration) -> Self {
        Self { future, deadline, timer: None }
    }
}

impl<F: Future> Future for Deadline<F> {
    type Output = Result<F::Output, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Ok(output));
        }
        if this.timer.is_none() {
            this.timer.set(Some(sleep(*this.deadline)));
        }
        match this.timer.as_pin_mut().map(|timer| timer.poll(cx)) {
            Some(Poll::Ready(())) => Poll::Ready(Err(Error::TimedOut { deadline: *this.deadline })),
            _ => Poll::Pending,
        }
    }
}
