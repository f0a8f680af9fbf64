//! All lines of a limiter: one for each set of limits and keys. `line.rs` is the order in one of them, and
//! [`Limiter::acquire`](super::Limiter::acquire) has the rules.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    future::poll_fn,
    hash::BuildHasherDefault,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use super::line::Line;
use crate::{
    key::{Digester, Key, Prehashed},
    limit::Limit,
};

/// Limits and keys share this many counters of what was given back.
const COUNTERS: usize = 32;

/// The lines of a limiter, which its clones share.
#[derive(Clone, Default)]
pub(super) struct Lines(Arc<Registry>);

#[derive(Default)]
struct Registry {
    digester: Digester,
    table: Mutex<Table>,
    /// How often units were given back, even if no caller was in line.
    given_back: [AtomicU64; COUNTERS],
}

/// The lines that are not empty.
#[derive(Default)]
struct Table {
    /// Two sets with the same digest share a line, which makes them slower, not wrong.
    lines: HashMap<u64, SharedLine, BuildHasherDefault<Prehashed>>,
    /// The lines that wait for a limit and key.
    by_charge: HashMap<u64, Vec<u64>, BuildHasherDefault<Prehashed>>,
}

struct SharedLine {
    line: Arc<Mutex<Line>>,
    places: usize,
}

/// The limits and keys of a check. They identify its line.
#[derive(Clone, Debug)]
pub(super) struct LineId {
    /// The same for the same limits and keys in any order.
    digest: u64,
    /// Of each limit and key.
    charges: Vec<u64>,
}

/// A settlement or reset on its way. Dropped, it is done, or goes on without its caller: then the first in each line that
/// waits for its limits and keys asks at once.
pub(super) struct RefundGuard<'a> {
    lines: &'a Lines,
    id: LineId,
    has_failed: bool,
}

/// A place in a line, until it is dropped.
pub(super) struct Place {
    lines: Lines,
    id: LineId,
    line: Arc<Mutex<Line>>,
    number: u64,
}

impl RefundGuard<'_> {
    /// Takes note of the outcome: after a failure of the store, no caller is to ask it at once.
    pub(super) fn finish<T, E>(mut self, outcome: Result<T, E>) -> Result<T, E> {
        self.has_failed = outcome.is_err();
        outcome
    }
}

