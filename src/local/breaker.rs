//! The circuit breaker's state and its probes. `local/mod.rs` has the rules and the defaults for
//! [`Breaker`].

#[cfg(not(test))]
use std::sync;
use std::{
    collections::HashMap,
    future::Future,
    sync::{Arc, PoisonError, Weak, atomic::Ordering},
    time::Duration,
};

// The tests here use loom, so that models can try every interleaving of threads.
#[cfg(test)]
use loom::sync;
use sync::{Mutex, MutexGuard, atomic::AtomicUsize};
use tokio::{
    runtime::Handle,
    task::AbortHandle,
    time::{Instant, sleep},
};

use super::Breaker;
use crate::{
    decision::Decision,
    error::{Error, StoreError, StoreErrorKind},
    logging::{Chain, Throttle, info, warn},
    metrics,
};

/// A store part's name: see [`Store::part_of`](crate::Store::part_of).
type Part = Option<Arc<str>>;

/// A limiter's handle on a breaker, which other limiters may share. Dropping the last handle ends
/// the probes.
pub(crate) struct SharedBreaker(Arc<BreakerState>);

/// A store's breaker, with a state for each part. An error counts like a timeout after the longest
/// deadline, [`Duration::MAX`].
#[derive(Default)]
pub(crate) struct BreakerState {
    settings: Breaker,
    /// The parts with failures that no answer has contradicted yet.
    failing: Mutex<HashMap<Part, FailingPart>>,
    /// The number of parts in `failing`. A check reads it without a lock, to find out whether any
    /// part fails.
    count: AtomicUsize,
    users: AtomicUsize,
    /// Bounds on the breaker's log lines, so that a store with many parts does not flood the log.
    opened: Throttle,
    closed: Throttle,
}

struct FailingPart {
    /// The longest deadlines among the checks that have failed in a row, the longest first. The
    /// list has room for as many failures as are needed to open the breaker. When it is full, the
    /// breaker opens for all checks whose deadline is at most the last deadline in the list.
    failures: Vec<Duration>,
    last: Arc<Error>,
    open: Option<Open>,
}

/// A part's state while its breaker is open.
struct Open {
    /// The breaker stops checks with this deadline or a shorter one.
    deadline: Duration,
    /// The deadline for the next probe, or for the one in flight.
    probe_takes: Duration,
    /// The longest deadline that any refused caller may have later. A default deadline may still
    /// grow with the round trip.
    longest: Duration,
    /// The last time at which a probe ended, or at which a caller's check became the probe. If
    /// neither has happened yet, the time at which the breaker opened.
    probed_at: Instant,
    /// The task that sends probes.
    probes: Option<AbortHandle>,
}

impl SharedBreaker {
    /// A breaker that no other limiter uses yet.
    pub(crate) fn new(settings: Breaker) -> Self {
        Self::of(&Arc::new(BreakerState::new(settings)))
    }

