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

/// The least time for a call to the store, even if its request has used up the deadline: enough for a store that answers.
const LEAST: Duration = Duration::from_millis(5);

pin_project! {
    /// Gives up on a future that is not ready in time.
    ///
    /// The timer starts when the future is pending for the first time: a store that answers at once costs no timer and
    /// needs no runtime.
    pub(crate) struct Deadline<F> {
        #[pin]
        future: F,
        deadline: Duration,
        // The part of the deadline that the request has spent on decisions of other layers, or on a choice.
        waited: Duration,
        // In a box, so that futures that need no timer stay small.
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F> Deadline<F> {
    #[inline]
    pub(super) fn new(future: F, deadline: Duration, waited: Duration) -> Self {
        Self { future, deadline, waited, timer: None }
    }

    /// Shortens the deadline, before the first poll, by what the request has `waited` for others.
    pub(super) fn after(&mut self, waited: Duration) {
        self.waited = waited;
    }

    /// How long the request has waited by now, including the time before this future.
    pub(super) fn waited(&self) -> Duration {
        self.waited.saturating_add(self.took())
    }

    /// How long a reply took: at most the deadline, however late it was polled.
    pub(super) fn took_in_time(&self) -> Duration {
        self.took().min(self.deadline)
    }

    /// Whether a timeout says something about the store: not if the request had spent more than half of the deadline
    /// elsewhere, nor if the timeout was noticed so late that the caller's runtime must have been blocked.
    pub(super) fn blames_store(&self) -> bool {
        let left = time_left(self.deadline, self.waited);
        let is_noticed_late = self.took() > left + (left / 2).max(Duration::from_millis(10));
        self.waited <= self.deadline / 2 && !is_noticed_late
    }

    /// How long the future has been pending.
    fn took(&self) -> Duration {
        let begun =
            self.timer.as_ref().and_then(|timer| timer.deadline().checked_sub(time_left(self.deadline, self.waited)));
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
        let (deadline, waited) = (*this.deadline, *this.waited);
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(time_left(deadline, waited))));
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(Error::TimedOut { deadline })),
            Poll::Pending => Poll::Pending,
        }
    }
}

fn time_left(deadline: Duration, waited: Duration) -> Duration {
    deadline.saturating_sub(waited).max(LEAST.min(deadline))
}
