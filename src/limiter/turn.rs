//! Whose turn it is in a line.
//!
//! 1. The callers have the turn in the order of their numbers. Only the first asks, until it leaves.
//! 2. The first says when it asks, and how long the question may take. If it does not get on by then and a [`GRACE`], it is
//!    not polled: it loses its turn, and the next takes over. Each place further back waits for one grace more, so that
//!    only one takes over, and places in between that are not polled either are passed by.
//! 3. A caller that is passed by does not count as waiting until it is polled. Then it takes its place again, by its number.
//! 4. Only the first and the next are woken: the next has to know when to take over. The others look by themselves, the
//!    seldomer the further back they are.

use std::{collections::BTreeMap, task::Waker, time::Duration};

use tokio::time::Instant;

/// How late the first in line may be.
pub(super) const GRACE: Duration = Duration::from_millis(100);

/// After so long the next but one looks, the one behind it after twice as long, and so on.
const LOOK: Duration = Duration::from_secs(1);

/// All places further back look as often as this one.
const FAR: usize = 64;

/// No question takes longer.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

pub(super) struct Turns {
    /// The callers that are polled, as far as is known.
    waiting: BTreeMap<u64, Waker>,
    first: Option<u64>,
    /// When the first asks.
    asks_at: Instant,
    /// When it loses its turn.
    due: Instant,
    numbers: u64,
}

/// The callers that are to look at the line, once it is no longer locked.
#[must_use]
pub(super) struct Woken([Option<Waker>; 2]);

impl Turns {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { waiting: BTreeMap::new(), first: None, asks_at: now, due: now, numbers: 0 }
    }

    /// The number of a new place, behind all others.
    pub(super) fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn asks_at(&self) -> Instant {
        self.asks_at
    }

    /// Takes the turn if it is this place's, or says when to look again.
    pub(super) fn take(&mut self, number: u64, waker: &Waker, now: Instant) -> (Option<Instant>, Woken) {
        self.waiting.insert(number, waker.clone());
        let Some(first) = self.first else { return (None, self.appoint(Some(number), now).but_the_first()) };
        if first == number {
            return (None, Woken::NONE);
        }
        let ahead: Vec<u64> =
            self.waiting.range(..number).map(|(other, _)| *other).filter(|other| *other != first).take(FAR).collect();
        let places = ahead.len() as u32;
        let takes_over_at = later(self.due, GRACE * places);
        if now < takes_over_at {
            let looks_at = if ahead.is_empty() { takes_over_at } else { takes_over_at.min(later(now, LOOK * places)) };
            return (Some(looks_at), Woken::NONE);
        }
        // None of them was there when it was due.
        for passed in ahead.into_iter().chain([first]) {
            self.waiting.remove(&passed);
        }
        let next = self.waiting.keys().next().copied();
        let woken = self.appoint(next, now);
        if next == Some(number) { (None, woken.but_the_first()) } else { (Some(self.due), woken) }
    }

    /// Waits no more for a turn that it does not have.
    pub(super) fn give_up(&mut self, number: u64) {
        self.waiting.remove(&number);
    }

    pub(super) fn is_first(&mut self, number: u64, waker: &Waker) -> bool {
        let is_first = self.first == Some(number);
        if is_first {
            self.waiting.insert(number, waker.clone());
        }
        is_first
    }

    /// The first asks at this time.
    pub(super) fn ask_at(&mut self, at: Instant) -> Woken {
        self.asks_at = at;
        self.set_due(later(at, GRACE))
    }

    /// The first asks now, which may take so long.
    pub(super) fn ask(&mut self, now: Instant, deadline: Duration) -> Woken {
        self.asks_at = now;
        self.set_due(later(now, deadline.min(LONGEST) + GRACE))
    }

    /// The first is to ask now, unless it does so already.
    pub(super) fn ask_now(&mut self, now: Instant) -> Woken {
        if self.asks_at <= now {
            return Woken::NONE;
        }
        self.appoint(self.first, now)
    }

    /// Leaves the line, and lets the next be the first if it was.
    pub(super) fn leave(&mut self, number: u64, now: Instant) -> Woken {
        self.waiting.remove(&number);
        if self.first != Some(number) {
            return Woken::NONE;
        }
        self.appoint(self.waiting.keys().next().copied(), now)
    }

    /// Gives a place the turn, to ask now.
    fn appoint(&mut self, first: Option<u64>, now: Instant) -> Woken {
        (self.first, self.asks_at, self.due) = (first, now, later(now, GRACE));
        Woken([first.and_then(|first| self.waiting.get(&first).cloned()), self.next()])
    }

    /// The next has to know if it is to take over sooner.
    fn set_due(&mut self, due: Instant) -> Woken {
        let is_sooner = due < self.due;
        self.due = due;
        if is_sooner { Woken([None, self.next()]) } else { Woken::NONE }
    }

    fn next(&self) -> Option<Waker> {
        self.waiting.iter().find(|(number, _)| Some(**number) != self.first).map(|(_, waker)| waker.clone())
    }
}

impl Woken {
    const NONE: Self = Self([None, None]);

    /// Where the first is the one that looks.
    fn but_the_first(mut self) -> Self {
        self.0[0] = None;
        self
    }

    pub(super) fn wake(self) {
        self.0.into_iter().flatten().for_each(Waker::wake);
    }
}

/// So much later, or the instant itself where that is beyond what a clock can show.
fn later(instant: Instant, by: Duration) -> Instant {
    instant.checked_add(by).unwrap_or(instant)
}
