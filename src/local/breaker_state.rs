//! A breaker at work. [`Breaker`] has the rules.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, sleep},
};

use super::breaker::Breaker;
use crate::{
    decision::Decision,
    error::{Error, StoreError},
    logging::{Chain, Throttle, info, warn},
    metrics,
};

/// Whether a store answers, as far as this process knows.
///
/// Deadlines are microseconds, at least 1. An error counts as a timeout after the longest deadline of all.
pub(super) struct BreakerState {
    settings: Breaker,
    /// The longest deadline that it is open for; 0 while it is closed.
    open_for: AtomicU64,
    streak: Mutex<Streak>,
    /// Whether the streak has failures, to find out without the lock.
    has_failed: AtomicBool,
    last_failure: RwLock<Option<Arc<Error>>>,
    /// The longest deadline of the callers that it has refused since it opened.
    longest_refused: AtomicU64,
    started: Instant,
    /// When a probe last began or ended, in microseconds after the start; 0 if none has since it opened.
    last_probe: AtomicU64,
    probes: Mutex<Option<AbortHandle>>,
    users: AtomicUsize,
    opened_line: Throttle,
    opened_further_line: Throttle,
    closed_line: Throttle,
}

/// Failures in a row, of checks whose deadline is at least `shortest`.
struct Streak {
    failures: u32,
    shortest: u64,
}

/// A limiter's handle on a breaker, which other limiters may share. The last handle that is dropped ends the probes.
pub(crate) struct SharedBreaker(Arc<BreakerState>);

impl SharedBreaker {
    /// A breaker that no other limiter uses yet.
    pub(crate) fn new(settings: Breaker) -> Self {
        Self::of(&Arc::new(BreakerState::new(settings)))
    }

    pub(super) fn of(state: &Arc<BreakerState>) -> Self {
        state.users.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(state))
    }

    /// Whether checks with this deadline are not sent to the store.
    pub(crate) fn is_open_for(&self, deadline: Duration) -> bool {
        self.0.is_open_for(deadline)
    }

    /// The error to return instead of asking the store, if it is open. `probes` makes a function that sends a probe with
    /// the given deadline.
    pub(crate) fn refuse<P, F>(&self, deadline: Duration, probes: impl FnOnce() -> P) -> Option<Error>
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        if !self.is_open_for(deadline) {
            return None;
        }
        let last_failure = self.0.refuse(deadline)?;
        if self.0.is_probe_overdue(deadline) && !self.send_probes(&Handle::try_current().ok()?, deadline, probes) {
            return None;
        }
        Some(Error::BreakerOpen(last_failure))
    }

    /// Counts the outcome of a call to the store, which `took` this long.
    pub(crate) fn count<T>(&self, outcome: &Result<T, Error>, took: impl FnOnce() -> Duration) {
        match outcome {
            Ok(_) => self.0.count_answer(took),
            Err(error) if error.is_the_stores() => self.0.count_failure(error),
            Err(_) => {}
        }
    }

    /// Sends probes until one is answered. Returns `false` if a task does so already, which has come to a stop: then the
    /// caller's check has to be the probe.
    fn send_probes<P, F>(&self, runtime: &Handle, deadline: Duration, probes: impl FnOnce() -> P) -> bool
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        let mut task = self.0.probes();
        if task.as_ref().is_some_and(|task| !task.is_finished()) {
            return false;
        }
        // Weak, so that the task does not keep the breaker of dropped limiters alive.
        let (state, every, probe) = (Arc::downgrade(&self.0), self.0.probe_every(), probes());
        let sent = runtime.spawn(async move {
            loop {
                let Some(deadline) = state.upgrade().map(|state| state.begin_probe(deadline)) else { return };
                let pause = sleep(every);
                let outcome = probe(deadline).await.and_then(|answer| Ok(answer?));
                if !state.upgrade().is_some_and(|state| state.end_probe(outcome)) {
                    return;
                }
                pause.await;
            }
        });
        *task = Some(sent.abort_handle());
        true
    }
}

impl BreakerState {
    pub(super) fn new(settings: Breaker) -> Self {
        Self {
            settings,
            open_for: AtomicU64::new(0),
            streak: Mutex::new(Streak::NONE),
            has_failed: AtomicBool::new(false),
            last_failure: RwLock::new(None),
            longest_refused: AtomicU64::new(0),
            started: Instant::now(),
            last_probe: AtomicU64::new(0),
            probes: Mutex::new(None),
            users: AtomicUsize::new(0),
            opened_line: Throttle::default(),
            opened_further_line: Throttle::default(),
            closed_line: Throttle::default(),
        }
    }

    fn is_open_for(&self, deadline: Duration) -> bool {
        let open_for = self.open_for.load(Ordering::Relaxed);
        open_for > 0 && micros(deadline) <= open_for
    }

    fn is_open(&self) -> bool {
        self.open_for.load(Ordering::Relaxed) > 0
    }

