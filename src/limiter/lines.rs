//! The lines of callers that wait in [`Limiter::acquire`](super::Limiter::acquire), which has the rules: one for each set of limits and
//! keys. `turns.rs` is the order in one of them, `freed.rs` says who asks when units are freed.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    future::poll_fn,
    hash::BuildHasherDefault,
    mem,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Poll, Waker, ready},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use super::{
    freed::{Freed, Pair, Wanted},
    turns::{Turns, later},
};
use crate::{
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    key::{Digester, Prehashed},
};

/// The lines of a limiter, which its clones share.
#[derive(Default)]
pub(super) struct Lines {
    digester: Digester,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    last_number: u64,
    /// By their limits and keys. Two sets with the same digest share a line, which makes them slower, not wrong.
    lines: HashMap<u64, Turns, BuildHasherDefault<Prehashed>>,
    /// The limits and keys of all callers.
    pairs: HashMap<u64, Pair, BuildHasherDefault<Prehashed>>,
}

/// A caller, and its place in a line. Dropped, it leaves.
pub(super) struct Place {
    lines: Arc<Lines>,
    line: u64,
    number: u64,
    wanted: Vec<Wanted>,
    /// Those that have refused it, the longest at the end.
    refused_by: Vec<Wanted>,
}

impl Lines {
    /// A caller arrives. Returns whether others are in its line; otherwise it asks now.
    pub(super) fn arrive(self: &Arc<Self>, check: &Check) -> (Place, bool) {
        let (now, mut line, mut table) = (Instant::now(), 0_u64, self.lock());
        let wanted = check.charges().map(|charge| {
            let digest = self.digest(charge);
            // The same for the same limits and keys in any order.
            line = line.wrapping_add(digest);
            let pair = table.pairs.entry(digest).or_default();
            pair.callers += 1;
            Wanted { digest, cost: charge.cost(), takes: charge.units(), freed_before: pair.freed, until: now }
        });
        let (wanted, refused_by) = (wanted.collect(), Vec::new());
        table.last_number += 1;
        let place = Place { lines: Arc::clone(self), line, number: table.last_number, wanted, refused_by };
        (place, table.lines.contains_key(&line))
    }

    pub(super) fn digest(&self, charge: &Charge) -> u64 {
        charge.limit().digest(&self.digester, charge.key())
    }

    /// Lets the callers ask that these units may admit: one at a time, so that no lock is held for long.
    pub(super) fn give(self: &Arc<Self>, freed: impl IntoIterator<Item = Freed>) {
        for mut freed in freed {
            while self.change(|table, wake| table.give(&mut freed, wake).map_or((0, false), |line| (line, true))) {}
        }
    }