    pub(super) fn of(state: &Arc<BreakerState>) -> Self {
        state.users.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(state))
    }

    /// True if the breaker may be open for any store part and any deadline.
    #[inline]
    pub(crate) fn may_be_open(&self) -> bool {
        self.0.count.load(Ordering::Relaxed) > 0
    }

    /// True if the breaker stops checks with this deadline from asking this part of the store.
    pub(crate) fn is_open_for(&self, part: impl FnOnce() -> Part, deadline: Duration) -> bool {
        self.may_be_open()
            && self
                .0
                .failing()
                .get(&part())
                .is_some_and(|failing| failing.is_open_for(deadline))
    }

    /// Counts how a call to a store part has ended. `took` is how long the call took.
    pub(crate) fn count<T>(
        &self,
        part: impl FnOnce() -> Part,
        outcome: &Result<T, Error>,
        took: impl FnOnce() -> Duration,
    ) {
        match outcome {
            Ok(_) if self.may_be_open() => {
                let (part, took) = (part(), took());
                self.0
                    .count_answer(&part, |failing| failing.learn_answer(took));
            }
            Err(error) if error.is_the_stores() && self.0.settings.failures > 0 => {
                self.0.count_failure(&part(), error);
            }
            _ => {}
        }
    }

    /// The error to return instead of asking a store part, if the breaker is open for this
    /// deadline. `probe` sends a probe. Its argument is the probe's deadline, which may grow up to
    /// `longest`.
    pub(crate) fn refuse<P, F>(
        &self,
        part: Part,
        deadline: Duration,
        longest: Duration,
        probe: P,
    ) -> Option<Error>
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        let mut parts = self.0.failing();
        let failing = parts.get_mut(&part)?;
        let open = failing.open.as_mut()?;
        if deadline > open.deadline {
            return None;
        }
        open.probe_takes = open.probe_takes.max(deadline);
        open.longest = open.longest.max(longest);
        // A probe is overdue only after twice the sum of the interval and its deadline. Before
        // that, the task's runtime may just be busy rather than blocked. If the runtime has ended,
        // the task has ended, too, and no probe is in flight.
        let every = self.0.settings.probe_every.max(Duration::from_millis(1));
        let takes = match &open.probes {
            Some(task) if task.is_finished() => Duration::ZERO,
            _ => open.probe_takes,
        };
        let is_overdue = open.probed_at.elapsed() >= every.saturating_add(takes).saturating_mul(2);
        if is_overdue {
            open.probed_at = Instant::now();
            open.probes.take_if(|task| task.is_finished());
        }
        if open.probes.is_none()
            && let Ok(runtime) = Handle::try_current()
        {
            let probes = send_probes(Arc::downgrade(&self.0), part, every, probe);
            open.probes = Some(runtime.spawn(probes).abort_handle());
        }
        // If a probe is overdue, the caller's check becomes the probe. There are two possible
        // reasons: the task that sends probes stands still or has ended, or no caller has come for
        // a long time, and the store may be back.
        (!is_overdue).then(|| Error::BreakerOpen(Arc::clone(&failing.last)))
    }
}

impl BreakerState {
    pub(super) fn new(settings: Breaker) -> Self {
        Self {
            settings,
            ..Self::default()
        }
    }

    /// The next probe's deadline; `None` if the breaker is closed. A probe that has begun may never
    /// end, since the limiter may be dropped, which also drops the task.
    fn next_probe(&self, part: &Part) -> Option<Duration> {
        Some(self.failing().get(part)?.open.as_ref()?.probe_takes)
    }

    /// Counts how a probe has ended. Without an answer, the next probe may take twice as long, a
    /// backoff as in RFC 6298: the store may be farther away than before. If a probe failed because
    /// the queue was full, it does not tell anything about the store.
    fn end_probe(&self, part: &Part, outcome: Result<Decision, Error>) {
        let failures = self.settings.failures;
        match outcome {
            Err(error) if error.is_the_stores() => self.count_failure(part, &error),
            Err(Error::Unavailable(error)) if error.kind == StoreErrorKind::TimedOut => {}
            _ => return self.count_answer(part, |failing| failing.learn_probe(failures)),
        }
        let mut parts = self.failing();
        let failing = parts.get_mut(part);
        if let Some(open) = failing.and_then(|failing| failing.open.as_mut()) {
            open.probed_at = Instant::now();
            let twice = open.probe_takes.saturating_mul(2);
            open.probe_takes = twice.min(open.longest).max(open.probe_takes);
        }
    }

    fn count_failure(&self, part: &Part, error: &Error) {
        let deadline = match error {
            Error::TimedOut { deadline, .. } => *deadline,
            _ => Duration::MAX,
        };
        let last = Arc::new(error.clone());
        let mut parts = self.failing();
        let failing = parts.entry(part.clone()).or_insert_with(|| FailingPart {
            failures: Vec::new(),
            last: Arc::clone(&last),
            open: None,
        });
        failing.last = last;
        let opens = failing.learn_failure(deadline, self.settings.failures as usize);
        self.count.store(parts.len(), Ordering::Relaxed);
        // The lock is released before the log line, so that callers do not wait for the line.
        drop(parts);
        if opens && let Some(suppressed) = self.opened.pass() {
            let error = Chain(error);
            let part = part.as_deref();
            warn!(%error, part, suppressed, "the rate-limit store has failed repeatedly: the breaker opens");
        }
    }

