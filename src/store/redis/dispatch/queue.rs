//! Checks and settlements that wait for the next batch.
//!
//! 1. While few checks are in flight, a check leaves at once. While as many batches are in flight
//!    as allowed, checks queue, if [admission](super::admission) lets them. When a batch returns,
//!    the queued checks leave as the next one, by [turns](super::turns) between their keys. No
//!    timer delays a check.
//! 2. A check whose caller has stopped waiting is not sent.
//! 3. A task with a permit serves the queue until it is empty.
//! 4. A check skips the queue if no batch and few other checks are in flight: its caller sends it,
//!    without a task. If the callers of checks in flight stop polling, later checks queue instead.
//!    A settlement never skips the queue, since it must be made even if its caller leaves.
//! 5. If several checks have recently left as one batch, the next check may not come alone either.
//!    So it does not skip the queue, and a task sends one batch with all checks that have arrived
//!    by the time it runs. Redis then runs fewer scripts, and fewer replies wake this process.
//!    After a caller has left without its reply, checks queue as well: a task receives even a late
//!    reply, and can sample the round trip from it.
//! 6. Nobody waits for a prefetch. So prefetches gather for a small part of their life before they
//!    leave. They leave earlier if a batch of checks leaves.
//! 7. Callers have only weak pointers to the queue. So the queue ends with its runtime, and callers
//!    whose jobs wait in it get an error.

#[cfg(not(test))]
use std::sync::{Mutex, MutexGuard};
use std::{
    mem,
    sync::{Arc, PoisonError, Weak, atomic::AtomicBool},
    time::{Duration, Instant},
};

// In tests, this file uses loom's lock, so that loom can run the threads in every order.
#[cfg(test)]
use loom::sync::{Mutex, MutexGuard};
use tokio::sync::oneshot::Receiver;

use super::{
    admission::{Admission, Admitted},
    crowds::Crowd,
    job::{Answer, Job},
    turns::Turns,
};
use crate::{decision::Decision, local::Crowded, metrics};

/// The most checks in flight that have skipped the queue. For so few checks, it would cost this
/// process more to run a task and build a batch for each than that would save.
const MOST_ALONE: usize = if cfg!(test) { 1 } else { 4 };

/// After this many batches in a row with a single check, a check may skip the queue again.
const ALONE: u8 = 8;

pub(super) struct Queue {
    max_in_flight: usize,
    /// True while a task waits so that prefetches can gather and leave together.
    pub(super) is_gathering: AtomicBool,
    crowded: Arc<Crowded>,
    state: Mutex<State>,
}

struct State {
    waiting: Turns,
    admission: Admission,
    in_flight: usize,
    /// The checks in flight that skipped the queue.
    alone: usize,
    /// How many more batches with a single check have to leave before a check may skip the queue.
    /// Zero at first.
    until_alone: u8,
}

impl Queue {
    pub(super) fn new(max_in_flight: usize, capacity: usize, crowded: Arc<Crowded>) -> Arc<Self> {
        Arc::new(Self {
            max_in_flight,
            is_gathering: AtomicBool::new(false),
            crowded,
            state: Mutex::new(State {
                waiting: Turns::default(),
                admission: Admission::new(capacity),
                in_flight: 0,
                alone: 0,
                until_alone: 0,
            }),
        })
    }

    /// Returns the permit to send a check without the queue, if no batch and few such checks are in
    /// flight. A queue that allows only one batch in flight never gives this permit, since the
    /// check would count as a second batch.
    pub(super) fn lone_permit(self: &Arc<Self>) -> Option<Permit> {
        let mut state = self.lock();
        let is_busy = state.in_flight > 0 || state.alone >= MOST_ALONE;
        if self.max_in_flight == 1 || is_busy || state.until_alone > 0 {
            return None;
        }
        state.alone += 1;
        Some(Permit {
            queue: Arc::downgrade(self),
            is_lone: true,
        })
    }

