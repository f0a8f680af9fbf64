//! Places of [concurrent](crate::Limit::concurrent) limits: how long they are held, and how they
//! are renewed.
//!
//! 1. A decision holds its places. They are freed when its last clone is dropped.
//! 2. A store that other processes share forgets a place that is not renewed for the window of its
//!    limit. So a task renews the places of a limiter that are held for half of it. Most requests
//!    end before. Neither the deadline nor the breaker ends a renewal or a release: they are for
//!    callers that wait, and the requests that hold the places go on.
//! 3. A place that the store does not know any more is lost: others may have got it. It is taken
//!    again, even beyond the limit, so that no further admission comes on top.
//! 4. A place is freed on a runtime that is polled: its own if that has threads of its own, or else
//!    that of the caller. If there is none, or if it ends meanwhile, a thread frees such places and
//!    ends. [`shutdown`](Limiter::shutdown) frees all.
//! 5. Each runtime on which places are taken has a task of its own. It renews those of another
//!    runtime when they are overdue: that one stands still, or has ended.
//! 6. A store that decides [at once](crate::Store::decide_now), such as `MemoryStore`, forgets no
//!    place.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, iter, mem,
    pin::pin,
    ptr,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use tokio::{
    runtime::{self, Handle, RuntimeFlavor},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::{Core, Limiter, failure::FailureMode};
use crate::{
    check::{AdmissionId, Charge, Check},
    decision::{Decision, Places, settlement::Settlement},
    local::{Holder, Underway},
    lock::lock,
    store::{MOST_TIME, give_back},
};

/// A place is renewed after this part of its life. A failure leaves time for three more tries, each
/// after the other part. A call that hangs is given up after the last part, at most after
/// [`MOST_TIME`], and leaves time for one more. A store that is far away is asked earlier by the
/// time of its replies, and has so much more time.
const RENEWAL: u32 = 2;
const NEXT_TRY: u32 = 8;
const LONGEST_TRY: u32 = 4;

/// The task looks this often for places that are due: for the shortest life, as often as for
/// another try.
const PAUSE: Duration = Duration::from_millis(125);

/// With a place that is due it renews those that are due so soon, so that many travel together:
/// that costs Redis a third less.
const AHEAD: Duration = Duration::from_millis(500);

/// So many renewals are on their way at once: more to a store that is far away, so many for each
/// millisecond of the round trip.
const IN_FLIGHT: usize = 128;
const IN_FLIGHT_FAR: usize = 8;
const MOST_IN_FLIGHT: usize = 4_096;

/// A place that is renewed.
struct Place {
    core: Arc<Core>,
    /// Of this place alone: it has a life of its own, and may be lost alone.
    check: Check,
    life: Duration,
    id: AdmissionId,
    at: SystemTime,
    runtime: runtime::Id,
    is_lost: AtomicBool,
    /// When it is renewed next. Only the table changes this.
    due: Mutex<Instant>,
    /// Until when the store keeps it, if it is not renewed.
    kept_until: Mutex<Instant>,
}

/// The places that the clones of a decision hold.
struct Held {
    core: Arc<Core>,
    /// Frees all places of the admission.
    free: Option<Settlement>,
    renewed: Vec<Arc<Place>>,
    /// `None` if the places are freed without a runtime.
    runtime: Option<Handle>,
}

/// Places that are to be freed, whatever happens to the task that does it.
struct Release {
    core: Arc<Core>,
    places: Settlement,
    /// Freed, or on the thread, which tries for the last time.
    is_done: bool,
    underway: Underway,
}

/// The places that a limiter renews.
#[derive(Default)]
pub(super) struct Renewals(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// By when they are due, and their addresses, since a caller may give one id to several checks.
    held: BTreeMap<(Instant, usize), Arc<Place>>,
    /// Of each runtime.
    tasks: HashMap<runtime::Id, AbortHandle>,
}

/// Lets a decision hold the places that its admission has taken. The store has `took` so long for
/// it, if it has not decided at once.
#[cold]
pub(super) fn hold(core: &Arc<Core>, check: &Check, decision: Decision, took: Option<Duration>) -> Decision {
    let taken = iter::zip(check.charges(), decision.statuses())
        .filter(|(charge, status)| charge.takes_place() && status.retry_after().is_none())
        .map(|(charge, status)| charge.on(status.limit().clone()));
    let Some(check) = Check::of_distinct(taken).filter(|_| decision.is_allowed()) else { return decision };
    let id = decision.id();
    let at = decision.at();
    let is_local = decision.local_cause().is_some();
    let runtime = Handle::try_current().ok().filter(|_| !is_local && took.is_some());
    let place = |charge: &Charge, runtime| {
        let check = Check::new(charge.clone());
        let life = charge.limit().window();
        let now = Instant::now();
        let took = took.unwrap_or_default();
        let core = Arc::clone(core);
        let [due, kept_until] =
            [now + core.renewed_after(life).saturating_sub(took), now + life.saturating_sub(took)].map(Mutex::new);
        Arc::new(Place { core, check, life, id, at, runtime, is_lost: AtomicBool::new(false), due, kept_until })
    };
    let mut renewed = Vec::new();
    if let Some(runtime) = &runtime {
        renewed.extend(check.charges().map(|charge| place(charge, runtime.id())));
        core.renewals.add(&renewed, core, runtime);
    }
    let mut free = Settlement::by_id(check, id, at, |_| Some(0));
    free.is_local = is_local;
    decision.holding(Arc::new(Held { core: Arc::clone(core), free: Some(free), renewed, runtime }))
}

impl Place {
    /// Where it stands in the table.
    fn entry(&self) -> (Instant, usize) {
        (*lock(&self.due), self.address())
    }

    fn address(&self) -> usize {
        ptr::from_ref(self).addr()
    }

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
        let are_given_back = self.core.renewals.remove(&self.renewed) < self.renewed.len();
        let Some(free) = self.free.take().filter(|_| !are_given_back) else { return };
        if self.runtime.is_none() {
            // A store in this process is ready at once.
            let call = limiter(&self.core).release(free.clone());
            let mut now = Context::from_waker(Waker::noop());
            if let Poll::Ready(Ok(_)) = pin!(call).poll(&mut now) {
                return;
            }
        }
        Release::new(&self.core, free).begin(self.runtime.as_ref());
    }
}