impl Lines {
    pub(super) fn id<'a>(&self, charges: impl IntoIterator<Item = (&'a Limit, &'a Key)>) -> LineId {
        let digest = |(limit, key): (&Limit, &Key)| self.0.digester.of_key(limit.name(), key);
        let charges: Vec<u64> = charges.into_iter().map(digest).collect();
        LineId { digest: charges.iter().copied().fold(0, u64::wrapping_add), charges }
    }

    /// The last place in a line.
    pub(super) fn join(&self, id: &LineId) -> Place {
        let mut table = self.lock();
        self.place(id, table.line(id))
    }

    /// The last place in a line that is not empty.
    pub(super) fn join_others(&self, id: &LineId) -> Option<Place> {
        Some(self.place(id, self.lock().lines.get_mut(&id.digest)?))
    }

    fn place(&self, id: &LineId, line: &mut SharedLine) -> Place {
        line.places += 1;
        let number = lock(&line.line).next_number();
        Place { lines: self.clone(), id: id.clone(), line: Arc::clone(&line.line), number }
    }

    /// Changes when units are given back that the line may wait for. A refusal from before may then be outdated.
    pub(super) fn times_given_back(&self, id: &LineId) -> u64 {
        id.charges.iter().map(|digest| self.counter(*digest).load(Ordering::SeqCst)).fold(0, u64::wrapping_add)
    }

    /// Units of these limits and keys are being given back.
    pub(super) fn refund(&self, id: LineId) -> RefundGuard<'_> {
        RefundGuard { lines: self, id, has_failed: false }
    }

    fn given_back(&self, id: &LineId) {
        // Before the search for lines, so that a caller that joins after the search sees the new count.
        for digest in &id.charges {
            self.counter(*digest).fetch_add(1, Ordering::SeqCst);
        }
        let lines = self.lock().waiting_for(id);
        for line in lines {
            let wakers = lock(&line).ask_now(Instant::now());
            wakers.wake();
        }
    }

    fn counter(&self, digest: u64) -> &AtomicU64 {
        &self.0.given_back[digest as usize % COUNTERS]
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn line(&mut self, id: &LineId) -> &mut SharedLine {
        self.lines.entry(id.digest).or_insert_with(|| {
            for digest in &id.charges {
                self.by_charge.entry(*digest).or_default().push(id.digest);
            }
            SharedLine { line: Arc::new(Mutex::new(Line::new())), places: 0 }
        })
    }

    /// The lines that wait for any of these limits and keys.
    fn waiting_for(&self, id: &LineId) -> Vec<Arc<Mutex<Line>>> {
        let lines = id.charges.iter().filter_map(|digest| self.by_charge.get(digest)).flatten();
        lines.filter_map(|line| self.lines.get(line)).map(|line| Arc::clone(&line.line)).collect()
    }

    /// Leaves a line, and removes it if it is empty then.
    fn leave(&mut self, id: &LineId) {
        let Some(line) = self.lines.get_mut(&id.digest) else { return };
        line.places -= 1;
        if line.places > 0 {
            return;
        }
        self.lines.remove(&id.digest);
        for digest in &id.charges {
            if let Entry::Occupied(mut lines) = self.by_charge.entry(*digest) {
                lines.get_mut().retain(|line| *line != id.digest);
                if lines.get().is_empty() {
                    lines.remove();
                }
            }
        }
    }
}

impl Place {
    /// Waits to be the first in line; `false` if `end` comes before.
    pub(super) async fn is_first_before(&self, end: Option<Instant>) -> bool {
        let mut timer = pin!(sleep_until(Instant::now()));
        poll_fn(|cx| {
            loop {
                let (look_again_at, wakers) = lock(&self.line).take_turn(self.number, cx.waker(), Instant::now());
                wakers.wake();
                let Some(at) = look_again_at else { return Poll::Ready(true) };
                if end.is_some_and(|end| end <= Instant::now()) {
                    lock(&self.line).give_up(self.number);
                    return Poll::Ready(false);
                }
                timer.as_mut().reset(end.map_or(at, |end| at.min(end)));
                ready!(timer.as_mut().poll(cx));
            }
        })
        .await
    }

    /// Lets the first in line wait until `at`, or until units are given back again. `false` if it has lost its turn. The
    /// call that follows may take as long as the deadline.
    pub(super) async fn asks(&self, at: Instant, given_back: u64, deadline: Duration) -> bool {
        let mut timer = pin!(sleep_until(at));
        poll_fn(|cx| {
            loop {
                let now = Instant::now();
                let mut line = lock(&self.line);
                if !line.is_first(self.number, cx.waker()) {
                    return Poll::Ready(false);
                }
                let asks = now >= at || self.lines.times_given_back(&self.id) != given_back;
                let wakers = if asks { line.ask(now, deadline) } else { line.ask_at(at) };
                drop(line);
                wakers.wake();
                if asks {
                    return Poll::Ready(true);
                }
                ready!(timer.as_mut().poll(cx));
            }
        })
        .await
    }

    /// How long the first in line waits until it asks.
    pub(super) fn first_waits(&self) -> Duration {
        lock(&self.line).asks_at().saturating_duration_since(Instant::now())
    }
}

fn lock(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for RefundGuard<'_> {
    fn drop(&mut self) {
        if !self.has_failed {
            self.lines.given_back(&self.id);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let wakers = lock(&self.line).leave(self.number, Instant::now());
        wakers.wake();
        self.lines.lock().leave(&self.id);
    }
}

/// Shows how many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lines").field(&self.lock().lines.len()).finish()
    }
}
