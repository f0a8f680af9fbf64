//! Checks and settlements that wait for the next batch.
//!
//! 1. While few checks are in flight, a check leaves at once. While the allowed number of batches
//!    is in flight, checks queue. When a batch returns, the checks in the queue leave as the next
//!    batch. No timer delays a check.
//! 2. A check that would not have its answer within its caller's deadline fails at once. The queue
//!    estimates the wait from the times at which earlier batches have left. The size of a batch,
//!    the number of batches in flight, and the number of checks that wait are bounded, too.
//! 3. A check whose caller has stopped waiting is not sent, and takes no room in the queue from
//!    other checks.
//! 4. A task that has a permit serves the queue until it is empty.
//! 5. A check that finds no batch and few other checks in flight skips the queue: its caller sends
//!    it, without a task. If the callers of those few checks stop polling, other checks queue
//!    instead. A settlement never skips the queue, since it must happen even if its caller leaves.
//!    If several checks have lately left as one batch, the next check does not skip the queue
//!    either, since more checks may come together with it. A task then sends one batch of all
//!    checks that have come by the time the task runs. So Redis runs fewer scripts, and fewer
//!    replies wake this process, than if each of these checks left alone. After a caller has left
//!    without its reply, checks queue as well. The reason is that a task hears even a reply that
//!    comes too late for the caller, and learns the round trip from it.
//! 6. Nobody waits for a prefetch that is taken or given back. So prefetches wait for other
//!    prefetches, for a small part of their life. They leave earlier if a batch of checks leaves.
//! 7. Callers have only weak pointers to the queue. So the queue ends with its runtime, and all
//!    callers whose jobs wait in it get an error.
//! 8. While many checks wait, the keys take turns. So a key that floods the queue delays its own
//!    checks, and no others. A check that is cancelled takes no turn.
//! 9. While many checks wait, a check is refused at once if as many equal checks are ahead of it as
//!    its limits can ever admit. When the check's turn comes, the equal checks ahead have taken all
//!    units, or have found them used up. So a client never fills the queue with checks that its own
//!    limit refuses.

#[cfg(not(test))]
use std::sync::{Mutex, MutexGuard};
use std::{
    collections::{VecDeque, hash_map::Entry},
    iter::from_fn,
    mem,
    sync::{Arc, PoisonError, Weak, atomic::AtomicBool},
    time::{Duration, Instant},
};

// In tests, this file uses loom's lock, so that loom can run the threads in every order.
#[cfg(test)]
use loom::sync::{Mutex, MutexGuard};
use tokio::sync::oneshot::Receiver;

use super::{
    crowds::Crowd,
    job::{Answer, Job},
};
use crate::{
    error::{StoreError, StoreErrorKind},
    key::{ByDigest, Digester},
    metrics,
    store::redis::connect::ASKING,
};

/// The most checks of a batch. In a larger batch, each check costs Redis more than in a smaller
/// one: the data of the batch no longer fits into the processor's nearest cache.
pub(super) const MAX_BATCH: usize = 64;

/// The most checks of a batch that begins with [`MAX_BATCH`] copies of one check. To Redis, the
/// copies are one check.
const MAX_COPIES: usize = 128;

/// The most checks that may wait. This bounds the memory while Redis hangs. While Redis works, the
/// deadlines mostly keep the queue shorter. A check that Redis could not decide within its deadline
/// does not queue, and Redis decides fewer checks within a deadline than this number.
pub(super) const CAPACITY: usize = 65_536;

/// Before the queue refuses a job, it removes cancelled jobs if more than a 32nd of the waiting
/// jobs may be cancelled. So one walk through the queue removes many jobs.
const PART_OF_CANCELLED: usize = 32;

/// The shortest time from one walk through the queue to the next walk that looks for passed
/// deadlines. Only the deadlines of checks that take places cause such a walk.
const BETWEEN_WALKS: Duration = Duration::from_millis(10);

/// While at most this many jobs wait, they leave in the order of their arrival. So while few jobs
/// wait, their keys need not be hashed.
const FEW: usize = 4 * MAX_BATCH;

/// The most checks in flight that have skipped the queue. For so few checks, a task and a batch for
/// each of them would cost this process more than they save.
const MOST_ALONE: usize = if cfg!(test) { 1 } else { 4 };

/// After this many batches in a row of a single check each, a check counts as alone again, and may
/// skip the queue.
const ALONE: u8 = 8;