impl Release {
    fn new(core: &Arc<Core>, places: Settlement) -> Self {
        Self { core: Arc::clone(core), places, is_done: false, underway: core.owed.begin() }
    }

    /// On their runtime if that has threads of its own. Otherwise it may not be polled any more,
    /// and that of the caller is.
    fn begin(self, own: Option<&Handle>) {
        let own = own.filter(|own| own.runtime_flavor() != RuntimeFlavor::CurrentThread).cloned();
        if let Some(runtime) = own.or_else(|| Handle::try_current().ok()) {
            runtime.spawn(self.free());
        }
    }

    async fn free(mut self) {
        let release = |places| limiter(&self.core).release(places);
        if release(self.places.clone()).await.is_err() {
            // In a box, since few are sent again.
            Box::pin(give_back(vec![self.places.clone()], release)).await;
        }
        self.is_done = true;
    }
}

/// Without a runtime, or with one that has ended, a thread frees the places.
impl Drop for Release {
    fn drop(&mut self) {
        if !self.is_done {
            let core = Arc::clone(&self.core);
            let places = self.places.clone();
            let underway = self.underway.clone();
            self.core.owed.on_thread(Self { core, places, underway, is_done: true }.free());
        }
    }
}

fn limiter(core: &Arc<Core>) -> Limiter {
    Limiter { core: Arc::clone(core), failure_mode: FailureMode::Open }
}

impl Renewals {
    fn add(&self, places: &[Arc<Place>], core: &Arc<Core>, runtime: &Handle) {
        let mut table = lock(&self.0);
        table.held.extend(places.iter().map(|place| (place.entry(), Arc::clone(place))));
        table.tasks.retain(|_, task| !task.is_finished());
        let task = || {
            core.owed.register(&core.renewals);
            runtime.spawn(renew(Arc::downgrade(&core.renewals), runtime.id())).abort_handle()
        };
        table.tasks.entry(runtime.id()).or_insert_with(task);
    }

    /// Returns how many of them were held.
    fn remove(&self, places: &[Arc<Place>]) -> usize {
        let mut table = lock(&self.0);
        places.iter().filter_map(|place| table.held.remove(&place.entry())).count()
    }

    fn has(&self, place: &Arc<Place>) -> bool {
        lock(&self.0).held.contains_key(&place.entry())
    }

