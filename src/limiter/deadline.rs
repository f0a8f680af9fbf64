//! A limiter's deadline, a future with a deadline, and its timer.

use std::{
    cell::Cell,
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

/// The least time for a store call, even if the request has used up the deadline before it. A store
/// that is near and works answers within this time.
const LEAST: Duration = Duration::from_millis(5);

/// A deadline or wait above thirty years counts as thirty years. Otherwise its end might be too
/// late for an [`Instant`].
const LONGEST: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

impl Core {
    /// The longest time for which a request waits for decisions.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline.unwrap_or_else(|| self.round_trip.deadline())
    }
}

/// The most timers that a thread keeps for later waits.
const MOST_SPARE: usize = 64;

/// A timer that fires later than this is not kept. Until it fires, it keeps its last task's waker,
/// and a paused tokio clock may move to its time.
const LONGEST_SPARE: Duration = Duration::from_secs(1);

/// A tokio timer, and the runtime that it belongs to.
type OwnedSleep = (Id, Pin<Box<Sleep>>);

thread_local! {
    /// Timers that this thread uses again. All of them belong to the same runtime. Tokio moves a
    /// registered timer to a later time in one atomic step. A new timer has to be registered, which
    /// often wakes the runtime's driver by a system call, and it is deregistered after its wait. If
    /// a runtime has ended, its timers and its driver stay in memory until the thread keeps a timer
    /// for another runtime, or ends.
    static SPARE: Cell<Vec<OwnedSleep>> = const { Cell::new(Vec::new()) };
}

/// A timer that always belongs to the runtime that polls it. In a runtime that has ended, a timer
/// would panic. In a runtime that is not driven, a timer would never fire.
#[derive(Default)]
pub(super) struct Timer {
    // The timer is boxed, so that futures that need no timer stay small.
    sleep: Option<OwnedSleep>,
    /// True if the thread may keep the timer.
    is_brief: bool,
}

impl Timer {
    /// Waits until the time `at`. Fails without a runtime, and in a runtime that has ended.
    pub(super) fn poll_until(
        &mut self,
        at: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Error>> {
        let runtime = current_runtime()?.id();
        let known = self
            .sleep
            .take()
            .filter(|(of, sleep)| *of == runtime && sleep.deadline() == at);
        let (_, sleep) = self.sleep.insert(known.unwrap_or_else(|| {
            let mut sleep = spare(runtime).unwrap_or_else(|| Box::pin(sleep_until(at)));
            // `reset` registers the timer. Otherwise the first poll would, and would panic in a
            // runtime that has ended. Such a runtime fires a registered timer at once.
            sleep.as_mut().reset(at);
            (runtime, sleep)
        }));
        if !sleep.is_elapsed() {
            return sleep.as_mut().poll(cx).map(Ok);
        }
        if Instant::now() < at {
            return Poll::Ready(Err(runtime_has_ended()));
        }
        Poll::Ready(Ok(()))
    }

    /// The time that the timer waits for.
    fn end(&self) -> Option<Instant> {
        self.sleep.as_ref().map(|(_, sleep)| sleep.deadline())
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if self.is_brief
            && let Some(unused) = self.sleep.take()
        {
            // A thread that is ending does not keep timers.
            let _ = SPARE.try_with(|spare| {
                let mut timers = spare.take();
                if timers.last().is_some_and(|(of, _)| *of != unused.0) {
                    timers.clear();
                }
                if timers.len() < MOST_SPARE {
                    timers.push(unused);
                }
                spare.set(timers);
            });
        }
    }
}

/// Returns a timer that the thread has kept for this runtime. Returns `None` if there is none, or
/// if the thread is ending.
fn spare(runtime: Id) -> Option<Pin<Box<Sleep>>> {
    let found = SPARE.try_with(|spare| {
        let mut timers = spare.take();
        let found = timers.pop_if(|(of, _)| *of == runtime);
        spare.set(timers);
        found
    });
    found.ok().flatten().map(|(_, sleep)| sleep)
}

pin_project! {
    /// Gives up on a future that is not ready in time.
    ///
    /// The timer starts when the future is first pending. So a store that answers at once costs no
    /// timer and needs no runtime.
    ///
    /// When the timer fires, the other tasks that can run are polled first, and then the future
    /// once more. If the process has not run for a while, a reply may have arrived in time without
    /// being read. Then one of the other tasks reads it.
    pub(crate) struct Deadline<F> {
        #[pin]
        future: F,
        pub(super) deadline: Duration,
        // The part of the deadline that the request has spent on other layers' decisions, or on
        // choosing a limit.
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
            deadline: deadline.min(LONGEST),
            waited,
            timer: Timer::default(),
            is_over: false,
        }
    }

