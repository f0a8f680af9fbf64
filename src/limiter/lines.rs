//! The lines of callers that wait in [`Limiter::acquire`](super::Limiter::acquire), which has the rules: one for each set of limits and
//! keys. `turns.rs` is the order in one of them.
//!
//! The first in line records which limits and keys have refused it. When units of one of them return, those that it has refused ask at
//! once, as far as the units reach.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::poll_fn,
    hash::BuildHasherDefault,
    iter,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Poll, Waker, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use super::turns::Turns;
use crate::{
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    key::{Digester, Key, Prehashed},
    limit::Limit,
};

/// Limits and keys share this many counters of what was returned.
const COUNTERS: usize = 32;

/// The lines of a limiter, which its clones share.
#[derive(Default)]
pub(super) struct Lines {
    digester: Digester,
    table: Mutex<Table>,
    /// How often units were returned, even if no caller was in line.
    returned: [AtomicU64; COUNTERS],
}

#[derive(Default)]
struct Table {
    last_number: u64,
    /// Those with a first caller, by their limits and keys. Two sets with the same digest share a line, which makes them slower, not
    /// wrong.
    lines: HashMap<u64, Turns, BuildHasherDefault<Prehashed>>,
    /// The line and cost of first callers, by a limit and key that has refused them, and their number.
    refused: BTreeMap<(u64, u64), (u64, u64)>,
}

/// A limit and key as a caller needs it.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    digest: u64,
    cost: u64,
    /// How often units had been returned before the caller asked.
    returned: u64,
}

/// A place in a line, until it is dropped.
pub(super) struct Place {
    lines: Arc<Lines>,
    line: u64,
    number: u64,
    refused_by: Vec<Wanted>,
}

/// A settlement or reset on its way. Dropped, it is done, or goes on without its caller: then the callers that it may help ask at once.
pub(super) struct Returning<'a> {
    lines: &'a Lines,
    /// The limits and keys, and the units that are left of them.
    left: Vec<(u64, u64)>,
}

impl Lines {
    /// The units that a caller needs if it asks now.
    pub(super) fn wanted(&self, check: &Check) -> Vec<Wanted> {
        let wanted = |charge: &Charge| {
            let digest = self.digest(charge.limit(), charge.key());
            Wanted { digest, cost: charge.cost(), returned: self.counter(digest).load(Ordering::SeqCst) }
        };
        check.charges().map(wanted).collect()
    }

    /// The last place in a line.
    pub(super) fn join(self: &Arc<Self>, wanted: &[Wanted]) -> Place {
        self.place(&mut self.lock(), wanted)
    }

    /// The last place in a line, if others are in it.
    pub(super) fn join_others(self: &Arc<Self>, wanted: &[Wanted]) -> Option<Place> {
        let mut table = self.lock();
        table.lines.contains_key(&line_of(wanted)).then(|| self.place(&mut table, wanted))
    }

    fn place(self: &Arc<Self>, table: &mut Table, wanted: &[Wanted]) -> Place {
        table.last_number += 1;
        Place { lines: Arc::clone(self), line: line_of(wanted), number: table.last_number, refused_by: Vec::new() }
    }

    /// Units of these limits and keys are being returned, all of them as far as is known.
    pub(super) fn returning<'a>(&self, accounts: impl IntoIterator<Item = (&'a Limit, &'a Key)>) -> Returning<'_> {
        let left = accounts.into_iter().map(|(limit, key)| (self.digest(limit, key), limit.units())).collect();
        Returning { lines: self, left }
    }

    fn digest(&self, limit: &Limit, key: &Key) -> u64 {
        self.digester.of_key(limit, key)
    }

    fn counter(&self, digest: u64) -> &AtomicU64 {
        &self.returned[digest as usize % COUNTERS]
    }

