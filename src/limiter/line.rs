//! Lines of callers that wait for room: one for each set of limits and keys. [`Limiter::acquire`](super::Limiter::acquire)
//! has their rules. `turn.rs` is the order in one of them.

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

use super::{patience::Patience, turn::Turns};
use crate::{digest::Digester, key::Key, limit::Limit, prehashed::Prehashed};

/// In so many parts it is counted how often something was given back.
const PARTS: usize = 32;

/// All lines of a limiter, which its clones share.
#[derive(Clone, Default)]
pub(super) struct Lines(Arc<Shared>);

#[derive(Default)]
struct Shared {
    digester: Digester,
    standing: Mutex<Standing>,
    /// How often something was given back, also where nobody was in line.
    given_back: [AtomicU64; PARTS],
}

/// Only lines in which somebody is.
#[derive(Default)]
struct Standing {
    /// Two sets of one digest share a line, which makes them slower, not wrong.
    lines: HashMap<u64, Line, BuildHasherDefault<Prehashed>>,
    /// Which lines wait for a limit and key.
    waiting_for: HashMap<u64, Vec<u64>, BuildHasherDefault<Prehashed>>,
}

struct Line {
    turns: Arc<Mutex<Turns>>,
    places: usize,
}

/// The limits and keys that a check is charged to.
#[derive(Clone, Debug)]
pub(super) struct Charged {
    /// The same for the same limits and keys, in whichever order.
    digest: u64,
    /// Of each limit and key.
    each: Vec<u64>,
}

/// Something that is being given back. Dropped, it is done, or goes on though its caller has left: then the first in each
/// line that waits for it asks at once.
pub(super) struct GivingBack<'a> {
    lines: &'a Lines,
    charged: Charged,
    has_failed: bool,
}

impl GivingBack<'_> {
    /// Notes the outcome. No caller is to ask a store because it has just failed.
    pub(super) fn outcome<T, E>(mut self, outcome: Result<T, E>) -> Result<T, E> {
        self.has_failed = outcome.is_err();
        outcome
    }
}

/// A place in a line, until it is dropped.
pub(super) struct Place {
    lines: Lines,
    charged: Charged,
    turns: Arc<Mutex<Turns>>,
    number: u64,
}

