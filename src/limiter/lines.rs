//! The lines of callers that wait in [`Limiter::acquire`](super::Limiter::acquire), which has the
//! rules: one for each set of limits and keys. `turns.rs` is the order in one of them, `freed.rs`
//! says who asks when units are freed.

use std::{
    fmt,
    future::poll_fn,
    mem,
    sync::{Arc, Mutex},
    task::{Poll, Waker, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use super::{
    deadline::Timer,
    freed::{Freed, Pair, Wanted},
    turns::{First, Turns, Wakers, later},
};
use crate::{
    check::Check,
    clock::micros,
    decision::Decision,
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
    lines: ByDigest<Turns>,
    /// The limits and keys of all callers.
    pairs: ByDigest<Pair>,
    /// The limits and keys with units that a caller has claimed and does not use. Others are woken
    /// for them when the lock is free.
    released: Vec<u64>,
}

/// A caller, and its place in a line. Dropped, it leaves.
pub(super) struct Place {
    lines: Arc<Lines>,
    line: u64,
    number: u64,
    wanted: Vec<Wanted>,
    /// After a failure, it does not ask before.
    asks_from: Instant,
}

impl Lines {
    /// A caller arrives. Returns whether others are in its line; otherwise it asks now.
    pub(super) fn arrive(self: &Arc<Self>, check: &Check, deadline: Option<Duration>) -> (Place, bool) {
        let now = Instant::now();
        let mut line = deadline.map_or(u64::MAX, micros);
        let mut table = lock(&self.table);
        let wanted = check.charges().map(|charge| {
            let digest = charge.digest(&self.digester);
            // The same for the same limits and keys in any order, and for callers that these can
            // refuse.
            line = line.wrapping_add(if charge.can_refuse() { digest } else { 0 });
            let pair = table.pairs.entry(digest).or_default();
            pair.callers += 1;
            let room = charge.limit().units().saturating_sub(charge.cost());
            Wanted { digest, room, takes: charge.units(), freed_before: 0, asked_before: 0, until: now }
        });
        let wanted = wanted.collect();
        table.last_number += 1;
        let lines = Arc::clone(self);
        let number = table.last_number;
        let mut place = Place { lines, line, number, wanted, asks_from: now };
        let is_in_line = table.lines.contains_key(&line);
        if !is_in_line {
            table.note_asked(&mut place);
        }
        (place, is_in_line)
    }

    /// Units were freed: the callers that fit ask after a delay.
    pub(super) fn free(self: &Arc<Self>, freed: &[Freed], delay: Duration) {
        let mut table = lock(&self.table);
        for freed in freed {
            table.pairs.get_mut(&freed.digest).into_iter().for_each(|pair| pair.free(freed));
        }
        drop(table);
        self.wake(freed.iter().map(|freed| freed.digest), delay);
    }

    /// Lets the callers ask that fit into one of these limits and keys: one at a time, so that no
    /// lock is held for long.
    fn wake(self: &Arc<Self>, digests: impl IntoIterator<Item = u64>, delay: Duration) {
        for digest in digests {
            let wake_next = |table: &mut Table, wakers: &mut Wakers| {
                table.wake_next(digest, delay, wakers).map_or((0, false), |line| (line, true))
            };
            while self.change(wake_next) {}
        }
    }

    /// Changes a line, and then wakes the callers that are to know. Starts its watch, or ends the
    /// line.
    fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut Table, &mut Wakers) -> (u64, T)) -> T {
        let mut wakers = Wakers::default();
        let mut ended = None;
        let mut table = lock(&self.table);
        let (id, result) = change(&mut table, &mut wakers);
        if let Some(line) = table.lines.get_mut(&id) {
            if line.is_empty() {
                line.end_watch();
                ended = table.lines.remove(&id);
            } else {
                line.be_watched(|due| watch(Arc::clone(self), id, due));
            }
        }
        let released = mem::take(&mut table.released);
        drop(table);
        drop(ended);
        wakers.woken.into_iter().for_each(Waker::wake);
        self.wake(released, Duration::ZERO);
        result
    }
}

/// Watches that the first in a line is polled, as long as others need that.
async fn watch(lines: Arc<Lines>, line: u64, mut due: Instant) {
    loop {
        sleep_until(due).await;
        let Some(look_again_at) = lines.change(|table, wakers| (line, table.look(line, wakers))) else { return };
        due = look_again_at;
    }
}

