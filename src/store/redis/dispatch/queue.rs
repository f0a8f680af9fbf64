//! Checks and settlements that wait for the next batch.
//!
//! 1. A lone check leaves at once. While the allowed number of batches is in flight, checks queue. When a batch returns, the
//!    queue leaves as the next one. No timer delays a check.
//! 2. The batches, their number in flight, and the queue are bounded. A full queue is an error, never a longer queue.
//! 3. A check whose caller has stopped waiting is not sent, and takes no place in the queue from other checks.
//! 4. A task that finds a free permit serves the queue until it is empty.
//! 5. A check that finds nothing in flight skips the queue: its caller sends it, without a task. If that caller stops
//!    polling, other checks queue instead. A settlement never skips the queue, since it must happen even if its caller leaves.
//! 6. Blocks are taken and given back before they are needed, so they wait for others for a small part of their life. They leave earlier
//!    with the next batch of checks.

use std::{
    collections::VecDeque,
    error, fmt,
    iter::{from_fn, once},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use crossbeam_queue::ArrayQueue;
use tokio::sync::oneshot::Sender;

use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    decision::Decision,
    error::StoreError,
    local::Outdated,
    settlement::{Settled, Settlement},
    store::redis::keys::Keys,
};

/// The most checks of a batch. More than some dozens cost Redis more a check, not less: its data for them no longer fits
/// into the processor's nearest cache.
const MAX_BATCH: usize = 64;

/// The most checks of a batch that begins with [`MAX_BATCH`] copies of one. To Redis they are one check.
const MAX_COPIES: usize = 128;

/// The checks that may wait: as many as one server decides in some tens of milliseconds. If callers stop waiting while the
/// queue is full, twice as many may wait.
pub(super) const CAPACITY: usize = 8_192;

/// Blocks are taken and given back only while no more than this part of the queue waits.
const PART_OF_BLOCKS: usize = 8;

/// A block waits for others for this part of its life, and at most for so long. It does not wait if that is less than a timer can tell.
const PART_OF_LIFE: u32 = 64;
const LONGEST_WAIT: Duration = Duration::from_millis(4);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// The queue has this part of its capacity in addition, for cancelled jobs that have not been removed yet.
const SPARE: usize = 32;

/// A check to decide or an admission to settle, and the callers that wait for the result.
pub(super) enum Job {
    Decide {
        check: Check,
        caller: Sender<Result<Decision, StoreError>>,
        /// The callers of equal checks, which travel as copies of this one.
        copies: Vec<Sender<Result<Decision, StoreError>>>,
        /// Given when the job joins a batch. The copies have the ids that follow.
        id: AdmissionId,
    },
    Settle {
        settlement: Settlement,
        caller: Sender<Result<Settled, StoreError>>,
        outdated: Outdated,
    },
}

impl Job {
    /// The check that is to be decided, or that was admitted.
    pub(super) fn check(&self) -> &Check {
        match self {
            Self::Decide { check, .. } => check,
            Self::Settle { settlement, .. } => settlement.check(),
        }
    }

    pub(super) fn id(&self) -> AdmissionId {
        match self {
            Self::Decide { id, .. } => *id,
            Self::Settle { settlement, .. } => settlement.id(),
        }
    }

    /// Gives the check and its copies their ids: the caller's own, or fresh ones.
    pub(super) fn set_id(&mut self) {
        let count = self.count();
        if let Self::Decide { check, id, .. } = self {
            *id = check.id().unwrap_or_else(|| AdmissionId::fresh_run(count));
        }
    }

    /// The job and its copies.
    pub(super) fn count(&self) -> u64 {
        match self {
            Self::Decide { copies, .. } => 1 + copies.len() as u64,
            Self::Settle { .. } => 1,
        }
    }

    /// Whether it takes a block, or gives one back.
    pub(super) fn is_of_block(&self) -> bool {
        self.check().charges().any(Charge::is_block)
    }

    /// How long it may wait for others to travel with, if it may.
    pub(super) fn may_wait(&self) -> Option<Duration> {
        let life = self.check().charges().find_map(Charge::life)?;
        Some((life / PART_OF_LIFE).min(LONGEST_WAIT)).filter(|wait| *wait >= SHORTEST_WAIT)
    }

    /// Its slot in a cluster. A check of several slots is split before it becomes a job.
    pub(super) fn hash_slot(&self, keys: &Keys) -> u16 {
        self.check().charges().next().map_or(0, |charge| keys.hash_slot(charge.key()))
    }

