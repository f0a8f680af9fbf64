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
//!    trip. Only the reply to the last that asked says so, since it counts the others. While the
//!    first waits for units, no other asks: one that needs many would wait for ever. Once one of
//!    them is refused, only the first asks again.
//! 6. If the runtime of the task is not driven, the task is late. Callers look at that from time to
//!    time, less often the more of them there are, and start another on their own runtime.

use std::{collections::BTreeMap, future::Future, mem, sync::Arc, time::Duration};

use tokio::{runtime::Handle, sync::Notify, task::AbortHandle, time::Instant};

use super::freed::{MOST_WOKEN, Wanted};

/// How late the first in line may be.
const GRACE: Duration = Duration::from_millis(100);

/// The time for the next to take over, before all others may.
const HEAD_START: Duration = Duration::from_millis(1);

/// After this time, and more for each caller that waits, a caller looks whether the task is late.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const LOOK_INTERVAL_PER_CALLER: Duration = Duration::from_millis(20);

/// No call takes longer.
const LONGEST_CALL: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A caller. Callers have numbers in the order of arrival.
pub(super) struct Caller {
    pub(super) number: u64,
    pub(super) line: u64,
    pub(super) wanted: Vec<Wanted>,
    /// Tells it to look at its line. That may drop a waker, which may own the caller, so no lock is
    /// held meanwhile.
    pub(super) wakes: Notify,
}

pub(super) struct Line {
    /// `None` while one is sought in the place of a first caller that was late.
    pub(super) first: Option<Arc<Caller>>,
    /// Of the callers up to this number, the one that is polled next takes over.
    sought_up_to: Option<u64>,
    /// The callers behind the first that are polled, as far as the line knows.
    waiting: BTreeMap<u64, Arc<Caller>>,
    /// What refuses the first, and until when, as far as is known. Nothing does when it asks.
    refused_by: Vec<(u64, Instant)>,
    /// When the first asks.
    pub(super) asks_at: Instant,
    /// When the first loses its turn.
    due: Instant,
    /// The last caller that has asked.
    last_asked: u64,
    /// Callers up to this number ask beside the first.
    asks_up_to: u64,
    /// The task that watches, and when it looks next.
    watch: Option<(AbortHandle, Instant)>,
}

