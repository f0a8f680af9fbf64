//! The lines of callers that wait in [`Limiter::acquire`](super::Limiter::acquire): one line for
//! each set of limits and keys. The documentation of `acquire` has the rules. `line.rs` has the
//! order in one line, and `freed.rs` chooses the callers that ask when units are freed.

use std::{
    fmt,
    future::poll_fn,
    mem,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::{
    deadline::{Timer, later},
    freed::Pair,
    line::{Caller, Line, Wanted},
};
use crate::{
    check::Check,
    clock::micros,
    decision::Decision,
    error::Error,
    key::{ByDigest, Digester},
    local::lock,
};

/// The lines of a limiter, which its clones share.
#[derive(Default)]
pub(super) struct Lines {
    pub(super) digester: Digester,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    last_number: u64,
    /// The lines, each by the digest of its set of limits and keys. If two sets happen to have the
    /// same digest, they share a line. Then their callers wait longer than in two lines, but the
    /// decisions are right.
    lines: ByDigest<Line>,
    /// The limits and keys of all callers.
    pairs: ByDigest<Pair>,
    /// The callers that are to look at their lines. These callers are woken when the lock is free.
    woken: Vec<Arc<Caller>>,
}

/// The position of a caller in a line. When this value is dropped, the caller leaves the line.
pub(super) struct Position {
    lines: Arc<Lines>,
    caller: Arc<Caller>,
}

impl Lines {
    /// Lets a caller arrive. Returns the position of the caller, and whether other callers are in
    /// its line. If there are none, the caller asks now.
    pub(super) fn arrive(
        self: &Arc<Self>,
        check: &Check,
        deadline: Option<Duration>,
    ) -> (Position, bool) {
        let mut table = lock(&self.table);
        let mut line = deadline.map_or(u64::MAX, micros);
        let wanted = check.charges().map(|charge| {
            let digest = charge.digest(&self.digester);
            table.pairs.entry(digest).or_default().callers += 1;
            let mut room = u64::MAX;
            if charge.can_refuse() {
                // The digests are added up, so that the order of the limits and keys makes no
                // difference.
                line = line.wrapping_add(digest);
                room = charge.limit().units().saturating_sub(charge.cost());
            }
            Wanted {
                digest,
                room,
                takes: charge.units(),
            }
        });
        let wanted = wanted.collect();
        table.last_number += 1;
        let caller = Caller {
            number: table.last_number,
            line,
            wanted,
            wakes: Notify::new(),
        };
        (
            Position {
                lines: Arc::clone(self),
                caller: Arc::new(caller),
            },
            table.lines.contains_key(&line),
        )
    }

    /// Takes note that units of a limit and key were freed, and lets callers ask after `delay`.
    /// `used` is the number of units that are used now; zero if the number is unknown.
    pub(super) fn free(self: &Arc<Self>, digest: u64, used: u64, delay: Duration) {
        self.change(None, |table| {
            table
                .pairs
                .get_mut(&digest)
                .into_iter()
                .for_each(|pair| pair.free(used));
            table.pass_on(digest, delay);
        });
    }

    /// Changes lines, and then wakes the callers that are to look at their lines. Also starts the
    /// tasks that watch lines with callers, and removes empty lines.
    fn change<T>(self: &Arc<Self>, line: Option<u64>, change: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = lock(&self.table);
        let result = change(&mut table);
        let woken = mem::take(&mut table.woken);
        for id in woken.iter().map(|caller| caller.line).chain(line) {
            let Some(line) = table.lines.get_mut(&id) else {
                continue;
            };
            if line.is_empty() {
                table.lines.remove(&id);
            } else {
                line.be_watched(watch(Arc::clone(self), id));
            }
        }
        drop(table);
        woken.iter().for_each(|caller| caller.wakes.notify_one());
        result
    }
}

/// Watches whether the first in a line is polled, until the line ends.
async fn watch(lines: Arc<Lines>, id: u64) {
    while let Some(due) = lines.change(Some(id), |table| table.look(id)) {
        sleep_until(due).await;
    }
}

impl Table {
    fn line(&mut self, caller: &Caller) -> &mut Line {
        self.lines.entry(caller.line).or_default()
    }

    fn pairs_of(&mut self, caller: &Caller, change: impl Fn(&mut Pair, u64)) {
        for wanted in &caller.wanted {
            self.pairs
                .get_mut(&wanted.digest)
                .into_iter()
                .for_each(|pair| change(pair, caller.number));
        }
    }

    /// Does the same as [`Line::ask`]. If the caller asks, its limits and keys take note of that.
    fn ask(
        &mut self,
        caller: &Arc<Caller>,
        takes: impl Fn() -> Duration,
    ) -> Option<(bool, Instant)> {
        let look_again = self.line(caller).ask(caller, takes);
        if look_again.is_none() {
            self.pairs_of(caller, Pair::ask);
        }
        look_again
    }

    /// Takes note of the reply to a caller. The caller asks again at `asks_at`, or leaves the line
    /// if `asks_at` is `None`.
    fn answer(
        &mut self,
        caller: &Arc<Caller>,
        outcome: &Result<Decision, Error>,
        asks_at: Option<Instant>,
    ) {
        let is_first = asks_at.is_some() && self.line(caller).join(caller);
        let told = outcome
            .as_ref()
            .ok()
            .filter(|decision| decision.is_the_stores());
        let mut used = Vec::new();
        let mut refused_by = Vec::new();
        for (wanted, status) in caller
            .wanted
            .iter()
            .zip(told.into_iter().flat_map(Decision::statuses))
        {
            let Some(pair) = self.pairs.get_mut(&wanted.digest) else {
                continue;
            };
            pair.answer(caller.number, wanted, status);
            used.push((wanted.digest, status.used));
            if let Some(wait) = status.refuses().filter(|_| is_first) {
                pair.refuse(caller, *wanted);
                refused_by.push((wanted.digest, later(Instant::now(), wait)));
            }
        }
        // If the store has not decided, other callers need not ask before this caller asks again.
        let mut delay = Duration::ZERO;
        if told.is_none() {
            self.pairs_of(caller, Pair::leave);
            delay = asks_at.map_or(delay, |at| at.saturating_duration_since(Instant::now()));
        }
        match asks_at {
            Some(asks_at) if is_first => self.line(caller).wait(refused_by, asks_at),
            Some(_) => {}
            None => self.leave(caller),
        }
        if let Some(line) = self.lines.get_mut(&caller.line) {
            let used = told.is_some_and(Decision::is_allowed).then_some(used);
            line.let_ask(caller.number, used, &mut self.woken);
        }
        caller
            .wanted
            .iter()
            .for_each(|wanted| self.pass_on(wanted.digest, delay));
    }

    /// Lets callers ask after `delay` if they fit into the units that a limit and key has left. A
    /// caller that was already woken to ask later now asks after `delay`, too.
    fn pass_on(&mut self, digest: u64, delay: Duration) {
        let Some(pair) = self.pairs.get_mut(&digest) else {
            return;
        };
        pair.pass_on(|caller| {
            self.woken.push(Arc::clone(caller));
            let line = self.lines.get_mut(&caller.line);
            line.is_some_and(|line| line.has_units_of(digest, later(Instant::now(), delay)))
        });
    }

    /// Takes the caller out of its line. If the caller was woken for units, these units go to other
    /// callers.
    fn leave(&mut self, caller: &Caller) {
        if let Some(line) = self.lines.get_mut(&caller.line) {
            self.woken.extend(line.leave(caller.number));
        }
        self.pairs_of(caller, Pair::leave);
        caller
            .wanted
            .iter()
            .for_each(|wanted| self.pass_on(wanted.digest, Duration::ZERO));
    }

    /// Looks whether the first in a line is late, and takes a late caller out. Returns when the
    /// task that watches the line looks again; `None` if the line has ended.
    fn look(&mut self, id: u64) -> Option<Instant> {
        let late = self.lines.get_mut(&id)?.look(&mut self.woken);
        late.iter().for_each(|late| self.leave(late));
        self.lines.get(&id)?.due
    }
}

impl Position {
    /// Waits until it is the caller's turn to ask, and returns `true`. Returns `false` if `end`
    /// comes before the caller is the first in line. `takes` is how long the caller's call to the
    /// store may take.
    pub(super) async fn has_turn_before(
        &self,
        end: Instant,
        takes: impl Fn() -> Duration,
    ) -> Result<bool, Error> {
        let mut timer = Timer::default();
        while let Some((is_first, at)) = self.change(|table| table.ask(&self.caller, &takes)) {
            if !is_first && end <= Instant::now() {
                self.change(|table| table.leave(&self.caller));
                return Ok(false);
            }
            let at = if is_first { at } else { at.min(end) };
            let mut woken = pin!(self.caller.wakes.notified());
            poll_fn(|cx| match woken.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Ok(())),
                Poll::Pending => timer.poll_until(at, cx),
            })
            .await?;
        }
        Ok(true)
    }

    /// Takes note of the store's reply to the caller. The caller asks again at `asks_at`, or leaves
    /// the line if `asks_at` is `None`.
    pub(super) fn answer(&self, outcome: &Result<Decision, Error>, asks_at: Option<Instant>) {
        self.change(|table| table.answer(&self.caller, outcome, asks_at));
    }

    /// The time until the first in line asks.
    pub(super) fn first_waits(&self) -> Duration {
        let asks_at = lock(&self.lines.table)
            .lines
            .get(&self.caller.line)
            .and_then(|line| line.asks_at);
        asks_at.map_or(Duration::ZERO, |at| {
            at.saturating_duration_since(Instant::now())
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        self.lines.change(Some(self.caller.line), change)
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        self.change(|table| {
            table.leave(&self.caller);
            table.pairs_of(&self.caller, |pair, _| pair.callers -= 1);
            for Wanted { digest, room, .. } in &self.caller.wanted {
                if table
                    .pairs
                    .get(digest)
                    .is_some_and(|pair| pair.callers == 0)
                {
                    table.pairs.remove(digest);
                    // All callers of a line want the same limits and keys that can refuse. No
                    // caller wants this limit and key any more, so the line has ended.
                    if *room < u64::MAX {
                        table.lines.remove(&self.caller.line);
                    }
                }
            }
        });
    }
}

/// Shows how many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lines")
            .field(&lock(&self.table).lines.len())
            .finish()
    }
}
