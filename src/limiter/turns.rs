//! The order of the callers in one line.
//!
//! 1. Callers have their turn in the order of their numbers. Only the first asks, until it leaves.
//! 2. The first records when it will ask, and how long that call may take. If it does not go on by then and a [`GRACE`], it is not
//!    polled: it loses its turn, and the next takes over.
//! 3. The next may not be polled either. Then a caller behind it wakes all before it, and takes them out of the line. After one more
//!    grace, those that are polled stand in line again, and their first takes over.
//! 4. A caller that is out of the line, or has lost its turn, takes its place again by its number when it is polled.
//! 5. Only the first and the next are woken, since the next has to know when to take over. The others look by themselves, less often
//!    the further back they are.

use std::{collections::BTreeMap, mem, task::Waker, time::Duration};

use tokio::time::Instant;

/// How late the first in line may be.
const GRACE: Duration = Duration::from_millis(100);

/// A caller behind the next leaves it this much time to take over, and more for each place.
const PATIENCE: Duration = Duration::from_millis(50);
const PATIENCE_PER_PLACE: Duration = Duration::from_millis(1);

/// After this time, and more for each place, such a caller looks whether the first has become due sooner.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const LOOK_INTERVAL_PER_PLACE: Duration = Duration::from_millis(20);

/// No call takes longer.
const LONGEST_CALL: Duration = Duration::from_secs(365 * 24 * 60 * 60);

pub(super) struct Turns {
    first: u64,
    /// Of the first, until it asks.
    sleeper: Option<Waker>,
    /// The callers behind the first that are polled, as far as the line knows.
    waiting: BTreeMap<u64, Waker>,
    asks_at: Instant,
    /// When the first loses its turn.
    due: Instant,
}

impl Turns {
    pub(super) fn new(first: u64, now: Instant) -> Self {
        Self { first, sleeper: None, waiting: BTreeMap::new(), asks_at: now, due: later(now, GRACE) }
    }

    pub(super) fn is_first(&self, number: u64) -> bool {
        self.first == number
    }

    /// When the first asks.
    pub(super) fn asks_at(&self) -> Instant {
        self.asks_at
    }

    /// Takes the turn if it is this caller's, or returns when to look again.
    pub(super) fn take(&mut self, number: u64, waker: &Waker, now: Instant, wake: &mut Vec<Waker>) -> Option<Instant> {
        if self.first == number {
            return None;
        }
        self.waiting.insert(number, waker.clone());
        let behind_the_next = self.waiting.keys().next().map_or(0, |next| number - next);
        if behind_the_next == 0 {
            let is_due = now >= self.due && self.appoint_next(now, wake).is_some();
            return (!is_due).then_some(self.due);
        }
        let places = u32::try_from(behind_the_next).unwrap_or(u32::MAX);
        let acts_at = later(self.due, PATIENCE + PATIENCE_PER_PLACE * places);
        if now < acts_at {
            return Some(acts_at.min(later(now, LOOK_INTERVAL + LOOK_INTERVAL_PER_PLACE * places)));
        }
        let not_before = self.waiting.split_off(&number);
        wake.extend(mem::replace(&mut self.waiting, not_before).into_values());
        self.due = later(now, GRACE);
        Some(self.due)
    }

    /// Keeps the waker of the first, for units that return before it asks.
    pub(super) fn sleep(&mut self, waker: &Waker) {
        self.sleeper = Some(waker.clone());
    }

    /// Makes the first ask now.
    pub(super) fn ask_now(&mut self, now: Instant, wake: &mut Vec<Waker>) {
        self.ask(now, Duration::ZERO, wake);
        wake.extend(self.sleeper.take());
    }

    /// The first asks at this time, which takes at most so long. Wakes the next if it may have to take over sooner.
    pub(super) fn ask(&mut self, at: Instant, takes: Duration, wake: &mut Vec<Waker>) {
        let due = later(at, takes.min(LONGEST_CALL) + GRACE);
        if due < self.due {
            wake.extend(self.waiting.values().next().cloned());
        }
        (self.asks_at, self.due) = (at, due);
    }

    /// Leaves the line. If the caller was the first, the next one is then. Returns whether the line is empty.
    pub(super) fn leave(&mut self, number: u64, now: Instant, wake: &mut Vec<Waker>) -> bool {
        self.waiting.remove(&number);
        if self.first != number {
            return false;
        }
        let next = self.appoint_next(now, wake);
        let is_empty = next.is_none();
        wake.extend(next);
        is_empty
    }

    /// Gives the next caller the turn, to ask now. `None` if there is none.
    fn appoint_next(&mut self, now: Instant, wake: &mut Vec<Waker>) -> Option<Waker> {
        let (first, waker) = self.waiting.pop_first()?;
        *self = Self { waiting: mem::take(&mut self.waiting), ..Self::new(first, now) };
        wake.extend(self.waiting.values().next().cloned());
        Some(waker)
    }
}

/// The instant after this time, or the instant itself if the clock cannot show that.
fn later(instant: Instant, by: Duration) -> Instant {
    instant.checked_add(by).unwrap_or(instant)
}
