//! The lines of callers that wait in [`Limiter::acquire`](super::Limiter::acquire), which has the
//! rules: one for each set of limits and keys. `line.rs` is the order in one of them, `freed.rs`
//! says who asks when units are freed.

use std::{
    fmt,
    future::poll_fn,
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
    deadline::Timer,
    freed::{Pair, Wanted},
    line::{Caller, Line, later},
};
use crate::{
    check::Check,
    clock::micros,
    decision::{Decision, LimitStatus},
    error::Error,
    key::{ByDigest, Digester},
    lock::lock,
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
    /// By their limits and keys. Two sets with the same digest share a line, which makes them
    /// slower, not wrong.
    lines: ByDigest<Line>,
    /// The limits and keys of all callers.
    pairs: ByDigest<Pair>,
}

/// The place of a caller in a line. Dropped, it leaves.
pub(super) struct Place {
    lines: Arc<Lines>,
    caller: Arc<Caller>,
}

impl Lines {
    /// A caller arrives. Returns whether others are in its line; otherwise it asks now.
    pub(super) fn arrive(self: &Arc<Self>, check: &Check, deadline: Option<Duration>) -> (Place, bool) {
        let mut line = deadline.map_or(u64::MAX, micros);
        let wanted = check.charges().map(|charge| {
            let digest = charge.digest(&self.digester);
            let mut room = u64::MAX;
            if charge.can_refuse() {
                // The same for the same limits and keys in any order.
                line = line.wrapping_add(digest);
                room = charge.limit().units().saturating_sub(charge.cost());
            }
            Wanted { digest, room, takes: charge.units() }
        });
        let wanted: Vec<_> = wanted.collect();
        let mut table = lock(&self.table);
        for wanted in &wanted {
            table.pairs.entry(wanted.digest).or_default().callers += 1;
        }
        table.last_number += 1;
        let number = table.last_number;
        let is_in_line = table.lines.contains_key(&line);
        drop(table);
        let caller = Arc::new(Caller { number, line, wanted, wakes: Notify::new() });
        (Place { lines: Arc::clone(self), caller }, is_in_line)
    }

    /// Units were freed, after which so many are used, if that is known. Callers ask after a delay.
    pub(super) fn free(self: &Arc<Self>, digest: u64, used: Option<u64>, delay: Duration) {
        self.change(None, |table, woken| {
            let Some(pair) = table.pairs.get_mut(&digest) else { return };
            let most = pair.note_used(used.unwrap_or_default());
            table.pass_on(digest, if used.is_some() { most } else { 1 }, delay, woken);
        });
    }

    /// Changes a line, and wakes the callers that are to know. Starts their watches, or ends the
    /// line.
    fn change<T>(
        self: &Arc<Self>,
        line: Option<u64>,
        change: impl FnOnce(&mut Table, &mut Vec<Arc<Caller>>) -> T,
    ) -> T {
        let mut woken = Vec::new();
        let mut table = lock(&self.table);
        let result = change(&mut table, &mut woken);
        for id in woken.iter().map(|caller| caller.line).chain(line) {
            let Some(line) = table.lines.get_mut(&id) else { continue };
            if line.is_empty() {
                line.end_watch();
                table.lines.remove(&id);
            } else {
                line.be_watched(|due| watch(Arc::clone(self), id, due));
            }
        }
        drop(table);
        woken.iter().for_each(|caller| caller.wakes.notify_one());
        result
    }
}

/// Watches that the first in a line is polled, as long as others need that.
async fn watch(lines: Arc<Lines>, id: u64, mut due: Instant) {
    loop {
        sleep_until(due).await;
        let Some(look_again_at) = lines.change(Some(id), |table, woken| table.look(id, woken)) else { return };
        due = look_again_at;
    }
}

impl Table {
    /// As [`Line::ask`].
    fn ask(&mut self, caller: &Arc<Caller>, takes: impl Fn() -> Duration) -> Option<(bool, Instant)> {
        let line = self.lines.entry(caller.line).or_insert_with(|| Line::new(Instant::now()));
        let look_again = line.ask(caller, takes);
        if look_again.is_none() {
            self.pairs_of(caller, Pair::ask);
        }
        look_again
    }

    /// Takes note of the reply to a caller, which asks again then, or leaves.
    fn answer(
        &mut self,
        caller: &Arc<Caller>,
        outcome: &Result<Decision, Error>,
        asks_at: Option<Instant>,
        woken: &mut Vec<Arc<Caller>>,
    ) {
        let replies = || caller.wanted.iter().zip(outcome.iter().flat_map(Decision::statuses));
        let learn = |(wanted, status): (&Wanted, &LimitStatus)| {
            let pair = self.pairs.get_mut(&wanted.digest)?;
            Some((wanted.digest, pair.answer(caller.number, wanted, status)))
        };
        let others: Vec<_> = replies().filter_map(learn).collect();
        match asks_at {
            Some(asks_at) => self.refuse(caller, replies(), asks_at),
            None => self.leave(caller, woken),
        }
        // The figures of a share say nothing about the store.
        let is_admission = |decision: &&Decision| decision.is_allowed() && decision.local_cause().is_none();
        let used = outcome
            .as_ref()
            .ok()
            .filter(is_admission)
            .map(|_| replies().map(|(wanted, status)| (wanted.digest, status.used())).collect());
        if let Some(line) = self.lines.get_mut(&caller.line) {
            line.let_ask(caller.number, used, woken);
        }
        for (digest, most) in others {
            self.pass_on(digest, most, Duration::ZERO, woken);
        }
    }

