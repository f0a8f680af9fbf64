//! Places of [concurrent](crate::Limit::concurrent) limits: who holds them, and for how long.
//!
//! 1. A decision holds its places. They are freed when its last clone is dropped.
//! 2. A store that other processes share forgets a place that is not renewed for the window of its limit. So one task renews all places of a
//!    limiter that are held for longer than a third of it. Most requests end before.
//! 3. A place that the store does not know any more is lost: others may have got it. It is taken again, even beyond the limit, so that
//!    no further admission comes on top.
//! 4. The task runs on the runtime of a caller. If it is late, the next caller that takes a place starts another on its own runtime.
//! 5. A store without [local state](crate::Store::local_state), such as `MemoryStore`, forgets no place.

use std::{
    collections::HashMap,
    fmt, iter,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, SystemTime},
};

use tokio::{
    runtime::Handle,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep},
};

use super::{Core, Limiter, failure::FailureMode};
use crate::{
    check::{AdmissionId, Charge, Check},
    decision::{Decision, Places, settlement::Settlement},
    error::Error,
    store::give_back,
};

/// A place is renewed after this part of its life, and the task looks twice as often.
const RENEWALS: u32 = 3;

/// The task looks no less often, and no more often than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// So many renewals are on their way at once.
const MOST_IN_FLIGHT: usize = 128;

/// The places of one admission.
struct Admission {
    check: Check,
    id: AdmissionId,
    at: SystemTime,
    /// Whether this process has decided in the store's place.
    is_local: bool,
    /// The shortest window of its limits.
    life: Duration,
    is_lost: AtomicBool,
    /// Until when the store keeps the places if they are not renewed; `None` if it does so until they are freed.
    kept_until: Option<Mutex<Instant>>,
}

/// What the clones of a decision share.
struct Held {
    core: Arc<Core>,
    admission: Arc<Admission>,
    /// `None` if the places are freed without a runtime.
    runtime: Option<Handle>,
}

/// The places that a limiter renews.
#[derive(Default)]
pub(super) struct Renewals(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// With the time of the next renewal.
    held: HashMap<AdmissionId, (Arc<Admission>, Instant)>,
    /// The task, and when it looks next.
    task: Option<(AbortHandle, Instant)>,
}

/// Lets a decision hold the places that its admission has taken. The store has `took` so long for it.
#[cold]
pub(super) fn hold(core: &Arc<Core>, check: &Check, decision: Decision, took: Duration) -> Decision {
    let taken = iter::zip(check.charges(), decision.statuses())
        .filter(|(charge, status)| charge.takes_place() && status.retry_after().is_none())
        .map(|(charge, status)| charge.on(status.limit().clone()));
    let Some(check) = Check::of_distinct(taken).filter(|_| decision.is_allowed()) else { return decision };
    let life = check.charges().map(|charge| charge.limit().window()).min().unwrap_or_default();
    let (id, at, is_local) = (decision.id(), decision.at(), decision.local_cause().is_some());
    let is_shared = !is_local && core.store.local_state().is_some();
    let kept_until = is_shared.then(|| Mutex::new(Instant::now() + life.saturating_sub(took)));
    let admission = Arc::new(Admission { check, id, at, is_local, life, is_lost: AtomicBool::new(false), kept_until });
    let runtime = Handle::try_current().ok().filter(|_| is_shared);
    if let Some(runtime) = &runtime {
        core.renewals.add(&admission, core, runtime);
    }
    decision.holding(Arc::new(Held { core: Arc::clone(core), admission, runtime }))
}

impl Admission {
    /// Frees the places, or renews them.
    fn settlement(&self, is_freed: bool) -> Settlement {
        let cost = |charge: &Charge| Some(if is_freed { 0 } else { charge.cost() });
        Settlement::by_id(self.check.clone(), self.id, self.at, cost).in_process(self.is_local)
    }
}

impl Places for Held {
    fn are_lost(&self) -> bool {
        let is_over = |kept_until: &Mutex<Instant>| *lock(kept_until) < Instant::now();
        self.admission.is_lost.load(Ordering::Relaxed) || self.admission.kept_until.as_ref().is_some_and(is_over)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.core.renewals.remove(self.admission.id);
        let (limiter, free) = (limiter(&self.core), self.admission.settlement(true));
        match &self.runtime {
            Some(runtime) => {
                let free = async move { give_back(vec![free], |free| settle(limiter.clone(), free)).await };
                drop(runtime.spawn(free));
            }
            // A store in this process is ready at once.
            None => drop(pin!(settle(limiter, free)).poll(&mut Context::from_waker(Waker::noop()))),
        }
    }
}

