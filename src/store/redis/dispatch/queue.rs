//! Checks and settlements that wait for the next batch.
//!
//! 1. A lone check leaves at once. While the allowed number of batches is in flight, checks queue. When a batch returns, the
//!    queue leaves as the next one. No timer delays a check.
//! 2. The batches, their number in flight, and the queue are bounded. A full queue is an error, never a longer queue.
//! 3. A check whose caller has stopped waiting is not sent, and takes no place in the queue from other checks.
//! 4. A task that has a permit serves the queue until it is empty.
//! 5. A check that finds nothing in flight skips the queue: its caller sends it, without a task. If that caller stops
//!    polling, other checks queue instead. A settlement never skips the queue, since it must happen even if its caller leaves.
//! 6. Prefetches are taken and given back before they are needed, so they wait for others for a small part of their life. They leave earlier
//!    with the next batch of checks.
//! 7. Callers hold the queue weakly. So it ends with its runtime, and all that wait in it get an error.
//! 8. While many checks wait, the keys take turns. So a key that floods the queue delays its own checks, and no others. A check
//!    that is cancelled takes no turn.

#[cfg(not(test))]
use std::sync::{Mutex, MutexGuard};
use std::{
    collections::{HashMap, VecDeque},
    hash::BuildHasherDefault,
    iter::from_fn,
    sync::{Arc, PoisonError, Weak, atomic::AtomicBool},
};

// In the tests of this file, so that models can try each order of the steps of threads.
#[cfg(test)]
use loom::sync::{Mutex, MutexGuard};
use tokio::sync::oneshot::Receiver;

use super::job::{Answer, Job};
use crate::{
    error::{StoreError, StoreErrorKind},
    key::{Digester, Prehashed},
    metrics,
    store::redis::connect::errors::ASKING,
};

/// The most checks of a batch. More than some dozens cost Redis more a check, not less: its data for them no longer fits
/// into the processor's nearest cache.
const MAX_BATCH: usize = 64;

/// The most checks of a batch that begins with [`MAX_BATCH`] copies of one. To Redis they are one check.
const MAX_COPIES: usize = 128;

/// The checks that may wait: as many as one server decides in some tens of milliseconds.
pub(super) const CAPACITY: usize = 8_192;

/// The queue has this part of its capacity in addition, for cancelled jobs that have not been removed yet.
const SPARE: usize = 32;

/// While no more wait, they leave in the order of their arrival, which costs no look at their keys.
const FEW: usize = 4 * MAX_BATCH;

/// Prefetches are taken and given back only while no more than this part of the queue waits.
const PART_OF_PREFETCHES: usize = 8;

pub(super) struct Queue {
    capacity: usize,
    max_in_flight: usize,
    digester: Digester,
    /// Whether a task lets prefetches wait for each other.
    pub(super) is_gathering: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// They leave first, in the order of their arrival.
    few: VecDeque<Box<Job>>,
    /// Those behind them, by the digest of their first limit and key.
    many: HashMap<u64, VecDeque<Box<Job>>, BuildHasherDefault<Prehashed>>,
    /// The digests in `many`. The first has its turn: one job of it leaves.
    turns: VecDeque<u64>,
    waiting: usize,
    /// The callers that stopped waiting since cancelled jobs were last removed. Some of their jobs have left the queue.
    cancelled: usize,
    in_flight: usize,
    is_lone_check_in_flight: bool,
}

impl Queue {
    pub(super) fn new(max_in_flight: usize, capacity: usize) -> Arc<Self> {
        let (digester, is_gathering, state) = (Digester::default(), AtomicBool::new(false), Mutex::default());
        Arc::new(Self { capacity, max_in_flight, digester, is_gathering, state })
    }

    /// The permit to send a check without a batch, if nothing is in flight. A queue that may have only one batch in flight
    /// gives none: the check would be a second one.
    pub(super) fn lone_permit(self: &Arc<Self>) -> Option<Permit> {
        let mut state = self.lock();
        if self.max_in_flight == 1 || state.in_flight > 0 || state.is_lone_check_in_flight {
            return None;
        }
        state.is_lone_check_in_flight = true;
        Some(Permit { queue: Arc::downgrade(self), is_lone: true })
    }

    /// Queues a job. A task has to [serve](Self::batch_permit) the queue from then on.
    pub(super) fn push(self: &Arc<Self>, mut job: Box<Job>) -> Result<(Receiver<Answer>, Caller), StoreError> {
        let is_of_prefetch = job.is_of_prefetch();
        let mut state = self.lock();
        let (waiting, spare) = (state.waiting, self.capacity.div_ceil(SPARE));
        // So that prefetches of thousands of keys never delay or fail the checks of callers.
        if is_of_prefetch && waiting > self.capacity / PART_OF_PREFETCHES {
            return Err(full(waiting));
        }
        if waiting >= self.capacity + spare {
            // Only once they take the spare capacity: so one walk through the queue serves many of them, and a queue without
            // cancelled jobs is found full at once.
            if state.cancelled >= spare {
                state.remove_cancelled();
            }
            if state.waiting >= self.capacity + spare {
                drop(state);
                metrics::queue_full();
                return Err(full(waiting));
            }
        }
        let answer = job.wait();
        state.push(job, &self.digester);
        Ok((answer, Caller::of(self)))
    }