    /// The caller waits in line. If it is the first, it asks at this time, or when the units are
    /// freed that refuse it.
    fn refuse<'a>(
        &mut self,
        caller: &Arc<Caller>,
        replies: impl Iterator<Item = (&'a Wanted, &'a LimitStatus)>,
        asks_at: Instant,
    ) {
        let now = Instant::now();
        let line = self.lines.entry(caller.line).or_insert_with(|| Line::new(now));
        if !line.join(caller, now) {
            return;
        }
        let mut refused_by = Vec::new();
        for (wanted, status) in replies {
            let Some(wait) = status.refuses() else { continue };
            refused_by.push((wanted.digest, later(now, wait)));
            if let Some(pair) = self.pairs.get_mut(&wanted.digest) {
                pair.refuse(caller.number, *wanted, caller.line);
            }
        }
        line.refuse(refused_by, asks_at);
    }

    /// Lets callers ask, after a delay, that fit into what is left of a limit and key.
    fn pass_on(&mut self, digest: u64, most: usize, delay: Duration, woken: &mut Vec<Arc<Caller>>) {
        let Self { lines, pairs, .. } = self;
        let Some(pair) = pairs.get_mut(&digest) else { return };
        let from = later(Instant::now(), delay);
        let mut left = most;
        while left > 0
            && let Some((number, wanted, line)) = pair.take_next()
        {
            let Some(line) = lines.get_mut(&line) else { continue };
            if line.has_units_of(digest, from) {
                pair.wake(number, wanted);
                left -= 1;
            }
            woken.extend(line.first.clone());
        }
    }

    /// Leaves the line. If the caller was the first, the next one is then.
    fn leave(&mut self, caller: &Caller, woken: &mut Vec<Arc<Caller>>) {
        if let Some(line) = self.lines.get_mut(&caller.line) {
            line.leave(caller.number, woken);
        }
        self.let_go(caller, woken);
    }

    /// What the caller was woken for is for others.
    fn let_go(&mut self, caller: &Caller, woken: &mut Vec<Arc<Caller>>) {
        self.pairs_of(caller, Pair::leave);
        for wanted in &caller.wanted {
            self.pass_on(wanted.digest, 1, Duration::ZERO, woken);
        }
    }

    fn pairs_of(&mut self, caller: &Caller, change: impl Fn(&mut Pair, u64)) {
        for wanted in &caller.wanted {
            self.pairs.get_mut(&wanted.digest).into_iter().for_each(|pair| change(pair, caller.number));
        }
    }

    /// When the watch looks again; `None` if the line has ended.
    fn look(&mut self, id: u64, woken: &mut Vec<Arc<Caller>>) -> Option<Instant> {
        let (late, look_again_at) = self.lines.get_mut(&id)?.look(woken);
        late.iter().for_each(|late| self.let_go(late, woken));
        Some(look_again_at)
    }
}

impl Place {
    /// Waits to be the first in line, and then as long as it is refused; `false` if `end` comes
    /// before it is the first. The call that follows may take as long as the deadline.
    pub(super) async fn has_turn_before(
        &self,
        end: Option<Instant>,
        deadline: impl Fn() -> Duration,
    ) -> Result<bool, Error> {
        let mut timer = Timer::default();
        loop {
            let Some((is_first, at)) = self.change(|table, _| table.ask(&self.caller, &deadline)) else {
                return Ok(true);
            };
            let end = end.filter(|_| !is_first);
            if end.is_some_and(|end| end <= Instant::now()) {
                self.leave();
                return Ok(false);
            }
            let at = end.map_or(at, |end| at.min(end));
            let mut woken = pin!(self.caller.wakes.notified());
            poll_fn(|cx| match woken.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Ok(())),
                Poll::Pending => timer.poll_until(at, cx),
            })
            .await?;
        }
    }

    /// Takes note of the store's reply to the caller, which asks again then, or leaves.
    pub(super) fn answer(&self, outcome: &Result<Decision, Error>, asks_at: Option<Instant>) {
        self.change(|table, woken| table.answer(&self.caller, outcome, asks_at, woken));
    }

    /// How long the first in line waits until it asks.
    pub(super) fn first_waits(&self) -> Duration {
        let asks_at = lock(&self.lines.table).lines.get(&self.caller.line).map(|line| line.asks_at);
        asks_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    fn leave(&self) {
        self.change(|table, woken| table.leave(&self.caller, woken));
    }

    fn change<T>(&self, change: impl FnOnce(&mut Table, &mut Vec<Arc<Caller>>) -> T) -> T {
        self.lines.change(Some(self.caller.line), change)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
        let mut table = lock(&self.lines.table);
        for Wanted { digest, .. } in &self.caller.wanted {
            let Some(pair) = table.pairs.get_mut(digest) else { continue };
            pair.callers -= 1;
            if pair.callers == 0 {
                table.pairs.remove(digest);
            }
        }
    }
}

/// Shows how many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lines").field(&lock(&self.table).lines.len()).finish()
    }
}
