//! The breaker: a store that has failed repeatedly is not asked. [`Breaker`] has its rules.

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

use super::{epoch::Epoch, events::Events};
use crate::{
    decision::Decision,
    error::{Error, StoreError},
    metrics,
};

/// Settings of a breaker: when to answer at once, without asking a store that has failed repeatedly.
///
/// 1. It opens after so many [failures](Self::failures) in a row, five by default: checks, settlements or resets that the
///    store answers with an error, or not within the deadline. Each answer that it does give begins the count anew.
/// 2. While it is open, every answer is [`Error::BreakerOpen`] with the last failure, at once: what happens then is the
///    route's [failure mode](crate::FailureMode), or the caller's choice. A refusal that is
///    [remembered](crate::DenyCache) still is one.
/// 3. A store that has an [epoch](crate::Store::epoch), as `RedisStore` has, has one breaker for all of its clones, whatever
///    limiters and layers are made on them, with the usual settings. One that is set on a limiter or layer is its own. Of
///    other stores, each limiter and its clones, or each layer and its services, have one.
/// 4. A limiter in a hurry keeps nobody with more time from the store: a timeout counts only for questions with the same
///    deadline or a shorter one. Questions with a longer deadline are asked until as many of them have failed. An error
///    counts for all, and an answer for all that have as much time as it took. Where less than half of the deadline was
///    left, since the request had waited elsewhere before, a timeout counts for none.
/// 5. As soon as somebody asks, and then [once in a while](Self::probe_every), 200 ms by default, whether anybody asks or
///    not, a probe goes to the store: the same question at no cost. Nobody waits for it. It has as much time as the longest
///    deadline of those who were answered by the breaker. The probes are a task of a caller's runtime that ends when the
///    breaker closes, or with the last limiter that uses it. When that runtime ends, another caller's takes over. Where it
///    stands still, or there is none, the check of one caller is the probe each time that one is overdue: after twice the
///    time between two probes and that caller's deadline.
/// 6. A probe that is answered in time closes it. The next failure then opens it again; after the next answer it takes as
///    many as at first.
/// 7. A cost above the limit, or a limit that cannot be chosen, is not the store's failure, nor is what a store says
///    about [one check alone](crate::StoreError::of_one_check).
/// 8. A closed breaker costs a check the look at one number.
///
/// ```
/// # #[cfg(feature = "redis")]
/// # fn settings() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_sliding_window::{Breaker, Limiter, RedisStore};
///
/// let limiter = Limiter::new(RedisStore::builder("redis://127.0.0.1:6379").build()?);
/// let calm = limiter.clone().breaker(Breaker::new().failures(20).probe_every(Duration::from_secs(1)));
/// let every_time = limiter.breaker(Breaker::off());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Breaker {
    failures: u32,
    probe_every: Duration,
}

impl Breaker {
    /// A breaker that opens after five failures in a row, and then sends a probe every 200 ms.
    pub const fn new() -> Self {
        Self { failures: 5, probe_every: Duration::from_millis(200) }
    }

    /// No breaker: the store is asked every time.
    pub const fn off() -> Self {
        Self::new().failures(0)
    }

    /// After how many failures in a row it opens. Default: 5. None is [`off`](Self::off).
    pub const fn failures(mut self, in_a_row: u32) -> Self {
        self.failures = in_a_row;
        self
    }

    /// How much time there is between two probes at least, a millisecond or more. Default: 200 ms. For so long it may stay
    /// open after the store is back.
    pub const fn probe_every(mut self, interval: Duration) -> Self {
        self.probe_every = interval;
        self
    }
}

impl Default for Breaker {
    fn default() -> Self {
        Self::new()
    }
}

/// A limiter's way to a breaker. As long as there is one, probes go on.
pub(crate) struct Circuit(Arc<Health>);

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

impl Circuit {
    /// The one that all limiters on a store use; a limiter's own where the store has no epoch.
    pub(crate) fn of_store(epoch: Option<&Epoch>) -> Self {
        epoch.map_or_else(|| Self::own(Breaker::new()), |epoch| Self::to(Arc::clone(epoch.health())))
    }

    /// One that nobody else uses.
    pub(crate) fn own(settings: Breaker) -> Self {
        Self::to(Arc::new(Health::new(settings)))
    }

    fn to(health: Arc<Health>) -> Self {
        health.users.fetch_add(1, Ordering::SeqCst);
        Self(health)
    }

    /// Whether questions with this deadline are not asked.
    pub(crate) fn is_open_for(&self, deadline: Duration) -> bool {
        self.0.is_open_for(micros(deadline))
    }