    /// The permit to have one batch in flight. Without one, the tasks that have them serve the queue.
    pub(super) fn batch_permit(self: &Arc<Self>) -> Option<Permit> {
        let mut state = self.lock();
        let is_free = state.in_flight < self.max_in_flight;
        state.in_flight += usize::from(is_free);
        is_free.then(|| Permit { queue: Arc::downgrade(self), is_lone: false })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error of this check only: the others in the queue are decided, so a breaker must not count it.
fn full(waiting: usize) -> StoreError {
    StoreError::new(ASKING, StoreErrorKind::Other, format!("{waiting} checks are waiting for Redis already"))
        .of_one_check()
}

impl State {
    fn push(&mut self, job: Box<Job>, digester: &Digester) {
        self.waiting += 1;
        if self.many.is_empty() && self.few.len() < FEW {
            return self.few.push_back(job);
        }
        let digest = job.check().charges().next().map_or(0, |first| first.limit().digest(digester, first.key()));
        let jobs = self.many.entry(digest).or_default();
        if jobs.is_empty() {
            self.turns.push_back(digest);
        }
        jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<Box<Job>> {
        let job = self.few.pop_front().or_else(|| self.pop_in_turn())?;
        self.waiting -= 1;
        Some(job)
    }

    fn pop_in_turn(&mut self) -> Option<Box<Job>> {
        let digest = self.turns.front()?;
        let jobs = self.many.get_mut(digest)?;
        let job = jobs.pop_front()?;
        if jobs.is_empty() {
            self.many.remove(digest);
            self.turns.pop_front();
        } else if !job.is_cancelled() {
            self.turns.rotate_left(1);
        }
        Some(job)
    }

    fn remove_cancelled(&mut self) {
        self.cancelled = 0;
        self.few.retain(|job| !job.is_cancelled());
        self.many.retain(|_, jobs| {
            jobs.retain(|job| !job.is_cancelled());
            !jobs.is_empty()
        });
        self.turns.retain(|digest| self.many.contains_key(digest));
        self.waiting = self.few.len() + self.many.values().map(VecDeque::len).sum::<usize>();
    }

    /// The next jobs that are not cancelled.
    fn next_batch(&mut self) -> Vec<Box<Job>> {
        let mut waiting = from_fn(|| self.pop()).filter(|job| !job.is_cancelled());
        let mut jobs: Vec<_> = waiting.by_ref().take(MAX_BATCH).collect();
        if jobs.len() == MAX_BATCH && jobs.iter().all(|job| job.is_interchangeable_with(&jobs[0])) {
            jobs.extend(waiting.take(MAX_COPIES - MAX_BATCH));
        }
        jobs
    }
}

/// The right to have one batch or one lone check in flight.
pub(super) struct Permit {
    queue: Weak<Queue>,
    is_lone: bool,
}

impl Permit {
    /// The next batch. `None` ends the permit: the queue is empty, and the next job gets a permit of its own.
    pub(super) fn next_batch(&mut self) -> Option<Vec<Box<Job>>> {
        let queue = self.queue.upgrade()?;
        let mut state = queue.lock();
        let (jobs, waiting) = (state.next_batch(), state.waiting);
        if jobs.is_empty() {
            state.in_flight -= 1;
            self.queue = Weak::new();
            return None;
        }
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
                state.is_lone_check_in_flight = false;
            } else {
                state.in_flight -= 1;
            }
        }
    }
}

/// The caller of a job in the queue. When it stops waiting, its job is cancelled, and is counted as such.
pub(super) struct Caller(Weak<Queue>);

impl Caller {
    pub(super) fn of(queue: &Arc<Queue>) -> Self {
        Self(Arc::downgrade(queue))
    }