    /// Counts an answer from a part. `learn` updates the part's state, and returns its open breaker
    /// if the answer closes it.
    fn count_answer(&self, part: &Part, learn: impl FnOnce(&mut FailingPart) -> Option<Open>) {
        let mut parts = self.failing();
        let Some(failing) = parts.get_mut(part) else {
            return;
        };
        let closed = learn(failing);
        if failing.failures.is_empty() && failing.open.is_none() {
            parts.remove(part);
            self.count.store(parts.len(), Ordering::Relaxed);
        }
        // The lock is released before the log line, so that callers do not wait for the line.
        drop(parts);
        if closed.is_some()
            && let Some(suppressed) = self.closed.pass()
        {
            let part = part.as_deref();
            info!(
                part,
                suppressed, "the rate-limit store answers again: the breaker closes"
            );
        }
    }

    fn failing(&self) -> MutexGuard<'_, HashMap<Part, FailingPart>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FailingPart {
    fn is_open_for(&self, deadline: Duration) -> bool {
        let open = self.open.as_ref();
        open.is_some_and(|open| deadline <= open.deadline)
    }

    /// Counts a failure at this deadline. After `enough` failures, the breaker is open for checks
    /// whose deadline is at most the shortest deadline among these failures. Returns true if this
    /// failure has opened it.
    fn learn_failure(&mut self, deadline: Duration, enough: usize) -> bool {
        if self.is_open_for(deadline) {
            return false;
        }
        self.failures.insert(
            self.failures.partition_point(|longer| *longer >= deadline),
            deadline,
        );
        self.failures.truncate(enough);
        let Some(&shortest) = self.failures.get(enough - 1) else {
            return false;
        };
        let was_open = self.open.is_some();
        // While the breaker is open, the list has only deadlines of at least `Open::deadline`.
        self.open.get_or_insert_with(Open::new).deadline = shortest;
        !was_open
    }

    /// An answer does not prove anything for checks whose deadline is shorter than the time that
    /// the answer took.
    fn learn_answer(&mut self, took: Duration) -> Option<Open> {
        self.failures.retain(|deadline| *deadline < took);
        self.open.take_if(|open| took <= open.deadline)
    }

    /// After an answered probe, one failure is enough to open the breaker again. A probe does not
    /// write to the store, so it may succeed while other checks fail.
    fn learn_probe(&mut self, enough: u32) -> Option<Open> {
        let open = self.open.take()?;
        self.failures = vec![Duration::MAX; enough as usize - 1];
        Some(open)
    }
}

impl Open {
    fn new() -> Self {
        metrics::breakers_open(1.0);
        let [deadline, probe_takes, longest] = [Duration::ZERO; 3];
        Self {
            deadline,
            probe_takes,
            longest,
            probed_at: Instant::now(),
            probes: None,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(probes) = &self.probes {
            probes.abort();
        }
        metrics::breakers_open(-1.0);
    }
}

/// Sends probes until one is answered. This task does not keep the breaker alive after all its
/// limiters are dropped.
async fn send_probes<F>(
    breaker: Weak<BreakerState>,
    part: Part,
    every: Duration,
    probe: impl Fn(Duration) -> F,
) where
    F: Future<Output = Result<Result<Decision, StoreError>, Error>>,
{
    while let Some(takes) = breaker
        .upgrade()
        .and_then(|breaker| breaker.next_probe(&part))
    {
        let pause = sleep(every);
        let outcome = probe(takes).await.and_then(|answer| Ok(answer?));
        let Some(breaker) = breaker.upgrade() else {
            return;
        };
        breaker.end_probe(&part, outcome);
        drop(breaker);
        pause.await;
    }
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
        let mut parts = self.0.failing();
        // A new handle may have been made before the lock was taken.
        if self.0.users.load(Ordering::SeqCst) == 0 {
            for failing in parts.values_mut() {
                if let Some(probes) = failing.open.as_mut().and_then(|open| open.probes.take()) {
                    probes.abort();
                }
            }
        }
    }
}

/// Models that try every interleaving of threads.
#[cfg(test)]
mod models {
    use std::future::ready;

    use loom::{model, thread::spawn};
    use tokio::{runtime::Builder, runtime::Runtime, task::yield_now};

    use super::*;
    use crate::error::StoreErrorKind;

    const DEADLINE: Duration = Duration::from_secs(60);
    const TIMED_OUT: Error = Error::TimedOut {
        deadline: DEADLINE,
        round_trip: None,
    };

