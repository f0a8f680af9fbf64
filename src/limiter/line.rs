//! The order of the callers in one line.
//!
//! 1. Callers have their turn in the order of their numbers. Only the first asks, until it leaves.
//! 2. The first records when it will ask, and how long that call may take. If it does not continue by then and a
//!    [`GRACE`], it is not polled: it loses its turn, and the next takes over. Each place further back waits for one
//!    more grace, so that only one takes over, and callers in between that are not polled either are passed over.
//! 3. A caller that was passed over does not count until it is polled. Then it takes its place again, by its number.
//! 4. Only the first and the next are woken, since the next has to know when to take over. The others look by themselves,
//!    less often the further back they are.

use std::{collections::BTreeMap, task::Waker, time::Duration};

use tokio::time::Instant;

/// How late the first in line may be.
const GRACE: Duration = Duration::from_millis(100);

/// The second behind the first looks after this time, the third after twice as long, and so on.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Callers further back look as often as this one.
const MAX_INTERVALS: usize = 64;

/// No call takes longer.
const LONGEST_CALL: Duration = Duration::from_secs(365 * 24 * 60 * 60);

pub(super) struct Line {
    /// The callers that are polled, as far as the line knows.
    waiting: BTreeMap<u64, Waker>,
    first: Option<u64>,
    /// When the first asks.
    asks_at: Instant,
    /// When it loses its turn.
    due: Instant,
    last_number: u64,
}

/// Callers to wake once the line is unlocked.
#[must_use]
pub(super) struct Wakers([Option<Waker>; 2]);

impl Line {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { waiting: BTreeMap::new(), first: None, asks_at: now, due: now, last_number: 0 }
    }

    /// The number of a new place, behind all others.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn asks_at(&self) -> Instant {
        self.asks_at
    }

    /// Takes the turn if it is this caller's, or returns when to look again.
    pub(super) fn take_turn(&mut self, number: u64, waker: &Waker, now: Instant) -> (Option<Instant>, Wakers) {
        self.waiting.insert(number, waker.clone());
        let Some(first) = self.first else { return (None, self.appoint(Some(number), now).without_first()) };
        if first == number {
            return (None, Wakers::NONE);
        }
        let ahead = self.waiting.range(..number).map(|(other, _)| *other).filter(|other| *other != first);
        let ahead: Vec<u64> = ahead.take(MAX_INTERVALS).collect();
        let places = ahead.len() as u32;
        let takes_over_at = later(self.due, GRACE * places);
        if now < takes_over_at {
            let look = later(now, LOOK_INTERVAL * places);
            return (Some(if ahead.is_empty() { takes_over_at } else { takes_over_at.min(look) }), Wakers::NONE);
        }
        // None of them was polled when its turn came.
        for passed_over in ahead.into_iter().chain([first]) {
            self.waiting.remove(&passed_over);
        }
        let next = self.waiting.keys().next().copied();
        let wakers = self.appoint(next, now);
        if next == Some(number) { (None, wakers.without_first()) } else { (Some(self.due), wakers) }
    }

    /// Stops waiting for a turn that the caller does not have.
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

    /// The first is going to ask at this time.
    pub(super) fn ask_at(&mut self, at: Instant) -> Wakers {
        self.asks_at = at;
        self.set_due(later(at, GRACE))
    }

    /// The first asks now, which takes at most the deadline.
    pub(super) fn ask(&mut self, now: Instant, deadline: Duration) -> Wakers {
        self.asks_at = now;
        self.set_due(later(now, deadline.min(LONGEST_CALL) + GRACE))
    }

    /// Makes the first ask now, unless it does so already.
    pub(super) fn ask_now(&mut self, now: Instant) -> Wakers {
        if self.asks_at <= now {
            return Wakers::NONE;
        }
        self.appoint(self.first, now)
    }

    /// Leaves the line. If the caller was the first, the next one is then.
    pub(super) fn leave(&mut self, number: u64, now: Instant) -> Wakers {
        self.waiting.remove(&number);
        if self.first != Some(number) {
            return Wakers::NONE;
        }
        self.appoint(self.waiting.keys().next().copied(), now)
    }

    /// Gives a caller the turn, to ask now.
    fn appoint(&mut self, first: Option<u64>, now: Instant) -> Wakers {
        (self.first, self.asks_at, self.due) = (first, now, later(now, GRACE));
        Wakers([first.and_then(|first| self.waiting.get(&first).cloned()), self.next()])
    }

    /// Wakes the next caller if it may have to take over sooner.
    fn set_due(&mut self, due: Instant) -> Wakers {
        let is_sooner = due < self.due;
        self.due = due;
        if is_sooner { Wakers([None, self.next()]) } else { Wakers::NONE }
    }

    fn next(&self) -> Option<Waker> {
        self.waiting.iter().find(|(number, _)| Some(**number) != self.first).map(|(_, waker)| waker.clone())
    }
}

impl Wakers {
    const NONE: Self = Self([None, None]);

    /// For a first that is running already.
    fn without_first(mut self) -> Self {
        self.0[0] = None;
        self
    }

    pub(super) fn wake(self) {
        self.0.into_iter().flatten().for_each(Waker::wake);
    }
}

/// The instant after this time, or the instant itself if the clock cannot show that.
fn later(instant: Instant, by: Duration) -> Instant {
    instant.checked_add(by).unwrap_or(instant)
}
