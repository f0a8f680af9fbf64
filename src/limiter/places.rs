//! Places of [concurrent](crate::Limit::concurrent) limits: how long they are held, and how they are renewed.
//!
//! 1. A decision holds its places. They are freed when its last clone is dropped.
//! 2. A store that other processes share forgets a place that is not renewed for the window of its limit. So a task renews the places of a
//!    limiter that are held for longer than a third of it. Most requests end before.
//! 3. A place that the store does not know any more is lost: others may have got it. It is taken again, even beyond the limit, so that
//!    no further admission comes on top.
//! 4. Each runtime on which places are taken has a task of its own. It renews those of another runtime when they are overdue: that one
//!    stands still, or has ended.
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
    runtime::{self, Handle},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep},
};

use super::{Core, Limiter, failure::FailureMode};
use crate::{
    check::{AdmissionId, Charge, Check},
    decision::{
        Decision, Places,
        settlement::{Settled, Settlement},
    },
    error::Error,
    store::give_back,
};

/// A place is renewed after this part of its life, and the task looks twice as often.
const RENEWALS: u32 = 3;

/// The task looks no less often, and no more often than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// So many renewals are on their way at once: more to a store that is far away, so many for each millisecond of the round trip.
const IN_FLIGHT: usize = 128;
const IN_FLIGHT_FAR: usize = 8;
const MOST_IN_FLIGHT: usize = 4_096;

/// A place that is renewed.
struct Place {
    /// Of this place alone: it has a life of its own, and may be lost alone.
    check: Check,
    life: Duration,
    id: AdmissionId,
    at: SystemTime,
    is_lost: AtomicBool,
    /// Until when the store keeps it, if it is not renewed.
    kept_until: Mutex<Instant>,
}

/// The places that the clones of a decision hold.
struct Held {
    core: Arc<Core>,
    /// Frees all places of the admission.
    free: Settlement,
    renewed: Vec<Arc<Place>>,
    /// `None` if the places are freed without a runtime.
    runtime: Option<Handle>,
}

/// The places that a limiter renews.
#[derive(Default)]
pub(super) struct Renewals(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// By their addresses, since a caller may give one id to several checks.
    held: HashMap<usize, Renewal>,
    /// The task of each runtime, and when it looks next.
    tasks: HashMap<runtime::Id, (AbortHandle, Instant)>,
}

struct Renewal {
    place: Arc<Place>,
    due: Instant,
    runtime: runtime::Id,
}

/// Lets a decision hold the places that its admission has taken. The store has `took` so long for it.
#[cold]
pub(super) fn hold(core: &Arc<Core>, check: &Check, decision: Decision, took: Duration) -> Decision {
    let taken = iter::zip(check.charges(), decision.statuses())
        .filter(|(charge, status)| charge.takes_place() && status.retry_after().is_none())
        .map(|(charge, status)| charge.on(status.limit().clone()));
    let Some(check) = Check::of_distinct(taken).filter(|_| decision.is_allowed()) else { return decision };
    let (id, at, is_local) = (decision.id(), decision.at(), decision.local_cause().is_some());
    let is_shared = !is_local && core.store.local_state().is_some();
    let runtime = Handle::try_current().ok().filter(|_| is_shared);
    let place = |charge: &Charge| {
        let (check, life) = (Check::new(charge.clone()), charge.limit().window());
        let kept_until = Mutex::new(Instant::now() + life.saturating_sub(took));
        Arc::new(Place { check, life, id, at, is_lost: AtomicBool::new(false), kept_until })
    };
    let renewed: Vec<_> = runtime.iter().flat_map(|_| check.charges()).map(place).collect();
    if let Some(runtime) = &runtime {
        core.renewals.add(&renewed, core, runtime);
    }
    let free = Settlement::by_id(check, id, at, |_| Some(0)).in_process(is_local);
    decision.holding(Arc::new(Held { core: Arc::clone(core), free, renewed, runtime }))
}

impl Place {
    fn settlement(&self, cost: u64) -> Settlement {
        Settlement::by_id(self.check.clone(), self.id, self.at, |_| Some(cost))
    }
}

impl Places for Held {
    fn are_lost(&self) -> bool {
        let now = Instant::now();
        let may_be_lost = |place: &Arc<Place>| place.is_lost.load(Ordering::Relaxed) || *lock(&place.kept_until) < now;
        self.renewed.iter().any(may_be_lost)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.core.renewals.remove(&self.renewed);
        let free = || {
            let (limiter, free) = (limiter(&self.core), self.free.clone());
            async move { give_back(vec![free], |free| settle(limiter.clone(), free)).await }
        };
        match &self.runtime {
            // A task of a runtime that has ended is over at once. Then this runtime may be another.
            Some(runtime) if runtime.spawn(free()).is_finished() => {
                drop(Handle::try_current().map(|current| current.spawn(free())));
            }
            Some(_) => {}
            // A store in this process is ready at once.
            None => {
                let free = settle(limiter(&self.core), self.free.clone());
                drop(pin!(free).poll(&mut Context::from_waker(Waker::noop())));
            }
        }
    }
}