    /// What to answer instead of asking the store, if it is open. Then `probes` may be what to send from now on, each with
    /// the deadline that it is given.
    pub(crate) fn refuse<P, F>(&self, deadline: Duration, probes: impl FnOnce() -> P) -> Option<Error>
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        if !self.is_open_for(deadline) {
            return None;
        }
        let cause = self.0.cause.read().unwrap_or_else(PoisonError::into_inner).clone()?;
        self.0.has_answered(micros(deadline));
        if self.0.sees_to_probes(deadline) && !self.send(&Handle::try_current().ok()?, deadline, probes) {
            return None;
        }
        Some(Error::BreakerOpen(cause))
    }

    /// Counts what came of a question that took so long.
    pub(crate) fn heard<T>(&self, outcome: &Result<T, Error>, took: impl FnOnce() -> Duration) {
        match outcome {
            Ok(_) => self.0.heard_answer(took),
            Err(error) if error.is_the_stores() => self.0.heard_failure(error),
            Err(_) => {}
        }
    }

    /// Sends probes until one is answered, unless there is a task that does and does not get on. Of the limiters, that
    /// holds only what does not keep them alive.
    fn send<P, F>(&self, runtime: &Handle, deadline: Duration, probes: impl FnOnce() -> P) -> bool
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        let mut sent = self.0.probes();
        if sent.as_ref().is_some_and(|sent| !sent.is_finished()) {
            return false;
        }
        let (health, every, probe) = (Arc::downgrade(&self.0), self.0.settings.probe_every, probes());
        let task = runtime.spawn(async move {
            loop {
                let Some(deadline) = health.upgrade().map(|health| health.begin_probe(deadline)) else { return };
                let pause = sleep(every.max(Duration::from_millis(1)));
                let outcome = probe(deadline).await.and_then(|answer| Ok(answer?));
                if !health.upgrade().is_some_and(|health| health.end_probe(outcome)) {
                    return;
                }
                pause.await;
            }
        });
        *sent = Some(task.abort_handle());
        true
    }
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

    fn is_open_for(&self, deadline: u64) -> bool {
        // Not even the shortest is 0.
        deadline <= self.open_for.load(Ordering::Relaxed)
    }

    fn is_open(&self) -> bool {
        self.open_for.load(Ordering::Relaxed) > 0
    }

    /// Notes that the breaker answers a question with this deadline.
    fn has_answered(&self, deadline: u64) {
        // What others read all the time is not written without a need.
        if self.longest.load(Ordering::Relaxed) < deadline {
            self.longest.fetch_max(deadline, Ordering::Relaxed);
        }
    }

    /// Whether the caller is to see to it that probes are sent. Twice the time that one takes, so that a runtime that is
    /// busy for a moment is not taken for one that stands still.
    fn sees_to_probes(&self, deadline: Duration) -> bool {
        let overdue = self.settings.probe_every.saturating_add(deadline).saturating_mul(2);
        let (sign, now) = (self.sign.load(Ordering::Relaxed), self.now());
        if sign > 0 && now < sign.saturating_add(micros(overdue)) {
            return false;
        }
        self.sign.compare_exchange(sign, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The deadline of a probe that begins, at least this.
    fn begin_probe(&self, deadline: Duration) -> Duration {
        self.sign.store(self.now(), Ordering::Relaxed);
        deadline.max(Duration::from_micros(self.longest.load(Ordering::Relaxed)))
    }

    /// Counts what came of a probe, and says whether it goes on.
    fn end_probe(&self, outcome: Result<Decision, Error>) -> bool {
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

    fn heard_failure(&self, error: &Error) {
        if self.settings.failures == 0 {
            return;
        }
        let deadline = if let Error::TimedOut { deadline } = error { micros(*deadline) } else { u64::MAX };
        // Before it is open: a caller that finds it open finds a cause.
        *self.cause.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(error.clone()));
        let mut run = self.run();
        if self.is_open_for(deadline) {
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

    /// That says nothing of questions with a deadline that is shorter than it took.
    fn heard_answer(&self, took: impl FnOnce() -> Duration) {
        if !self.has_failed.load(Ordering::Relaxed) && !self.is_open() {
            return;
        }
        let (took, mut run) = (micros(took()), self.run());
        if took <= run.shortest {
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

    fn probes(&self) -> MutexGuard<'_, Option<AbortHandle>> {
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

impl Clone for Circuit {
    fn clone(&self) -> Self {
        Self::to(Arc::clone(&self.0))
    }
}

impl Drop for Circuit {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        let mut probes = self.0.probes();
        // Unless there is a new one by now.
        if self.0.users.load(Ordering::SeqCst) == 0
            && let Some(probes) = probes.take()
        {
            probes.abort();
            self.0.sign.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        if self.is_open() {
            metrics::breaker_closed();
        }
    }
}

impl fmt::Debug for Circuit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaker")
            .field("settings", &self.settings)
            .field("is_open", &self.is_open())
            .finish_non_exhaustive()
    }
}