    /// Whether the order of the two makes no difference.
    pub(super) fn is_interchangeable_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Decide { check, .. }, Self::Decide { check: other, .. }) => check.is_interchangeable_with(other),
            _ => false,
        }
    }

    /// Makes an interchangeable job a copy of this one, or returns it.
    pub(super) fn join(&mut self, other: Box<Self>) -> Result<(), Box<Self>> {
        if !self.is_interchangeable_with(&other) {
            return Err(other);
        }
        if let (Self::Decide { copies, .. }, Self::Decide { caller, .. }) = (self, *other) {
            copies.push(caller);
        }
        Ok(())
    }

    /// Whether it counts once even if it is sent twice: the store remembers its id.
    pub(super) fn is_repeatable(&self) -> bool {
        match self {
            Self::Decide { check, .. } => {
                let is_kept = |charge: &Charge| charge.units() == 0 || charge.lease().is_some() || charge.is_exact();
                check.id().is_some() || check.charges().all(is_kept)
            }
            Self::Settle { .. } => true,
        }
    }

    /// For the text of an error.
    pub(super) fn doing(&self) -> &'static str {
        match self {
            Self::Decide { .. } => "deciding a check",
            Self::Settle { .. } => "settling an admission",
        }
    }

    /// Sends the next results to the callers, in order: the decision, and whether a settlement was applied.
    pub(super) fn finish(self, results: &mut impl Iterator<Item = Result<(Decision, bool), StoreError>>) {
        let doing = self.doing();
        let results = results.map(|result| result.map_err(|error| error.when(doing)));
        match self {
            Self::Decide { caller, copies, .. } => {
                for (caller, result) in once(caller).chain(copies).zip(results) {
                    drop(caller.send(result.map(|(decision, _)| decision)));
                }
            }
            Self::Settle { caller, outdated, .. } => {
                drop(outdated);
                for (caller, result) in once(caller).zip(results) {
                    drop(caller.send(result.map(|(decision, was_applied)| Settled::of(decision, was_applied))));
                }
            }
        }
    }

    /// Whether its caller has stopped waiting. A settlement is done nevertheless.
    fn is_cancelled(&self) -> bool {
        matches!(self, Self::Decide { caller, .. } if caller.is_closed())
    }
}

pub(super) struct Queue {
    capacity: usize,
    waiting: ArrayQueue<Box<Job>>,
    /// The jobs that came before those, and were kept when cancelled jobs were removed. Mostly none.
    front: Mutex<VecDeque<Box<Job>>>,
    /// The callers that stopped waiting since cancelled jobs were last removed. Some of their jobs have left the queue.
    cancelled: AtomicUsize,
    in_flight: AtomicUsize,
    max_in_flight: usize,
    is_lone_check_in_flight: AtomicBool,
    /// Whether a task lets blocks wait for each other.
    is_gathering: AtomicBool,
}

