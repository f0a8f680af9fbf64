//! The order of the callers in one line.
//!
//! 1. Callers have their turn in the order of their numbers. Only the first asks, until it leaves.
//! 2. The first records when it will ask, and how long that call may take. If it does not go on by then and a [`GRACE`], it is not
//!    polled, and loses its turn.
//! 3. A task watches that, since the other callers may not be polled either. It wakes the next caller, and a moment later all others.
//!    The first of them that is polled takes over. Those that are not polled are out of the line, and delay it only once.
//! 4. A caller that is out of the line, or has lost its turn, takes its place again by its number when it is polled.
//! 5. If the runtime of the task is not driven, the task is late. Callers look at that from time to time, less often the further back
//!    they are, and start another on their own runtime.

use std::{collections::BTreeMap, future::Future, mem, task::Waker, time::Duration};

use tokio::{runtime::Handle, task::AbortHandle, time::Instant};

use super::freed::{Freed, Wanted};

/// How late the first in line may be.
const GRACE: Duration = Duration::from_millis(100);

/// The time for the next to take over, before all others may.
const HEAD_START: Duration = Duration::from_millis(1);

/// After this time, and more for each place, a caller looks whether the task is late.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const LOOK_INTERVAL_PER_PLACE: Duration = Duration::from_millis(20);

/// No call takes longer.
const LONGEST_CALL: Duration = Duration::from_secs(365 * 24 * 60 * 60);

pub(super) struct Turns {
    /// `None` until one of those is polled that were woken in the place of a first caller that was late.
    pub(super) first: Option<u64>,
    /// Of the first, until it asks.
    sleeper: Option<Waker>,
    /// The callers behind the first that are polled, as far as the line knows.
    waiting: BTreeMap<u64, Waker>,
    /// When the first asks.
    pub(super) asks_at: Instant,
    /// When the first loses its turn.
    due: Instant,
    /// The task that watches, and when it looks next.
    watch: Option<(AbortHandle, Instant)>,
    /// The limits and keys that refuse the first, the longest at the end. The first waits in the list of that one.
    pub(super) refused_by: Vec<Wanted>,
    /// The units for which the first asks. If it leaves, its successor does.
    pub(super) freed: Vec<Freed>,
}

impl Turns {
    pub(super) fn new(now: Instant) -> Self {
        let (refused_by, freed) = (Vec::new(), Vec::new());
        let (first, sleeper, watch, waiting) = (None, None, None, BTreeMap::new());
        Self { first, sleeper, waiting, asks_at: now, due: now, watch, refused_by, freed }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none() && self.waiting.is_empty()
    }

    /// Takes the turn if it is this caller's, or returns when to look again.
    pub(super) fn take(&mut self, number: u64, waker: &Waker, now: Instant) -> Option<Instant> {
        if self.first.is_none() {
            self.appoint(number, now);
        }
        if self.first == Some(number) {
            return None;
        }
        self.waiting.insert(number, waker.clone());
        let places = self.waiting.keys().next().map_or(0, |next| number - next);
        Some(later(now, LOOK_INTERVAL + LOOK_INTERVAL_PER_PLACE * u32::try_from(places).unwrap_or(u32::MAX)))
    }

    /// Keeps the waker of the first, for units that are freed before it asks.
    pub(super) fn sleep(&mut self, waker: &Waker) {
        self.sleeper = Some(waker.clone());
    }

    /// The first asks at this time, which takes at most so long.
    pub(super) fn ask(&mut self, at: Instant, takes: Duration, wake: &mut Vec<Waker>) {
        if at < self.asks_at {
            wake.extend(self.sleeper.take());
        }
        (self.asks_at, self.due) = (at, later(at, takes.min(LONGEST_CALL) + GRACE));
    }

    /// Leaves the line. If the caller was the first, the next one is then, and asks now.
    pub(super) fn leave(&mut self, number: u64, now: Instant, wake: &mut Vec<Waker>) {
        self.waiting.remove(&number);
        if self.first == Some(number) {
            self.first = None;
            if let Some((next, waker)) = self.waiting.pop_first() {
                self.appoint(next, now);
                wake.push(waker);
            }
        }
    }

    fn appoint(&mut self, first: u64, now: Instant) {
        (self.first, self.sleeper, self.asks_at, self.due) = (Some(first), None, now, later(now, GRACE));
    }

    /// Whether the first has lost its turn.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// Starts a watch if others need it, and none looks in time.
    pub(super) fn be_watched<F: Future<Output = ()> + Send + 'static>(&mut self, watch: impl FnOnce(Instant) -> F) {
        let due = self.due;
        let looks = |(task, at): &(AbortHandle, Instant)| {
            !task.is_finished() && *at <= due && later(*at, GRACE) >= Instant::now()
        };
        let is_needed = !self.waiting.is_empty() || !self.freed.is_empty();
        if is_needed
            && !self.watch.as_ref().is_some_and(looks)
            && let Ok(runtime) = Handle::try_current()
        {
            self.end_watch();
            self.watch = Some((runtime.spawn(watch(due)).abort_handle(), due));
        }
    }

    /// A first caller that is late loses its turn. Returns when the watch looks again, and the callers that are to be woken.
    pub(super) fn look(&mut self, now: Instant) -> (Instant, BTreeMap<u64, Waker>) {
        let woken = match (self.is_late(now), self.first) {
            (false, _) => BTreeMap::new(),
            (true, Some(_)) => self.waiting.pop_first().into_iter().collect(),
            (true, None) => mem::take(&mut self.waiting),
        };
        if self.is_late(now) {
            (self.first, self.due) = (None, later(now, HEAD_START));
        }
        self.watch.iter_mut().for_each(|(_, at)| *at = self.due);
        (self.due, woken)
    }

    pub(super) fn end_watch(&mut self) {
        self.watch.take().inspect(|(task, _)| task.abort());
    }
}

/// The instant after this time, or the instant itself if the clock cannot show that.
pub(super) fn later(instant: Instant, by: Duration) -> Instant {
    instant.checked_add(by).unwrap_or(instant)
}
