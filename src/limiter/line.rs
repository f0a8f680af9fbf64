//! Lines of those who wait for room: one for each set of limits and keys. [`Limiter::acquire`](super::Limiter::acquire)
//! has their rules.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    hash::BuildHasherDefault,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::{Instant, timeout_at},
};

use super::patience::Patience;
use crate::{digest::Digester, key::Key, limit::Limit, prehashed::Prehashed};

/// In so many parts it is counted how often something was given back.
const PARTS: usize = 32;

/// All lines of a limiter, which its clones share.
#[derive(Clone, Default)]
pub(super) struct Lines(Arc<Shared>);

#[derive(Default)]
struct Shared {
    digester: Digester,
    /// Only lines in which somebody is. Two sets of one digest share a line, which makes them slower, not wrong.
    lines: Mutex<HashMap<u64, Line, BuildHasherDefault<Prehashed>>>,
    /// How often something was given back, also where nobody was in line.
    given_back: [AtomicU64; PARTS],
}

struct Line {
    queue: Arc<Queue>,
    places: usize,
}

/// What those in one line share.
struct Queue {
    /// The first in line has the only permit. The semaphore gives it on in the order in which it was asked for.
    turn: Semaphore,
    /// When the first in line is going to ask.
    asks_at: Mutex<Instant>,
    given_back: Notify,
}

/// Something that is being given back. Dropped, it is done, or goes on though its caller has left: the first in line asks at
/// once.
pub(super) struct GivingBack<'a> {
    lines: &'a Lines,
    digest: u64,
    has_failed: bool,
}

impl GivingBack<'_> {
    /// What came of it. Nobody is to ask a store because it has just failed.
    pub(super) fn outcome<T, E>(mut self, outcome: Result<T, E>) -> Result<T, E> {
        self.has_failed = outcome.is_err();
        outcome
    }
}

/// A place in a line, until it is dropped.
pub(super) struct Place {
    lines: Lines,
    digest: u64,
    queue: Arc<Queue>,
}

impl Lines {
    /// The same for the same limits and keys, in whichever order.
    pub(super) fn digest<'a>(&self, charged: impl IntoIterator<Item = (&'a Limit, &'a Key)>) -> u64 {
        let digest = |(limit, key): (&Limit, &Key)| self.0.digester.of_key(limit, key);
        charged.into_iter().map(digest).fold(0, u64::wrapping_add)
    }

    /// The last place in a line.
    pub(super) fn join(&self, digest: u64) -> Place {
        let mut lines = self.lock();
        let line = lines.entry(digest).or_insert_with(|| Line { queue: Arc::new(Queue::new()), places: 0 });
        line.places += 1;
        Place { lines: self.clone(), digest, queue: Arc::clone(&line.queue) }
    }

    /// The last place in a line in which others are.
    pub(super) fn join_others(&self, digest: u64) -> Option<Place> {
        let mut lines = self.lock();
        let line = lines.get_mut(&digest)?;
        line.places += 1;
        Some(Place { lines: self.clone(), digest, queue: Arc::clone(&line.queue) })
    }

    /// Changes when something is given back that those in such a line may wait for: a refusal from before may then be out
    /// of date.
    pub(super) fn times_given_back(&self, digest: u64) -> u64 {
        self.count(digest).load(Ordering::Relaxed)
    }

    /// Something is being given back that those in such a line may wait for.
    pub(super) fn give_back(&self, digest: u64) -> GivingBack<'_> {
        GivingBack { lines: self, digest, has_failed: false }
    }

    /// Lets the first in line ask at once, since something was given back.
    fn given_back(&self, digest: u64) {
        // Before the look for a line: who joins after that look finds it counted.
        self.count(digest).fetch_add(1, Ordering::Relaxed);
        if let Some(line) = self.lock().get(&digest) {
            line.queue.given_back.notify_one();
        }
    }

    fn count(&self, digest: u64) -> &AtomicU64 {
        &self.0.given_back[digest as usize % PARTS]
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Line, BuildHasherDefault<Prehashed>>> {
        self.0.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn new() -> Self {
        Self { turn: Semaphore::new(1), asks_at: Mutex::new(Instant::now()), given_back: Notify::new() }
    }
}

impl Place {
    /// Waits to be the first in line, which it is until the permit is dropped; `None` if the patience ends before.
    pub(super) async fn turn(&self, patience: Patience) -> Option<SemaphorePermit<'_>> {
        let turn = self.queue.turn.acquire();
        let turn = match patience.end() {
            Some(end) => timeout_at(end, turn).await.ok()?,
            None => turn.await,
        };
        // An error would say that the semaphore is closed, which it never is.
        turn.ok()
    }

    /// Lets the first in line wait until it is to ask, or until something is given back.
    pub(super) async fn wait_until(&self, asks_at: Instant) {
        *self.asks_at() = asks_at;
        if timeout_at(asks_at, self.queue.given_back.notified()).await.is_ok() {
            *self.asks_at() = Instant::now();
        }
    }

    /// How long the first in line waits until it asks.
    pub(super) fn first_waits(&self) -> Duration {
        self.asks_at().saturating_duration_since(Instant::now())
    }

    fn asks_at(&self) -> MutexGuard<'_, Instant> {
        self.queue.asks_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for GivingBack<'_> {
    fn drop(&mut self) {
        if !self.has_failed {
            self.lines.given_back(self.digest);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Entry::Occupied(mut line) = self.lines.lock().entry(self.digest) {
            line.get_mut().places -= 1;
            if line.get().places == 0 {
                line.remove();
            }
        }
    }
}

/// How many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lines").field(&self.lock().len()).finish()
    }
}
