//! More threads than processors ask for one key, and threads that are stopped in the middle. What
//! is admitted is counted by a clock outside of the store.

use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, UNIX_EPOCH},
};

use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, Limiter, MemoryStore, Store, limiter::Share,
    store::ManualClock,
};

use crate::support::stores::failing;

const THREADS: usize = 64;
const UNITS: u64 = 10;
const WINDOW: Duration = Duration::from_millis(150);
const TIME: Duration = Duration::from_millis(1_000);
const LIMIT: Limit = Limit::per("contended", UNITS, WINDOW);

const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::SLIDING_LOG,
    Algorithm::compact_log(16),
    Algorithm::SLIDING_WINDOW_COUNTER,
    Algorithm::FIXED_WINDOW,
];

/// An admission: microseconds by the outer clock just before and just after the call, and the time
/// of the decision by the store's clock.
struct Admission {
    before: u64,
    after: u64,
    at: u64,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap()
}

/// Lets the threads ask without a pause, and returns all admissions.
fn admissions(ask: impl Fn() -> Decision + Sync) -> Vec<Admission> {
    let began = Instant::now();
    let ask_for_long = || {
        let mut admissions = Vec::new();
        while began.elapsed() < TIME {
            let before = micros(began.elapsed());
            let decision = ask();
            let after = micros(began.elapsed()) + 1;
            if decision.is_allowed() {
                let at = micros(decision.at().duration_since(UNIX_EPOCH).unwrap());
                admissions.push(Admission { before, after, at });
            }
        }
        admissions
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(ask_for_long)).collect();
        let admissions = threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap());
        admissions.collect()
    })
}

/// The most admissions that certainly lie within one window of any position.
fn in_any_window(admissions: &[Admission]) -> usize {
    // Both clocks cut off parts of microseconds.
    let window = micros(WINDOW) - 3;
    let ending = |last: &Admission| {
        let since = last.after.saturating_sub(window);
        let certain = |one: &&Admission| one.before > since && one.after <= last.after;
        admissions.iter().filter(certain).count()
    };
    admissions.iter().map(ending).max().unwrap_or_default()
}

/// The most admissions that certainly lie within one window of the store's clock. The store's clock
/// runs as the outer one does, and each admission bounds the difference of the two.
fn in_any_window_of_the_clock(admissions: &[Admission]) -> usize {
    let least = admissions.iter().map(|one| one.at - one.after).max();
    let most = admissions.iter().map(|one| one.at + 1 - one.before).min();
    let (Some(least), Some(most)) = (least, most) else {
        return 0;
    };
    let window = micros(WINDOW);
    let of_window = |number: u64| {
        let (from, until) = (number * window, (number + 1) * window);
        let certain = |one: &&Admission| one.before + least >= from && one.after + most < until;
        admissions.iter().filter(certain).count()
    };
    let windows = admissions.iter().map(|one| of_window(one.at / window));
    windows.max().unwrap_or_default()
}

/// Fails if more was certainly admitted than the algorithm allows.
fn hold_to(algorithm: Algorithm, case: &str, units: u64, admissions: &[Admission]) {
    let (any, of_clock) = (
        in_any_window(admissions) as u64,
        in_any_window_of_the_clock(admissions) as u64,
    );
    println!(
        "{algorithm:?}, {case}: {} admissions, at most {any} in a window, and {of_clock} in one of the clock, under {units}",
        admissions.len()
    );
    let (most, most_of_clock) = match algorithm {
        Algorithm::FIXED_WINDOW => (2 * units, units),
        Algorithm::SLIDING_WINDOW_COUNTER => (2 * units - 1, units),
        _ => (units, units),
    };
    assert!(
        any <= most,
        "{algorithm:?}, {case}: {any} in a window of {units}"
    );
    assert!(
        of_clock <= most_of_clock,
        "{algorithm:?}, {case}: {of_clock} of {units} in a window of the clock"
    );
    let windows = micros(TIME) / micros(WINDOW);
    assert!(
        admissions.len() as u64 >= units * windows / 3,
        "{algorithm:?}, {case}: only {} admissions",
        admissions.len()
    );
}

