//! A breaker at work. `local/mod.rs` has the rules and the defaults of [`Breaker`].

#[cfg(not(test))]
use std::sync;
use std::{
    collections::HashMap,
    fmt,
    future::Future,
    iter, mem,
    sync::{Arc, PoisonError, Weak, atomic::Ordering},
    time::Duration,
};

// The tests of this file use loom, so that models can try each order of the steps of threads.
#[cfg(test)]
use loom::sync;
use sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize},
};
use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, sleep},
};

use super::Breaker;
use crate::{
    clock,
    decision::Decision,
    error::{Error, StoreError},
    logging::{Chain, Throttle, info, warn},
    metrics,
};

/// Once there are this many breakers, those of parts that work again are forgotten.
pub(super) const MOST_PARTS: usize = 1_024;

/// The name of a part of a store: see [`Store::part_of`](crate::Store::part_of).
type Part = Option<Arc<str>>;

/// A limiter's handle on a breaker, which other limiters may share. The last handle that is dropped
/// ends the probes.
#[derive(Debug)]
pub(crate) struct SharedBreaker(Arc<BreakerState>);

/// The breaker of a store, or of a named part of a store. Deadlines are in microseconds, and at
/// least 1. An error counts like a timeout after the longest deadline, `u64::MAX`.
pub(crate) struct BreakerState {
    settings: Breaker,
    part: Part,
    /// The breakers of the parts that have failed.
    parts: Mutex<HashMap<Arc<str>, Arc<Self>>>,
    shared: Arc<Shared>,
    /// The longest deadline for which the breaker is open; 0 while it is closed.
    open_for: AtomicU64,
    history: Mutex<History>,
    users: AtomicUsize,
}

/// The state that the breakers of a store and its parts share.
#[derive(Default)]
struct Shared {
    /// The number of breakers that are open or have counted failures. So a check finds out without
    /// a lock whether there are any such breakers.
    troubled: AtomicUsize,
    /// Bounds on the log lines of the breakers, so that a store with many parts does not flood the
    /// log.
    opened: Throttle,
    opened_further: Throttle,
    closed: Throttle,
}

#[derive(Default)]
struct History {
    /// Whether the breaker is counted in [`Shared::troubled`].
    is_troubled: bool,
    /// The longest deadlines of checks that have failed in a row, the longest first. The list has
    /// room for the number of failures that open the breaker. When the list is full, the breaker
    /// opens for the last deadline in the list.
    failures: Vec<u64>,
    last: Option<Arc<Error>>,
    /// The longest deadline of the callers that the breaker has refused since it opened.
    longest_refused: Duration,
    /// The longest deadline that any of these callers may have later: a default deadline grows with
    /// the round trip.
    longest: Duration,
    /// The deadline of the last probe.
    probe_takes: Duration,
    /// When the breaker opened.
    opened: Option<Instant>,
    /// When a probe last began or ended since the breaker opened.
    last_probe: Option<Instant>,
    probes: Option<AbortHandle>,
}

impl SharedBreaker {
    /// A breaker that no other limiter uses yet.
    pub(crate) fn new(settings: Breaker) -> Self {
        Self::of(&Arc::new(BreakerState::of_store(settings)))
    }

    pub(super) fn of(state: &Arc<BreakerState>) -> Self {
        state.users.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(state))
    }

    /// Whether the breaker may be open for any part of the store and any deadline.
    #[inline]
    pub(crate) fn may_be_open(&self) -> bool {
        self.0.shared.troubled.load(Ordering::Relaxed) > 0
    }

    /// Whether the breaker keeps checks of this part with this deadline from the store.
    pub(crate) fn is_open_for(&self, part: impl FnOnce() -> Part, deadline: Duration) -> bool {
        self.may_be_open() && self.of_part(part(), false).is_some_and(|breaker| breaker.is_open_for(deadline))
    }

    /// Counts the outcome of a call to a part of the store. `took` is how long the call took.
    pub(crate) fn count<T>(
        &self,
        part: impl FnOnce() -> Part,
        outcome: &Result<T, Error>,
        took: impl FnOnce() -> Duration,
    ) {
        match outcome {
            Ok(_) if !self.may_be_open() => {}
            Ok(_) => _ = self.of_part(part(), false).map(|breaker| breaker.count_answer(took)),
            Err(error) if error.is_the_stores() && self.0.settings.failures > 0 => {
                _ = self.of_part(part(), true).map(|breaker| breaker.count_failure(error));
            }
            Err(_) => {}
        }
    }

    /// The breaker of a part, if there is one. A part that fails for the first time gets a breaker.
    pub(crate) fn of_part(&self, part: Part, has_failed: bool) -> Option<Arc<BreakerState>> {
        let Some(name) = part else { return Some(Arc::clone(&self.0)) };
        let mut parts = self.0.parts();
        if has_failed && !parts.contains_key(&name) {
            if parts.len() >= MOST_PARTS {
                parts.retain(|_, breaker| breaker.history().is_troubled);
            }
            let breaker = BreakerState::new(self.0.settings, Some(Arc::clone(&name)), Arc::clone(&self.0.shared));
            parts.insert(Arc::clone(&name), Arc::new(breaker));
        }
        parts.get(&name).cloned()
    }
}

