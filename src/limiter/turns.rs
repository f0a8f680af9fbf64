//! The order of the callers in one line.
//!
//! 1. Callers have their turn in the order of their numbers. Only the first asks, until it leaves.
//! 2. The first records when it will ask, and how long that call may take. If it does not go on by
//!    then and a [`GRACE`], it is not polled, and loses its turn.
//! 3. A task watches that, since the other callers may not be polled either. It wakes the next
//!    caller, and a moment later all others. The first of them that is polled takes over. Those
//!    that are not polled are out of the line, and delay it only once.
//! 4. A caller that is out of the line, or has lost its turn, takes its place again by its number
//!    when it is polled.
//! 5. After an admission that leaves units, the next callers ask as well, if all that ask fit
//!    together. So a line of a store that is far away does not move by one caller in each round
//!    trip. While the first waits for units, no other asks: one that needs many would wait for
//!    ever. Once one of them is refused, only the first asks again.
//! 6. If the runtime of the task is not driven, the task is late. Callers look at that from time to
//!    time, less often the more of them there are, and start another on their own runtime.

use std::{collections::BTreeMap, future::Future, mem, task::Waker, time::Duration};

use tokio::{runtime::Handle, task::AbortHandle, time::Instant};

use super::freed::Wanted;

/// How late the first in line may be.
const GRACE: Duration = Duration::from_millis(100);

/// The time for the next to take over, before all others may.
const HEAD_START: Duration = Duration::from_millis(1);

/// After this time, and more for each caller that waits, a caller looks whether the task is late.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const LOOK_INTERVAL_PER_CALLER: Duration = Duration::from_millis(20);

/// So many callers are woken at once to ask beside the first. Each of them that is admitted lets
/// others ask.
const MOST_BESIDE: usize = 256;

/// No call takes longer.
const LONGEST_CALL: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The wakers that leave a line. A waker may own its task, so it is dropped after the lock, too.
#[derive(Default)]
pub(super) struct Wakers {
    pub(super) woken: Vec<Waker>,
    pub(super) unused: Vec<Waker>,
}

pub(super) struct Turns {
    /// The number of the first caller. `None` in an empty line, and after a first caller was late,
    /// until one of those is polled that were woken in its place.
    pub(super) first: Option<u64>,
    /// Of the first, until it asks: units may be freed before.
    pub(super) sleeper: Option<Waker>,
    /// The callers behind the first that are polled, as far as the line knows.
    waiting: BTreeMap<u64, Waiting>,
    /// When the first asks.
    pub(super) asks_at: Instant,
    /// When the first loses its turn.
    due: Instant,
    /// The task that watches, and when it looks next.
    watch: Option<(AbortHandle, Instant)>,
    /// Callers up to this number ask beside the first.
    asks_up_to: u64,
    /// The limits and keys that the first wants.
    pub(super) wanted: Vec<Wanted>,
    pub(super) state: First,
}

/// A caller behind the first.
struct Waiting {
    waker: Waker,
    wanted: Vec<Wanted>,
}

/// The state of the first in a line.
pub(super) enum First {
    Waits,
    /// In the list of this limit and key.
    Listed(Wanted),
    /// It asks, or was woken to ask: it has claimed what it wants.
    Asks,
    /// No caller is the first. Of the callers up to this number, the one that is polled next takes
    /// over.
    IsSought(u64),
}