impl Line {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            first: None,
            sought_up_to: None,
            waiting: BTreeMap::new(),
            refused_by: Vec::new(),
            asks_at: now,
            due: now,
            last_asked: 0,
            asks_up_to: 0,
            watch: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none() && self.sought_up_to.is_none() && self.waiting.is_empty()
    }

    /// Joins the line, at the caller's old place if it had one. Returns whether it is the first.
    pub(super) fn join(&mut self, caller: &Arc<Caller>, now: Instant) -> bool {
        if self.first.is_none() && self.sought_up_to.is_none_or(|last| caller.number <= last) {
            self.appoint(Arc::clone(caller), now);
        }
        let is_first = self.first.as_ref().is_some_and(|first| first.number == caller.number);
        if !is_first {
            self.waiting.insert(caller.number, Arc::clone(caller));
        }
        is_first
    }

    /// Takes note that the caller asks, and returns `None`, if it is its turn. Otherwise returns
    /// whether it is the first, and when to look again. The call may take so long.
    pub(super) fn ask(&mut self, caller: &Arc<Caller>, takes: impl Fn() -> Duration) -> Option<(bool, Instant)> {
        let now = Instant::now();
        let is_first = self.join(caller, now);
        if is_first && self.asks_at > now {
            return Some((true, self.asks_at));
        }
        if is_first {
            self.refused_by.clear();
            self.wait(now, takes());
        } else if self.first.is_some() && caller.number <= self.asks_up_to {
            self.waiting.remove(&caller.number);
        } else {
            let others = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
            return Some((false, later(now, LOOK_INTERVAL + LOOK_INTERVAL_PER_CALLER * others)));
        }
        self.last_asked = caller.number;
        None
    }

    /// The first is refused, and asks again at this time.
    pub(super) fn refuse(&mut self, refused_by: Vec<(u64, Instant)>, asks_at: Instant) {
        self.refused_by = refused_by;
        self.wait(asks_at, Duration::ZERO);
    }

    /// A limit and key has units for the first from this time on. Returns whether the first asks
    /// then, since no other refuses it.
    pub(super) fn has_units_of(&mut self, digest: u64, from: Instant) -> bool {
        self.refused_by.retain(|(by, until)| *by != digest && *until > from);
        let refused_until = self.refused_by.iter().map(|(_, until)| *until).max();
        self.wait(refused_until.unwrap_or(from).min(self.asks_at), Duration::ZERO);
        refused_until.is_none()
    }

    /// The first asks at this time, which takes at most so long.
    fn wait(&mut self, asks_at: Instant, takes: Duration) {
        (self.asks_at, self.due) = (asks_at, later(asks_at, takes.min(LONGEST_CALL) + GRACE));
    }

    /// After the reply to a caller, the next ones ask beside the first if so many units of each
    /// limit and key are used. With `None`, the caller was not admitted.
    pub(super) fn let_ask(&mut self, answered: u64, used: Option<Vec<(u64, u64)>>, woken: &mut Vec<Arc<Caller>>) {
        let woken_up_to = self.asks_up_to;
        let Some(mut used) = used.filter(|_| self.asks_at <= Instant::now()) else {
            self.asks_up_to = 0;
            return;
        };
        if self.last_asked != answered {
            return;
        }
        self.asks_up_to = 0;
        let mut fits = |caller: &Caller| {
            caller.wanted.iter().all(|wanted| {
                let Some((_, used)) = used.iter_mut().find(|(digest, _)| *digest == wanted.digest) else { return true };
                let fits = wanted.room >= *used;
                *used = used.saturating_add(wanted.takes);
                fits
            })
        };
        if self.first.as_deref().is_some_and(|first| !fits(first)) {
            return;
        }
        for next in self.waiting.values().take(MOST_WOKEN).take_while(|next| fits(next)) {
            self.asks_up_to = next.number;
            woken.extend((next.number > woken_up_to).then(|| Arc::clone(next)));
        }
    }

    /// Leaves the line. If the caller was the first, the next one is then, and asks now.
    pub(super) fn leave(&mut self, number: u64, woken: &mut Vec<Arc<Caller>>) {
        self.waiting.remove(&number);
        if self.first.as_ref().is_some_and(|first| first.number == number) {
            self.first = None;
            if let Some((_, next)) = self.waiting.pop_first() {
                woken.push(Arc::clone(&next));
                self.appoint(next, Instant::now());
            }
        }
    }

    fn appoint(&mut self, first: Arc<Caller>, now: Instant) {
        self.waiting.remove(&first.number);
        (self.first, self.sought_up_to) = (Some(first), None);
        self.refuse(Vec::new(), now);
    }

    /// Starts a watch if others need it, and none looks in time.
    pub(super) fn be_watched<F: Future<Output = ()> + Send + 'static>(&mut self, watch: impl FnOnce(Instant) -> F) {
        let due = self.due;
        let looks = |(task, at): &(AbortHandle, Instant)| {
            !task.is_finished() && *at <= due && later(*at, GRACE) >= Instant::now()
        };
        let is_needed = !self.waiting.is_empty() || self.refused_by.is_empty();
        if is_needed
            && !self.watch.as_ref().is_some_and(looks)
            && let Ok(runtime) = Handle::try_current()
        {
            self.end_watch();
            self.watch = Some((runtime.spawn(watch(due)).abort_handle(), due));
        }
    }

    /// Takes the turn of a first caller that is late, and returns it. Returns when to look again.
    pub(super) fn look(&mut self, woken: &mut Vec<Arc<Caller>>) -> (Option<Arc<Caller>>, Instant) {
        let now = Instant::now();
        let mut late = None;
        if now >= self.due {
            late = self.first.take();
            self.sought_up_to = self.waiting.last_key_value().map(|(last, _)| *last);
            if late.is_some() {
                woken.extend(self.waiting.pop_first().map(|(_, next)| next));
            } else {
                woken.extend(mem::take(&mut self.waiting).into_values());
            }
            self.due = later(now, if late.is_some() { HEAD_START } else { GRACE });
        }
        self.watch.iter_mut().for_each(|(_, at)| *at = self.due);
        (late, self.due)
    }

    pub(super) fn end_watch(&mut self) {
        self.watch.take().inspect(|(task, _)| task.abort());
    }
}

/// The instant after this time, or the instant itself if the clock cannot show that.
pub(super) fn later(instant: Instant, by: Duration) -> Instant {
    instant.checked_add(by).unwrap_or(instant)
}
