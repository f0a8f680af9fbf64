//! The order of the callers in one line.
//!
//! 1. Callers have their turn in the order of their numbers. Only the first caller asks, until that
//!    caller leaves the line.
//! 2. The first caller records when it will ask, and by when its call has to end. If the caller is
//!    late by more than a [`GRACE`], nobody polls it, so it loses its turn.
//! 3. A task watches the first, since the other callers may not be polled either. If the first is
//!    late, the task wakes the next caller, and a moment later all others. Of these callers, the
//!    first that is polled takes over. A caller that is not polled is out of the line, so it delays
//!    the line only once.
//! 4. A caller that is out of the line, or has lost its turn, returns to the position of its number
//!    when it is polled.
//! 5. After an admission that leaves units, the next callers ask as well, as many as fit into these
//!    units together. Otherwise a line far away from its store would move by only one caller in
//!    each round trip. The reply to the last caller that has asked says how many units are left,
//!    since this reply also counts the callers that asked earlier. While the first waits for units,
//!    no other caller asks. Otherwise a first caller that needs many units would wait for ever.
//!    After a refusal, again only the first asks.
//! 6. If the runtime of the task is not driven, the task is late. Callers look for a late task from
//!    time to time, and start another task on their own runtime. The more callers wait, the less
//!    often each of them looks.

use std::{collections::BTreeMap, future::Future, mem, sync::Arc, time::Duration};

use tokio::{runtime::Handle, sync::Notify, task::JoinSet, time::Instant};

use super::deadline::later;

/// How late the first in line may be.
const GRACE: Duration = Duration::from_millis(100);

/// How long after the next caller all other callers are woken, too. The first of them that is
/// polled takes over.
const HEAD_START: Duration = Duration::from_millis(1);

/// Each waiting caller looks from time to time whether the task is late: after one second, plus
/// this time for each caller in the line.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The most callers that are woken at once to ask beside the first.
const MOST_BESIDE: usize = 1_024;

/// A limit and key that the check of a caller charges.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) digest: u64,
    /// The caller fits while at most this number of units of the limit is used. Two limits that
    /// share units may differ in this number.
    pub(super) room: u64,
    /// The units that an admission takes.
    pub(super) takes: u64,
}

/// A caller. Callers have numbers in the order of arrival.
pub(super) struct Caller {
    pub(super) number: u64,
    pub(super) line: u64,
    pub(super) wanted: Vec<Wanted>,
    /// Wakes the caller, so that it looks at its line. Waking may drop a waker that owns the
    /// caller, so no lock is held meanwhile.
    pub(super) wakes: Notify,
}