fn check_of(algorithm: Algorithm, limits: usize) -> Check {
    let charge = |key| Charge::new(LIMIT.with_algorithm(algorithm), key, 1).unwrap();
    let check = Check::new(charge("ada"));
    if limits == 1 {
        check
    } else {
        check.and(charge("bob")).unwrap()
    }
}

fn press(case: &str, limits: usize, make: impl Fn() -> MemoryStore) {
    for algorithm in ALGORITHMS {
        let (store, check) = (make(), check_of(algorithm, limits));
        let admissions = admissions(|| store.decide_now(&check).unwrap().unwrap());
        hold_to(algorithm, case, UNITS, &admissions);
    }
}

#[test]
fn many_threads_get_one_limit_of_a_key() {
    press("one limit", 1, MemoryStore::new);
}

#[test]
fn many_threads_get_one_limit_of_two_keys() {
    press("two limits", 2, MemoryStore::new);
}

#[test]
fn many_threads_get_one_limit_without_room() {
    press("no room", 1, || MemoryStore::new().capacity(0));
}

#[test]
fn many_threads_get_one_share_of_a_limit() {
    let limit = Limit::per("contended", 2 * UNITS, WINDOW);
    let limiter = Limiter::new(failing()).fail_local(Share::one_of(2));
    let admissions = admissions(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(limiter.check(&limit, "ada", 1)).unwrap()
    });
    hold_to(Algorithm::SLIDING_LOG, "a share", UNITS, &admissions);
}

/// Stops the next thread that reads the clock.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<Steps>, Condvar)>);

#[derive(Clone, Copy, Default, PartialEq, PartialOrd)]
enum Steps {
    #[default]
    Idle,
    Armed,
    Stopped,
    Open,
}

/// A thread that rightly reads the clock under a lock makes others wait, so it does not stop for
/// ever.
const STOPPED: Duration = Duration::from_millis(100);

impl Gate {
    fn of(clock: &ManualClock) -> Self {
        let gate = Self::default();
        let stopping = gate.clone();
        clock.after_reading(move || {
            if *stopping.0.0.lock().unwrap() == Steps::Armed {
                stopping.set(Steps::Stopped);
                stopping.wait(Steps::Open, STOPPED);
            }
        });
        gate
    }

    fn set(&self, step: Steps) {
        *self.0.0.lock().unwrap() = step;
        self.0.1.notify_all();
    }

    fn wait(&self, step: Steps, longest: Duration) {
        let (steps, changed) = &*self.0;
        let before = |steps: &mut Steps| *steps < step;
        drop(changed.wait_timeout_while(steps.lock().unwrap(), longest, before));
    }

    /// Stops `late` after its first reading of the clock, and lets it go on after `meanwhile`.
    fn pass<T: Send>(&self, late: impl FnOnce() -> T + Send, meanwhile: impl FnOnce()) -> T {
        self.set(Steps::Armed);
        thread::scope(|scope| {
            let late = scope.spawn(late);
            self.wait(Steps::Stopped, Duration::from_secs(10));
            meanwhile();
            self.set(Steps::Open);
            late.join().unwrap()
        })
    }
}

/// All keys share the only cell of a store without capacity. So a check of another key that comes
/// late, by more than two sub-windows, must not take the newer counts for those of the future.
#[test]
fn a_late_thread_moves_no_counts_of_cells() {
    for algorithm in [Algorithm::SLIDING_LOG, Algorithm::compact_log(16)] {
        let clock = ManualClock::new();
        let gate = Gate::of(&clock);
        let store = MemoryStore::new().capacity(0).clock(&clock);
        let ask = |key: String| {
            let limit = Limit::per("contended", 5, WINDOW).with_algorithm(algorithm);
            let check = Check::new(Charge::new(limit, key, 1).unwrap());
            store.decide_now(&check).unwrap().unwrap().is_allowed()
        };
        let ask_all = || (0..20).filter(|key| ask(format!("{key}"))).count();
        let admitted = AtomicU64::new(0);
        gate.pass(
            || ask("late".into()),
            || {
                clock.advance(3 * WINDOW);
                admitted.fetch_add(ask_all() as u64, Ordering::Relaxed);
            },
        );
        let admitted = admitted.into_inner() + ask_all() as u64;
        assert!(
            admitted <= 5,
            "{algorithm:?}: {admitted} of 5 at one moment"
        );
    }
}