/// A measured time per check is bounded by a multiple of the smoothed time. If the smoothed time is
/// not known, or is shorter than this time, the bound is a multiple of this time instead. Few
/// servers decide a check in less time.
const SHORT_TIME: Duration = Duration::from_micros(10);

/// Prefetches are taken only while at most a 64th of the queue's capacity waits. That part is only
/// a few batches, since prefetches delay the checks behind them. Prefetches are given back however
/// many jobs wait, since their units count until they are given back.
const PART_OF_PREFETCHES: usize = 64;

pub(super) struct Queue {
    capacity: usize,
    max_in_flight: usize,
    digester: Digester,
    /// Whether a task is waiting, so that prefetches gather and leave together.
    pub(super) is_gathering: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The jobs that leave first, in the order of their arrival.
    few: VecDeque<Box<Job>>,
    /// The jobs behind `few`, by the digest of their first limit and key.
    many: ByDigest<VecDeque<Box<Job>>>,
    /// The digests in `many`, in the order of their turns: one job of the first digest leaves next.
    turns: VecDeque<u64>,
    waiting: usize,
    /// The crowds of the checks that came while many jobs waited, by the digest of the checks.
    crowds: ByDigest<Crowd>,
    /// The number of callers that have stopped waiting since cancelled jobs were last removed. Some
    /// of their jobs may have left the queue meanwhile.
    cancelled: usize,
    /// The earliest time at which the queue is next searched for checks that take places and whose
    /// deadlines have passed. `cancelled` does not count such checks. The first search is due at
    /// the deadline of the first check that takes a place.
    first_end: Option<Instant>,
    in_flight: usize,
    /// The checks in flight that skipped the queue.
    alone: usize,
    /// How many batches of one check have to leave before a check counts as alone. Zero at first.
    until_alone: u8,
    /// The time from one batch to the next, divided by the number of checks in the first of the
    /// two, and smoothed. It is zero until two batches have told it, and again after the queue was
    /// empty, so that no check is refused because of an earlier wait.
    time_per_check: Duration,
    /// The time at which the last batch left, and the number of its checks. `None` if no job waited
    /// behind that batch.
    last_batch: Option<(Instant, u32)>,
}