#[derive(Default)]
pub(super) struct Line {
    /// The callers of the line, except those that were not polled in time, and those that ask
    /// beside the first.
    callers: BTreeMap<u64, Arc<Caller>>,
    /// The number of the first. `None` while the line seeks another caller, since the first was
    /// late.
    first: Option<u64>,
    /// Of the callers up to this number, the one that is polled next takes over.
    sought_up_to: Option<u64>,
    /// The limits and keys that refuse the first, each with the expected end of its refusal. The
    /// list is empty when the first asks.
    refused_by: Vec<(u64, Instant)>,
    /// When the first asks.
    pub(super) asks_at: Option<Instant>,
    /// When the first loses its turn.
    pub(super) due: Option<Instant>,
    /// The last caller that has asked.
    last_asked: u64,
    /// Callers up to this number ask beside the first.
    asks_up_to: u64,
    /// The task that watches the first. Empty until other callers need such a task.
    watch: JoinSet<()>,
    /// When the task looks next.
    looks_at: Option<Instant>,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.callers.is_empty() && self.sought_up_to.is_none()
    }

    /// Lets a caller join the line, at its old position if it had one. Returns whether the caller
    /// is the first.
    pub(super) fn join(&mut self, caller: &Arc<Caller>) -> bool {
        self.callers.insert(caller.number, Arc::clone(caller));
        if self.first.is_none() && self.sought_up_to.is_none_or(|last| caller.number <= last) {
            self.appoint(caller.number);
        }
        self.first == Some(caller.number)
    }

    fn appoint(&mut self, first: u64) {
        (self.first, self.sought_up_to) = (Some(first), None);
        self.wait(Vec::new(), Instant::now());
    }

    /// Lets the first ask at `asks_at`. `refused_by` has the limits and keys that refuse the first
    /// before that time.
    pub(super) fn wait(&mut self, refused_by: Vec<(u64, Instant)>, asks_at: Instant) {
        (self.refused_by, self.asks_at, self.due) =
            (refused_by, Some(asks_at), Some(later(asks_at, GRACE)));
    }

    /// If it is the caller's turn, takes note that the caller asks, and returns `None`. Otherwise
    /// returns whether the caller is the first, and when to look again. `takes` is how long the
    /// caller's call to the store may take.
    pub(super) fn ask(
        &mut self,
        caller: &Arc<Caller>,
        takes: impl Fn() -> Duration,
    ) -> Option<(bool, Instant)> {
        let now = Instant::now();
        if self.join(caller) {
            if let Some(asks_at) = self.asks_at.filter(|at| *at > now) {
                return Some((true, asks_at));
            }
            self.wait(Vec::new(), now);
            self.due = Some(later(now, takes().saturating_add(GRACE)));
        } else {
            if self.first.is_none() || caller.number > self.asks_up_to {
                let others = u32::try_from(self.callers.len())
                    .unwrap_or(u32::MAX)
                    .saturating_add(50);
                return Some((false, later(now, LOOK_INTERVAL * others)));
            }
            self.callers.remove(&caller.number);
        }
        self.last_asked = caller.number;
        None
    }

    /// Takes note that a limit and key has units for the first from the time `from` on. Returns
    /// `true` if no other limit and key refuses the first, so that the first asks at that time.
    pub(super) fn has_units_of(&mut self, digest: u64, from: Instant) -> bool {
        let mut others = mem::take(&mut self.refused_by);
        others.retain(|(by, until)| *by != digest && *until > from);
        let asks_at = others
            .iter()
            .fold(from, |latest, (_, until)| latest.max(*until));
        self.wait(others, self.asks_at.map_or(asks_at, |at| at.min(asks_at)));
        self.refused_by.is_empty()
    }

    /// After an admission, lets the next callers ask beside the first. `used` has the used units of
    /// each limit and key, including this admission; `None` after any other reply.
    pub(super) fn let_ask(
        &mut self,
        answered: u64,
        used: Option<Vec<(u64, u64)>>,
        woken: &mut Vec<Arc<Caller>>,
    ) {
        if used.is_some() && self.last_asked != answered {
            return;
        }
        let woken_up_to = mem::take(&mut self.asks_up_to);
        let Some(mut used) = used.filter(|_| self.asks_at <= Some(Instant::now())) else {
            return;
        };
        let mut fits = |caller: &Caller| {
            caller.wanted.iter().all(|wanted| {
                let Some((_, used)) = used.iter_mut().find(|(digest, _)| *digest == wanted.digest)
                else {
                    return true;
                };
                let fits = wanted.room >= *used;
                *used = used.saturating_add(wanted.takes);
                fits
            })
        };
        for next in self
            .callers
            .values()
            .take(MOST_BESIDE)
            .take_while(|next| fits(next))
        {
            self.asks_up_to = next.number;
            woken.extend((next.number > woken_up_to).then(|| Arc::clone(next)));
        }
    }

    /// Takes a caller out of the line. If this caller was the first, returns the next caller, which
    /// asks now.
    pub(super) fn leave(&mut self, number: u64) -> Option<Arc<Caller>> {
        self.callers.remove(&number);
        self.first.take_if(|first| *first == number)?;
        let next = self.callers.values().next().map(Arc::clone)?;
        self.appoint(next.number);
        Some(next)
    }

    /// Starts a task that watches the first, if other callers need such a task, and no other task
    /// looks in time.
    pub(super) fn be_watched(&mut self, watch: impl Future<Output = ()> + Send + 'static) {
        let is_needed = self.callers.len() > 1 || self.refused_by.is_empty();
        let is_late = self
            .looks_at
            .is_none_or(|at| later(at, GRACE) < Instant::now());
        if is_needed
            && (is_late || self.looks_at > self.due)
            && let Ok(runtime) = Handle::try_current()
        {
            self.looks_at = self.due;
            self.watch = JoinSet::new();
            self.watch.spawn_on(watch, &runtime);
        }
    }

    /// Takes the turn away from a first caller that is late, and returns this caller.
    pub(super) fn look(&mut self, woken: &mut Vec<Arc<Caller>>) -> Option<Arc<Caller>> {
        let now = Instant::now();
        let mut late = None;
        if self.due <= Some(now) {
            self.wait(Vec::new(), now);
            late = self
                .first
                .take()
                .and_then(|first| self.callers.remove(&first));
            self.sought_up_to = self.callers.last_key_value().map(|(last, _)| *last);
            if late.is_some() {
                self.due = Some(later(now, HEAD_START));
                woken.extend(self.callers.pop_first().map(|(_, next)| next));
            } else {
                woken.extend(mem::take(&mut self.callers).into_values());
            }
        }
        self.looks_at = self.due;
        late
    }
}