impl Queue {
    pub(super) fn new(max_in_flight: usize, capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            capacity,
            waiting: ArrayQueue::new(capacity + capacity.div_ceil(SPARE)),
            front: Mutex::default(),
            cancelled: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            max_in_flight,
            is_lone_check_in_flight: AtomicBool::new(false),
            is_gathering: AtomicBool::new(false),
        })
    }

    /// The permit to send a check without a batch, if nothing is in flight. A queue that may have only one batch in flight
    /// gives none: the check would be a second one.
    pub(super) fn lone_permit(self: &Arc<Self>) -> Option<Permit> {
        // Loaded before it is swapped: a swap takes the cache line away from other threads even if it changes nothing.
        let is_free = self.max_in_flight > 1
            && self.in_flight.load(Ordering::Relaxed) == 0
            && !self.is_lone_check_in_flight.load(Ordering::Relaxed)
            && !self.is_lone_check_in_flight.swap(true, Ordering::Relaxed);
        is_free.then(|| Permit { queue: Arc::clone(self), is_lone: true })
    }

    /// The permit to have one batch in flight, if one is free.
    pub(super) fn batch_permit(self: &Arc<Self>) -> Option<Permit> {
        // Sequentially consistent, together with `Permit::renew`: either a push sees the permit that has become free, or
        // `renew` sees the pushed job.
        let add_one = |in_flight| (in_flight < self.max_in_flight).then_some(in_flight + 1);
        let is_free = self.in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add_one).is_ok();
        is_free.then(|| Permit { queue: Arc::clone(self), is_lone: false })
    }

    /// Whether the caller has to let blocks wait for each other from now on, as nothing does yet.
    pub(super) fn begin_gathering(&self) -> bool {
        !self.is_gathering.swap(true, Ordering::SeqCst)
    }

    /// To be called before the task gets a permit, so that a block that comes later is gathered by another task.
    pub(super) fn end_gathering(&self) {
        self.is_gathering.store(false, Ordering::SeqCst);
    }

    /// Queues a job. The caller must then try to get a [`batch_permit`](Self::batch_permit), or let it wait for others first.
    pub(super) fn push(&self, job: Box<Job>) -> Result<(), QueueFull> {
        // So that blocks of thousands of keys never delay or fail the checks of callers.
        if self.waiting.len() > self.capacity / PART_OF_BLOCKS && job.is_of_block() {
            return Err(QueueFull { waiting: self.len(), is_of_block: true });
        }
        self.waiting.push(job).or_else(|job| {
            self.remove_cancelled();
            self.waiting.push(job).map_err(|_| QueueFull { waiting: self.len(), is_of_block: false })
        })
    }

    /// Counts a caller that has stopped waiting. To be called once its job [is cancelled](Job::is_cancelled).
    pub(super) fn note_cancelled(&self) {
        self.cancelled.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes the cancelled jobs once they may take the spare capacity. So one walk through the queue serves many of them,
    /// and a queue without cancelled jobs is found full at once.
    fn remove_cancelled(&self) {
        let mut front = self.front();
        if self.cancelled.load(Ordering::SeqCst) < self.waiting.capacity() - self.capacity {
            return;
        }
        self.cancelled.store(0, Ordering::SeqCst);
        front.retain(|job| !job.is_cancelled());
        while front.len() < self.capacity
            && let Some(job) = self.waiting.pop()
        {
            if !job.is_cancelled() {
                front.push_back(job);
            }
        }
    }

    /// The next batch of jobs that are not cancelled.
    pub(super) fn next_batch(&self) -> Vec<Box<Job>> {
        let mut front = self.front();
        let next = || front.pop_front().or_else(|| self.waiting.pop());
        let mut waiting = from_fn(next).filter(|job| !job.is_cancelled());
        let mut jobs: Vec<_> = waiting.by_ref().take(MAX_BATCH).collect();
        if jobs.len() == MAX_BATCH && jobs.iter().all(|job| job.is_interchangeable_with(&jobs[0])) {
            jobs.extend(waiting.take(MAX_COPIES - MAX_BATCH));
        }
        jobs
    }

    /// Locked by all code that takes jobs out of the queue, so that they stay in order.
    fn front(&self) -> MutexGuard<'_, VecDeque<Box<Job>>> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.front().len() + self.waiting.len()
    }
}

/// The right to have one batch or one lone check in flight.
pub(super) struct Permit {
    queue: Arc<Queue>,
    is_lone: bool,
}

impl Permit {
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Gives the permit of a batch up because the queue was empty. Returns a new one if it no longer is.
    pub(super) fn renew(self) -> Option<Self> {
        let queue = Arc::clone(&self.queue);
        drop(self);
        if queue.len() == 0 { None } else { queue.batch_permit() }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.is_lone {
            self.queue.is_lone_check_in_flight.store(false, Ordering::Relaxed);
        } else {
            self.queue.in_flight.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[derive(Debug)]
pub(super) struct QueueFull {
    waiting: usize,
    pub(super) is_of_block: bool,
}

impl fmt::Display for QueueFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} checks are waiting for Redis already", self.waiting)
    }
}

impl error::Error for QueueFull {}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::{Receiver, channel};

    use super::*;
    use crate::{key::Key, limit::Limit};

    const CALLS: Limit = Limit::per_hour("calls", 100);

    /// Blocks join a queue that is filled to an eighth at most, so the rest is for the checks of callers.
    #[test]
    fn blocks_leave_the_queue_to_the_checks_of_callers() {
        let (queue, mut callers) = (Queue::new(1, 32), Vec::new());
        let mut push = |charge: Charge| {
            let (caller, waiting): (_, Receiver<_>) = channel();
            callers.push(waiting);
            let (check, id) = (Check::new(charge), AdmissionId::fresh());
            queue.push(Box::new(Job::Decide { check, caller, copies: Vec::new(), id }))
        };
        let mut push_all = |charge: &dyn Fn() -> Charge| (0..40).filter(|_| push(charge()).is_ok()).count();
        let blocks = push_all(&|| Charge::block(CALLS, Key::from("ada"), 10, 100_000));
        let checks = push_all(&|| Charge::new(CALLS, "ada", 1).unwrap());
        assert_eq!((blocks, checks), (5, 28), "of 32, and one for checks that are cancelled");
    }
}