impl BreakerState {
    pub(super) fn of_store(settings: Breaker) -> Self {
        Self::new(settings, None, Arc::default())
    }

    fn new(settings: Breaker, part: Part, shared: Arc<Shared>) -> Self {
        let (parts, history) = (Mutex::default(), Mutex::default());
        Self { settings, part, parts, shared, open_for: AtomicU64::new(0), history, users: AtomicUsize::new(0) }
    }

    /// The error to return instead of asking the store, if the breaker is open for this deadline.
    /// `probe` sends a probe with the deadline that is passed to it. This deadline may become as
    /// long as `longest`.
    pub(crate) fn refuse<P, F>(self: &Arc<Self>, deadline: Duration, longest: Duration, probe: P) -> Option<Error>
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        if !self.is_open_for(deadline) {
            return None;
        }
        let mut history = self.history();
        let last_failure = history.last.clone()?;
        history.longest_refused = history.longest_refused.max(deadline);
        history.longest = history.longest.max(longest);
        // A probe is overdue only after twice the sum of the interval and its deadline. After a
        // shorter time, the runtime of the task may only be busy, and not blocked.
        let takes = history.probe_takes.max(deadline);
        let overdue = self.probe_every().saturating_add(takes).saturating_mul(2);
        if history.last_probe.is_none_or(|probe| probe.elapsed() >= overdue) {
            let is_first = history.last_probe.replace(Instant::now()).is_none();
            let runtime = Handle::try_current().ok()?;
            if history.probes.as_ref().is_some_and(|task| !task.is_finished()) {
                // The task that sends probes stands still, so the caller's check has to be the
                // probe.
                return None;
            }
            let probes = send_probes(Arc::downgrade(self), self.probe_every(), deadline, probe);
            history.probes = Some(runtime.spawn(probes).abort_handle());
            // No caller has come for a long time, and the store may be back, so this caller's check
            // asks as well.
            if is_first && history.opened.is_some_and(|opened| opened.elapsed() >= overdue) {
                return None;
            }
        }
        Some(Error::BreakerOpen(last_failure))
    }

    fn is_open_for(&self, deadline: Duration) -> bool {
        micros(deadline) <= self.open_for.load(Ordering::Relaxed)
    }

    fn is_open(&self) -> bool {
        self.open_for.load(Ordering::Relaxed) > 0
    }

    fn probe_every(&self) -> Duration {
        self.settings.probe_every.max(Duration::from_millis(1))
    }

    /// Takes note that a probe begins, and returns the deadline of the probe. That is `deadline`,
    /// but not above [`History::longest`], and never below [`History::longest_refused`].
    fn begin_probe(&self, deadline: Duration) -> Duration {
        let mut history = self.history();
        // A task that was aborted may still run. Callers must not wait for the next probe of such a
        // task.
        history.last_probe = history.probes.is_some().then(Instant::now);
        history.probe_takes = deadline.min(history.longest).max(history.longest_refused);
        history.probe_takes
    }

    /// Counts the outcome of a probe, and returns whether another has to follow.
    fn end_probe(&self, outcome: Result<Decision, Error>) -> bool {
        match outcome {
            Err(error) if error.is_the_stores() => self.count_failure(&error),
            _ => {
                let mut history = self.history();
                // From now on, one failure is enough to open the breaker again. A probe writes
                // nothing, so it may succeed while other checks fail.
                history.failures = vec![u64::MAX; self.settings.failures.saturating_sub(1) as usize];
                self.close(history);
            }
        }
        let mut history = self.history();
        history.last_probe = history.probes.is_some().then(Instant::now);
        self.is_open()
    }

    fn count_failure(&self, error: &Error) {
        let deadline = if let Error::TimedOut { deadline, .. } = error { micros(*deadline) } else { u64::MAX };
        let mut history = self.history();
        history.last = Some(Arc::new(error.clone()));
        if deadline <= self.open_for.load(Ordering::Relaxed) {
            return;
        }
        let failures = &mut history.failures;
        let enough = self.settings.failures as usize;
        failures.insert(failures.partition_point(|longer| *longer >= deadline), deadline);
        failures.truncate(enough);
        let shortest = failures.get(enough - 1).copied().unwrap_or(0);
        self.note_trouble(&mut history);
        if shortest <= self.open_for.load(Ordering::Relaxed) {
            return;
        }
        let was_open = self.is_open();
        if !was_open {
            (history.opened, history.last_probe) = (Some(Instant::now()), None);
            history.longest_refused = Duration::ZERO;
            (history.longest, history.probe_takes) = (Duration::ZERO, Duration::ZERO);
            metrics::breaker_opened();
        }
        self.open_for.store(shortest, Ordering::Relaxed);
        // The lock is released before the log line, so that no caller waits for the line.
        drop(history);
        let (line, trouble) = match was_open {
            true => (&self.shared.opened_further, "fails checks with longer deadlines as well"),
            false => (&self.shared.opened, "has failed repeatedly: the breaker opens"),
        };
        if let Some(suppressed) = line.pass() {
            let error = Chain(error);
            let part = self.part.as_deref();
            warn!(%error, part, suppressed, "the rate-limit store {trouble}");
        }
    }

    /// Counts an answer. An answer proves nothing for checks whose deadline is shorter than the
    /// time that the answer took.
    fn count_answer(&self, took: impl FnOnce() -> Duration) {
        let took = took();
        let mut history = self.history();
        history.failures.retain(|deadline| *deadline < micros(took));
        self.note_trouble(&mut history);
        if self.is_open_for(took) {
            self.close(history);
        }
    }

    fn note_trouble(&self, history: &mut History) {
        let is_troubled = self.is_open() || !history.failures.is_empty();
        match (mem::replace(&mut history.is_troubled, is_troubled), is_troubled) {
            (false, true) => drop(self.shared.troubled.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.shared.troubled.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
    }

    fn close(&self, mut history: MutexGuard<'_, History>) {
        let was_open = self.open_for.swap(0, Ordering::Relaxed) > 0;
        self.note_trouble(&mut history);
        // The lock is released before the log line, so that no caller waits for the line.
        drop(history);
        if was_open {
            metrics::breaker_closed();
            if let Some(suppressed) = self.shared.closed.pass() {
                let part = self.part.as_deref();
                info!(part, suppressed, "the rate-limit store answers again: the breaker closes");
            }
        }
    }

    fn parts(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Self>>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends probes until a probe is answered. After a probe without an answer, the next probe may take
/// twice as long, as in RFC 6298: the store may be farther away than before. The task does not keep
/// a breaker alive after its limiters are dropped.
async fn send_probes<F>(
    breaker: Weak<BreakerState>,
    every: Duration,
    mut deadline: Duration,
    probe: impl Fn(Duration) -> F,
) where
    F: Future<Output = Result<Result<Decision, StoreError>, Error>>,
{
    while let Some(takes) = breaker.upgrade().map(|breaker| breaker.begin_probe(deadline)) {
        deadline = takes.saturating_mul(2);
        let pause = sleep(every);
        let outcome = probe(takes).await.and_then(|answer| Ok(answer?));
        if !breaker.upgrade().is_some_and(|breaker| breaker.end_probe(outcome)) {
            return;
        }
        pause.await;
    }
}

/// The microseconds of a duration, at least 1.
fn micros(duration: Duration) -> u64 {
    clock::micros(duration).max(1)
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
        let parts: Vec<_> = self.0.parts().values().cloned().collect();
        for breaker in iter::once(&self.0).chain(&parts) {
            let mut history = breaker.history();
            // A new handle may have been made before the lock was taken.
            if self.0.users.load(Ordering::SeqCst) == 0
                && let Some(probes) = history.probes.take()
            {
                probes.abort();
                (history.opened, history.last_probe) = (None, None);
            }
        }
    }
}

impl Drop for BreakerState {
    fn drop(&mut self) {
        if self.is_open() {
            metrics::breaker_closed();
        }
        // A failure may have been counted after the part was forgotten.
        if self.history().is_troubled {
            self.shared.troubled.fetch_sub(1, Ordering::Relaxed);
        }
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

/// Models that try each order of the steps of threads.
#[cfg(test)]
mod models {
    use std::future::ready;

    use loom::{model, thread::spawn};
    use tokio::{runtime::Builder, runtime::Runtime, task::yield_now};

    use super::*;
    use crate::error::StoreErrorKind;

    const DEADLINE: Duration = Duration::from_secs(60);
    const TIMED_OUT: Error = Error::TimedOut { deadline: DEADLINE, round_trip: None };

    /// Runs a model on an idle runtime. At the end, checks that the count of failures and the gauge
    /// agree with whether the breaker is open.
    fn in_each_order(preemptions: Option<usize>, run: impl Fn(&Runtime) -> SharedBreaker + Send + Sync + 'static) {
        let mut orders = model::Builder::new();
        orders.preemption_bound = preemptions;
        let check = move |assert_gauge: &dyn Fn(i8)| {
            let runtime = runtime();
            let _entered = runtime.enter();
            let breaker = run(&runtime);
            let failures = breaker.0.history().failures.len();
            let is_open = breaker.0.is_open();
            assert_eq!(breaker.may_be_open(), is_open || failures > 0);
            assert!(is_open || failures < breaker.0.settings.failures as usize, "enough to open it");
            assert_gauge(is_open.into());
            breaker.count(|| None, &Ok(()), || DEADLINE);
            assert!(!refuse(&breaker, None).0 && breaker.0.history().failures.is_empty(), "the store answers");
            assert_gauge(-i8::from(is_open));
            let probed = open_breaker(1);
            assert!(refuse(&probed, None).1);
            drop((breaker, probed));
            assert_gauge(0);
        };
        #[cfg(not(feature = "metrics"))]
        orders.check(move || check(&|_| {}));
        #[cfg(feature = "metrics")]
        {
            let recorder = metrics_util::debugging::DebuggingRecorder::new();
            let gauge = recorder.snapshotter();
            // A snapshot tells by how much the gauge has risen since the last snapshot.
            let assert_gauge = move |risen: i8| {
                let values = gauge.snapshot().into_vec().into_iter().map(|(.., value)| value);
                assert!(values.eq([metrics_util::debugging::DebugValue::Gauge(f64::from(risen).into())]), "{risen}");
            };
            ::metrics::with_local_recorder(&recorder, || orders.check(move || check(&assert_gauge)));
        }
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().unwrap()
    }

    fn open_breaker(failures: u32) -> SharedBreaker {
        let breaker = SharedBreaker::new(Breaker::new(failures, DEADLINE));
        (0..failures).for_each(|_| breaker.0.count_failure(&TIMED_OUT));
        breaker
    }

    /// An error of one check: the store has replied.
    fn answer() -> Error {
        StoreError::new("deciding a check", StoreErrorKind::Other, "it has another kind").of_one_check().into()
    }

    /// Returns whether the caller is refused, and whether the caller starts a task. The probes end
    /// with `outcome`; if `outcome` is `None`, they wait for ever.
    fn refuse(breaker: &SharedBreaker, outcome: Option<Error>) -> (bool, bool) {
        let before = breaker.0.history().probes.as_ref().map(AbortHandle::id);
        let refused = breaker.0.refuse(DEADLINE, DEADLINE, move |_| {
            let outcome = outcome.clone();
            async move { if let Some(error) = outcome { Err(error) } else { std::future::pending().await } }
        });
        let starts = breaker.0.history().probes.as_ref().map(AbortHandle::id) != before;
        (refused.is_some(), starts)
    }

    /// The runtime ends before the first poll of the task, while the task waits for the answer, or
    /// while it pauses after a failure.
    #[test]
    fn another_caller_takes_over_when_the_runtime_of_the_probes_ends() {
        for (is_polled, outcome) in [(false, None), (true, None), (true, Some(TIMED_OUT))] {
            in_each_order(None, move |lasting| {
                let ending = runtime();
                let breaker = open_breaker(1);
                ending.block_on(async { assert_eq!(refuse(&breaker, outcome.clone()), (true, true)) });
                is_polled.then(|| ending.block_on(yield_now()));
                // Time passes.
                breaker.0.history().last_probe = None;
                let other = breaker.clone();
                let other = spawn(move || refuse(&other, Some(answer())));
                let own = refuse(&breaker, Some(answer()));
                assert!(!own.1, "the caller is the probe while the task lasts");
                drop(ending);
                let [own, other] = [own, other.join().unwrap()].map(|(is_refused, starts)| !is_refused || starts);
                assert_ne!(own, other, "one takes over");
                breaker.0.history().last_probe = None;
                refuse(&breaker, Some(answer()));
                lasting.block_on(yield_now());
                assert!(!breaker.0.is_open(), "the probe was answered");
                breaker
            });
        }
    }

    /// The waits grow up to the longest deadline.
    #[test]
    fn each_probe_waits_twice_as_long() {
        model(|| {
            let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            let breaker = open_breaker(1);
            let waits = Arc::new(std::sync::Mutex::new(Vec::new()));
            let probes = Arc::clone(&waits);
            runtime.block_on(async {
                let probe = move |takes: Duration| {
                    probes.lock().unwrap().push(takes / DEADLINE.as_secs() as u32);
                    ready(Err(TIMED_OUT))
                };
                assert!(breaker.0.refuse(DEADLINE, 10 * DEADLINE, probe).is_some());
                sleep(6 * DEADLINE - Duration::from_secs(1)).await;
            });
            assert_eq!(*waits.lock().unwrap(), [1, 2, 4, 8, 10, 10].map(Duration::from_secs));
        });
    }

    /// A task ends, or goes on, while the store fails again.
    #[test]
    fn a_breaker_that_opens_again_is_probed() {
        let long = Error::TimedOut { deadline: Duration::MAX, round_trip: None };
        let cases =
            [(1, answer(), TIMED_OUT), (2, answer(), TIMED_OUT), (2, answer(), long), (2, TIMED_OUT, TIMED_OUT)];
        for (failures, outcome, failure) in cases {
            in_each_order(None, move |_| {
                let breaker = open_breaker(failures);
                assert!(refuse(&breaker, None).1);
                let state = Arc::clone(&breaker.0);
                let outcome = outcome.clone();
                let task = spawn(move || state.end_probe(Err(outcome)));
                breaker.count::<()>(|| None, &Err(failure.clone()), || DEADLINE);
                let goes_on = task.join().unwrap();
                let last_probe = breaker.0.history().last_probe;
                assert!(goes_on || last_probe.is_none() || !breaker.0.is_open(), "the probe is lost");
                let is_counted = breaker.0.is_open() || breaker.0.history().failures.len() == failures as usize - 1;
                assert!(is_counted, "a failure after the probe is lost");
                breaker
            });
        }
    }

    /// The last limiter leaves, a probe begins and ends, and a new limiter is made.
    #[test]
    fn a_new_limiter_keeps_or_starts_the_probes() {
        let long = Err(Error::TimedOut { deadline: Duration::MAX, round_trip: None });
        let cases = [(2, Ok(()), TIMED_OUT), (2, Err(TIMED_OUT), answer()), (2, Ok(()), answer()), (1, long, answer())];
        for (failures, counted, outcome) in cases {
            in_each_order(Some(2), move |_| {
                let last = open_breaker(failures);
                let outcome = outcome.clone();
                let counted = counted.clone();
                assert!(refuse(&last, None).1);
                let state = Arc::clone(&last.0);
                let task = Arc::clone(&last.0);
                let task = spawn(move || (task.begin_probe(DEADLINE), task.end_probe(Err(outcome))));
                let leaving = spawn(move || last.count(|| None, &counted, || DEADLINE));
                let new = SharedBreaker::of(&state);
                let (is_refused, _) = refuse(&new, None);
                new.count::<()>(|| None, &Err(TIMED_OUT), || DEADLINE);
                task.join().unwrap();
                leaving.join().unwrap();
                assert!(!is_refused || state.history().probes.is_some(), "no task sends probes");
                new
            });
        }
    }
}
