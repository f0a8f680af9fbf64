//! Whether a store answers, as far as is known. [`Breaker`] has the rules.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{task::AbortHandle, time::Instant};

use super::{breaker::Breaker, events::Events};
use crate::{decision::Decision, error::Error, metrics};

/// Whether a store answers, as far as is known.
///
/// Deadlines are microseconds, at least 1. An error counts as a timeout after the longest of all.
pub(super) struct Health {
    settings: Breaker,
    /// The longest deadline that it is open for; 0 while it is closed.
    open_for: AtomicU64,
    run: Mutex<Run>,
    /// Whether that has failures in it.
    has_failed: AtomicBool,
    /// The last failure.
    cause: RwLock<Option<Arc<Error>>>,
    /// The longest deadline of the questions that it has answered since it opened.
    longest: AtomicU64,
    started: Instant,
    /// The microsecond after the start of the last sign of a probe; 0 if there was none since it opened.
    sign: AtomicU64,
    probes: Mutex<Option<AbortHandle>>,
    users: AtomicUsize,
    events: Events,
}

/// Failures in a row, for all questions with no longer deadline than the shortest of theirs.
struct Run {
    failures: u32,
    shortest: u64,
}

impl Health {
    pub(super) fn new(settings: Breaker) -> Self {
        Self {
            settings,
            open_for: AtomicU64::new(0),
            run: Mutex::new(Run::NONE),
            has_failed: AtomicBool::new(false),
            cause: RwLock::new(None),
            longest: AtomicU64::new(0),
            started: Instant::now(),
            sign: AtomicU64::new(0),
            probes: Mutex::new(None),
            users: AtomicUsize::new(0),
            events: Events::default(),
        }
    }

    pub(super) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// With the last one, the probes end.
    pub(super) fn remove_user(&self) {
        if self.users.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        let mut probes = self.probes();
        // Unless there is a new one by now.
        if self.users.load(Ordering::SeqCst) == 0
            && let Some(probes) = probes.take()
        {
            probes.abort();
            self.sign.store(0, Ordering::Relaxed);
        }
    }

    /// Whether questions with this deadline are not asked.
    pub(super) fn is_open_for(&self, deadline: Duration) -> bool {
        let open_for = self.open_for.load(Ordering::Relaxed);
        open_for > 0 && micros(deadline) <= open_for
    }

    fn is_open(&self) -> bool {
        self.open_for.load(Ordering::Relaxed) > 0
    }

    /// The last failure, instead of asking a question with this deadline.
    pub(super) fn answer(&self, deadline: Duration) -> Option<Arc<Error>> {
        let deadline = micros(deadline);
        // What others read all the time is not written without a need.
        if self.longest.load(Ordering::Relaxed) < deadline {
            self.longest.fetch_max(deadline, Ordering::Relaxed);
        }
        self.cause.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How much time there is between two probes.
    pub(super) fn probe_every(&self) -> Duration {
        self.settings.probe_every.max(Duration::from_millis(1))
    }

    /// Whether the caller is to see to it that probes are sent. Twice the time that one takes, so that a runtime that is
    /// busy for a moment is not taken for one that stands still.
    pub(super) fn sees_to_probes(&self, deadline: Duration) -> bool {
        let overdue = self.probe_every().saturating_add(deadline).saturating_mul(2);
        let (sign, now) = (self.sign.load(Ordering::Relaxed), self.now());
        if sign > 0 && now < sign.saturating_add(micros(overdue)) {
            return false;
        }
        self.sign.compare_exchange(sign, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The deadline of a probe that begins, at least this.
    pub(super) fn begin_probe(&self, deadline: Duration) -> Duration {
        self.sign.store(self.now(), Ordering::Relaxed);
        deadline.max(Duration::from_micros(self.longest.load(Ordering::Relaxed)))
    }

    /// Counts what came of a probe, and says whether it goes on.
    pub(super) fn end_probe(&self, outcome: Result<Decision, Error>) -> bool {
        match outcome {
            Err(error) if error.is_the_stores() => self.heard_failure(&error),
            _ => {
                let mut run = self.run();
                // One failure is enough to open it again: a probe writes nothing, and may pass where others do not.
                self.count(&mut run, Run { failures: self.settings.failures.saturating_sub(1), ..Run::NONE });
                self.close(run);
            }
        }
        self.sign.store(self.now(), Ordering::Relaxed);
        self.is_open()
    }

    /// Counts a failure of the store.
    pub(super) fn heard_failure(&self, error: &Error) {
        if self.settings.failures == 0 {
            return;
        }
        let deadline = if let Error::TimedOut { deadline } = error { micros(*deadline) } else { u64::MAX };
        // Before it is open: a caller that finds it open finds a cause.
        *self.cause.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(error.clone()));
        let mut run = self.run();
        if deadline <= self.open_for.load(Ordering::Relaxed) {
            return;
        }
        let (failures, shortest) = (run.failures.saturating_add(1), run.shortest.min(deadline));
        if failures < self.settings.failures {
            self.count(&mut run, Run { failures, shortest });
            return;
        }
        self.count(&mut run, Run::NONE);
        let was_open = self.is_open();
        if !was_open {
            self.sign.store(0, Ordering::Relaxed);
            self.longest.store(0, Ordering::Relaxed);
            metrics::breaker_opened();
        }
        self.open_for.store(shortest, Ordering::Relaxed);
        drop(run);
        if was_open {
            self.events.opened_for_more(error);
        } else {
            self.events.opened(error);
        }
    }

    /// Counts an answer, which says nothing of questions with a deadline that is shorter than it took.
    pub(super) fn heard_answer(&self, took: impl FnOnce() -> Duration) {
        if !self.has_failed.load(Ordering::Relaxed) && !self.is_open() {
            return;
        }
        let (took, mut run) = (took(), self.run());
        if micros(took) <= run.shortest {
            self.count(&mut run, Run::NONE);
        }
        if self.is_open_for(took) {
            self.close(run);
        }
    }

    /// Counts failures in a row from here on.
    fn count(&self, run: &mut Run, counted: Run) {
        self.has_failed.store(counted.failures > 0, Ordering::Relaxed);
        *run = counted;
    }

    fn close(&self, run: MutexGuard<'_, Run>) {
        let was_open = self.open_for.swap(0, Ordering::Relaxed) > 0;
        // No caller waits for a log line.
        drop(run);
        if was_open {
            metrics::breaker_closed();
            self.events.closed();
        }
    }

    /// Microseconds since the start.
    fn now(&self) -> u64 {
        micros(self.started.elapsed())
    }

    fn run(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The task that sends probes, if one does.
    pub(super) fn probes(&self) -> MutexGuard<'_, Option<AbortHandle>> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Run {
    const NONE: Self = Self { failures: 0, shortest: u64::MAX };
}

/// At least 1.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).max(1)
}

impl Drop for Health {
    fn drop(&mut self) {
        if self.is_open() {
            metrics::breaker_closed();
        }
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health")
            .field("settings", &self.settings)
            .field("is_open", &self.is_open())
            .finish_non_exhaustive()
    }
}
