//! The breaker: a store that has failed repeatedly is not asked. [`Breaker`] has its rules.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, sleep},
};

use super::{deadline::Deadline, events::Events};
use crate::{
    decision::Decision,
    error::{Error, StoreError},
    metrics,
};

/// Settings of a limiter's breaker: when to answer at once, without asking a store that has failed repeatedly.
///
/// 1. It opens after so many [failures](Self::failures) in a row, five by default: checks, settlements or resets that the
///    store answers with an error, or not within the deadline. Each answer that it does give begins the count anew.
/// 2. While it is open, every answer is [`Error::BreakerOpen`] with the last failure, at once: what happens then is the
///    route's [failure mode](super::FailureMode), or the caller's choice. A refusal that may be
///    [repeated](super::DenyCache) still is.
/// 3. As soon as somebody asks, and then [once in a while](Self::probe_every), 200 ms by default, whether anybody asks or
///    not, a probe goes to the store: the same question at no cost. Nobody waits for it. The probes are a task of the
///    caller's runtime that ends when it closes, or with the limiter and its clones. Without a runtime, or in one that
///    stands still between checks, so that the probes do not get on, the caller's own check is the probe.
/// 4. A probe that is answered within the deadline closes it. The next failure then opens it again; after the next answer
///    it takes as many as at first.
/// 5. A cost above the limit, or a limit that cannot be chosen, is not the store's failure, nor is what a store says
///    about [one check alone](crate::StoreError::of_one_check).
/// 6. Clones of a limiter, and services of a layer, have one breaker. A closed one costs a check the look at one number.
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

/// The breaker at work. Clones are one.
#[derive(Clone)]
pub(super) struct Circuit(Arc<Shared>);

struct Shared {
    settings: Breaker,
    /// In a row. From as many on as the settings say, it is open.
    failures: AtomicU32,
    /// The last failure.
    cause: RwLock<Option<Arc<Error>>>,
    started: Instant,
    /// The microsecond after the start from which on the next probe is overdue: at once when it opens.
    overdue: AtomicU64,
    probes: Mutex<Option<AbortHandle>>,
    events: Events,
}

impl Circuit {
    pub(super) fn new(settings: Breaker) -> Self {
        Self(Arc::new(Shared {
            settings,
            failures: AtomicU32::new(0),
            cause: RwLock::new(None),
            started: Instant::now(),
            overdue: AtomicU64::new(0),
            probes: Mutex::new(None),
            events: Events::default(),
        }))
    }

    /// What to answer instead of asking the store, if it is open. Then `probes` may be what to send from now on.
    pub(super) fn refuse<P, F>(&self, deadline: Duration, probes: impl FnOnce() -> P) -> Option<Error>
    where
        P: Fn() -> F + Send + 'static,
        F: Future<Output = Result<Decision, StoreError>> + Send + 'static,
    {
        if !self.0.is_open() {
            return None;
        }
        let cause = self.0.cause.read().unwrap_or_else(PoisonError::into_inner).clone()?;
        if self.0.sees_to_probes(deadline) && !self.send(&Handle::try_current().ok()?, deadline, probes) {
            return None;
        }
        Some(Error::BreakerOpen(cause))
    }

    /// Counts what came of a question.
    pub(super) fn heard<T>(&self, outcome: &Result<T, Error>) {
        match outcome {
            Ok(_) => self.0.count_from(0),
            Err(error) if error.is_the_stores() => self.0.failed(error),
            Err(_) => {}
        }
    }

    /// Sends probes until one is answered, unless there is a task that does and does not get on. Of the limiter, that holds
    /// only what does not keep it alive.
    fn send<P, F>(&self, runtime: &Handle, deadline: Duration, probes: impl FnOnce() -> P) -> bool
    where
        P: Fn() -> F + Send + 'static,
        F: Future<Output = Result<Decision, StoreError>> + Send + 'static,
    {
        let mut sent = self.0.probes.lock().unwrap_or_else(PoisonError::into_inner);
        if sent.as_ref().is_some_and(|sent| !sent.is_finished()) {
            return false;
        }
        let (shared, every, probe) = (Arc::downgrade(&self.0), self.0.settings.probe_every, probes());
        let task = runtime.spawn(async move {
            loop {
                let pause = sleep(every.max(Duration::from_millis(1)));
                let outcome = Deadline::new(probe(), deadline).await.and_then(|answer| Ok(answer?));
                let Some(shared) = shared.upgrade() else { return };
                match outcome {
                    Err(error) if error.is_the_stores() => shared.failed(&error),
                    // One failure is enough to open it again: a probe writes nothing, and may pass where others do not.
                    _ => shared.count_from(shared.settings.failures.saturating_sub(1)),
                }
                if !shared.is_open() {
                    return;
                }
                shared.overdue.store(shared.overdue_from_now(deadline), Ordering::Relaxed);
                drop(shared);
                pause.await;
            }
        });
        *sent = Some(task.abort_handle());
        true
    }
}

impl Shared {
    fn is_open(&self) -> bool {
        self.settings.failures > 0 && self.failures.load(Ordering::Relaxed) >= self.settings.failures
    }

    /// Whether the caller is to see to it that probes are sent.
    fn sees_to_probes(&self, deadline: Duration) -> bool {
        let overdue = self.overdue.load(Ordering::Relaxed);
        if overdue > micros(self.started.elapsed()) {
            return false;
        }
        let next = self.overdue_from_now(deadline);
        self.overdue.compare_exchange(overdue, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// When a probe that is sent now, or after the pause, has long come to its end. Twice the time that it takes, so that a
    /// runtime that is busy for a moment is not taken for one that stands still.
    fn overdue_from_now(&self, deadline: Duration) -> u64 {
        let longest = self.settings.probe_every.saturating_add(deadline);
        micros(self.started.elapsed().saturating_add(longest.saturating_mul(2)))
    }

    fn failed(&self, error: &Error) {
        if self.settings.failures == 0 {
            return;
        }
        // Before it is open: who finds it open finds a cause.
        *self.cause.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(error.clone()));
        let more = |failures: u32| Some(failures.saturating_add(1));
        let before = self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        if before.is_ok_and(|before| before.saturating_add(1) == self.settings.failures) {
            self.overdue.store(0, Ordering::Relaxed);
            metrics::breaker_opened();
            self.events.opened(error);
        }
    }

    /// Counts failures in a row from here on, which closes it.
    fn count_from(&self, failures: u32) {
        // What others read all the time is not written without a need.
        if self.failures.load(Ordering::Relaxed) <= failures {
            return;
        }
        let before = self.failures.swap(failures, Ordering::Relaxed);
        if self.settings.failures > 0 && before >= self.settings.failures {
            metrics::breaker_closed();
            self.events.closed();
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(probes) = self.probes.get_mut().unwrap_or_else(PoisonError::into_inner) {
            probes.abort();
        }
        if self.is_open() {
            metrics::breaker_closed();
        }
    }
}

impl fmt::Debug for Circuit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Circuit")
            .field("settings", &self.0.settings)
            .field("is_open", &self.0.is_open())
            .finish_non_exhaustive()
    }
}