impl Turns {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            first: None,
            sleeper: None,
            waiting: BTreeMap::new(),
            asks_at: now,
            due: now,
            watch: None,
            asks_up_to: 0,
            wanted: Vec::new(),
            state: First::Waits,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none() && self.waiting.is_empty() && !matches!(self.state, First::IsSought(_))
    }

    /// Takes the turn if it is this caller's, or returns when to look again.
    pub(super) fn take(
        &mut self,
        number: u64,
        wanted: &[Wanted],
        waker: &Waker,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Option<Instant> {
        if self.first.is_none() && !matches!(self.state, First::IsSought(last) if number > last) {
            self.appoint(number, wanted.to_vec(), now, wakers);
        }
        if self.first == Some(number) {
            return None;
        }
        let waiting = Waiting { waker: waker.clone(), wanted: wanted.to_vec() };
        wakers.unused.extend(self.waiting.insert(number, waiting).map(|before| before.waker));
        let others = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        Some(later(now, LOOK_INTERVAL + LOOK_INTERVAL_PER_CALLER * others))
    }

    /// Takes note of the reply to a caller. After an admission with which so many units of each
    /// limit and key are used, the next callers ask beside the first.
    pub(super) fn let_ask(&mut self, answered: u64, used: Option<Vec<(u64, u64)>>, wakers: &mut Wakers) {
        let woken_up_to = mem::take(&mut self.asks_up_to);
        let Some(mut used) = used.filter(|_| self.asks_at <= Instant::now()) else { return };
        let mut fits = |all_wanted: &[Wanted]| {
            all_wanted.iter().all(|wanted| {
                let Some((_, used)) = used.iter_mut().find(|(digest, _)| *digest == wanted.digest) else { return true };
                let fits = wanted.room >= *used;
                *used = used.saturating_add(wanted.takes);
                fits
            })
        };
        if self.first.is_some_and(|first| first != answered) && !fits(&self.wanted) {
            return;
        }
        for (number, next) in self.waiting.iter().take(MOST_BESIDE).take_while(|(_, next)| fits(&next.wanted)) {
            self.asks_up_to = *number;
            wakers.woken.extend((*number > woken_up_to).then(|| next.waker.clone()));
        }
    }

    /// Whether the caller asks now, although it is not the first.
    pub(super) fn asks_beside(&mut self, number: u64, wakers: &mut Wakers) -> bool {
        let asks = self.first.is_some_and(|first| first != number) && number <= self.asks_up_to;
        if asks {
            wakers.unused.extend(self.waiting.remove(&number).map(|waiting| waiting.waker));
        }
        asks
    }

    /// The first asks at this time, which takes at most so long.
    pub(super) fn ask(&mut self, at: Instant, takes: Duration, wakers: &mut Wakers) {
        if at < self.asks_at {
            wakers.woken.extend(self.sleeper.take());
        }
        (self.asks_at, self.due) = (at, later(at, takes.min(LONGEST_CALL) + GRACE));
    }

    /// Leaves the line. If the caller was the first, the next one is then, and asks now.
    pub(super) fn leave(&mut self, number: u64, now: Instant, wakers: &mut Wakers) {
        wakers.unused.extend(self.waiting.remove(&number).map(|waiting| waiting.waker));
        if self.first == Some(number) {
            self.first = None;
            if let Some((next, Waiting { waker, wanted })) = self.waiting.pop_first() {
                self.appoint(next, wanted, now, wakers);
                wakers.woken.push(waker);
            }
        }
    }

    fn appoint(&mut self, first: u64, wanted: Vec<Wanted>, now: Instant, wakers: &mut Wakers) {
        wakers.unused.extend(self.sleeper.take());
        (self.first, self.wanted, self.state) = (Some(first), wanted, First::Waits);
        (self.asks_at, self.due) = (now, later(now, GRACE));
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
        let is_needed = !self.waiting.is_empty() || matches!(self.state, First::Asks);
        if is_needed
            && !self.watch.as_ref().is_some_and(looks)
            && let Ok(runtime) = Handle::try_current()
        {
            self.end_watch();
            self.watch = Some((runtime.spawn(watch(due)).abort_handle(), due));
        }
    }

    /// A first caller that is late loses its turn. Returns when the watch looks again.
    pub(super) fn look(&mut self, now: Instant, wakers: &mut Wakers) -> Instant {
        if self.is_late(now) {
            let is_first_late = self.first.take().is_some();
            let last = self.waiting.last_key_value();
            self.state = last.map_or(First::Waits, |(last, _)| First::IsSought(*last));
            if is_first_late {
                wakers.woken.extend(self.waiting.pop_first().map(|(_, next)| next.waker));
            } else {
                wakers.woken.extend(mem::take(&mut self.waiting).into_values().map(|waiting| waiting.waker));
            }
            self.due = later(now, if is_first_late { HEAD_START } else { GRACE });
        }
        self.watch.iter_mut().for_each(|(_, at)| *at = self.due);
        self.due
    }

    pub(super) fn end_watch(&mut self) {
        self.watch.take().inspect(|(task, _)| task.abort());
    }
}

/// The instant after this time, or the instant itself if the clock cannot show that.
pub(super) fn later(instant: Instant, by: Duration) -> Instant {
    instant.checked_add(by).unwrap_or(instant)
}
