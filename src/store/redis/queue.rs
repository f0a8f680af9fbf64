//! Where checks wait while earlier ones are on their way.
//!
//! 1. A lone check leaves at once. While as many batches are in flight as may be, arriving checks queue; when one
//!    returns, what has queued up leaves as the next. There is no timer and no added delay: a batch only lets those
//!    tasks go first that are ready to run, and may want to come along.
//! 2. Batches, their number in flight, and the queue are bounded. A full queue is an error, never a longer queue.
//! 3. A check whose caller has given up before it is sent is not sent. Wherever it stands, it keeps no place from others:
//!    as many as the queue is for always find room if they are waited for.
//! 4. Nobody owns the queue: whoever finds a free slot starts a task that serves it until it is empty. Slots are held by
//!    tasks only, which the runtime polls.
//! 5. A check that finds nothing in flight does not even queue: its own caller sends it, without a task, and without a slot. If
//!    the caller stops polling, others queue instead, and lose nothing else. A settlement is always sent by a task, since it has
//!    to be done also if its caller leaves.

use std::{
    collections::VecDeque,
    error, fmt,
    iter::from_fn,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use crossbeam_queue::ArrayQueue;

use super::job::Job;

/// The checks of one batch at most. Beyond some dozens a larger batch costs Redis more a check, not less: what it holds for
/// each of them no longer fits into the nearest cache of a processor.
const MAX_BATCH: usize = 64;

/// The checks of a batch that begins with so many copies of one: to Redis they are one.
const MAX_COPIES: usize = 128;

/// The checks that may wait: some tens of milliseconds' worth of what one server decides. After some have given up in a full
/// queue it may be twice as many.
pub(super) const CAPACITY: usize = 8_192;

/// There are places for this part more of the capacity, which those who have given up may take until room is made.
const SPARE: usize = 32;

pub(super) struct Queue {
    capacity: usize,
    waiting: ArrayQueue<Job>,
    /// Those that came before them, and were still waited for when room was made: mostly none.
    front: Mutex<VecDeque<Job>>,
    /// How many callers have given up since room was last made. The checks of some have left the queue by now.
    given_up: AtomicUsize,
    in_flight: AtomicUsize,
    max_in_flight: usize,
    /// Whether a check is on its way by itself.
    is_one_alone: AtomicBool,
}

impl Queue {
    pub(super) fn new(max_in_flight: usize, capacity: usize) -> Arc<Self> {
        let (waiting, front) = (ArrayQueue::new(capacity + capacity.div_ceil(SPARE)), Mutex::default());
        let (given_up, in_flight, is_one_alone) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        Arc::new(Self { capacity, waiting, front, given_up, in_flight, max_in_flight, is_one_alone })
    }

    /// Lets a check be sent by itself, if nothing is in flight. Where only one batch may be, it would be a second one.
    pub(super) fn enter_alone(self: &Arc<Self>) -> Option<Alone> {
        // Only read where it is not to be changed: an exchange takes the flag away from the other threads even if it fails.
        let entered = self.max_in_flight > 1
            && self.in_flight.load(Ordering::Relaxed) == 0
            && !self.is_one_alone.load(Ordering::Relaxed)
            && !self.is_one_alone.swap(true, Ordering::Relaxed);
        entered.then(|| Alone { queue: Arc::clone(self) })
    }

    /// Lets a job wait. Who has pushed one has to try to [`enter`](Self::enter) then.
    pub(super) fn push(&self, job: Job) -> Result<(), Full> {
        self.waiting.push(job).or_else(|job| {
            self.make_room();
            self.waiting.push(job).map_err(|_| Full { waiting: self.len() })
        })
    }

    /// Counts a caller that gives up, after its job can be seen to be given up.
    pub(super) fn note_given_up(&self) {
        self.given_up.fetch_add(1, Ordering::SeqCst);
    }

    /// Drops the jobs that nobody waits for any more, once those who have given up may have taken all spare places. So a look
    /// at the whole queue is paid for by as many of them, and a queue of which all are waited for is found full at once.
    fn make_room(&self) {
        let mut front = self.front();
        if self.given_up.load(Ordering::SeqCst) < self.waiting.capacity() - self.capacity {
            return;
        }
        self.given_up.store(0, Ordering::SeqCst);
        front.retain(|job| !job.is_given_up());
        while front.len() < self.capacity
            && let Some(job) = self.waiting.pop()
        {
            if !job.is_given_up() {
                front.push_back(job);
            }
        }
    }

    /// Nobody takes a job out of the queue who does not hold this, so they stay in order.
    fn front(&self) -> MutexGuard<'_, VecDeque<Job>> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> usize {
        self.front().len() + self.waiting.len()
    }

    /// A slot to send batches in, if one is free.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Slot> {
        // Sequentially consistent, together with `Slot::leave`: either the pusher sees the slot that has become free,
        // or the leaver sees the job that has been pushed.
        let free = |in_flight| (in_flight < self.max_in_flight).then_some(in_flight + 1);
        let entered = self.in_flight.fetch_update(Ordering::SeqCst, Ordering::SeqCst, free).is_ok();
        entered.then(|| Slot { queue: Arc::clone(self) })
    }
}

/// Says that a check is on its way by itself. It keeps nothing from others but the same.
pub(super) struct Alone {
    queue: Arc<Queue>,
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.queue.is_one_alone.store(false, Ordering::Relaxed);
    }
}

/// The right to have one batch in flight. Held by tasks only.
pub(super) struct Slot {
    queue: Arc<Queue>,
}

impl Slot {
    /// The next batch, of jobs whose callers still wait; empty if there are none.
    pub(super) fn next_batch(&self) -> Vec<Job> {
        let mut front = self.queue.front();
        let next = || front.pop_front().or_else(|| self.queue.waiting.pop());
        let mut waiting = from_fn(next).filter(|job| !job.is_given_up());
        let mut jobs: Vec<_> = waiting.by_ref().take(MAX_BATCH).collect();
        if jobs.len() == MAX_BATCH && jobs.iter().all(|job| job.is_interchangeable_with(&jobs[0])) {
            jobs.extend(waiting.take(MAX_COPIES - MAX_BATCH));
        }
        jobs
    }

    /// How many jobs wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Gives the slot up because the queue was empty, and returns one if that is no longer so.
    pub(super) fn leave(self) -> Option<Self> {
        let queue = Arc::clone(&self.queue);
        drop(self);
        if queue.len() == 0 { None } else { queue.enter() }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.queue.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

/// As many checks wait as may wait.
#[derive(Debug)]
pub(super) struct Full {
    waiting: usize,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} checks are waiting for Redis already", self.waiting)
    }
}

impl error::Error for Full {}