async fn settle(limiter: Limiter, settlement: Settlement) -> Result<Settled, Error> {
    limiter.settle(settlement).await
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

    fn add(&self, places: &[Arc<Place>], core: &Arc<Core>, handle: &Handle) {
        let (mut table, now, runtime) = (self.lock(), Instant::now(), handle.id());
        let Some(pause) = places.iter().map(|place| pause(place.life)).min() else { return };
        for place in places {
            let (place, due) = (Arc::clone(place), now + place.life / RENEWALS);
            table.held.insert(Arc::as_ptr(&place).addr(), Renewal { place, due, runtime });
        }
        table.tasks.retain(|_, (task, _)| !task.is_finished());
        if table.tasks.get(&runtime).is_none_or(|(_, looks_at)| *looks_at > now + pause) {
            let task = handle.spawn(renew(Arc::downgrade(core), runtime, pause)).abort_handle();
            if let Some((slower, _)) = table.tasks.insert(runtime, (task, now + pause)) {
                slower.abort();
            }
        }
    }

    fn remove(&self, places: &[Arc<Place>]) {
        let mut table = self.lock();
        places.iter().for_each(|place| drop(table.held.remove(&Arc::as_ptr(place).addr())));
    }

    fn has(&self, place: &Arc<Place>) -> bool {
        self.lock().held.contains_key(&Arc::as_ptr(place).addr())
    }

    /// The places that the task of a runtime renews now, and the pause until it looks again; `None` if no place is held.
    fn due(&self, runtime: runtime::Id) -> Option<(Vec<Arc<Place>>, Duration)> {
        let (mut table, now) = (self.lock(), Instant::now());
        let Some(shortest) = table.held.values().map(|renewal| pause(renewal.place.life)).min() else {
            table.tasks.remove(&runtime);
            return None;
        };
        let is_due = |renewal: &&Renewal| {
            let is_own = renewal.runtime == runtime;
            renewal.due + if is_own { Duration::ZERO } else { pause(renewal.place.life) } <= now
        };
        let due = table.held.values().filter(is_due).map(|renewal| Arc::clone(&renewal.place)).collect();
        if let Some((_, looks_at)) = table.tasks.get_mut(&runtime) {
            *looks_at = now + shortest;
        }
        Some((due, shortest))
    }

    /// Takes note that a place was renewed by a call that began then.
    fn renewed(&self, place: &Arc<Place>, began: Instant) {
        *lock(&place.kept_until) = began + place.life;
        if let Some(renewal) = self.lock().held.get_mut(&Arc::as_ptr(place).addr()) {
            renewal.due = began + place.life / RENEWALS;
        }
    }
}

impl Drop for Renewals {
    fn drop(&mut self) {
        self.lock().tasks.values().for_each(|(task, _)| task.abort());
    }
}

fn pause(life: Duration) -> Duration {
    (life / (2 * RENEWALS)).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}

/// Renews the places of a limiter as long as any is held.
async fn renew(core: Weak<Core>, runtime: runtime::Id, mut pause: Duration) {
    loop {
        sleep(pause).await;
        let Some(core) = core.upgrade() else { return };
        let Some((due, next)) = core.renewals.due(runtime) else { return };
        pause = next;
        let far = IN_FLIGHT_FAR.saturating_mul(core.distance().as_millis() as usize);
        let (in_flight, mut calls) = (far.clamp(IN_FLIGHT, MOST_IN_FLIGHT), JoinSet::new());
        for place in due {
            if calls.len() >= in_flight {
                calls.join_next().await;
            }
            calls.spawn(renew_one(limiter(&core), place));
        }
        while calls.join_next().await.is_some() {}
    }
}

/// After a failure, the place stays due.
async fn renew_one(limiter: Limiter, place: Arc<Place>) {
    let (began, renewals) = (Instant::now(), Arc::clone(&limiter.core.renewals));
    let Ok(is_known) = limiter.renew(place.settlement(1)).await else { return };
    if !is_known && renewals.has(&place) {
        place.is_lost.store(true, Ordering::Relaxed);
        let again = place.check.map(|charge| charge.as_spent(charge.limit().clone(), charge.cost()));
        if limiter.take_again(again.with_id(place.id)).await.is_err() {
            return;
        }
        if !renewals.has(&place) {
            // It was freed meanwhile.
            drop(limiter.settle(place.settlement(0)).await);
            return;
        }
    }
    renewals.renewed(&place, began);
}

/// Shows how many places are renewed.
impl fmt::Debug for Renewals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Renewals").field(&self.lock().held.len()).finish()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(self.free.check()).finish()
    }
}