    /// Changes the lines, and then wakes the callers that are to know.
    fn change<T>(&self, change: impl FnOnce(&mut Table, &mut Vec<Waker>) -> T) -> T {
        let mut woken = Vec::new();
        let result = change(&mut self.lock(), &mut woken);
        woken.into_iter().for_each(Waker::wake);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The same for the same limits and keys in any order.
fn line_of(wanted: &[Wanted]) -> u64 {
    wanted.iter().fold(0, |digest, wanted| digest.wrapping_add(wanted.digest))
}

/// Those of the wanted limits and keys that have refused.
pub(super) fn refused_by(wanted: &[Wanted], refusal: &Decision) -> Vec<Wanted> {
    let refuses = |status: &LimitStatus| status.refuses().is_some();
    wanted.iter().zip(refusal.statuses()).filter(|(_, status)| refuses(status)).map(|(wanted, _)| *wanted).collect()
}

impl Table {
    fn line(&mut self, place: &Place) -> Option<&mut Turns> {
        self.lines.get_mut(&place.line)
    }

    /// Takes the turn if it is this caller's, or returns when to look again.
    fn take_turn(&mut self, place: &Place, waker: &Waker, wake: &mut Vec<Waker>) -> Option<Instant> {
        let (number, now) = (place.number, Instant::now());
        let line = self.lines.entry(place.line).or_insert_with(|| Turns::new(number, now));
        line.take(number, waker, now, wake)
    }

    /// The first in line waits until a time, unless units that it needs have been returned since it asked.
    fn wait(&mut self, place: &mut Place, asks_at: Instant, refused_by: &[Wanted], wake: &mut Vec<Waker>) {
        self.forget(place);
        let Some(line) = self.line(place).filter(|line| line.is_first(place.number)) else { return };
        let is_outdated =
            |wanted: &Wanted| place.lines.counter(wanted.digest).load(Ordering::SeqCst) != wanted.returned;
        let asks_at = if refused_by.iter().any(is_outdated) { Instant::now() } else { asks_at };
        line.ask(asks_at, Duration::ZERO, wake);
        for wanted in refused_by {
            self.refused.insert((wanted.digest, place.number), (place.line, wanted.cost));
        }
        place.refused_by = refused_by.to_vec();
    }

    /// When the first in line asks; `None` if the caller has lost its turn. The call that follows may take as long as the deadline.
    fn asks_at(&mut self, place: &Place, deadline: Duration, waker: &Waker, wake: &mut Vec<Waker>) -> Option<Instant> {
        let now = Instant::now();
        let line = self.line(place).filter(|line| line.is_first(place.number))?;
        if line.asks_at() <= now {
            line.ask(now, deadline, wake);
        } else {
            line.sleep(waker);
        }
        Some(line.asks_at())
    }

    fn forget(&mut self, place: &Place) {
        for wanted in &place.refused_by {
            self.refused.remove(&(wanted.digest, place.number));
        }
    }

    /// Callers that this limit and key has refused ask now, as far as its units reach.
    fn ask_now(&mut self, digest: u64, mut left: u64, wake: &mut Vec<Waker>) {
        let now = Instant::now();
        for (&(_, number), &(line, cost)) in self.refused.range((digest, 0)..=(digest, u64::MAX)) {
            if left == 0 {
                return;
            }
            let waits = |line: &&mut Turns| line.is_first(number) && line.asks_at() > now;
            if cost <= left
                && let Some(line) = self.lines.get_mut(&line).filter(waits)
            {
                left -= cost;
                line.ask_now(now, wake);
            }
        }
    }

    /// Leaves the line. If the caller was the first, the next one is then.
    fn leave(&mut self, place: &Place, wake: &mut Vec<Waker>) {
        self.forget(place);
        if let Some(line) = self.line(place)
            && line.leave(place.number, Instant::now(), wake)
        {
            self.lines.remove(&place.line);
        }
    }
}

impl Place {
    /// Waits to be the first in line; `false` if `end` comes before.
    pub(super) async fn is_first_before(&self, end: Option<Instant>) -> bool {
        let mut timer = pin!(sleep_until(Instant::now()));
        poll_fn(|cx| {
            loop {
                let look_again_at = self.lines.change(|table, wake| table.take_turn(self, cx.waker(), wake));
                let Some(at) = look_again_at else { return Poll::Ready(true) };
                if end.is_some_and(|end| end <= Instant::now()) {
                    self.lines.change(|table, wake| table.leave(self, wake));
                    return Poll::Ready(false);
                }
                timer.as_mut().reset(end.map_or(at, |end| at.min(end)));
                ready!(timer.as_mut().poll(cx));
            }
        })
        .await
    }

    /// Lets the first in line wait until `at`, or until units of those that have refused it return. `false` if it has lost its turn.
    /// The call that follows may take as long as the deadline.
    pub(super) async fn asks(&mut self, at: Instant, refused_by: &[Wanted], deadline: Duration) -> bool {
        let lines = Arc::clone(&self.lines);
        lines.change(|table, wake| table.wait(self, at, refused_by, wake));
        let mut timer = pin!(sleep_until(at));
        poll_fn(|cx| {
            loop {
                let asks_at = lines.change(|table, wake| table.asks_at(self, deadline, cx.waker(), wake));
                match asks_at {
                    None => return Poll::Ready(false),
                    Some(at) if at <= Instant::now() => return Poll::Ready(true),
                    Some(_) => ready!(timer.as_mut().poll(cx)),
                }
            }
        })
        .await
    }

    /// How long the first in line waits until it asks.
    pub(super) fn first_waits(&self) -> Duration {
        let table = self.lines.lock();
        table
            .lines
            .get(&self.line)
            .map_or(Duration::ZERO, |line| line.asks_at().saturating_duration_since(Instant::now()))
    }
}

impl Returning<'_> {
    /// Takes note of the outcome: what is left now. After a failure of the store, no caller is to ask it at once.
    pub(super) fn end(mut self, left: Option<&Decision>) {
        let statuses = left.into_iter().flat_map(Decision::statuses);
        self.left =
            iter::zip(&self.left, statuses).map(|((digest, _), status)| (*digest, status.remaining())).collect();
    }
}

impl Drop for Returning<'_> {
    fn drop(&mut self) {
        for (digest, left) in self.left.iter().filter(|(_, left)| *left > 0) {
            // Before the search for callers, so that one that comes after the search sees the new count.
            self.lines.counter(*digest).fetch_add(1, Ordering::SeqCst);
            self.lines.change(|table, wake| table.ask_now(*digest, *left, wake));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lines.change(|table, wake| table.leave(self, wake));
    }
}

/// Shows how many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lines").field(&self.lock().lines.len()).finish()
    }
}