    /// Queues a job. After that, a task has to [serve](Self::batch_permit) the queue.
    pub(super) fn push(self: &Arc<Self>, mut job: Box<Job>) -> Queued {
        let mut state = self.lock();
        if state.alone >= MOST_ALONE {
            state.until_alone = ALONE;
        }
        let State {
            waiting,
            admission,
            in_flight,
            ..
        } = &mut *state;
        let admitted = admission.admit(&mut job, waiting, *in_flight);
        let is_refused = match &admitted {
            Ok(admitted) => admitted.expected.is_some(),
            Err(answer) => answer.is_ok(),
        };
        let crowded = if is_refused { job.shared_check() } else { None };
        let deadline = job.deadline;
        let queued = admitted.map(|Admitted { turn, expected }| {
            let (answer, crowd) = (job.wait(), job.crowd.as_ref().map(Arc::downgrade));
            admission.expect(job.end);
            waiting.push(job, turn);
            let caller = Caller {
                queue: Arc::downgrade(self),
                crowd,
                expected,
            };
            (answer, caller)
        });
        drop(state);
        if let Some(check) = crowded {
            self.crowded.note(&check, deadline);
        } else if queued.is_err() {
            metrics::queue_full();
        }
        queued
    }

    /// Returns the permit for one batch in flight. Returns `None` if all permits are taken: the
    /// tasks that have them send the waiting jobs. If the server is far away, `for_distance` may
    /// allow more batches than the queue does.
    pub(super) fn batch_permit(
        self: &Arc<Self>,
        for_distance: impl FnOnce() -> usize,
    ) -> Option<Permit> {
        let mut state = self.lock();
        let is_free = state.in_flight < self.max_in_flight || state.in_flight < for_distance();
        state.in_flight += usize::from(is_free);
        is_free.then(|| Permit {
            queue: Arc::downgrade(self),
            is_lone: false,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The permit for one batch or lone check in flight.
pub(super) struct Permit {
    queue: Weak<Queue>,
    is_lone: bool,
}

impl Permit {
    /// Ends a lone check's permit, after its reply or an error.
    pub(super) fn end(mut self) {
        if let Some(queue) = mem::take(&mut self.queue).upgrade() {
            queue.lock().alone -= 1;
        }
    }

    /// True if any jobs wait.
    pub(super) fn has_waiting(&self) -> bool {
        self.queue
            .upgrade()
            .is_some_and(|queue| queue.lock().waiting.len() > 0)
    }

    /// Takes the next batch. If the queue is empty, returns `None` and ends the permit. After that,
    /// the next job gets its own permit.
    pub(super) fn next_batch(&mut self) -> Option<Vec<Box<Job>>> {
        let queue = self.queue.upgrade()?;
        let mut state = queue.lock();
        let jobs = state.waiting.next_batch();
        let (waiting, in_flight) = (state.waiting.len(), state.in_flight);
        if jobs.is_empty() {
            state.in_flight -= 1;
            state.admission.forget();
            self.queue = Weak::new();
            return None;
        }
        let checks = jobs.len();
        let now = Instant::now();
        state.admission.measure(now, checks, in_flight, waiting);
        state.until_alone = if jobs.len() > 1 {
            ALONE
        } else {
            state.until_alone.saturating_sub(1)
        };
        drop(state);
        metrics::batch(jobs.len(), || waiting);
        Some(jobs)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade() {
            let mut state = queue.lock();
            if self.is_lone {
                state.alone -= 1;
                state.until_alone = ALONE;
            } else {
                state.in_flight -= 1;
            }
        }
    }
}

/// The receiver for a queued job's answer, or the answer itself if the job cannot be queued. The
/// second case is rare, so its answer is boxed.
pub(super) type Queued = Result<(Receiver<Answer>, Caller), Box<Answer>>;

/// A queued job's caller. When the caller stops waiting, its job is cancelled, and the queue counts
/// the job as cancelled.
pub(super) struct Caller {
    queue: Weak<Queue>,
    /// The job's crowd. It ends with the job.
    crowd: Option<Weak<Crowd>>,
    /// The expected refusal, and how long the caller waits for a reply with exact figures instead.
    pub(super) expected: Option<(Box<Decision>, Duration)>,
}

impl Caller {
    /// Lets the caller leave with its answer, without counting its job as cancelled.
    pub(super) fn leave(mut self) {
        self.queue = Weak::new();
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(crowd) = self.crowd.as_ref().and_then(Weak::upgrade) {
            crowd.leave_unsent();
        }
        if let Some(queue) = self.queue.upgrade() {
            queue.lock().admission.cancelled += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        iter,
        pin::pin,
        sync::atomic::Ordering,
        task::{Context, Wake, Waker},
        time::SystemTime,
    };

    use super::*;
    use crate::{
        check::{AdmissionId, Charge, Check},
        decision::{LimitStatus, Settlement},
        error::{StoreError, StoreErrorKind},
        key::Key,
        limit::Limit,
        local::LocalState,
        store::{
            ManualClock,
            redis::{
                connect::ASKING,
                dispatch::{
                    admission::CAPACITY,
                    turns::{FEW, tests::CALLS},
                },
            },
        },
    };

    const LOGINS: Limit = Limit::per_minute("login", 5);

    /// Runs a test on one thread. Loom's lock bounds the number of steps of a test, and this
    /// function raises the bound.
    fn on_one_thread(test: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.max_branches = 1_000_000;
        model.check(test);
    }

    /// The only part of a check of several slots.
    fn part(check: Check) -> Box<Job> {
        Job::decide(check.clone(), Duration::MAX).part(check)
    }

    fn login(key: u64, cost: u64) -> Check {
        Check::new(Charge::new(LOGINS, key, cost).unwrap())
    }

    fn push(
        queue: &Arc<Queue>,
        key: u64,
        deadline: u64,
    ) -> Result<(Receiver<Answer>, Caller), String> {
        let check = Check::new(Charge::new(CALLS, key, 1).unwrap());
        queue
            .push(Job::decide(check, Duration::from_millis(deadline)))
            .map_err(|error| format!("{error:?}"))
    }

    /// After the deadline, the callers have left, and only tasks wait, to free the places.
    #[test]
    fn a_check_that_takes_a_place_is_not_sent_after_its_deadline() {
        on_one_thread(|| {
            let queue = Queue::new(2, 4, Arc::default());
            let push = |deadline| {
                let check =
                    Check::new(Charge::new(Limit::concurrent("places", 1), "ada", 1).unwrap());
                queue.push(Job::decide(check, deadline))
            };
            let mut asked: Vec<_> = (0..4).map(|_| push(Duration::ZERO).unwrap()).collect();
            asked.push(
                push(Duration::MAX).unwrap_or_else(|answer| panic!("they still wait: {answer:?}")),
            );
            let batch = queue
                .batch_permit(|| 0)
                .and_then(|mut permit| permit.next_batch());
            assert_eq!(batch.map(|jobs| jobs.len()), Some(1));
        });
    }

    /// Its caller may ask again as soon as it has the answer.
    #[test]
    fn a_check_that_has_its_answer_is_ahead_of_no_other() {
        struct AsksAgain {
            queue: Arc<Queue>,
            is_refused: AtomicBool,
        }

        impl Wake for AsksAgain {
            fn wake(self: Arc<Self>) {
                let is_refused = self.queue.push(all_logins()).is_err();
                self.is_refused.store(is_refused, Ordering::SeqCst);
            }
        }

        fn all_logins() -> Box<Job> {
            part(login(1, LOGINS.units()))
        }

        on_one_thread(|| {
            let queue = Queue::new(2, 4, Arc::default());
            let (answer, _caller) = queue.push(all_logins()).unwrap();
            let asks = Arc::new(AsksAgain {
                queue: Arc::clone(&queue),
                is_refused: AtomicBool::new(false),
            });
            let waker = Waker::from(Arc::clone(&asks));
            let mut answer = pin!(answer);
            let poll = answer.as_mut().poll(&mut Context::from_waker(&waker));
            assert!(poll.is_pending());
            let mut permit = queue.batch_permit(|| 0).unwrap();
            for job in permit.next_batch().unwrap() {
                let error = || StoreError::new(ASKING, StoreErrorKind::Other, "no reply");
                job.finish(&mut iter::repeat_with(|| Err(error())), |_, _, _, _| {});
            }
            assert!(!asks.is_refused.load(Ordering::SeqCst));
        });
    }

    /// The next checks of the queue, as copies of the first.
    fn next_as_copies(queue: &Arc<Queue>) -> Box<Job> {
        let jobs = queue.batch_permit(|| 0).unwrap().next_batch().unwrap();
        let mut jobs = jobs.into_iter();
        let mut first = jobs.next().unwrap();
        jobs.for_each(|job| first.join(*job));
        first
    }

    /// The checks have their answers, although their callers have not yet been polled.
    #[test]
    fn copies_that_have_their_answers_are_ahead_of_no_other() {
        on_one_thread(|| {
            let queue = Queue::new(2, CAPACITY, Arc::default());
            let push = |is_part| {
                let job = Job::decide(login(1, 1), Duration::MAX);
                queue.push(if is_part { part(login(1, 1)) } else { job })
            };
            let _callers: Vec<_> = (0..LOGINS.units()).map(|_| push(false).unwrap()).collect();
            assert!(push(true).is_err());
            let error = || StoreError::new(ASKING, StoreErrorKind::Other, "no reply");
            let mut errors = iter::repeat_with(|| Err(error()));
            next_as_copies(&queue).finish(&mut errors, |_, _, _, _| {});
            let again: Vec<_> = (0..LOGINS.units()).map(|_| push(true)).collect();
            assert!(again.iter().all(Result::is_ok));
        });
    }

    /// The caller behind the others got a refusal. The others may have passed by fail-open.
    #[test]
    fn only_a_check_behind_its_copies_is_given_back() {
        on_one_thread(|| {
            let queue = Queue::new(2, CAPACITY, Arc::default());
            let push = || queue.push(Job::decide(login(1, 1), Duration::MAX)).unwrap();
            let callers: Vec<_> = (0..=LOGINS.units()).map(|_| push()).collect();
            let job = next_as_copies(&queue);
            drop(callers);
            let answer = || {
                let id = AdmissionId::fresh();
                let decision = Decision::new(&login(1, 1), SystemTime::now(), id, |charge| {
                    LimitStatus::new(charge, 1, 0, Duration::ZERO, None)
                });
                Ok((decision, true))
            };
            let mut are_unused = Vec::new();
            job.finish(&mut iter::repeat_with(answer), |_, is_unused, _, _| {
                are_unused.push(is_unused);
            });
            assert_eq!(are_unused, [false, false, false, false, false, true]);
        });
    }

    /// A sent check's caller may have passed by fail-open. The caller of a queued check has not.
    #[test]
    fn a_check_on_its_way_is_ahead_although_its_caller_has_left() {
        on_one_thread(|| {
            let queue = Queue::new(2, 4, Arc::default());
            let push = |is_waiting| {
                let mut check = login(1, LOGINS.units());
                if is_waiting {
                    check.wait_in_line();
                }
                queue.push(part(check))
            };
            drop(push(false).unwrap());
            let queued = push(false).unwrap();
            let sent = queue.batch_permit(|| 0).unwrap().next_batch().unwrap();
            assert_eq!(sent.len(), 1);
            drop(queued);
            assert!(push(false).is_err());
            assert!(push(true).is_ok(), "it waits in line");
            drop(sent);
            assert!(push(false).is_ok());
        });
    }

    /// The units of a short lease may be given back while equal checks wait.
    #[test]
    fn only_a_long_lease_bounds_the_equal_checks_that_wait() {
        on_one_thread(|| {
            for (lease, is_bounded) in [(100, false), (1_000, true)] {
                let queue = Queue::new(2, 8, Arc::default());
                let push = || {
                    let charge = Charge::new(LOGINS, 1_u64, LOGINS.units()).unwrap();
                    let check = Check::new(charge.reserve(Duration::from_millis(lease)));
                    queue.push(part(check))
                };
                let _first = push().unwrap();
                assert_eq!(push().is_err(), is_bounded, "{lease} ms");
            }
        });
    }

    /// 64 checks are in flight, and a check takes 100 µs.
    #[test]
    fn a_check_is_refused_that_would_wait_for_longer_than_its_caller() {
        on_one_thread(|| {
            let queue = Queue::new(4, CAPACITY, Arc::default());
            let mut callers = Vec::new();
            let _permit = queue.batch_permit(|| 0);
            let mut push =
                |key, deadline| push(&queue, key, deadline).map(|queued| callers.push(queued));
            assert!(
                (0..1_000).all(|key| push(key, 1).is_ok()),
                "nothing is known"
            );
            queue.lock().admission.time_per_check = Duration::from_micros(100);
            assert!(push(1_000, 141).is_err_and(
                |error| error.contains("1000 checks are") && error.contains("about 141.8ms")
            ));
            assert_eq!((push(1_000, 143), push(1_001, 1_000)), (Ok(()), Ok(())));
            // A key that floods the queue delays only its own checks.
            assert!((0..500).all(|_| push(0, 60_000).is_ok()));
            assert_eq!((push(1_002, 143), push(0, 143).is_ok()), (Ok(()), false));
            assert_eq!(
                queue.lock().waiting.len(),
                1_503,
                "no check waits that was refused"
            );
        });
    }

    /// If the refused checks of this test were sent, they would be answered too late. Each of them
    /// would delay a check that can be answered in time.
    #[test]
    fn few_checks_of_a_slow_server_are_refused() {
        on_one_thread(|| {
            let queue = Queue::new(1, CAPACITY, Arc::default());
            let mut callers = Vec::new();
            let _permit = queue.batch_permit(|| 0);
            queue.lock().admission.time_per_check = Duration::from_micros(200);
            callers.extend((0..FEW as u64).map_while(|key| push(&queue, key, 50).ok()));
            // In 50 ms the server decides 250 checks. A quarter of these is kept in reserve, and 64
            // checks are in flight.
            assert_eq!(callers.len(), 125);
        });
    }

    #[test]
    fn callers_that_have_left_refuse_no_other() {
        on_one_thread(|| {
            let queue = Queue::new(4, CAPACITY, Arc::default());
            let callers: Vec<_> = (0..2_000).map(|key| push(&queue, key, 50)).collect();
            queue.lock().admission.time_per_check = Duration::from_micros(100);
            assert!(push(&queue, 2_000, 50).is_err());
            drop(callers);
            assert!(push(&queue, 2_000, 50).is_ok());
            assert_eq!(queue.lock().waiting.len(), 1);
        });
    }

    /// The first checks come while few checks wait. When a caller leaves or has its answer, there
    /// is room for another check.
    #[test]
    fn no_more_equal_checks_wait_than_their_limit_admits() {
        on_one_thread(|| {
            let queue = Queue::new(4, CAPACITY, Arc::default());
            let mut callers = Vec::new();
            let push = |key: u64, cost| queue.push(Job::decide(login(key, cost), Duration::MAX));
            let check_of = |cost| Charge::new(LOGINS, 9_999, cost).unwrap();
            callers.extend((0..FEW as u64).map(|key| push(key, 1).unwrap()));
            let mut logins: Vec<_> = (0..5).map(|_| push(9_999, 1).unwrap()).collect();
            let refusal = push(9_999, 1).err().unwrap().unwrap().0;
            assert!(
                !refusal.is_allowed() && refusal.retry_after() == Some(Duration::from_secs(1)),
                "{refusal:?}"
            );
            assert!(
                refusal.binding().is_refused_by_reservations(),
                "it begins no ban"
            );
            assert!(
                push(9_998, 1).is_ok() && push(9_999, 2).is_ok(),
                "another key, and another cost"
            );
            let others = [
                Check::new(check_of(1)).with_id(AdmissionId(7)),
                Check::new(check_of(1).in_shadow()),
                Check::new(check_of(0)),
                Check::new(Charge::any_left(LOGINS, 9_999).unwrap()),
            ];
            for other in others {
                callers.extend((0..9).map(|_| {
                    queue
                        .push(Job::decide(other.clone(), Duration::MAX))
                        .unwrap()
                }));
            }
            drop(logins.pop());
            logins.push(push(9_999, 1).unwrap());
            assert!(push(9_999, 1).is_err());
            let (_, caller) = logins.remove(0);
            caller.leave();
            assert!(push(9_999, 1).is_ok());
        });
    }

    /// After checks that came together, a check queues until some batches of a single check have
    /// left: the next checks may come together, too.
    #[test]
    fn a_check_that_follows_checks_in_company_does_not_skip_the_queue() {
        on_one_thread(|| {
            let queue = Queue::new(4, 10, Arc::default());
            let serve = |keys: &[u64]| {
                let callers: Vec<_> = keys.iter().map(|key| push(&queue, *key, 50)).collect();
                let mut permit = queue.batch_permit(|| 0).unwrap();
                let sent: Vec<_> = iter::from_fn(|| permit.next_batch())
                    .map(|jobs| jobs.len())
                    .collect();
                drop(callers);
                sent
            };
            let batches_until_alone = || {
                let is_alone = |batch: &u64| {
                    queue.lone_permit().map(Permit::end).is_some() || serve(&[*batch]) != [1]
                };
                (0..100).find(is_alone)
            };
            assert_eq!(batches_until_alone(), Some(0), "nothing has come before");
            let alone = queue.lone_permit();
            assert_eq!(serve(&[1]), [1], "behind the lone check");
            alone.unwrap().end();
            assert_eq!(batches_until_alone(), Some(u64::from(ALONE) - 1));
            assert_eq!(serve(&[1, 2]), [2]);
            assert_eq!(batches_until_alone(), Some(ALONE.into()));
            drop(queue.lone_permit());
            assert_eq!(
                batches_until_alone(),
                Some(ALONE.into()),
                "a caller has left without its reply"
            );
        });
    }

    /// The settlements of this test give back prefetches.
    #[test]
    fn a_queue_full_of_checks_takes_settlements() {
        on_one_thread(|| {
            let queue = Queue::new(1, 10, Arc::default());
            let local_state = LocalState::by(&ManualClock::new());
            let checks: Vec<_> = (0..12)
                .map_while(|key| push(&queue, key, 50).ok())
                .collect();
            let settle = || {
                let check = Check::new(Charge::prefetch(CALLS, Key::from("ada"), 10, 100_000));
                queue.push(Job::settle(
                    Settlement::refund_by_id(check, AdmissionId::fresh()),
                    &local_state,
                ))
            };
            let settlements: Vec<_> = iter::from_fn(|| Some(settle()))
                .map_while(Result::ok)
                .take(30)
                .collect();
            assert_eq!(
                (checks.len(), settlements.len()),
                (10, 10),
                "both are bounded"
            );
            let _permit = queue.batch_permit(|| 0);
            queue.lock().admission.time_per_check = Duration::from_secs(1);
            let sent = queue.lock().waiting.next_batch();
            assert_eq!(sent.len(), 20);
            assert!(settle().is_ok(), "no time is too long for it");
        });
    }

    /// Prefetches join a queue only while few jobs wait in it, so the rest of the queue is left for
    /// the checks of callers.
    #[test]
    fn prefetches_leave_the_queue_to_the_checks_of_callers() {
        on_one_thread(|| {
            let queue = Queue::new(1, 640, Arc::default());
            let mut callers = Vec::new();
            let mut push = |charge: Charge| {
                let pushed = queue.push(Job::decide(Check::new(charge), Duration::MAX));
                pushed
                    .inspect_err(|error| {
                        assert!(
                            format!("{error:?}").contains("an unknown time"),
                            "{error:?}"
                        );
                    })
                    .map(|queued| callers.push(queued))
            };
            let mut push_all =
                |charge: &dyn Fn() -> Charge| (0..700).filter(|_| push(charge()).is_ok()).count();
            let prefetches = push_all(&|| Charge::prefetch(CALLS, Key::from("ada"), 10, 100_000));
            let checks = push_all(&|| Charge::new(CALLS, "ada", 1).unwrap());
            assert_eq!((prefetches, checks), (11, 629), "of 640");
        });
    }
}

/// Tests that loom repeats with each order of the threads' steps.
#[cfg(test)]
mod models {
    use loom::thread::spawn;

    use super::*;
    use crate::{
        check::{Charge, Check},
        limit::Limit,
    };

    fn job(key: &'static str) -> Box<Job> {
        Job::decide(
            Check::new(Charge::new(Limit::per_hour("calls", 100), key, 1).unwrap()),
            Duration::MAX,
        )
    }

    /// Serves the queue as a task does, and returns how many jobs it has sent.
    fn serve(queue: &Arc<Queue>) -> usize {
        let Some(mut permit) = queue.batch_permit(|| 0) else {
            return 0;
        };
        let mut sent = 0;
        while let Some(jobs) = permit.next_batch() {
            sent += jobs.len();
        }
        sent
    }

    /// Asserts that the queue is as at the beginning: no job is left, and no permit is lost.
    fn assert_idle(queue: &Queue) {
        let state = queue.lock();
        assert_eq!(state.waiting.len(), 0, "a job is left");
        assert_eq!((state.in_flight, state.alone), (0, 0), "a permit is lost");
    }

    /// Each job is sent once, however many batches may be in flight.
    #[test]
    fn each_job_that_was_pushed_is_sent_once() {
        for (threads, max_in_flight) in [(2, 1), (2, 2), (3, 1)] {
            let mut orders = loom::model::Builder::new();
            // Loom tries all orders of two threads. Of three threads, it tries the orders that
            // interrupt a thread at most twice.
            orders.preemption_bound = (threads > 2).then_some(2);
            orders.check(move || {
                let queue = Queue::new(max_in_flight, 4, Arc::default());
                let callers: Vec<_> = ["ada", "bob", "cy"][..threads]
                    .iter()
                    .map(|key| {
                        let queue = Arc::clone(&queue);
                        spawn(move || {
                            let queued = queue.push(job(key)).unwrap();
                            (serve(&queue), queued)
                        })
                    })
                    .collect();
                let ended: Vec<_> = callers
                    .into_iter()
                    .map(|caller| caller.join().unwrap())
                    .collect();
                assert_eq!(ended.iter().map(|(sent, _)| sent).sum::<usize>(), threads);
                assert_idle(&queue);
            });
        }
    }

    #[test]
    fn a_cancelled_job_is_sent_or_not_and_no_other_is_lost() {
        loom::model(|| {
            let queue = Queue::new(1, 4, Arc::default());
            let leaving = {
                let queue = Arc::clone(&queue);
                spawn(move || {
                    drop(queue.push(job("ada")).unwrap());
                    serve(&queue)
                })
            };
            let queued = queue.push(job("bob")).unwrap();
            let sent = serve(&queue) + leaving.join().unwrap();
            assert!(sent == 1 || sent == 2, "{sent} are sent");
            assert_idle(&queue);
            drop(queued);
        });
    }

    /// A caller sends its check alone, or queues it.
    #[test]
    fn a_lone_check_gives_its_permit_back() {
        loom::model(|| {
            let queue = Queue::new(2, 4, Arc::default());
            let send = |queue: &Arc<Queue>, key| match queue.lone_permit() {
                Some(permit) => {
                    drop(permit);
                    1
                }
                None => {
                    let _queued = queue.push(job(key)).unwrap();
                    serve(queue)
                }
            };
            let other = {
                let queue = Arc::clone(&queue);
                spawn(move || send(&queue, "ada"))
            };
            let sent = send(&queue, "bob") + other.join().unwrap();
            assert_eq!(sent, 2);
            assert_idle(&queue);
        });
    }
}