impl Table {
    /// Whether the caller asks now; otherwise when to look again. One that was not the first waits
    /// as long as it is refused. The call that follows may take as long as the deadline.
    fn take_turn(
        &mut self,
        place: &mut Place,
        is_first: &mut bool,
        deadline: impl Fn() -> Duration,
        waker: &Waker,
        wakers: &mut Wakers,
    ) -> Option<Instant> {
        let now = Instant::now();
        let line = self.lines.entry(place.line).or_insert_with(|| Turns::new(now));
        if place.asks_from <= now && line.asks_beside(place.number, wakers) {
            self.note_asked(place);
            return None;
        }
        let look_again_at = line.take(place.number, &place.wanted, waker, now, wakers);
        let was_first = mem::replace(is_first, look_again_at.is_none());
        if look_again_at.is_some() {
            return look_again_at;
        }
        if !was_first {
            line.wanted.clone_from(&place.wanted);
            self.wait_or_ask(place.line, place.asks_from.saturating_duration_since(now), wakers);
        }
        let line = self.lines.get_mut(&place.line)?;
        let now = Instant::now();
        if line.asks_at > now {
            wakers.unused.extend(line.sleeper.replace(waker.clone()));
            return Some(line.asks_at);
        }
        line.ask(now, deadline(), wakers);
        self.claim(place.line);
        self.note_asked(place);
        None
    }

    /// The caller asks now.
    fn note_asked(&mut self, place: &mut Place) {
        for wanted in &mut place.wanted {
            self.pairs.get_mut(&wanted.digest).into_iter().for_each(|pair| pair.note_asked(wanted));
        }
    }

    /// The first waits in the list of the limit and key that refuses it for longest. If none
    /// refuses it any more, it asks after the delay.
    fn wait_or_ask(&mut self, id: u64, delay: Duration, wakers: &mut Wakers) {
        let Self { lines, pairs, .. } = &mut *self;
        let now = Instant::now();
        let Some((line, number)) = lines.get_mut(&id).and_then(|line| line.first.map(|first| (line, first))) else {
            return;
        };
        let refuses = |wanted: &Wanted| {
            wanted.until > now && !pairs.get(&wanted.digest).is_some_and(|pair| pair.may_admit(wanted))
        };
        let refusing = line.wanted.iter().copied().filter(refuses);
        let Some(longest) = refusing.max_by_key(|wanted| wanted.until) else {
            line.ask(later(now, delay), Duration::ZERO, wakers);
            return self.claim(id);
        };
        pairs.get_mut(&longest.digest).into_iter().for_each(|pair| pair.enlist(&longest, number, id));
        line.state = First::Listed(longest);
        line.ask(longest.until, Duration::ZERO, wakers);
    }

    /// The first asks for what it wants.
    fn claim(&mut self, id: u64) {
        self.release(id);
        let Some(line) = self.lines.get_mut(&id) else { return };
        line.state = First::Asks;
        for wanted in &line.wanted {
            self.pairs.get_mut(&wanted.digest).into_iter().for_each(|pair| pair.claim(wanted));
        }
    }

    /// The first waits in no list and asks for nothing any more.
    fn release(&mut self, id: u64) {
        let Self { lines, pairs, released, .. } = self;
        let Some(line) = lines.get_mut(&id) else { return };
        match (mem::replace(&mut line.state, First::Waits), line.first) {
            (First::Listed(wanted), Some(first)) => {
                pairs.get_mut(&wanted.digest).into_iter().for_each(|pair| pair.delist(&wanted, first));
            }
            (First::Asks, _) => {
                for wanted in &line.wanted {
                    pairs.get_mut(&wanted.digest).into_iter().for_each(|pair| pair.unclaim(wanted));
                    released.push(wanted.digest);
                }
            }
            _ => {}
        }
    }

    fn release_own(&mut self, place: &Place) {
        if self.lines.get(&place.line).is_some_and(|line| line.first == Some(place.number)) {
            self.release(place.line);
        }
    }

    /// Lets the next caller in the list ask, or go over to another list. Returns its line.
    fn wake_next(&mut self, digest: u64, delay: Duration, wakers: &mut Wakers) -> Option<u64> {
        let id = self.pairs.get(&digest)?.next()?;
        self.release(id);
        self.wait_or_ask(id, delay, wakers);
        Some(id)
    }