    /// The places that the task of a runtime renews now; `None` if no place is held.
    fn due(&self, runtime: runtime::Id) -> Option<Vec<Arc<Place>>> {
        let mut table = lock(&self.0);
        let now = Instant::now();
        if table.held.is_empty() {
            table.tasks.remove(&runtime);
            return None;
        }
        let is_own = |place: &Place| place.runtime == runtime || *lock(&place.due) + place.life / NEXT_TRY <= now;
        let is_any_due = table.held.first_key_value().is_some_and(|((due, _), _)| *due <= now);
        let until = if is_any_due { now + AHEAD } else { now };
        let soon = table.held.range(..=(until, usize::MAX)).map(|(_, place)| Arc::clone(place));
        let due: Vec<_> = soon.filter(|place| is_own(place)).collect();
        due.iter().for_each(|place| table.delay(place, now + place.life / NEXT_TRY));
        Some(due)
    }
}

impl Table {
    /// Lets a place be renewed then, if it is held.
    fn delay(&mut self, place: &Place, due: Instant) {
        if let Some(held) = self.held.remove(&place.entry()) {
            *lock(&place.due) = due;
            self.held.insert(place.entry(), held);
        }
    }
}

impl Drop for Renewals {
    fn drop(&mut self) {
        lock(&self.0).tasks.values().for_each(AbortHandle::abort);
    }
}

impl Holder for Renewals {
    fn give_back(&self) -> bool {
        let held = mem::take(&mut lock(&self.0).held);
        let is_any_held = !held.is_empty();
        for place in held.into_values() {
            place.is_lost.store(true, Ordering::Relaxed);
            Release::new(&place.core, place.settlement(0)).begin(None);
        }
        is_any_held
    }
}

impl Core {
    /// So that the reply arrives before the place is lost.
    fn renewed_after(&self, life: Duration) -> Duration {
        (life / RENEWAL).saturating_sub(self.round_trip.smoothed())
    }
}

/// Renews the places of a limiter as long as any is held. A call that hangs, as in a cluster with a
/// node that does, delays the others of a round by a pause.
async fn renew(renewals: Weak<Renewals>, runtime: runtime::Id) {
    let (mut calls, mut busy) = (JoinSet::new(), HashMap::<_, AbortHandle>::new());
    loop {
        sleep(PAUSE).await;
        while calls.try_join_next().is_some() {}
        busy.retain(|_, call| !call.is_finished());
        let Some(renewals) = renewals.upgrade() else { return };
        let Some(mut due) = renewals.due(runtime) else { break };
        due.retain(|place| !busy.contains_key(&place.address()));
        let distance = due.first().map_or(Duration::ZERO, |place| place.core.round_trip.distance());
        let far = IN_FLIGHT_FAR.saturating_mul(distance.as_millis() as usize);
        let mut is_late = false;
        // Together, so that they share batches.
        for places in due.chunks(far.clamp(IN_FLIGHT, MOST_IN_FLIGHT)) {
            let before = calls.len();
            for place in places {
                let renewal = renew_one(limiter(&place.core), Arc::clone(place));
                busy.insert(place.address(), calls.spawn(renewal));
            }
            let answered = async { while calls.len() > before && calls.join_next().await.is_some() {} };
            is_late = is_late || timeout(PAUSE, answered).await.is_err();
        }
    }
    // They may have taken a place again that was freed meanwhile.
    while calls.join_next().await.is_some() {}
}

/// After a failure, the next try is due soon.
async fn renew_one(limiter: Limiter, place: Arc<Place>) {
    let began = Instant::now();
    let renewals = Arc::clone(&limiter.core.renewals);
    let store = &limiter.core.store;
    let _underway = limiter.core.owed.begin();
    let deadline = (place.life / LONGEST_TRY + limiter.core.round_trip.smoothed()).min(MOST_TIME);
    let try_again = || lock(&renewals.0).delay(&place, began + place.life / NEXT_TRY);
    let Ok(settled) = limiter.upkeep(store.settle(place.settlement(1)), deadline).await else { return try_again() };
    if !settled.was_applied && renewals.has(&place) {
        place.is_lost.store(true, Ordering::Relaxed);
        let again = place.check.map(|charge| charge.as_spent(charge.limit().clone(), charge.cost()));
        let taken = limiter.upkeep(store.decide(again.with_id(place.id)), deadline).await;
        if !renewals.has(&place) {
            // It was freed meanwhile. It may be taken even if no reply has come.
            return Release::new(&limiter.core, place.settlement(0)).free().await;
        }
        if taken.is_err() {
            return try_again();
        }
    }
    *lock(&place.kept_until) = began + place.life;
    lock(&renewals.0).delay(&place, began + limiter.core.renewed_after(place.life));
}

/// Shows how many places are renewed.
impl fmt::Debug for Renewals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Renewals").field(&lock(&self.0).held.len()).finish()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held").field(&self.free.as_ref().map(Settlement::check)).finish()
    }
}