    /// Runs a model on an idle runtime. At the end, checks that the failure count and the gauge
    /// agree with whether the breaker is open.
    fn in_each_order(
        preemptions: Option<usize>,
        run: impl Fn(&Runtime) -> SharedBreaker + Send + Sync + 'static,
    ) {
        let mut orders = model::Builder::new();
        orders.preemption_bound = preemptions;
        let check = move |assert_gauge: &dyn Fn(i8)| {
            let runtime = runtime();
            let _entered = runtime.enter();
            let breaker = run(&runtime);
            let (is_open, failures) = state(&breaker);
            assert_eq!(breaker.may_be_open(), is_open || failures > 0);
            assert!(
                is_open || failures < breaker.0.settings.failures as usize,
                "enough to open it"
            );
            assert_gauge(is_open.into());
            breaker.count(|| None, &Ok(()), || DEADLINE);
            assert!(
                breaker.0.failing().is_empty() && !breaker.may_be_open(),
                "the store answers"
            );
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
            // A snapshot tells by how much the gauge has risen since the last one.
            let assert_gauge = move |risen: i8| {
                let values = gauge
                    .snapshot()
                    .into_vec()
                    .into_iter()
                    .map(|(.., value)| value);
                assert!(
                    values.eq([metrics_util::debugging::DebugValue::Gauge(
                        f64::from(risen).into()
                    )]),
                    "{risen}"
                );
            };
            ::metrics::with_local_recorder(&recorder, || {
                orders.check(move || check(&assert_gauge));
            });
        }
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().unwrap()
    }

    fn open_breaker(failures: u32) -> SharedBreaker {
        let breaker = SharedBreaker::new(Breaker::new(failures, DEADLINE));
        for _ in 0..failures {
            breaker.0.count_failure(&None, &TIMED_OUT);
        }
        breaker
    }

    /// True if the breaker is open, and how many failures it has.
    fn state(breaker: &SharedBreaker) -> (bool, usize) {
        breaker.0.failing().get(&None).map_or((false, 0), |part| {
            (part.open.is_some(), part.failures.len())
        })
    }

    fn task(breaker: &BreakerState) -> Option<AbortHandle> {
        breaker.failing().get(&None)?.open.as_ref()?.probes.clone()
    }

    /// Time passes, so that a probe is overdue.
    fn wait(breaker: &SharedBreaker) {
        if let Some(open) = breaker
            .0
            .failing()
            .get_mut(&None)
            .and_then(|part| part.open.as_mut())
        {
            open.probed_at -= 10 * DEADLINE;
        }
    }

    /// An error of one check: the store has replied.
    fn answer() -> Error {
        StoreError::new(
            "deciding a check",
            StoreErrorKind::Other,
            "it has another kind",
        )
        .of_one_check()
        .into()
    }

    /// Returns whether the caller is refused, and whether it starts a task. The probes end with
    /// `outcome`, or wait for ever if it is `None`.
    fn refuse(breaker: &SharedBreaker, outcome: Option<Error>) -> (bool, bool) {
        let before = task(&breaker.0).map(|task| task.id());
        let refused = breaker.refuse(None, DEADLINE, DEADLINE, move |_| {
            let outcome = outcome.clone();
            async move {
                if let Some(error) = outcome {
                    Err(error)
                } else {
                    std::future::pending().await
                }
            }
        });
        let after = task(&breaker.0).map(|task| task.id());
        (refused.is_some(), after.is_some() && after != before)
    }

    #[test]
    fn a_probe_without_room_in_the_queue_closes_nothing() {
        loom::model(|| {
            let breaker = open_breaker(1);
            let cause = "65536 checks are waiting";
            let full = StoreError::new("asking", StoreErrorKind::TimedOut, cause).of_one_check();
            breaker.0.end_probe(&None, Err(full.into()));
            assert_eq!(state(&breaker), (true, 1));
            breaker.0.end_probe(&None, Err(answer()));
            assert!(!state(&breaker).0, "the store has replied");
        });
    }

    /// The runtime ends before the task's first poll, while the task waits for the answer, or while
    /// it pauses after a failure.
    #[test]
    fn another_caller_takes_over_when_the_runtime_of_the_probes_ends() {
        for (is_polled, outcome) in [(false, None), (true, None), (true, Some(TIMED_OUT))] {
            in_each_order(None, move |lasting| {
                let ending = runtime();
                let breaker = open_breaker(1);
                ending.block_on(async {
                    assert_eq!(refuse(&breaker, outcome.clone()), (true, true));
                });
                is_polled.then(|| ending.block_on(yield_now()));
                wait(&breaker);
                let other = breaker.clone();
                let other = spawn(move || refuse(&other, Some(answer())));
                let own = refuse(&breaker, Some(answer()));
                assert!(!own.1, "the caller is the probe while the task lasts");
                drop(ending);
                let [own, other] =
                    [own, other.join().unwrap()].map(|(is_refused, starts)| !is_refused || starts);
                assert_ne!(own, other, "one takes over");
                wait(&breaker);
                refuse(&breaker, Some(answer()));
                lasting.block_on(yield_now());
                assert!(!state(&breaker).0, "the probe was answered");
                breaker
            });
        }
    }