    /// Changes a line, and then wakes the callers that are to know. Starts its watch, or ends the line.
    fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut Table, &mut Vec<Waker>) -> (u64, T)) -> T {
        let (mut woken, mut unused, mut table) = (Vec::new(), Vec::new(), self.lock());
        let (id, result) = change(&mut table, &mut woken);
        if let Some(line) = table.lines.get_mut(&id) {
            if line.is_empty() {
                line.end_watch();
                unused = mem::take(&mut line.freed);
                table.lines.remove(&id);
            } else {
                line.be_watched(|due| watch(Arc::clone(self), id, due));
            }
        }
        drop(table);
        woken.into_iter().for_each(Waker::wake);
        self.give(unused);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches that the first in a line is polled, as long as others need that.
async fn watch(lines: Arc<Lines>, line: u64, mut due: Instant) {
    loop {
        sleep_until(due).await;
        let Some((look_again_at, woken)) = lines.change(|table, _| (line, table.look(line))) else { return };
        woken.into_values().for_each(Waker::wake);
        due = look_again_at;
    }
}

impl Table {
    /// The line in which this caller is the first.
    fn own_line(&mut self, place: &Place) -> Option<&mut Turns> {
        self.lines.get_mut(&place.line).filter(|line| line.first == Some(place.number))
    }

    /// Takes the turn if it is this caller's, or returns when to look again. A caller that was not the first waits as long as it is refused.
    fn take_turn(
        &mut self,
        place: &Place,
        was_first: &mut bool,
        waker: &Waker,
        wake: &mut Vec<Waker>,
    ) -> Option<Instant> {
        let now = Instant::now();
        let line = self.lines.entry(place.line).or_insert_with(|| Turns::new(now));
        let look_again_at = line.take(place.number, waker, now);
        if !mem::replace(was_first, look_again_at.is_none()) && look_again_at.is_none() {
            line.refused_by.clone_from(&place.refused_by);
            self.wait_or_ask(place.line, wake);
        }
        look_again_at
    }

    /// Leaves out the limits and keys of which units were freed, or whose time is over. Without others the first asks now: its line.
    fn wait_or_ask(&mut self, id: u64, wake: &mut Vec<Waker>) -> Option<&mut Turns> {
        let (Self { lines, pairs, .. }, now) = (self, Instant::now());
        let line = lines.get_mut(&id)?;
        let is_freed = |wanted: &Wanted| pairs.get(&wanted.digest).is_some_and(|pair| pair.unclaimed(wanted) > 0);
        let refuses = |wanted: &Wanted| wanted.until > now && !is_freed(wanted);
        if line.refused_by.iter().any(refuses) {
            line.refused_by.retain(refuses);
            let (longest, first) = (*line.refused_by.last()?, line.first?);
            pairs.entry(longest.digest).or_default().refused.insert((longest.cost, first), id);
            line.ask(longest.until, Duration::ZERO, wake);
            return None;
        }
        let claim = |wanted: Wanted| pairs.get_mut(&wanted.digest)?.claim(&wanted);
        line.freed.extend(mem::take(&mut line.refused_by).into_iter().filter_map(claim));
        line.ask(now, Duration::ZERO, wake);
        Some(line)
    }

    /// Whether the first in line asks now; otherwise when. The call that follows may take as long as the deadline.
    fn asks(&mut self, place: &mut Place, deadline: Duration, waker: &Waker, wake: &mut Vec<Waker>) -> Option<Instant> {
        let (line, now) = (self.own_line(place)?, Instant::now());
        if line.asks_at > now {
            line.sleep(waker);
            return Some(line.asks_at);
        }
        line.ask(now, deadline, wake);
        self.forget(place.line);
        for wanted in &mut place.wanted {
            wanted.freed_before = self.pairs.get(&wanted.digest).map_or(0, |pair| pair.freed);
        }
        None
    }

    /// The first in line waits for nothing any more.
    fn forget(&mut self, line: u64) {
        if let Some(line) = self.lines.get_mut(&line)
            && let Some(longest) = mem::take(&mut line.refused_by).pop()
            && let (Some(pair), Some(first)) = (self.pairs.get_mut(&longest.digest), line.first)
        {
            pair.refused.remove(&(longest.cost, first));
        }
    }

    /// Lets the first caller in the list ask for some of these units, or go over to another list. Returns its line.
    fn give(&mut self, freed: &mut Freed, wake: &mut Vec<Waker>) -> Option<u64> {
        let (cost, id) = self.pairs.get_mut(&freed.digest)?.take(freed)?;
        self.lines.get_mut(&id)?.refused_by.pop();
        if let Some(line) = self.wait_or_ask(id, wake) {
            let given = Freed { units: cost.min(freed.units), ..*freed };
            line.freed.push(given);
            (freed.units, freed.left) = (freed.units - given.units, freed.left.saturating_sub(cost));
        }
        Some(id)
    }

    /// The units that the first has asked for and not used. After a failure there are none: no caller is to ask the store at once.
    fn answered(&mut self, place: &Place, reply: Option<&Decision>) -> Vec<Freed> {
        let freed = self.own_line(place).map(|line| mem::take(&mut line.freed)).unwrap_or_default();
        let unused = |freed: Freed| {
            let mut statuses = place.wanted.iter().zip(reply?.statuses());
            let (wanted, status) = statuses.find(|(wanted, _)| wanted.digest == freed.digest)?;
            Some(freed.after(wanted, status, reply?.is_allowed()))
        };
        freed.into_iter().filter_map(unused).collect()
    }

    /// Leaves the line. If the caller was the first, the next one is then.
    fn leave(&mut self, place: &Place, wake: &mut Vec<Waker>) {
        if self.own_line(place).is_some() {
            self.forget(place.line);
        }
        if let Some(line) = self.lines.get_mut(&place.line) {
            line.leave(place.number, Instant::now(), wake);
        }
    }

    /// When the watch looks again, and the callers that are to be woken. `None` if the line has ended.
    fn look(&mut self, id: u64) -> Option<(Instant, BTreeMap<u64, Waker>)> {
        let now = Instant::now();
        if self.lines.get(&id)?.is_late(now) {
            self.forget(id);
        }
        Some(self.lines.get_mut(&id)?.look(now))
    }
}

impl Place {
    /// Waits to be the first in line, and then as long as it is refused; `false` if `end` comes before it is the first. The call that
    /// follows may take as long as the deadline.
    pub(super) async fn has_turn_before(&mut self, end: Option<Instant>, deadline: Duration) -> bool {
        let (mut timer, mut is_first) = (pin!(sleep_until(Instant::now())), false);
        poll_fn(|cx| {
            loop {
                let (lines, line, waker) = (Arc::clone(&self.lines), self.line, cx.waker());
                let at = lines.change(|table, wake| {
                    let at = table.take_turn(self, &mut is_first, waker, wake);
                    (line, at.or_else(|| table.asks(self, deadline, waker, wake)))
                });
                let Some(at) = at else { return Poll::Ready(true) };
                let end = end.filter(|_| !is_first);
                if end.is_some_and(|end| end <= Instant::now()) {
                    self.change(|table, wake| table.leave(self, wake));
                    return Poll::Ready(false);
                }
                timer.as_mut().reset(end.map_or(at, |end| at.min(end)));
                ready!(timer.as_mut().poll(cx));
            }
        })
        .await
    }

    /// Takes note of the store's reply. Units that this caller did not use are for others.
    pub(super) fn answered(&self, reply: Option<&Decision>) {
        self.lines.give(self.change(|table, _| table.answered(self, reply)));
    }

    /// Takes note of what refuses the caller until `asks_at`, when it asks again.
    pub(super) fn is_refused(&mut self, refusal: &Decision, asks_at: Instant) {
        let now = Instant::now();
        let refuses = |(wanted, status): (&Wanted, &LimitStatus)| {
            Some(Wanted { until: later(now, status.refuses()?).min(asks_at), ..*wanted })
        };
        self.refused_by = self.wanted.iter().zip(refusal.statuses()).filter_map(refuses).collect();
        self.refused_by.sort_by_key(|wanted| wanted.until);
        self.refused_by.last_mut().into_iter().for_each(|longest| longest.until = asks_at);
    }

    /// How long the first in line waits until it asks.
    pub(super) fn first_waits(&self) -> Duration {
        let asks_at = self.lines.lock().lines.get(&self.line).map(|line| line.asks_at);
        asks_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now()))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Table, &mut Vec<Waker>) -> T) -> T {
        self.lines.change(|table, wake| (self.line, change(table, wake)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.change(|table, wake| {
            table.leave(self, wake);
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
        f.debug_tuple("Lines").field(&self.lock().lines.len()).finish()
    }
}