impl Queue {
    pub(super) fn new(max_in_flight: usize, capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            capacity,
            max_in_flight,
            digester: Digester::default(),
            is_gathering: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    /// The permit to send a check without the queue, if few checks are in flight. A queue that may
    /// have only one batch in flight gives no such permit, since the check would be a second batch.
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

    /// Queues a job. If the job cannot be queued, returns its answer, boxed since that is rare.
    /// When a job is queued, a task has to [serve](Self::batch_permit) the queue.
    pub(super) fn push(
        self: &Arc<Self>,
        mut job: Box<Job>,
    ) -> Result<(Receiver<Answer>, Caller), Box<Answer>> {
        let mut state = self.lock();
        if state.alone >= MOST_ALONE {
            state.until_alone = ALONE;
        }
        let turn = state.turn_of(&job, &self.digester);
        // This keeps prefetches of thousands of keys from delaying or failing the checks of
        // callers.
        if job.is_check()
            && job.is_of_prefetch()
            && state.waiting > self.capacity / PART_OF_PREFETCHES
        {
            return Err(Box::new(Err(state.refusal(turn))));
        }
        let is_check = job.is_check();
        let most_crowds = FEW + 2 * state.waiting;
        let crowd = turn.filter(|_| is_check);
        let crowd = crowd
            .and_then(|_| Crowd::join(&mut state.crowds, job.check(), &self.digester, most_crowds));
        let is_behind = |crowd: &&Crowd, state: &State| {
            crowd.refuses(job.check(), || state.cancelled_in(turn, crowd))
        };
        let behind = |state: &State| crowd.as_ref().filter(|crowd| is_behind(crowd, state));
        // A settlement that is refused is lost, so checks leave room for settlements.
        let most = if is_check {
            self.capacity
        } else {
            2 * self.capacity
        };
        let is_too_long = |state: &State| state.waiting >= most || state.wait(turn) > job.deadline;
        if behind(&state).is_some() || is_too_long(&state) {
            let is_any_over = state.first_end.is_some_and(|end| end <= Instant::now());
            if is_any_over || state.cancelled > state.waiting / PART_OF_CANCELLED {
                state.remove_cancelled();
            }
            if let Some(crowd) = behind(&state) {
                return Err(Box::new(Ok((crowd.refusal(job.check()), false))));
            }
            if is_too_long(&state) {
                let refusal = state.refusal(turn);
                drop(state);
                metrics::queue_full();
                return Err(Box::new(Err(refusal)));
            }
        }
        job.crowd = crowd;
        let answer = job.wait();
        if let Some(end) = job.end {
            state.first_end.get_or_insert(end);
        }
        state.push(job, turn);
        Ok((
            answer,
            Caller {
                queue: Arc::downgrade(self),
            },
        ))
    }

    /// The permit to have one batch in flight. `None` if all permits are taken: the tasks that have
    /// these permits send the waiting jobs. If the server is far away, `for_distance` may allow
    /// more batches in flight than the queue does.
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

impl State {
    /// The digest of a job's first limit and key, by which the job takes turns. `None` while few
    /// jobs wait.
    fn turn_of(&self, job: &Job, digester: &Digester) -> Option<u64> {
        let digest = || job.check().first().digest(digester);
        (!self.many.is_empty() || self.few.len() >= FEW).then(digest)
    }

    /// The number of cancelled checks of this turn and crowd.
    fn cancelled_in(&self, turn: Option<u64>, crowd: &Crowd) -> u64 {
        let is_in = |job: &Job| job.crowd.as_ref().is_some_and(|other| other.is(crowd));
        let of_turn = turn
            .and_then(|digest| self.many.get(&digest))
            .into_iter()
            .flatten();
        of_turn
            .filter(|job| is_in(job) && job.is_cancelled())
            .count() as u64
    }

    /// The estimated time until a job of this turn has its answer, if the job comes now. All jobs
    /// in flight, and the jobs ahead of the new job, are decided before it. A third is added, for
    /// batches that take longer than usual. Without this addition, more checks would be answered
    /// too late, and such checks only delay other checks.
    fn wait(&self, turn: Option<u64>) -> Duration {
        let of_its_own = turn
            .and_then(|digest| self.many.get(&digest))
            .map_or(0, VecDeque::len);
        let ahead = self
            .waiting
            .min(self.few.len() + self.turns.len() * (of_its_own + 1))
            + self.in_flight * MAX_BATCH;
        self.time_per_check
            .saturating_mul((ahead + ahead / 3) as u32)
    }

    /// The error of a check that cannot be queued. The store still decides the checks in the queue.
    /// So this error is no failure of the store, and a breaker must not count it.
    fn refusal(&self, turn: Option<u64>) -> StoreError {
        let wait = self.wait(turn);
        let takes = if wait.is_zero() {
            "an unknown time".into()
        } else {
            format!("about {wait:?}")
        };
        let cause = format!(
            "{} checks are waiting for Redis, which takes {takes}",
            self.waiting
        );
        StoreError::new(ASKING, StoreErrorKind::TimedOut, cause).of_one_check()
    }

    fn push(&mut self, job: Box<Job>, turn: Option<u64>) {
        self.waiting += 1;
        let Some(digest) = turn else {
            return self.few.push_back(job);
        };
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
        let Entry::Occupied(mut jobs) = self.many.entry(*self.turns.front()?) else {
            return None;
        };
        let job = jobs.get_mut().pop_front()?;
        if jobs.get().is_empty() {
            jobs.remove();
            self.turns.pop_front();
        } else if !job.is_cancelled() {
            self.turns.rotate_left(1);
        }
        Some(job)
    }

    fn remove_cancelled(&mut self) {
        self.cancelled = 0;
        // The next walk for passed deadlines comes later, so that it removes many jobs.
        self.first_end = self.first_end.map(|_| Instant::now() + BETWEEN_WALKS);
        self.few.retain(|job| !job.is_cancelled());
        self.many.retain(|_, jobs| {
            jobs.retain(|job| !job.is_cancelled());
            !jobs.is_empty()
        });
        self.turns.retain(|digest| self.many.contains_key(digest));
        self.waiting = self.few.len() + self.many.values().map(VecDeque::len).sum::<usize>();
    }

    /// Takes the jobs of the next batch out of the queue, and drops cancelled jobs on the way.
    fn next_batch(&mut self) -> Vec<Box<Job>> {
        let mut waiting = from_fn(|| self.pop()).filter(|job| !job.is_cancelled());
        let mut jobs: Vec<_> = waiting.by_ref().take(MAX_BATCH).collect();
        if jobs.len() == MAX_BATCH && jobs.iter().all(|job| job.is_interchangeable_with(&jobs[0])) {
            jobs.extend(waiting.take(MAX_COPIES - MAX_BATCH));
        }
        jobs
    }

    /// Learns the time per check from the time between the last batch and the batch that leaves
    /// now. A pause of the server says little about later batches, so a measured time counts as at
    /// most four times the smoothed time. This bound is multiplied by the number of batches in
    /// flight, since all of these batches may leave together.
    fn measure(&mut self, now: Instant, checks: usize) {
        if let Some((before, checks)) = self.last_batch {
            let most = self
                .time_per_check
                .max(SHORT_TIME)
                .saturating_mul(4 * self.in_flight as u32);
            let took = (now.saturating_duration_since(before) / checks).min(most);
            self.time_per_check = (self.time_per_check * 7 + took) / 8;
        }
        self.last_batch = (self.waiting > 0).then_some((now, checks as u32));
    }
}

/// The right to have one batch or one lone check in flight.
pub(super) struct Permit {
    queue: Weak<Queue>,
    is_lone: bool,
}

impl Permit {
    /// Ends the permit of a lone check that has its reply or an error.
    pub(super) fn end(mut self) {
        if let Some(queue) = mem::take(&mut self.queue).upgrade() {
            queue.lock().alone -= 1;
        }
    }

    /// Whether any jobs wait in the queue.
    pub(super) fn has_waiting(&self) -> bool {
        self.queue
            .upgrade()
            .is_some_and(|queue| queue.lock().waiting > 0)
    }

    /// Takes the next batch out of the queue. If the queue is empty, returns `None` and ends the
    /// permit. The next job that comes then gets a permit of its own.
    pub(super) fn next_batch(&mut self) -> Option<Vec<Box<Job>>> {
        let queue = self.queue.upgrade()?;
        let mut state = queue.lock();
        let jobs = state.next_batch();
        let waiting = state.waiting;
        if jobs.is_empty() {
            state.in_flight -= 1;
            (state.time_per_check, state.last_batch, state.first_end) =
                (Duration::ZERO, None, None);
            self.queue = Weak::new();
            return None;
        }
        state.measure(Instant::now(), jobs.len());
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

/// The caller of a job in the queue. When the caller stops waiting, its job is cancelled, and the
/// queue counts one more cancelled job.
pub(super) struct Caller {
    pub(super) queue: Weak<Queue>,
}

impl Caller {
    /// Lets the caller leave with its answer, so that its job does not count as cancelled.
    pub(super) fn leave(mut self) {
        self.queue = Weak::new();
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.lock().cancelled += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        check::{AdmissionId, Charge, Check},
        decision::Settlement,
        key::Key,
        limit::Limit,
        local::LocalState,
        store::ManualClock,
    };

    /// A limit of more units than any of these tests takes.
    const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
    const LOGINS: Limit = Limit::per_minute("login", 5);

    /// A queue, and the callers of its checks.
    #[derive(Default)]
    struct Crowd {
        state: State,
        digester: Digester,
        callers: Vec<Receiver<Answer>>,
    }

    impl Crowd {
        fn push(&mut self, key: impl Into<Key>, cost: u64) {
            let mut job = Job::decide(
                Check::new(Charge::new(CALLS, key, cost).unwrap()),
                Duration::MAX,
            );
            self.callers.push(job.wait());
            let turn = self.state.turn_of(&job, &self.digester);
            self.state.push(job, turn);
        }

        /// Pushes a check whose caller leaves at once.
        fn push_cancelled(&mut self, key: &str) {
            self.push(key, 1);
            drop(self.callers.pop());
        }
    }

    /// Runs a test on one thread. Loom's lock bounds the number of steps of a test, and this
    /// function raises the bound.
    fn on_one_thread(test: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.max_branches = 1_000_000;
        model.check(test);
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
            let queue = Queue::new(2, 4);
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

    /// A check comes behind many checks of the same key whose callers have left. 400 other keys
    /// have a check each in the queue, and for each check that leaves, another key's check comes.
    #[test]
    fn cancelled_checks_delay_no_other_of_their_key() {
        for (cancelled, are_removed) in [
            (0, false),
            (200, false),
            (4_000, false),
            (200, true),
            (4_000, true),
        ] {
            let mut crowd = Crowd::default();
            let mut others = (0..400_u64).cycle();
            others
                .by_ref()
                .take(400)
                .for_each(|other| crowd.push(other, 1));
            (0..cancelled).for_each(|_| crowd.push_cancelled("ada"));
            if are_removed {
                crowd.state.remove_cancelled();
                assert_eq!(crowd.state.waiting, 400);
            }
            crowd.push("ada", 2);
            let has_left = |_: &i32| {
                let jobs = crowd.state.next_batch();
                others
                    .by_ref()
                    .take(jobs.len())
                    .for_each(|other| crowd.push(other, 1));
                jobs.iter()
                    .any(|job| job.check().charges().any(|charge| charge.cost() == 2))
            };
            let batch = (1..1_000).find(has_left);
            assert!(
                batch.is_some_and(|batch| batch <= 8),
                "{batch:?}, {cancelled} cancelled, removed: {are_removed}"
            );
        }
    }

    /// The turns begin behind the jobs that leave in the order of their arrival.
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
        let costs: Vec<_> = jobs
            .map(|job| job.check().charges().map(Charge::cost).sum::<u64>())
            .collect();
        assert_eq!(costs, [1, 3, 5, 2, 6, 4]);
        assert_eq!((crowd.state.waiting, crowd.state.many.len()), (0, 0));
    }

    /// At 1 ms per check, the estimate tells how many checks may leave before a check that comes
    /// now. In fact, never more checks than that are ahead of the check.
    #[test]
    fn no_check_leaves_later_than_its_estimate() {
        let mut seed = 7_u64;
        let mut dice = |sides: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % sides
        };
        let mut long = 0;
        for round in 0..100 {
            let mut crowd = Crowd::default();
            crowd.state.time_per_check = Duration::from_millis(1);
            let keys = 1 + dice(20);
            for _ in 0..dice(900) {
                match dice(200) {
                    0..20 => crowd.push_cancelled("left"),
                    20 => drop(crowd.state.next_batch()),
                    _ => crowd.push(dice(keys) * dice(2), 1),
                }
            }
            let key = Key::from(dice(keys));
            let job = Job::decide(
                Check::new(Charge::new(CALLS, key.clone(), 2).unwrap()),
                Duration::MAX,
            );
            let Some(turn) = crowd.state.turn_of(&job, &crowd.digester) else {
                continue;
            };
            let most = crowd.state.wait(Some(turn)).as_millis() as usize * 3 / 4;
            crowd.push(key, 2);
            let is_last = |job: &Job| job.check().charges().any(|charge| charge.cost() == 2);
            let ahead = from_fn(|| crowd.state.pop())
                .filter(|job| !job.is_cancelled())
                .position(|job| is_last(&job));
            assert!(
                ahead.is_some_and(|ahead| ahead <= most),
                "round {round}: {ahead:?} of {most}"
            );
            long += 1;
        }
        assert!(long > 20, "only {long} queues were long");
    }

    /// While other checks wait, a batch of 64 checks leaves every 10 ms. So the time per check is
    /// 156 µs.
    #[test]
    fn the_time_per_check_is_that_of_batches_with_others_behind_them() {
        let mut crowd = Crowd::default();
        let mut now = Instant::now();
        crowd.state.in_flight = 4;
        let mut leave = |crowd: &mut Crowd, after: u64| {
            now += Duration::from_millis(after);
            let jobs = crowd.state.next_batch().len();
            crowd.state.measure(now, jobs);
            crowd.state.time_per_check.as_micros()
        };
        crowd.push(0, 1);
        assert_eq!(
            (leave(&mut crowd, 1), crowd.state.last_batch),
            (0, None),
            "nobody waited behind it"
        );
        (0..3_000_u64).for_each(|key| crowd.push(key, 1));
        assert_eq!(leave(&mut crowd, 60_000), 0, "nobody has waited for it");
        let measured: Vec<_> = (0..40).map(|_| leave(&mut crowd, 10)).collect();
        assert!(
            measured.is_sorted() && measured[0] == 19 && measured[39] > 150 && measured[39] <= 156,
            "{measured:?}"
        );
    }

    /// Four batches are in flight, and leave together every 40 ms. Then the server pauses for a
    /// second, or becomes slow.
    #[test]
    fn a_pause_changes_the_time_per_check_little() {
        for (batches_before, later, most) in [
            (0, 40, 200),
            (1, 40, 200),
            (40, 40, 500),
            (40, 1_000, 6_000),
        ] {
            let mut crowd = Crowd::default();
            let mut now = Instant::now();
            crowd.state.in_flight = 4;
            (0..20_000_u64).for_each(|key| crowd.push(key, 1));
            let mut leave = |after: u64| {
                now += Duration::from_millis(after);
                for _ in 0..4 {
                    let jobs = crowd.state.next_batch().len();
                    crowd.state.measure(now, jobs);
                }
                crowd.state.time_per_check.as_micros()
            };
            for _ in 0..batches_before {
                leave(40);
            }
            leave(1_000);
            let measured: Vec<_> = (0..10).map(|_| leave(later)).collect();
            assert!(
                measured.iter().all(|time| *time <= most),
                "{batches_before}, {later}: {measured:?}"
            );
            assert!(
                measured[9] > most / 4,
                "{batches_before}, {later}: {measured:?}"
            );
        }
    }

    /// 64 checks are in flight, and a check takes 100 µs.
    #[test]
    fn a_check_is_refused_that_would_wait_for_longer_than_its_caller() {
        on_one_thread(|| {
            let queue = Queue::new(4, CAPACITY);
            let mut callers = Vec::new();
            let _permit = queue.batch_permit(|| 0);
            let mut push =
                |key, deadline| push(&queue, key, deadline).map(|queued| callers.push(queued));
            assert!(
                (0..1_000).all(|key| push(key, 1).is_ok()),
                "nothing is known"
            );
            queue.lock().time_per_check = Duration::from_micros(100);
            assert!(push(1_000, 141).is_err_and(
                |error| error.contains("1000 checks are") && error.contains("about 141.8ms")
            ));
            assert_eq!((push(1_000, 143), push(1_001, 1_000)), (Ok(()), Ok(())));
            // A key that floods the queue delays only its own checks.
            assert!((0..500).all(|_| push(0, 60_000).is_ok()));
            assert_eq!((push(1_002, 143), push(0, 143).is_ok()), (Ok(()), false));
            assert_eq!(
                queue.lock().waiting,
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
            let queue = Queue::new(1, CAPACITY);
            let mut callers = Vec::new();
            let _permit = queue.batch_permit(|| 0);
            queue.lock().time_per_check = Duration::from_micros(200);
            callers.extend((0..FEW as u64).map_while(|key| push(&queue, key, 50).ok()));
            // In 50 ms the server decides 250 checks. A quarter of these is kept in reserve, and 64
            // checks are in flight.
            assert_eq!(callers.len(), 125);
        });
    }

    #[test]
    fn callers_that_have_left_refuse_no_other() {
        on_one_thread(|| {
            let queue = Queue::new(4, CAPACITY);
            let callers: Vec<_> = (0..2_000).map(|key| push(&queue, key, 50)).collect();
            queue.lock().time_per_check = Duration::from_micros(100);
            assert!(push(&queue, 2_000, 50).is_err());
            drop(callers);
            assert!(push(&queue, 2_000, 50).is_ok());
            assert_eq!(queue.lock().waiting, 1);
        });
    }

    /// The first checks come while few checks wait. A caller that leaves makes room for another
    /// check, and so does a caller that has its answer.
    #[test]
    fn no_more_equal_checks_wait_than_their_limit_admits() {
        on_one_thread(|| {
            let queue = Queue::new(4, CAPACITY);
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
            let queue = Queue::new(4, 10);
            let serve = |keys: &[u64]| {
                let callers: Vec<_> = keys.iter().map(|key| push(&queue, *key, 50)).collect();
                let mut permit = queue.batch_permit(|| 0).unwrap();
                let sent: Vec<_> = from_fn(|| permit.next_batch())
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
            let queue = Queue::new(1, 10);
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
            let settlements: Vec<_> = from_fn(|| Some(settle()))
                .map_while(Result::ok)
                .take(30)
                .collect();
            assert_eq!(
                (checks.len(), settlements.len()),
                (10, 10),
                "both are bounded"
            );
            let _permit = queue.batch_permit(|| 0);
            queue.lock().time_per_check = Duration::from_secs(1);
            let sent = queue.lock().next_batch();
            assert_eq!(sent.len(), 20);
            assert!(settle().is_ok(), "no time is too long for it");
        });
    }

    /// Prefetches join a queue only while few jobs wait in it, so the rest of the queue is for the
    /// checks of callers.
    #[test]
    fn prefetches_leave_the_queue_to_the_checks_of_callers() {
        on_one_thread(|| {
            let queue = Queue::new(1, 640);
            let mut callers = Vec::new();
            let mut push = |charge: Charge| {
                let pushed = queue.push(Job::decide(Check::new(charge), Duration::MAX));
                pushed
                    .inspect_err(|error| {
                        assert!(
                            format!("{error:?}").contains("an unknown time"),
                            "{error:?}"
                        )
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
        assert_eq!(state.waiting, 0, "a job is left");
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