    /// It has its answer.
    pub(super) fn leave(mut self) {
        self.0 = Weak::new();
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(queue) = self.0.upgrade() {
            queue.lock().cancelled += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        check::{Charge, Check},
        key::Key,
        limit::Limit,
    };

    const CALLS: Limit = Limit::per_hour("calls", 100);

    /// A queue, and the callers of its checks.
    #[derive(Default)]
    struct Crowd {
        state: State,
        digester: Digester,
        callers: Vec<Receiver<Answer>>,
    }

    impl Crowd {
        fn push(&mut self, key: impl Into<Key>, cost: u64) {
            let mut job = Job::decide(Check::new(Charge::new(CALLS, key, cost).unwrap()));
            self.callers.push(job.wait());
            self.state.push(job, &self.digester);
        }

        /// The same for a caller that leaves at once.
        fn push_cancelled(&mut self, key: &str) {
            self.push(key, 1);
            drop(self.callers.pop());
        }
    }

    /// A check comes behind many of its key whose callers have left. Of 400 other keys as many checks come as leave.
    #[test]
    fn cancelled_checks_delay_no_other_of_their_key() {
        for (cancelled, are_removed) in [(0, false), (200, false), (4_000, false), (200, true), (4_000, true)] {
            let (mut crowd, mut others) = (Crowd::default(), (0..400_u64).cycle());
            others.by_ref().take(400).for_each(|other| crowd.push(other, 1));
            (0..cancelled).for_each(|_| crowd.push_cancelled("ada"));
            if are_removed {
                crowd.state.remove_cancelled();
                assert_eq!(crowd.state.waiting, 400);
            }
            crowd.push("ada", 2);
            let has_left = |_: &i32| {
                let jobs = crowd.state.next_batch();
                others.by_ref().take(jobs.len()).for_each(|other| crowd.push(other, 1));
                jobs.iter().any(|job| job.check().charges().any(|charge| charge.cost() == 2))
            };
            let batch = (1..1_000).find(has_left);
            assert!(batch.is_some_and(|batch| batch <= 8), "{batch:?}, {cancelled} cancelled, removed: {are_removed}");
        }
    }

    /// Behind those that leave in the order of their arrival.
    #[test]
    fn each_key_has_one_turn_and_its_checks_keep_their_order() {
        let mut crowd = Crowd::default();
        (0..FEW).for_each(|_| crowd.push("first", 9));
        crowd.push_cancelled("bob");
        crowd.push("ada", 1);
        crowd.state.remove_cancelled();
        for (key, cost) in [("ada", 2), ("bob", 3), ("ada", 4), ("eve", 5), ("bob", 6)] {
            crowd.push(key, cost);
        }
        assert_eq!(crowd.state.waiting, FEW + 6);
        let jobs = from_fn(|| crowd.state.pop()).skip(FEW);
        let costs: Vec<_> = jobs.map(|job| job.check().charges().map(Charge::cost).sum::<u64>()).collect();
        assert_eq!(costs, [1, 3, 5, 2, 6, 4]);
        assert_eq!((crowd.state.waiting, crowd.state.many.len()), (0, 0));
    }

    /// Prefetches join a queue that is filled to an eighth at most, so the rest is for the checks of callers.
    #[test]
    fn prefetches_leave_the_queue_to_the_checks_of_callers() {
        loom::model(|| {
            let (queue, mut callers) = (Queue::new(1, 32), Vec::new());
            let mut push =
                |charge: Charge| queue.push(Job::decide(Check::new(charge))).map(|queued| callers.push(queued));
            let mut push_all = |charge: &dyn Fn() -> Charge| (0..40).filter(|_| push(charge()).is_ok()).count();
            let prefetches = push_all(&|| Charge::prefetch(CALLS, Key::from("ada"), 10, 100_000));
            let checks = push_all(&|| Charge::new(CALLS, "ada", 1).unwrap());
            assert_eq!((prefetches, checks), (5, 28), "of 32, and one for checks that are cancelled");
        });
    }
}

/// In each order of the steps of threads.
#[cfg(test)]
mod models {
    use loom::thread::spawn;

    use super::*;
    use crate::{
        check::{Charge, Check},
        limit::Limit,
    };

    fn job(key: &'static str) -> Box<Job> {
        Job::decide(Check::new(Charge::new(Limit::per_hour("calls", 100), key, 1).unwrap()))
    }

    /// Serves the queue as a task does, and returns how many jobs it has sent.
    fn serve(queue: &Arc<Queue>) -> usize {
        let Some(mut permit) = queue.batch_permit() else { return 0 };
        let mut sent = 0;
        while let Some(jobs) = permit.next_batch() {
            sent += jobs.len();
        }
        sent
    }

    /// Whether the queue is as at the beginning: no job is left, and no permit is lost.
    fn assert_idle(queue: &Queue) {
        let state = queue.lock();
        assert_eq!(state.waiting, 0, "a job is left");
        assert_eq!((state.in_flight, state.is_lone_check_in_flight), (0, false), "a permit is lost");
    }

    /// However many batches may be in flight.
    #[test]
    fn each_job_that_was_pushed_is_sent_once() {
        for (threads, max_in_flight) in [(2, 1), (2, 2), (3, 1)] {
            let mut orders = loom::model::Builder::new();
            // All orders of two threads, and of three those that interrupt a thread at most twice.
            orders.preemption_bound = (threads > 2).then_some(2);
            orders.check(move || {
                let queue = Queue::new(max_in_flight, 4);
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
                let ended: Vec<_> = callers.into_iter().map(|caller| caller.join().unwrap()).collect();
                assert_eq!(ended.iter().map(|(sent, _)| sent).sum::<usize>(), threads);
                assert_idle(&queue);
            });
        }
    }

    #[test]
    fn a_cancelled_job_is_sent_or_not_and_no_other_is_lost() {
        loom::model(|| {
            let queue = Queue::new(1, 4);
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
            let queue = Queue::new(2, 4);
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
