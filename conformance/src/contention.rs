//! Threads that are stopped between reading the clock and deciding.
//!
//! A store that reads its clock before it takes its lock decides by an old time if the thread then
//! waits. To such a decision, units of other threads seem to come from the future. The test clock
//! stops readers, so a test shows this without luck.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use tokio::task::spawn_blocking;
use tower_sliding_window::{Algorithm, Charge, Check, Decision, Key, Limit, Store};

use crate::trial::Trial;

const UNITS: u64 = 5;
const WINDOW: Duration = Duration::from_secs(10);

/// The readers stop this long before a window of the clock begins, and the others decide as long
/// after it has begun.
const MOMENT: Duration = Duration::from_millis(1);

/// A store that rightly reads the clock under a lock makes all other threads wait for a stopped
/// one. So a reader is stopped for a bounded time, and the test waits a bounded time for threads.
const STOPPED: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_millis(20);

/// Stops the threads that read a clock.
#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// True if further readers are stopped.
    stops: bool,
    /// True if the stopped readers go on.
    is_open: bool,
    stopped: usize,
    /// The threads that have decided after the clock went on.
    done: usize,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Waits until `is_met`, for at most `longest`.
    fn wait(&self, longest: Duration, is_met: impl Fn(&State) -> bool) {
        let wait = |state: &mut State| !is_met(state);
        drop(self.changed.wait_timeout_while(self.state(), longest, wait));
    }

    fn hold_up(&self) {
        if self.state().stops {
            self.set(|state| state.stopped += 1);
            self.wait(STOPPED, |state| state.is_open);
        }
    }
}

/// The decision, if the store makes it without waiting.
fn decided_at_once(store: &dyn Store, check: &Check) -> Option<Decision> {
    let mut decision = store.decide(check.clone());
    match decision
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
    {
        Poll::Ready(decision) => decision.ok(),
        Poll::Pending => None,
    }
}

/// How many of `times` checks are admitted.
fn admitted(store: &dyn Store, check: &Check, times: u64) -> u64 {
    let decisions = (0..times).filter_map(|_| decided_at_once(store, check));
    decisions.filter(Decision::is_allowed).count() as u64
}

/// A store on a server is not tested: it reads the server's clock where it decides, and the test
/// clock only stands in for that one.
pub(crate) async fn stopped_readers(
    trial: Trial,
    algorithms: Vec<Algorithm>,
) -> Result<(), String> {
    let gate = Arc::new(Gate::default());
    let reader = Arc::clone(&gate);
    trial.clock.after_reading(move || reader.hold_up());
    for algorithm in algorithms {
        for limits in 1..=2 {
            let limit = |name| Limit::per(name, UNITS, WINDOW).with_algorithm(algorithm);
            let key = Key::from(format!("{algorithm:?} {limits}"));
            let charge = |name| Charge::new(limit(name), &key, 1).unwrap();
            let mut check = Check::new(charge("contended"));
            if limits == 2 {
                check = check.and(charge("contended_too")).unwrap();
            }
            if decided_at_once(&*trial.handles[0], &check).is_none() {
                return Ok(());
            }
            let (gate, clock, handles) = (
                Arc::clone(&gate),
                trial.clock.clone(),
                trial.handles.clone(),
            );
            let counted =
                spawn_blocking(move || within_one_window(&gate, &clock, &handles, &check));
            let counted = counted.await.map_err(|error| error.to_string())?;
            if counted > UNITS {
                return Err(format!(
                    "units of {limits} limits by {algorithm:?} that are admitted within one \
                     window, while threads stop between reading the clock and deciding: expected \
                     at most {UNITS}, got {counted}"
                ));
            }
        }
    }
    Ok(())
}

/// Stops threads that have read the clock, moves the clock on, lets other threads decide, and then
/// the stopped ones. Returns how many units are admitted after the clock has moved on and before
/// one window after the stopped threads have read it. All of them are in one window of the clock.
fn within_one_window(
    gate: &Gate,
    clock: &tower_sliding_window::store::ManualClock,
    handles: &[Arc<dyn Store>; 2],
    check: &Check,
) -> u64 {
    // The clock stands just before a window of the clock that has no units yet.
    let since = clock.now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let window = WINDOW.as_micros();
    let over = Duration::from_micros((since.as_micros() % window) as u64);
    clock.advance(3 * WINDOW - over - MOMENT);
    // More threads than processors.
    let threads = 2 * thread::available_parallelism().map_or(1, usize::from) + 2;
    gate.set(|state| {
        *state = State {
            stops: true,
            ..State::default()
        }
    });
    let handle = |number: usize| &*handles[number % 2];
    let mut counted = thread::scope(|scope| {
        for number in 0..threads {
            scope.spawn(move || admitted(handle(number), check, 1));
        }
        gate.wait(STOPPED, |state| state.stopped > 0);
        gate.wait(PATIENCE, |state| state.stopped == threads);
        gate.set(|state| state.stops = false);
        clock.advance(2 * MOMENT);
        let in_time: Vec<_> = (0..threads)
            .map(|number| {
                scope.spawn(move || {
                    let admitted = admitted(handle(number), check, UNITS);
                    gate.set(|state| state.done += 1);
                    admitted
                })
            })
            .collect();
        gate.wait(PATIENCE, |state| state.done == threads);
        gate.set(|state| state.is_open = true);
        let admitted = in_time.into_iter().map(|thread| thread.join().unwrap());
        admitted.sum::<u64>()
    });
    clock.advance(WINDOW - 2 * MOMENT);
    counted += admitted(handle(0), check, UNITS);
    counted
}
