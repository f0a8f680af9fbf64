//! The lines for [`Limiter::acquire`](super::Limiter::acquire): a fair semaphore for each set of
//! limits and keys, and for each limit and key a `Notify` that tells when units are freed.
//!
//! 1. A waiter asks the store while it has a permit, and keeps the permit after a refusal. A line
//!    has one permit. If units are left after an admission, it has as many permits as there are
//!    further checks that fit. While a refused waiter sleeps, it has only one permit, since others
//!    would overtake that waiter.
//! 2. A refused waiter sleeps on the `Notify` for the limit and key that refuse it for the longest
//!    time. Freed units wake the waiter that has slept longest. If the store's reply to it says
//!    that units are left, the next waiter is woken, and so on.
//! 3. If units are freed while nobody sleeps, the next waiter that would sleep asks again at once,
//!    since the store may have refused it before the units were freed.
//! 4. A woken waiter wakes the next one if it leaves or if its call fails. If the freed units are
//!    too few for a woken waiter, it wakes the next one when it leaves.
//! 5. Each runtime has its own lines, since another runtime may stand still.

use std::{
    collections::HashMap,
    fmt, iter,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use tokio::{
    runtime::{Handle, Id},
    sync::{Notify, Semaphore},
    task::JoinSet,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    check::Check,
    clock::micros,
    decision::Decision,
    key::{ByDigest, Digester, make_room},
    local::lock,
};

/// The most permits in a line.
const MOST_PERMITS: usize = 1_024;

/// A limiter's lines, which its clones share.
#[derive(Default)]
pub(super) struct Lines {
    pub(super) digester: Digester,
    table: Mutex<Table>,
    /// Tasks that wake waiters later. They end with the lines.
    later: Mutex<JoinSet<()>>,
}

#[derive(Default)]
struct Table {
    lines: HashMap<LineId, Weak<Line>>,
    /// For each limit and key, one `Notify` per runtime with callers.
    freed: ByDigest<Vec<(Option<Id>, Weak<Notify>)>>,
}

/// Identifies a line by its runtime and by the sum of its deadline and digests. If two sets of
/// limits and keys happen to have the same sum, they share a line, and their waiters wait longer.
type LineId = (u64, Option<Id>);

struct Line {
    /// The permits that no caller has.
    permits: Semaphore,
    /// The permits beyond the first, including those that callers have.
    extra: Mutex<usize>,
    /// When a sleeping waiter asks again. Each sleeper has a clone.
    asks_at: Arc<Mutex<Instant>>,
}

/// A caller's place in its line. Dropping it leaves the line.
pub(super) struct Place {
    line: Arc<Line>,
    wanted: Vec<Wanted>,
    has_permit: bool,
    /// How many other callers may ask after this one.
    next: usize,
    /// The `Notify` for the limit and key that refuse this caller for the longest time. `None` if
    /// the store has not decided.
    refused_by: Option<Arc<Notify>>,
    /// The freed units for which the caller was woken; cleared by the next store reply.
    woken_for: Option<Arc<Notify>>,
    /// The freed units that have woken the caller, but are too few for it. When it leaves, they are
    /// for the next waiter.
    too_few: Option<Arc<Notify>>,
}

/// One limit and key that a caller is charged under.
struct Wanted {
    /// The cost; zero if the charge cannot refuse.
    units: u64,
    freed: Arc<Notify>,
}

impl Lines {
    pub(super) fn arrive(&self, check: &Check, deadline: Option<Duration>) -> Place {
        // The store may answer in time only for callers with a long deadline, so callers with a
        // different deadline do not wait in their line.
        let mut sum = deadline.map_or(u64::MAX, micros);
        let mut wanted = Vec::new();
        let runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        let mut table = lock(&self.table);
        for charge in check.charges() {
            let digest = charge.digest(&self.digester);
            let freed = table.freed_on(runtime, digest);
            let mut units = 0;
            if charge.can_refuse() {
                (sum, units) = (sum.wrapping_add(digest), charge.cost());
            }
            wanted.push(Wanted { units, freed });
        }
        Place {
            line: table.line((sum, runtime)),
            wanted,
            has_permit: false,
            next: 1,
            refused_by: None,
            woken_for: None,
            too_few: None,
        }
    }

    /// Wakes one waiter per runtime for freed units under each limit and key.
    pub(super) fn free(&self, digests: &[u64]) {
        let table = lock(&self.table);
        let freed = digests.iter().filter_map(|digest| table.freed.get(digest));
        for freed in freed.flatten().filter_map(|(_, freed)| freed.upgrade()) {
            freed.notify_one();
        }
    }

    /// Calls [`free`](Self::free) after a `delay`. Without a runtime, calls it at once.
    pub(super) fn free_after(self: &Arc<Self>, delay: Duration, digests: Vec<u64>) {
        let Ok(runtime) = Handle::try_current() else {
            return self.free(&digests);
        };
        let lines = Arc::downgrade(self);
        let free = async move {
            sleep(delay).await;
            if let Some(lines) = lines.upgrade() {
                lines.free(&digests);
            }
        };
        let mut later = lock(&self.later);
        while later.try_join_next().is_some() {}
        later.spawn_on(free, &runtime);
    }
}

impl Table {
    fn line(&mut self, id: LineId) -> Arc<Line> {
        if let Some(known) = self.lines.get(&id).and_then(Weak::upgrade) {
            return known;
        }
        make_room(&mut self.lines, |line| line.strong_count() > 0);
        let new = Arc::new(Line {
            permits: Semaphore::new(1),
            extra: Mutex::default(),
            asks_at: Arc::new(Mutex::new(Instant::now())),
        });
        self.lines.insert(id, Arc::downgrade(&new));
        new
    }

    fn freed_on(&mut self, runtime: Option<Id>, digest: u64) -> Arc<Notify> {
        make_room(&mut self.freed, |all| {
            all.retain(|(_, freed)| freed.strong_count() > 0);
            !all.is_empty()
        });
        let all = self.freed.entry(digest).or_default();
        let mut known = all.iter().filter(|(of, _)| *of == runtime);
        if let Some(known) = known.find_map(|(_, freed)| freed.upgrade()) {
            return known;
        }
        let new = Arc::default();
        all.retain(|(_, freed)| freed.strong_count() > 0);
        all.push((runtime, Arc::downgrade(&new)));
        new
    }
}

impl Place {
    /// The time until a waiter asks; `None` if nobody is in line.
    pub(super) fn line_waits(&self) -> Option<Duration> {
        let asks_at = *lock(&self.line.asks_at);
        let asks_at = self.line.has_sleeper().then_some(asks_at);
        let wait = asks_at.map(|at| at.saturating_duration_since(Instant::now()));
        (self.line.permits.available_permits() == 0).then_some(wait.unwrap_or_default())
    }

    /// Waits for a permit.
    pub(super) async fn turn(&mut self) {
        if let Ok(permit) = self.line.permits.acquire().await {
            permit.forget();
        }
        self.has_permit = true;
    }

    /// Sleeps until `asks_at`, or until units are freed.
    pub(super) async fn sleep(&mut self, asks_at: Instant) {
        let sleeper = Arc::clone(&self.line.asks_at);
        *lock(&sleeper) = asks_at;
        self.line.forget_extra();
        let freed = self.refused_by.take().unwrap_or_default();
        let woken = timeout_at(asks_at, freed.notified()).await;
        self.pass_on();
        self.woken_for = woken.ok().map(|()| freed);
    }

    /// Records the store's reply; `None` if it has not decided.
    pub(super) fn hear(&mut self, reply: Option<&Decision>) {
        (self.refused_by, self.next) = (None, 1);
        let Some(reply) = reply else { return };
        self.next = usize::MAX;
        for (wanted, status) in iter::zip(&self.wanted, reply.statuses()) {
            let (wait, left) = (status.refuses(), status.remaining());
            if let Some(fit) = left.checked_div(wanted.units) {
                self.next = self.next.min(fit as usize);
            }
            if wait.is_some() && wait == reply.retry_after() {
                self.refused_by = Some(Arc::clone(&wanted.freed));
            }
            let mut was_woken = false;
            for woken in [&mut self.woken_for, &mut self.too_few] {
                let taken = woken.take_if(|freed| Arc::ptr_eq(freed, &wanted.freed));
                was_woken |= taken.is_some();
            }
            if was_woken && left > 0 {
                // A refused waiter does not wake others yet. Otherwise two of them would wake each
                // other again and again.
                if wait.is_some() {
                    self.too_few = Some(Arc::clone(&wanted.freed));
                } else {
                    wanted.freed.notify_one();
                }
            }
        }
    }

    /// Wakes the next waiter instead of this one.
    fn pass_on(&mut self) {
        if let Some(freed) = self.woken_for.take() {
            freed.notify_one();
        }
    }
}

impl Line {
    fn forget_extra(&self) {
        let mut extra = lock(&self.extra);
        *extra -= self.permits.forget_permits(*extra);
    }

    fn has_sleeper(&self) -> bool {
        Arc::strong_count(&self.asks_at) > 1
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pass_on();
        if let Some(freed) = self.too_few.take() {
            freed.notify_one();
        }
        self.refused_by = None;
        if self.has_permit {
            let mut extra = lock(&self.line.extra);
            let next = self.next.clamp(1, MOST_PERMITS);
            let next = if self.line.has_sleeper() { 1 } else { next };
            let new = next.saturating_sub(*extra);
            *extra = *extra + new - 1;
            self.line.permits.add_permits(new);
        }
    }
}

/// Shows how many lines there are.
impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = lock(&self.table);
        let lines = table.lines.values().filter_map(Weak::upgrade);
        let lines = lines.filter(|line| line.permits.available_permits() == 0);
        f.debug_tuple("Lines").field(&lines.count()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check::Charge, limit::Limit};

    /// One caller after another, each with a different key.
    #[test]
    fn lines_without_callers_are_forgotten() {
        let lines = Lines::default();
        for key in 0..100_000_u64 {
            let charge = Charge::new(Limit::per_hour("calls", 1), key, 1).unwrap();
            drop(lines.arrive(&Check::new(charge), None));
        }
        let table = lock(&lines.table);
        assert!(table.lines.capacity() < 10 && table.freed.capacity() < 10);
    }
}