    /// Takes note of the store's reply. After a failure of the store, no other caller is to ask it
    /// at once.
    fn answered(&mut self, place: &Place, outcome: &Result<Decision, Error>, wakers: &mut Wakers) {
        self.release_own(place);
        if let Some(line) = self.lines.get_mut(&place.line) {
            // The figures of a share say nothing about the store.
            let is_admission = |decision: &&Decision| decision.is_allowed() && decision.local_cause().is_none();
            let used = outcome.as_ref().ok().filter(is_admission).map(|admission| {
                let statuses = place.wanted.iter().zip(admission.statuses()).filter(|(_, status)| !status.is_shadow());
                let used = |(wanted, status): (&Wanted, _)| {
                    self.pairs.get(&wanted.digest).map(|pair| (wanted.digest, pair.used_next(wanted, status)))
                };
                statuses.filter_map(used).collect()
            });
            line.let_ask(place.number, used, wakers);
        }
        for (wanted, status) in outcome.iter().flat_map(|reply| place.wanted.iter().zip(reply.statuses())) {
            self.pairs.get_mut(&wanted.digest).into_iter().for_each(|pair| pair.learn(wanted, status));
        }
        if outcome.as_ref().is_err_and(|error| error.is_the_stores() || matches!(error, Error::BreakerOpen(_))) {
            self.released.clear();
        }
    }

    /// Leaves the line. If the caller was the first, the next one is then.
    fn leave(&mut self, place: &Place, wakers: &mut Wakers) {
        self.release_own(place);
        if let Some(line) = self.lines.get_mut(&place.line) {
            line.leave(place.number, Instant::now(), wakers);
        }
    }

    /// When the watch looks again; `None` if the line has ended.
    fn look(&mut self, id: u64, wakers: &mut Wakers) -> Option<Instant> {
        let now = Instant::now();
        if self.lines.get(&id)?.is_late(now) {
            self.release(id);
        }
        Some(self.lines.get_mut(&id)?.look(now, wakers))
    }
}

impl Place {
    /// Waits to be the first in line, and then as long as it is refused; `false` if `end` comes
    /// before it is the first. The call that follows may take as long as the deadline.
    pub(super) async fn has_turn_before(
        &mut self,
        end: Option<Instant>,
        deadline: impl Fn() -> Duration,
    ) -> Result<bool, Error> {
        let mut timer = Timer::default();
        let mut is_first = false;
        poll_fn(|cx| {
            loop {
                let lines = Arc::clone(&self.lines);
                let line = self.line;
                let at = lines.change(|table, wakers| {
                    (line, table.take_turn(self, &mut is_first, &deadline, cx.waker(), wakers))
                });
                let Some(at) = at else { return Poll::Ready(Ok(true)) };
                let end = end.filter(|_| !is_first);
                if end.is_some_and(|end| end <= Instant::now()) {
                    self.change(|table, wakers| table.leave(self, wakers));
                    return Poll::Ready(Ok(false));
                }
                ready!(timer.poll_until(end.map_or(at, |end| at.min(end)), cx))?;
            }
        })
        .await
    }

    /// Takes note of the store's reply. Units that this caller did not use are for others. After a
    /// failure, it asks again after a pause.
    pub(super) fn answered(&mut self, outcome: &Result<Decision, Error>, pause: Duration) {
        if outcome.is_err() {
            self.asks_from = later(Instant::now(), pause);
        }
        self.change(|table, wakers| table.answered(self, outcome, wakers));
    }

    /// Takes note of what refuses the caller until `asks_at`, when it asks again.
    pub(super) fn is_refused(&mut self, refusal: &Decision, asks_at: Instant) {
        let now = Instant::now();
        for (wanted, status) in self.wanted.iter_mut().zip(refusal.statuses()) {
            wanted.until = status.refuses().map_or(now, |wait| later(now, wait).min(asks_at));
        }
        if let Some(longest) = self.wanted.iter_mut().max_by_key(|wanted| wanted.until) {
            longest.until = asks_at;
        }
    }

    /// How long the first in line waits until it asks.
    pub(super) fn first_waits(&self) -> Duration {
        let asks_at = lock(&self.lines.table).lines.get(&self.line).map(|line| line.asks_at);
        asks_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Table, &mut Wakers) -> T) -> T {
        self.lines.change(|table, wakers| (self.line, change(table, wakers)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.change(|table, wakers| {
            table.leave(self, wakers);
            for wanted in &self.wanted {
                let Some(pair) = table.pairs.get_mut(&wanted.digest) else { continue };
                pair.callers -= 1;
                if pair.callers == 0 {
                    table.pairs.remove(&wanted.digest);
                }
            }
        });
    }
}

/// Shows how many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lines").field(&lock(&self.table).lines.len()).finish()
    }
}