async fn settle(limiter: Limiter, settlement: Settlement) -> Result<bool, Error> {
    limiter.settle(settlement).await.map(|settled| settled.was_applied)
}

fn limiter(core: &Arc<Core>) -> Limiter {
    Limiter { core: Arc::clone(core), failure_mode: FailureMode::Open }
}

/// No code that can panic runs under a lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Renewals {
    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.0)
    }

    fn add(&self, admission: &Arc<Admission>, core: &Arc<Core>, runtime: &Handle) {
        let (mut table, now) = (self.lock(), Instant::now());
        table.held.insert(admission.id, (Arc::clone(admission), now + admission.life / RENEWALS));
        let pause = pause(admission.life);
        let looks =
            |(task, at): &(AbortHandle, Instant)| !task.is_finished() && now <= *at + pause && *at <= now + pause;
        if !table.task.as_ref().is_some_and(looks) {
            table.end_task();
            let task = runtime.spawn(renew(Arc::downgrade(core), pause)).abort_handle();
            table.task = Some((task, now + pause));
        }
    }

    fn remove(&self, id: AdmissionId) {
        self.lock().held.remove(&id);
    }

    fn has(&self, id: AdmissionId) -> bool {
        self.lock().held.contains_key(&id)
    }

    /// The places that are due, and the pause until the task looks again; `None` if no place is held.
    fn due(&self) -> Option<(Vec<Arc<Admission>>, Duration)> {
        let (mut table, now) = (self.lock(), Instant::now());
        let Some(pause) = table.held.values().map(|(admission, _)| pause(admission.life)).min() else {
            table.task = None;
            return None;
        };
        let due =
            table.held.values().filter(|(_, due)| *due <= now).map(|(admission, _)| Arc::clone(admission)).collect();
        table.task.iter_mut().for_each(|(_, at)| *at = now + pause);
        Some((due, pause))
    }

    /// Takes note that a place was renewed by a call that began then.
    fn renewed(&self, admission: &Admission, began: Instant) {
        admission.kept_until.iter().for_each(|kept_until| *lock(kept_until) = began + admission.life);
        if let Some((_, due)) = self.lock().held.get_mut(&admission.id) {
            *due = began + admission.life / RENEWALS;
        }
    }
}

impl Table {
    fn end_task(&mut self) {
        self.task.take().inspect(|(task, _)| task.abort());
    }
}

impl Drop for Renewals {
    fn drop(&mut self) {
        self.lock().end_task();
    }
}

fn pause(life: Duration) -> Duration {
    (life / (2 * RENEWALS)).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}

/// Renews the places of a limiter as long as any is held.
async fn renew(core: Weak<Core>, mut pause: Duration) {
    loop {
        sleep(pause).await;
        let Some(core) = core.upgrade() else { return };
        let Some((due, next)) = core.renewals.due() else { return };
        pause = next;
        let mut calls = JoinSet::new();
        for admission in due {
            if calls.len() >= MOST_IN_FLIGHT {
                calls.join_next().await;
            }
            calls.spawn(renew_one(limiter(&core), admission));
        }
        while calls.join_next().await.is_some() {}
    }
}

/// After a failure, the place stays due.
async fn renew_one(limiter: Limiter, admission: Arc<Admission>) {
    let (began, renewals) = (Instant::now(), Arc::clone(&limiter.core.renewals));
    let Ok(is_known) = settle(limiter.clone(), admission.settlement(false)).await else { return };
    if !is_known && renewals.has(admission.id) {
        admission.is_lost.store(true, Ordering::Relaxed);
        let again = admission.check.map(|charge| charge.as_spent(charge.limit().clone(), charge.cost()));
        if limiter.take_again(again.with_id(admission.id)).await.is_err() {
            return;
        }
        if !renewals.has(admission.id) {
            // It was freed meanwhile.
            drop(settle(limiter, admission.settlement(true)).await);
            return;
        }
    }
    renewals.renewed(&admission, began);
}

/// Shows how many places are renewed.
impl fmt::Debug for Renewals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Renewals").field(&self.lock().held.len()).finish()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.admission.check).finish()
    }
}