    /// The waits grow up to the longest deadline.
    #[test]
    fn each_probe_waits_twice_as_long() {
        model(|| {
            let runtime = Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .unwrap();
            let breaker = open_breaker(1);
            let waits = Arc::new(std::sync::Mutex::new(Vec::new()));
            let probes = Arc::clone(&waits);
            runtime.block_on(async {
                let probe = move |takes: Duration| {
                    probes
                        .lock()
                        .unwrap()
                        .push(takes / DEADLINE.as_secs() as u32);
                    ready(Err(TIMED_OUT))
                };
                assert!(
                    breaker
                        .refuse(None, DEADLINE, 10 * DEADLINE, probe)
                        .is_some()
                );
                sleep(6 * DEADLINE - Duration::from_secs(1)).await;
            });
            assert_eq!(
                *waits.lock().unwrap(),
                [1, 2, 4, 8, 10, 10].map(Duration::from_secs)
            );
        });
    }

    /// A task ends, or goes on, while the store fails again.
    #[test]
    fn a_breaker_that_opens_again_is_probed() {
        let long = Error::TimedOut {
            deadline: Duration::MAX,
            round_trip: None,
        };
        let cases = [
            (1, answer(), TIMED_OUT),
            (2, answer(), TIMED_OUT),
            (2, answer(), long),
            (2, TIMED_OUT, TIMED_OUT),
        ];
        for (failures, outcome, failure) in cases {
            in_each_order(None, move |_| {
                let breaker = open_breaker(failures);
                assert!(refuse(&breaker, None).1);
                let probed = Arc::clone(&breaker.0);
                let is_answered = !outcome.is_the_stores();
                let outcome = outcome.clone();
                let ends = spawn(move || probed.end_probe(&None, Err(outcome)));
                breaker.count::<()>(|| None, &Err(failure.clone()), || DEADLINE);
                ends.join().unwrap();
                assert!(
                    !is_answered || task(&breaker.0).is_none(),
                    "no caller starts the probes again"
                );
                let (is_open, counted) = state(&breaker);
                assert!(
                    is_open || counted == failures as usize - 1,
                    "a failure after the probe is lost"
                );
                breaker
            });
        }
    }

    /// The last limiter leaves, a probe begins and ends, and a new limiter is made.
    #[test]
    fn a_new_limiter_keeps_or_starts_the_probes() {
        let long = Err(Error::TimedOut {
            deadline: Duration::MAX,
            round_trip: None,
        });
        let cases = [
            (2, Ok(()), TIMED_OUT),
            (2, Err(TIMED_OUT), answer()),
            (2, Ok(()), answer()),
            (1, long, answer()),
        ];
        for (failures, counted, outcome) in cases {
            in_each_order(Some(2), move |lasting| {
                let last = open_breaker(failures);
                let outcome = outcome.clone();
                let counted = counted.clone();
                assert!(refuse(&last, None).1);
                let [shared, probed] = [(); 2].map(|()| Arc::clone(&last.0));
                let probe = spawn(move || {
                    (
                        probed.next_probe(&None),
                        probed.end_probe(&None, Err(outcome)),
                    )
                });
                let leaving = spawn(move || last.count(|| None, &counted, || DEADLINE));
                let new = SharedBreaker::of(&shared);
                refuse(&new, None);
                new.count::<()>(|| None, &Err(TIMED_OUT), || DEADLINE);
                probe.join().unwrap();
                leaving.join().unwrap();
                let (is_refused, _) = refuse(&new, None);
                // Tasks that were aborted end now.
                lasting.block_on(yield_now());
                let is_probed = task(&shared).is_some_and(|task| !task.is_finished());
                assert!(!is_refused || is_probed, "no task sends probes");
                new
            });
        }
    }
}