    /// True if the future has been pending.
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

    /// True if a timeout says something about the store. It does not if the request had spent more
    /// than half the deadline before the call, or if the timeout was noticed so late that the
    /// caller's runtime must have been blocked.
    pub(super) fn blames_store(&self) -> bool {
        let left = time_left(self.deadline, self.waited);
        let is_noticed_late = self.took() > left + (left / 2).max(Duration::from_millis(10));
        self.waited <= self.deadline / 2 && !is_noticed_late
    }

    /// How long the future has been pending.
    pub(super) fn took(&self) -> Duration {
        let left = time_left(self.deadline, self.waited);
        let begun = self.timer.end().and_then(|end| end.checked_sub(left));
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
        let end = this.timer.end().unwrap_or_else(|| {
            let left = time_left(deadline, waited);
            this.timer.is_brief = left <= LONGEST_SPARE;
            later(Instant::now(), left)
        });
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

pub(super) fn current_runtime() -> Result<Handle, Error> {
    Handle::try_current().map_err(cannot_wait)
}

pub(super) fn runtime_has_ended() -> Error {
    cannot_wait("the runtime has ended")
}

fn cannot_wait(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    StoreError::new("waiting in a tokio runtime", StoreErrorKind::Other, cause)
        .of_one_check()
        .into()
}

pub(super) fn later(instant: Instant, by: Duration) -> Instant {
    instant + by.min(LONGEST)
}

pub(super) fn time_left(deadline: Duration, waited: Duration) -> Duration {
    deadline.saturating_sub(waited).max(LEAST.min(deadline))
}

#[cfg(test)]
mod tests {
    use std::{future::pending, thread};

    use tokio::{runtime::Builder, sync::oneshot::channel, time::sleep};

    use super::*;

    /// While nothing else waits, a paused tokio clock moves to the next timer.
    #[tokio::test(start_paused = true)]
    async fn a_timer_of_a_long_deadline_moves_no_paused_clock_after_the_reply() {
        let hour = Duration::from_secs(3_600);
        let reply = Deadline::new(sleep(Duration::from_millis(2)), hour, Duration::ZERO);
        assert!(reply.await.is_ok());
        let begun = Instant::now();
        let (send, sent) = channel();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            send.send(())
        });
        sent.await.unwrap();
        assert!(begun.elapsed() <= LONGEST_SPARE, "{:?}", begun.elapsed());
    }

    /// A kept timer keeps its runtime's driver alive, and so the driver's open files.
    #[test]
    fn a_thread_keeps_no_timers_of_several_runtimes() {
        let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
        let runtimes = [(); 3].map(|()| runtime());
        for runtime in &runtimes {
            let waits = async {
                let never =
                    Deadline::new(pending::<()>(), Duration::from_millis(1), Duration::ZERO);
                assert!(never.await.is_err());
            };
            runtime.block_on(waits);
        }
        let kept = SPARE.take();
        assert!(kept.iter().all(|(of, _)| *of == runtimes[2].handle().id()));
        assert_eq!(kept.len(), 1);
    }
}