impl Lines {
    pub(super) fn charged<'a>(&self, charged: impl IntoIterator<Item = (&'a Limit, &'a Key)>) -> Charged {
        let digest = |(limit, key): (&Limit, &Key)| self.0.digester.of_key(limit, key);
        let each: Vec<u64> = charged.into_iter().map(digest).collect();
        Charged { digest: each.iter().copied().fold(0, u64::wrapping_add), each }
    }

    /// The last place in a line.
    pub(super) fn join(&self, charged: &Charged) -> Place {
        let mut standing = self.lock();
        self.place(charged, standing.line(charged))
    }

    /// The last place in a line in which others are.
    pub(super) fn join_others(&self, charged: &Charged) -> Option<Place> {
        Some(self.place(charged, self.lock().lines.get_mut(&charged.digest)?))
    }

    fn place(&self, charged: &Charged, line: &mut Line) -> Place {
        line.places += 1;
        let number = lock(&line.turns).next_number();
        Place { lines: self.clone(), charged: charged.clone(), turns: Arc::clone(&line.turns), number }
    }

    /// Changes when something is given back that those in such a line may wait for: a refusal from before may then be out
    /// of date.
    pub(super) fn times_given_back(&self, charged: &Charged) -> u64 {
        charged.each.iter().map(|digest| self.count(*digest).load(Ordering::SeqCst)).fold(0, u64::wrapping_add)
    }

    /// Something is being given back that others may wait for.
    pub(super) fn give_back(&self, charged: Charged) -> GivingBack<'_> {
        GivingBack { lines: self, charged, has_failed: false }
    }

    /// Lets the first in each line that waits for it ask at once, since something was given back.
    fn given_back(&self, charged: &Charged) {
        // Before the look for lines: a caller that joins after that look finds it counted.
        for digest in &charged.each {
            self.count(*digest).fetch_add(1, Ordering::SeqCst);
        }
        let lines = self.lock().waiting_for(charged);
        for turns in lines {
            let woken = lock(&turns).ask_now(Instant::now());
            woken.wake();
        }
    }

    fn count(&self, digest: u64) -> &AtomicU64 {
        &self.0.given_back[digest as usize % PARTS]
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.0.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Standing {
    /// The line of what is charged, which may be new.
    fn line(&mut self, charged: &Charged) -> &mut Line {
        self.lines.entry(charged.digest).or_insert_with(|| {
            for digest in &charged.each {
                self.waiting_for.entry(*digest).or_default().push(charged.digest);
            }
            Line { turns: Arc::new(Mutex::new(Turns::new())), places: 0 }
        })
    }

    /// The lines that wait for any of this.
    fn waiting_for(&self, charged: &Charged) -> Vec<Arc<Mutex<Turns>>> {
        let lines = charged.each.iter().filter_map(|digest| self.waiting_for.get(digest)).flatten();
        lines.filter_map(|line| self.lines.get(line)).map(|line| Arc::clone(&line.turns)).collect()
    }

    /// Leaves a line, which ends with the last who is in it.
    fn leave(&mut self, charged: &Charged) {
        let Some(line) = self.lines.get_mut(&charged.digest) else { return };
        line.places -= 1;
        if line.places > 0 {
            return;
        }
        self.lines.remove(&charged.digest);
        for digest in &charged.each {
            if let Entry::Occupied(mut lines) = self.waiting_for.entry(*digest) {
                lines.get_mut().retain(|line| *line != charged.digest);
                if lines.get().is_empty() {
                    lines.remove();
                }
            }
        }
    }
}

impl Place {
    /// Waits to be the first in line, which it is until it is dropped, or has lost its turn; `false` if the patience ends
    /// before.
    pub(super) async fn turn(&self, patience: Patience) -> bool {
        let mut timer = pin!(sleep_until(Instant::now()));
        poll_fn(|cx| {
            loop {
                let (look_again_at, woken) = lock(&self.turns).take(self.number, cx.waker(), Instant::now());
                woken.wake();
                let Some(at) = look_again_at else { return Poll::Ready(true) };
                if patience.is_over() {
                    lock(&self.turns).give_up(self.number);
                    return Poll::Ready(false);
                }
                timer.as_mut().reset(patience.end().map_or(at, |end| at.min(end)));
                ready!(timer.as_mut().poll(cx));
            }
        })
        .await
    }

    /// Lets the first in line wait until it is to ask, or until something has been given back since so many times. `false` if
    /// it has lost its turn. A question may then take so long.
    pub(super) async fn is_to_ask(&self, at: Instant, given_back: u64, deadline: Duration) -> bool {
        let mut timer = pin!(sleep_until(at));
        poll_fn(|cx| {
            loop {
                let now = Instant::now();
                let mut turns = lock(&self.turns);
                if !turns.is_first(self.number, cx.waker()) {
                    return Poll::Ready(false);
                }
                let asks = now >= at || self.lines.times_given_back(&self.charged) != given_back;
                let woken = if asks { turns.ask(now, deadline) } else { turns.ask_at(at) };
                drop(turns);
                woken.wake();
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
        lock(&self.turns).asks_at().saturating_duration_since(Instant::now())
    }
}

fn lock(turns: &Mutex<Turns>) -> MutexGuard<'_, Turns> {
    turns.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for GivingBack<'_> {
    fn drop(&mut self) {
        if !self.has_failed {
            self.lines.given_back(&self.charged);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let woken = lock(&self.turns).leave(self.number, Instant::now());
        woken.wake();
        self.lines.lock().leave(&self.charged);
    }
}

/// How many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lines").field(&self.lock().lines.len()).finish()
    }
}
