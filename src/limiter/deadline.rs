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

/// A question has at least this time, however long its request has waited: enough for a store that answers.
const LEAST: Duration = Duration::from_millis(5);

/// A deadline, and how much of it a request has waited already: for the decisions of other layers, or for a choice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Time {
    deadline: Duration,
    waited: Duration,
}

impl Time {
    pub(super) fn new(deadline: Duration, waited: Duration) -> Self {
        Self { deadline, waited }
    }

    fn left(self) -> Duration {
        self.deadline.saturating_sub(self.waited).max(LEAST.min(self.deadline))
    }

    /// Whether at least half of it is left, so that its end tells something of what was asked last.
    pub(super) fn is_mostly_left(self) -> bool {
        self.waited <= self.deadline / 2
    }

    pub(super) fn error(self) -> Error {
        Error::TimedOut { deadline: self.deadline }
    }
}

pin_project! {
    /// Gives up on a future that is not ready in time.
    ///
    /// The timer is armed only once the future has made somebody wait: a store that answers at once costs no timer and
    /// needs no runtime.
    pub(crate) struct Deadline<F> {
        #[pin]
        future: F,
        time: Time,
        // In a box, so that what needs none is not the larger for it.
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F> Deadline<F> {
    #[inline]
    pub(super) fn new(future: F, time: Time) -> Self {
        Self { future, time, timer: None }
    }

    pub(super) fn time(&self) -> Time {
        self.time
    }

    /// How long the request has waited by now, what it had waited before included.
    pub(super) fn waited(&self) -> Duration {
        self.time.waited.saturating_add(self.took())
    }

    /// How long an answer that has come took: no longer than the deadline, however late it was looked at.
    pub(super) fn took_in_time(&self) -> Duration {
        self.took().min(self.time.deadline)
    }

    /// Whether its end was noticed so late that the caller's runtime must have stood still.
    pub(super) fn is_noticed_late(&self) -> bool {
        self.took() > self.time.left() + (self.time.left() / 2).max(Duration::from_millis(10))
    }

    /// How long the future has made somebody wait by now.
    fn took(&self) -> Duration {
        let begun = self.timer.as_ref().and_then(|timer| timer.deadline().checked_sub(self.time.left()));
        begun.map(|begun| begun.elapsed()).unwrap_or_default()
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
        let time = *this.time;
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(time.left())));
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(time.error())),
            Poll::Pending => Poll::Pending,
        }
    }
}