    /// The last failure, for a caller with this deadline.
    fn refuse(&self, deadline: Duration) -> Option<Arc<Error>> {
        let deadline = micros(deadline);
        // Every thread reads it, so it is written only if it changes.
        if self.longest_refused.load(Ordering::Relaxed) < deadline {
            self.longest_refused.fetch_max(deadline, Ordering::Relaxed);
        }
        self.last_failure.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn probe_every(&self) -> Duration {
        self.settings.probe_every.max(Duration::from_millis(1))
    }

    /// Whether no probe has begun or ended for too long, and this caller is the first to notice. Twice the time that a probe
    /// takes, so that a runtime that is busy for a moment does not pass for one that blocks.
    fn is_probe_overdue(&self, deadline: Duration) -> bool {
        let overdue = self.probe_every().saturating_add(deadline).saturating_mul(2);
        let (last_probe, now) = (self.last_probe.load(Ordering::Relaxed), self.now());
        if last_probe > 0 && now < last_probe.saturating_add(micros(overdue)) {
            return false;
        }
        self.last_probe.compare_exchange(last_probe, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The deadline of a probe that begins now: at least this one.
    fn begin_probe(&self, deadline: Duration) -> Duration {
        self.last_probe.store(self.now(), Ordering::Relaxed);
        deadline.max(Duration::from_micros(self.longest_refused.load(Ordering::Relaxed)))
    }

    /// Counts the outcome of a probe, and returns whether another has to follow.
    fn end_probe(&self, outcome: Result<Decision, Error>) -> bool {
        match outcome {
            Err(error) if error.is_the_stores() => self.count_failure(&error),
            _ => {
                let mut streak = self.streak();
                // One failure is enough to open it again: a probe writes nothing, so it may pass where other checks fail.
                self.set(&mut streak, Streak { failures: self.settings.failures.saturating_sub(1), ..Streak::NONE });
                self.close(streak);
            }
        }
        self.last_probe.store(self.now(), Ordering::Relaxed);
        self.is_open()
    }

    fn count_failure(&self, error: &Error) {
        if self.settings.failures == 0 {
            return;
        }
        let deadline = if let Error::TimedOut { deadline } = error { micros(*deadline) } else { u64::MAX };
        // Before it opens, so that a caller that finds it open finds a failure.
        *self.last_failure.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(error.clone()));
        let mut streak = self.streak();
        if deadline <= self.open_for.load(Ordering::Relaxed) {
            return;
        }
        let (failures, shortest) = (streak.failures.saturating_add(1), streak.shortest.min(deadline));
        if failures < self.settings.failures {
            self.set(&mut streak, Streak { failures, shortest });
            return;
        }
        self.set(&mut streak, Streak::NONE);
        let was_open = self.is_open();
        if !was_open {
            self.last_probe.store(0, Ordering::Relaxed);
            self.longest_refused.store(0, Ordering::Relaxed);
            metrics::breaker_opened();
        }
        self.open_for.store(shortest, Ordering::Relaxed);
        drop(streak);
        let (line, trouble) = if was_open {
            (&self.opened_further_line, "fails checks with longer deadlines as well")
        } else {
            (&self.opened_line, "has failed repeatedly: the breaker opens")
        };
        if let Some(suppressed) = line.pass() {
            let error = Chain(error);
            warn!(%error, suppressed, "the rate-limit store {trouble}");
        }
    }

    /// Counts an answer. It proves nothing for checks with a shorter deadline than it took.
    fn count_answer(&self, took: impl FnOnce() -> Duration) {
        if !self.has_failed.load(Ordering::Relaxed) && !self.is_open() {
            return;
        }
        let (took, mut streak) = (took(), self.streak());
        if micros(took) <= streak.shortest {
            self.set(&mut streak, Streak::NONE);
        }
        if self.is_open_for(took) {
            self.close(streak);
        }
    }

    fn set(&self, streak: &mut Streak, new: Streak) {
        self.has_failed.store(new.failures > 0, Ordering::Relaxed);
        *streak = new;
    }

    fn close(&self, streak: MutexGuard<'_, Streak>) {
        let was_open = self.open_for.swap(0, Ordering::Relaxed) > 0;
        // Before the log line, so that no caller waits for it.
        drop(streak);
        if was_open {
            metrics::breaker_closed();
            if let Some(suppressed) = self.closed_line.pass() {
                info!(suppressed, "the rate-limit store answers again: the breaker closes");
            }
        }
    }

    /// Microseconds since the start.
    fn now(&self) -> u64 {
        micros(self.started.elapsed())
    }

    fn streak(&self) -> MutexGuard<'_, Streak> {
        self.streak.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn probes(&self) -> MutexGuard<'_, Option<AbortHandle>> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Streak {
    const NONE: Self = Self { failures: 0, shortest: u64::MAX };
}

/// At least 1.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).max(1)
}

impl Clone for SharedBreaker {
    fn clone(&self) -> Self {
        Self::of(&self.0)
    }
}

impl Drop for SharedBreaker {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        let mut probes = self.0.probes();
        // A new handle may have been made before the lock was taken.
        if self.0.users.load(Ordering::SeqCst) == 0
            && let Some(probes) = probes.take()
        {
            probes.abort();
            self.0.last_probe.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for BreakerState {
    fn drop(&mut self) {
        if self.is_open() {
            metrics::breaker_closed();
        }
    }
}

impl fmt::Debug for SharedBreaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for BreakerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaker")
            .field("settings", &self.settings)
            .field("is_open", &self.is_open())
            .finish_non_exhaustive()
    }
}
