//! Places under [concurrent](crate::Limit::concurrent) limits, which are permits with a time to
//! live. This file says how long they are held, and how they are renewed.
//!
//! 1. A decision holds its places. Dropping its last clone frees them.
//! 2. A store that several processes share forgets a place that is not renewed within its limit's
//!    window. So a task renews each place when half the window has passed. Most requests end
//!    earlier, and their places are never renewed. Renewals and releases ignore the deadline and
//!    the breaker, since no caller waits for them, and the requests that hold the places go on.
//! 3. A place that the store no longer knows is lost: another request may have got it. The task
//!    takes it again, even if the limit is then exceeded. Otherwise the store would count it as
//!    free, and admit one more request.
//! 4. A place is freed on the runtime on which it was taken, if that runtime is multi-threaded. A
//!    current-thread runtime may no longer be polled, so such a place is freed on the current
//!    runtime of the caller that drops the decision. If there is no current runtime, or it ends
//!    meanwhile, a separate thread frees the place. [`shutdown`](super::Limiter::shutdown) frees
//!    all places that are held when it begins, and those that checks in flight at that time take.
//!    It does not wake waiters in line: these places are for other processes, since the requests
//!    that held them may go on.
//! 5. Each runtime on which places are taken has its own task. If a runtime's places are overdue,
//!    the runtime stands still or has ended, so the tasks on other runtimes also renew these
//!    places.
//! 6. A store that decides [at once](crate::Store::decide_now), such as `MemoryStore`, does not
//!    forget places, so they are not renewed.
//! 7. If a caller gives an id, which is an idempotency key, several tries and decisions in the
//!    process may use the same place. They share a lock, and the last user frees the place. A reply
//!    that comes too late for its caller counts as such a decision, too. If a call is freeing the
//!    place, a new try waits until that call has ended.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, iter, mem,
    pin::pin,
    ptr,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use tokio::{
    runtime::{self, Handle, RuntimeFlavor},
    sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::Core;
use crate::{
    check::{AdmissionId, Check},
    decision::{Decision, Places, settlement::Settlement},
    local::{Holder, SharedPlaces, Underway, lock},
    store::{MOST_TIME, StoreFuture, give_back},
};

/// A place's life is divided by these numbers. A place is renewed after half its life. If the
/// renewal fails, there is time for three more tries, an eighth of the life apart. A call that
/// hangs is given up after a quarter of the life, or after [`MOST_TIME`] if that is shorter. Then
/// there is time for one more call. Each renewal begins a round trip earlier, and may take a round
/// trip longer, so that it also reaches a store that is far away.
const RENEWAL: u32 = 2;
const NEXT_TRY: u32 = 8;
const LONGEST_TRY: u32 = 4;

/// The time after which the task looks again for due places: an eighth of a second. With the
/// shortest life that a place can have, this is the time between two tries.
const PAUSE: Duration = Duration::from_millis(125);

/// When a place is due, the task also renews those that are due within this time. Many renewals
/// then travel together, which costs Redis a third less.
const AHEAD: Duration = Duration::from_millis(500);

/// The most renewals in flight at once: `IN_FLIGHT_FAR` per millisecond of distance to the store,
/// but at least `IN_FLIGHT`, and at most `MOST_IN_FLIGHT`.
const IN_FLIGHT: usize = 128;
const IN_FLIGHT_FAR: usize = 8;
const MOST_IN_FLIGHT: usize = 4_096;

/// A place that is renewed.
struct Place {
    core: Arc<Core>,
    /// A check with only this place. Each place in an admission has its own life, and may be lost
    /// while the others are kept.
    check: Check,
    life: Duration,
    id: AdmissionId,
    at: SystemTime,
    runtime: runtime::Id,
    /// `None` if no other decision can use the place.
    shared: Option<Arc<SharedPlaces>>,
    /// When the place is renewed next. Only [`Table::delay`] changes it, since the table is sorted
    /// by it.
    due: Mutex<Instant>,
    /// The time until which the store keeps the place without another renewal. `None` once the
    /// place was lost.
    kept_until: Mutex<Option<Instant>>,
}

/// The places that a decision and its clones hold.
struct Held {
    renewed: Vec<Arc<Place>>,
    user: User,
}

/// A user of places: a decision, or a try with a caller's id. The last user frees the places.
pub(super) struct User {
    core: Arc<Core>,
    /// Frees all the admission's places.
    free: Settlement,
    /// True if this user has to free the places, unless another user still has them.
    has_taken: bool,
    /// The runtime on which the places were taken. `None` if the places are freed without a
    /// runtime.
    runtime: Option<Handle>,
    /// `None` if nobody else can use the places.
    shared: Option<OwnedRwLockReadGuard<AtomicBool>>,
}

/// The places that a limiter renews.
#[derive(Default)]
pub(super) struct Renewals(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// The places that are held, sorted by their next renewal and their address in memory.
    /// Admission ids would not tell two places apart, since a caller may give one id to several
    /// checks.
    held: BTreeMap<(Instant, usize), Arc<Place>>,
    /// The task on each runtime.
    tasks: HashMap<runtime::Id, AbortHandle>,
}

/// Lets a decision hold the places that its admission has taken. `call` has the time until the
/// store's reply, and the value that counts the check as in flight; it is `None` if the store
/// decided at once. If a shutdown has begun since the check was sent, the places are freed at once.
#[cold]
pub(super) fn hold(
    core: &Arc<Core>,
    check: &Check,
    decision: Decision,
    call: Option<(Duration, &Underway)>,
) -> Decision {
    let is_local = decision.local_cause().is_some();
    let shared = core.owed.shared_places(check, is_local);
    let taken = iter::zip(check.charges(), decision.statuses())
        .filter(|(charge, status)| charge.takes_place() && status.retry_after().is_none())
        .map(|(charge, status)| charge.on(status.limit.clone()));
    let check = match Check::of_distinct(taken) {
        Some(check) if decision.is_allowed() => check,
        _ => return decision,
    };
    let (id, at) = (decision.id(), decision.at());
    let call = if is_local { None } else { call };
    let runtime = call.and_then(|_| Handle::try_current().ok());
    let mut renewed = Vec::new();
    if let (Some((took, underway)), Some(runtime)) = (call, &runtime) {
        let now = Instant::now();
        for charge in check.charges() {
            let life = charge.limit().window();
            let due = now + core.renewed_after(life).saturating_sub(took);
            renewed.push(Arc::new(Place {
                core: Arc::clone(core),
                check: Check::new(charge.clone()),
                life,
                id,
                at,
                runtime: runtime.id(),
                shared: shared.clone(),
                due: Mutex::new(due),
                kept_until: Mutex::new(Some(now + life.saturating_sub(took))),
            }));
        }
        if underway.has_changed().unwrap_or(true) {
            for place in &renewed {
                place.give_back();
            }
        } else {
            core.renewals.add(&renewed, core, runtime);
        }
    }
    let mut free = Settlement::by_id(check, id, at, |_| Some(0));
    free.is_local = is_local;
    let user = User::of_taken(core, free, shared, runtime);
    decision.holding(Arc::new(Held { renewed, user }))
}

/// Registers a try with a caller's id as a user of its places before the try is sent. If a call is
/// freeing these places, the try waits for that call first. The returned lock is set when the try
/// is sent. Any other check need not wait, and gets `None`.
pub(super) fn in_turn(
    core: &Arc<Core>,
    check: &Check,
    reply: StoreFuture<Decision>,
) -> (Option<Arc<OnceLock<User>>>, StoreFuture<Decision>) {
    let places = check.charges().filter(|charge| charge.takes_place());
    let places = check.id().zip(Check::of_distinct(places.cloned()));
    let shared = core.owed.shared_places(check, false);
    let (Some((id, places)), Some(shared)) = (places, shared) else {
        return (None, reply);
    };
    let user = Arc::new(OnceLock::new());
    let (core, is_sent) = (Arc::clone(core), Arc::clone(&user));
    let reply = async move {
        let shared = Some(shared.read_owned().await);
        let _ = is_sent.set(User {
            core,
            free: Settlement::refund_by_id(places, id),
            has_taken: false,
            runtime: None,
            shared,
        });
        drop(is_sent);
        reply.await
    };
    (Some(user), Box::pin(reply))
}

impl Place {
    /// The place's position in the table.
    fn entry(&self) -> (Instant, usize) {
        (*lock(&self.due), self.address())
    }

    fn address(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    fn settlement(&self, cost: u64) -> Settlement {
        Settlement::by_id(self.check.clone(), self.id, self.at, |_| Some(cost))
    }

    /// Frees the place before its decision is dropped.
    fn give_back(self: &Arc<Self>) {
        *lock(&self.kept_until) = None;
        free(&self.core, self.settlement(0), false, None, None);
    }
}

impl Places for Held {
    fn are_lost(&self) -> bool {
        let now = Some(Instant::now());
        self.renewed
            .iter()
            .any(|place| *lock(&place.kept_until) < now)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let held = self.user.core.renewals.remove(&self.renewed);
        // Another decision may have taken shared places after they were given back.
        self.user.has_taken = held == self.renewed.len() || self.user.shared.is_some();
    }
}

impl User {
    fn of_taken(
        core: &Arc<Core>,
        free: Settlement,
        shared: Option<Arc<SharedPlaces>>,
        runtime: Option<Handle>,
    ) -> Self {
        Self {
            core: Arc::clone(core),
            free,
            has_taken: true,
            runtime,
            // This fails only while a call frees the places.
            shared: shared.and_then(|shared| shared.try_read_owned().ok()),
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut alone = None;
        if let Some(guard) = self.shared.take() {
            guard.fetch_or(self.has_taken, Ordering::SeqCst);
            let shared = Arc::clone(OwnedRwLockReadGuard::rwlock(&guard));
            drop(guard);
            // If this fails, another user has the places, and frees them.
            let Ok(lock) = shared.try_write_owned() else {
                return;
            };
            self.has_taken = lock.swap(false, Ordering::SeqCst);
            alone = Some(lock);
        }
        if !self.has_taken {
            return;
        }
        if self.runtime.is_none() {
            // In an in-process store, a release ends with its first poll.
            let call = self.core.release(self.free.clone(), true);
            let mut now = Context::from_waker(Waker::noop());
            if let Poll::Ready(Ok(_)) = pin!(call).poll(&mut now) {
                return;
            }
        }
        let (places, own) = (self.free.clone(), self.runtime.as_ref());
        free(&self.core, places, true, own, alone);
    }
}

/// Begins to free places. This runs on `own`, the runtime on which the places were taken, if that
/// runtime is multi-threaded. A current-thread runtime may no longer be polled, so the caller's
/// current runtime is used instead. If `wakes` is set, waiters may ask for the freed places. The
/// next try with the same id needs the lock `alone`, so it waits until the call has ended.
/// Otherwise the call might free that try's place.
fn free(
    core: &Arc<Core>,
    places: Settlement,
    wakes: bool,
    own: Option<&Handle>,
    alone: Option<OwnedRwLockWriteGuard<AtomicBool>>,
) {
    let own = own.filter(|own| own.runtime_flavor() != RuntimeFlavor::CurrentThread);
    let runtime = own.cloned().or_else(|| Handle::try_current().ok());
    let call = Arc::new((Arc::clone(core), places, alone));
    core.owed.complete(runtime, move || {
        let call = Arc::clone(&call);
        Box::pin(async move {
            let (core, places, _) = &*call;
            if core.release(places.clone(), wakes).await.is_err() {
                // Most releases succeed at once. The future for the retries is boxed, so that this
                // one stays small.
                let places = vec![places.clone()];
                Box::pin(give_back(places, |places| core.release(places, wakes))).await;
            }
        })
    });
}

impl Renewals {
    fn add(&self, places: &[Arc<Place>], core: &Arc<Core>, runtime: &Handle) {
        let mut table = lock(&self.0);
        for place in places {
            table.held.insert(place.entry(), Arc::clone(place));
        }
        table.tasks.retain(|_, task| !task.is_finished());
        table.tasks.entry(runtime.id()).or_insert_with(|| {
            core.owed.register(&core.renewals);
            let renewal = renew(Arc::downgrade(&core.renewals), runtime.id());
            runtime.spawn(renewal).abort_handle()
        });
    }

    /// Removes places, and returns how many were held.
    fn remove(&self, places: &[Arc<Place>]) -> usize {
        let mut table = lock(&self.0);
        places
            .iter()
            .filter_map(|place| table.held.remove(&place.entry()))
            .count()
    }

    fn has(&self, place: &Arc<Place>) -> bool {
        lock(&self.0).held.contains_key(&place.entry())
    }

    /// Returns the places that a runtime's task has to renew now, and schedules the next try for
    /// each of them. If no place is held, forgets the task and returns `None`.
    fn due(&self, runtime: runtime::Id) -> Option<Vec<Arc<Place>>> {
        let mut table = lock(&self.0);
        let now = Instant::now();
        let Some((&(first, _), _)) = table.held.first_key_value() else {
            table.tasks.remove(&runtime);
            return None;
        };
        let until = if first <= now { now + AHEAD } else { now };
        let mut due = Vec::new();
        for ((at, _), place) in table.held.range(..=(until, usize::MAX)) {
            if place.runtime == runtime || *at + place.life / NEXT_TRY <= now {
                due.push(Arc::clone(place));
            }
        }
        for place in &due {
            table.delay(place, now + place.life / NEXT_TRY);
        }
        Some(due)
    }
}

impl Table {
    /// Sets when a place is renewed next, if it is held.
    fn delay(&mut self, place: &Place, due: Instant) {
        if let Some(held) = self.held.remove(&place.entry()) {
            *lock(&place.due) = due;
            self.held.insert(place.entry(), held);
        }
    }
}

impl Drop for Renewals {
    fn drop(&mut self) {
        for task in lock(&self.0).tasks.values() {
            task.abort();
        }
    }
}

impl Holder for Renewals {
    fn give_back(&self) {
        let held = mem::take(&mut lock(&self.0).held);
        for place in held.values() {
            place.give_back();
        }
    }
}

impl Core {
    /// The time after which a place is renewed: half its life minus a round trip, so that the reply
    /// arrives before the place is lost.
    fn renewed_after(&self, life: Duration) -> Duration {
        (life / RENEWAL).saturating_sub(self.round_trip.smoothed())
    }
}

/// Renews a limiter's places as long as any is held. A call that hangs, such as to one cluster
/// node, delays the other calls by one [`PAUSE`].
async fn renew(renewals: Weak<Renewals>, runtime: runtime::Id) {
    let (mut calls, mut busy) = (JoinSet::new(), HashMap::<_, AbortHandle>::new());
    loop {
        sleep(PAUSE).await;
        while calls.try_join_next().is_some() {}
        busy.retain(|_, call| !call.is_finished());
        let Some(renewals) = renewals.upgrade() else {
            return;
        };
        let Some(mut due) = renewals.due(runtime) else {
            break;
        };
        due.retain(|place| !busy.contains_key(&place.address()));
        let distance = due.first().map(|place| place.core.round_trip.distance());
        let millis = distance.unwrap_or_default().as_millis() as usize;
        let far = IN_FLIGHT_FAR.saturating_mul(millis);
        let mut is_late = false;
        // A chunk's renewals begin together, so that they share batches.
        for places in due.chunks(far.clamp(IN_FLIGHT, MOST_IN_FLIGHT)) {
            let before = calls.len();
            for place in places {
                let renewal = renew_one(Arc::clone(place));
                busy.insert(place.address(), calls.spawn(renewal));
            }
            let answered =
                async { while calls.len() > before && calls.join_next().await.is_some() {} };
            is_late = is_late || timeout(PAUSE, answered).await.is_err();
        }
    }
    // A place may be freed while its renewal is in flight. The renewal may then take the place
    // again, so the place has to be freed once more. Therefore, the task waits for the calls in
    // flight.
    while calls.join_next().await.is_some() {}
}

/// Renews a place. After a failure, the next try is due an eighth of the life after this try.
async fn renew_one(place: Arc<Place>) {
    let began = Instant::now();
    let core = &place.core;
    let (renewals, store) = (&core.renewals, &core.store);
    let _underway = core.owed.begin();
    let deadline = (place.life / LONGEST_TRY + core.round_trip.smoothed()).min(MOST_TIME);
    let next_try = began + place.life / NEXT_TRY;
    let renewal = store.settle(place.settlement(1));
    let Ok(settled) = core.upkeep(renewal, deadline).await else {
        return lock(&renewals.0).delay(&place, next_try);
    };
    if !settled.was_applied && renewals.has(&place) {
        *lock(&place.kept_until) = None;
        let again = place
            .check
            .map(|charge| charge.as_spent(charge.limit().clone(), charge.cost()));
        let again = store.decide(again.with_id(place.id));
        let taken = core.upkeep(again, deadline).await;
        if !renewals.has(&place) {
            // The place was freed meanwhile. The store may have taken it again, even if no reply
            // came. So it is freed once more, unless another decision uses it.
            let (free, shared) = (place.settlement(0), place.shared.clone());
            let runtime = Handle::try_current().ok();
            return drop(User::of_taken(core, free, shared, runtime));
        }
        if taken.is_err() {
            return lock(&renewals.0).delay(&place, next_try);
        }
    }
    if let Some(kept_until) = &mut *lock(&place.kept_until) {
        *kept_until = began + place.life;
    }
    lock(&renewals.0).delay(&place, began + core.renewed_after(place.life));
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.user.free.check).finish()
    }
}
