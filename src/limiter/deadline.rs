//! The deadline of a limiter, a future with a deadline, and the timer of a deadline.

use std::{
    future::Future,
    mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::{
    runtime::{Handle, Id},
    time::{Instant, Sleep, sleep_until},
};

use super::Core;
use crate::error::{Error, StoreError, StoreErrorKind};

/// The least time for a call to the store, even if the request has used up the deadline before the
/// call. A store that is near and works answers within this time.
const LEAST: Duration = Duration::from_millis(5);

const WAITING: &str = "waiting in a tokio runtime";

/// A deadline or wait of more than thirty years counts as thirty years. Otherwise its end might be
/// too late for an [`Instant`].
const LONGEST: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

impl Core {
    /// The longest time that a request waits for decisions.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline.unwrap_or_else(|| self.round_trip.deadline())
    }
}

/// A timer that always belongs to the runtime that polls it. A timer of a runtime that has ended
/// would panic, and a timer of a runtime that is not driven would never fire.
#[derive(Default)]
pub(super) struct Timer {
    // The timer is boxed, so that futures that need no timer stay small.
    sleep: Option<(Id, Pin<Box<Sleep>>)>,
}

impl Timer {
    /// Waits until the time `at`. Fails without a runtime, and in a runtime that has ended.
    pub(super) fn poll_until(
        &mut self,
        at: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Error>> {
        let runtime = Handle::try_current()
            .map_err(|cause| StoreError::new(WAITING, StoreErrorKind::Other, cause).of_one_check())?
            .id();
        let known = self
            .sleep
            .take()
            .filter(|(of, sleep)| *of == runtime && sleep.deadline() == at);
        let (_, sleep) = self.sleep.insert(known.unwrap_or_else(|| {
            let mut sleep = Box::pin(sleep_until(at));
            // `reset` registers the timer. Otherwise the first poll would register the timer, and
            // panic in a runtime that has ended. A runtime that has ended fires a registered timer
            // at once.
            sleep.as_mut().reset(at);
            (runtime, sleep)
        }));
        if !sleep.is_elapsed() {
            return sleep.as_mut().poll(cx).map(Ok);
        }
        let is_early = || {
            StoreError::new(WAITING, StoreErrorKind::Other, "the runtime has ended").of_one_check()
        };
        Poll::Ready(if Instant::now() < at {
            Err(is_early().into())
        } else {
            Ok(())
        })
    }

    /// The time that the timer waits for.
    fn end(&self) -> Option<Instant> {
        self.sleep.as_ref().map(|(_, sleep)| sleep.deadline())
    }
}

pin_project! {
    /// Gives up on a future that is not ready in time.
    ///
    /// The timer starts when the future is pending for the first time. So a store that answers at
    /// once costs no timer and needs no runtime.
    ///
    /// When the timer fires, the other tasks that can run are polled first, and then the future
    /// once more. If the process has not run for a while, a reply may have come in time without
    /// being read. Then one of these tasks reads the reply.
    pub(crate) struct Deadline<F> {
        #[pin]
        future: F,
        pub(super) deadline: Duration,
        // The part of the deadline that the request has spent on decisions of other layers, or on
        // the choice of a limit.
        waited: Duration,
        timer: Timer,
        is_over: bool,
    }
}

impl<F> Deadline<F> {
    #[inline]
    pub(super) fn new(future: F, deadline: Duration, waited: Duration) -> Self {
        Self {
            future,
            deadline,
            waited,
            timer: Timer::default(),
            is_over: false,
        }
    }

    /// Whether the future has been pending.
    pub(super) fn has_begun(&self) -> bool {
        self.timer.end().is_some()
    }

    /// Takes the future out, so that another task may poll it, and waits for the given `future`
    /// instead.
    pub(super) fn replace(&mut self, future: F) -> F {
        mem::replace(&mut self.future, future)
    }

    /// How long the request has waited by now, including the time before this future.
    pub(crate) fn waited(&self) -> Duration {
        self.waited.saturating_add(self.took())
    }

    /// Whether a timeout says something about the store. The timeout says nothing if the request
    /// had spent more than half of the deadline before the call, or if the timeout was noticed so
    /// late that the caller's runtime must have been blocked.
    pub(super) fn blames_store(&self) -> bool {
        let left = time_left(self.deadline, self.waited);
        let is_noticed_late = self.took() > left + (left / 2).max(Duration::from_millis(10));
        self.waited <= self.deadline / 2 && !is_noticed_late
    }

    /// How long the future has been pending.
    pub(super) fn took(&self) -> Duration {
        let begun = self
            .timer
            .end()
            .and_then(|end| end.checked_sub(time_left(self.deadline, self.waited)));
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
        let deadline = *this.deadline;
        let waited = *this.waited;
        let end = this
            .timer
            .end()
            .unwrap_or_else(|| later(Instant::now(), time_left(deadline, waited)));
        ready!(this.timer.poll_until(end, cx))?;
        if !mem::replace(this.is_over, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Err(Error::TimedOut {
            deadline,
            round_trip: None,
        }))
    }
}

pub(super) fn later(instant: Instant, by: Duration) -> Instant {
    instant + by.min(LONGEST)
}

pub(super) fn time_left(deadline: Duration, waited: Duration) -> Duration {
    deadline.saturating_sub(waited).max(LEAST.min(deadline))
}
