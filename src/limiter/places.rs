//! Places of [concurrent](crate::Limit::concurrent) limits: how long they are held, and how they
//! are renewed.
//!
//! 1. A decision holds its places. The places are freed when the last clone of the decision is
//!    dropped.
//! 2. A store that several processes share forgets a place that is not renewed within the window of
//!    its limit. So a task renews each place when half of the window has passed. Most requests end
//!    earlier, and their places are never renewed. Renewals and releases ignore the deadline and
//!    the breaker, since no caller waits for them, and the requests that hold the places go on.
//! 3. A place that the store no longer knows is lost: another request may have got it. The task
//!    takes a lost place again, even if the limit is then exceeded. Otherwise the store would count
//!    the place as free, and admit one more request.
//! 4. A place is freed on the runtime on which it was taken, if that runtime has threads of its
//!    own. Otherwise that runtime may not be polled, so the place is freed on the runtime of the
//!    caller that drops the decision. If there is no runtime, or if the runtime ends meanwhile, a
//!    thread frees the place. [`shutdown`](super::Limiter::shutdown) frees all places.
//! 5. Each runtime on which places are taken has a task of its own. If the places of a runtime are
//!    overdue, that runtime stands still or has ended, so the tasks of the other runtimes renew its
//!    places, too.
//! 6. A store that decides [at once](crate::Store::decide_now), such as `MemoryStore`, forgets no
//!    place, so its places are not renewed.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, iter, mem,
    pin::pin,
    ptr,
    sync::{Arc, Mutex, Weak},
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use tokio::{
    runtime::{self, Handle, RuntimeFlavor},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::Core;
use crate::{
    check::{AdmissionId, Charge, Check},
    decision::{Decision, Places, settlement::Settlement},
    local::{Holder, Underway, lock},
    store::{MOST_TIME, give_back},
};

/// The life of a place is divided by these numbers. A place is renewed after a half of its life. If
/// the renewal fails, there is time for three more tries, an eighth of the life apart. A call that
/// hangs is given up after a quarter of the life, at most after [`MOST_TIME`]. Then there is time
/// for one more call. Each renewal begins a round trip earlier, and may take a round trip longer,
/// so that it also reaches a store that is far away.
const RENEWAL: u32 = 2;
const NEXT_TRY: u32 = 8;
const LONGEST_TRY: u32 = 4;

/// The time after which the task looks again for places that are due. This is an eighth of a
/// second, the time between two tries under the shortest life of a place.
const PAUSE: Duration = Duration::from_millis(125);

/// When a place is due, the task also renews the places that are due within this time. Many
/// renewals then travel together, which costs Redis a third less.
const AHEAD: Duration = Duration::from_millis(500);

/// The most renewals that are on their way at once: `IN_FLIGHT_FAR` for each millisecond of the
/// distance to the store, but at least `IN_FLIGHT`, and at most `MOST_IN_FLIGHT`.
const IN_FLIGHT: usize = 128;
const IN_FLIGHT_FAR: usize = 8;
const MOST_IN_FLIGHT: usize = 4_096;

/// A place that is renewed.
struct Place {
    core: Arc<Core>,
    /// A check of this place alone. Each place of an admission has a life of its own, and may be
    /// lost alone.
    check: Check,
    life: Duration,
    id: AdmissionId,
    at: SystemTime,
    runtime: runtime::Id,
    /// When the place is renewed next. Only [`Table::delay`] changes this time, since the table is
    /// sorted by it.
    due: Mutex<Instant>,
    /// The time until which the store keeps the place without a further renewal. `None` once the
    /// place was lost.
    kept_until: Mutex<Option<Instant>>,
}

/// The places that the clones of a decision hold.
struct Held {
    core: Arc<Core>,
    /// Frees all places of the admission.
    free: Option<Settlement>,
    renewed: Vec<Arc<Place>>,
    /// The runtime on which the places were taken. `None` if the places are freed without a
    /// runtime.
    runtime: Option<Handle>,
}

/// Places that are freed even if the task that frees them is dropped.
struct Release {
    core: Arc<Core>,
    places: Settlement,
    /// Whether the places have been freed, or were handed to the thread of
    /// [`Owed`](crate::local::Owed), which tries for the last time.
    is_done: bool,
    _underway: Underway,
}

/// The places that a limiter renews.
#[derive(Default)]
pub(super) struct Renewals(Mutex<Table>);

#[derive(Default)]
struct Table {
    /// The places that are held, by the time of the next renewal and the address in memory. The ids
    /// of admissions would not tell two places apart, since a caller may give one id to several
    /// checks.
    held: BTreeMap<(Instant, usize), Arc<Place>>,
    /// The task of each runtime.
    tasks: HashMap<runtime::Id, AbortHandle>,
}

/// Lets a decision hold the places that its admission has taken. `took` is the time until the
/// store's reply; `None` if the store decided at once.
#[cold]
pub(super) fn hold(
    core: &Arc<Core>,
    check: &Check,
    decision: Decision,
    took: Option<Duration>,
) -> Decision {
    let taken = iter::zip(check.charges(), decision.statuses())
        .filter(|(charge, status)| charge.takes_place() && status.retry_after().is_none())
        .map(|(charge, status)| charge.on(status.limit.clone()));
    let Some(check) = Check::of_distinct(taken).filter(|_| decision.is_allowed()) else {
        return decision;
    };
    let id = decision.id();
    let at = decision.at();
    let is_local = decision.local_cause().is_some();
    let runtime = Handle::try_current()
        .ok()
        .filter(|_| !is_local && took.is_some());
    let place = |charge: &Charge, runtime| {
        let check = Check::new(charge.clone());
        let life = charge.limit().window();
        let now = Instant::now();
        let took = took.unwrap_or_default();
        let core = Arc::clone(core);
        let due = Mutex::new(now + core.renewed_after(life).saturating_sub(took));
        let kept_until = Mutex::new(Some(now + life.saturating_sub(took)));
        Arc::new(Place {
            core,
            check,
            life,
            id,
            at,
            runtime,
            due,
            kept_until,
        })
    };
    let mut renewed = Vec::new();
    if let Some(runtime) = &runtime {
        renewed.extend(check.charges().map(|charge| place(charge, runtime.id())));
        core.renewals.add(&renewed, core, runtime);
    }
    let mut free = Settlement::by_id(check, id, at, |_| Some(0));
    free.is_local = is_local;
    decision.holding(Arc::new(Held {
        core: Arc::clone(core),
        free: Some(free),
        renewed,
        runtime,
    }))
}

impl Place {
    /// The position of the place in the table.
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
        let now = Some(Instant::now());
        self.renewed
            .iter()
            .any(|place| *lock(&place.kept_until) < now)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let are_given_back = self.core.renewals.remove(&self.renewed) < self.renewed.len();
        let Some(free) = self.free.take().filter(|_| !are_given_back) else {
            return;
        };
        if self.runtime.is_none() {
            // In a store in this process, a release ends with its first poll.
            let call = self.core.release(free.clone());
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
        Self {
            core: Arc::clone(core),
            places,
            is_done: false,
            _underway: core.owed.begin(),
        }
    }

    /// Begins to free the places, on their own runtime if that runtime has threads of its own.
    /// Otherwise that runtime may no longer be polled, so the runtime of the caller frees the
    /// places.
    fn begin(self, own: Option<&Handle>) {
        let own = own
            .filter(|own| own.runtime_flavor() != RuntimeFlavor::CurrentThread)
            .cloned();
        if let Some(runtime) = own.or_else(|| Handle::try_current().ok()) {
            runtime.spawn(self.free());
        }
    }

    async fn free(mut self) {
        let release = |places| self.core.release(places);
        if release(self.places.clone()).await.is_err() {
            // Most releases succeed at once. The future of the repetitions is boxed, so that the
            // future of this function stays small.
            Box::pin(give_back(vec![self.places.clone()], release)).await;
        }
        self.is_done = true;
    }
}

/// Without a runtime, or with one that has ended, a thread frees the places.
impl Drop for Release {
    fn drop(&mut self) {
        if !self.is_done {
            let mut last_try = Self::new(&self.core, self.places.clone());
            last_try.is_done = true;
            self.core.owed.on_thread(last_try.free());
        }
    }
}

impl Renewals {
    fn add(&self, places: &[Arc<Place>], core: &Arc<Core>, runtime: &Handle) {
        let mut table = lock(&self.0);
        table.held.extend(
            places
                .iter()
                .map(|place| (place.entry(), Arc::clone(place))),
        );
        table.tasks.retain(|_, task| !task.is_finished());
        let task = || {
            core.owed.register(&core.renewals);
            runtime
                .spawn(renew(Arc::downgrade(&core.renewals), runtime.id()))
                .abort_handle()
        };
        table.tasks.entry(runtime.id()).or_insert_with(task);
    }

    /// Removes places, and returns how many of them were held.
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

    /// Returns the places that the task of a runtime renews now, and sets when they are tried
    /// again. If no place is held, returns `None`, and forgets the task.
    fn due(&self, runtime: runtime::Id) -> Option<Vec<Arc<Place>>> {
        let mut table = lock(&self.0);
        let now = Instant::now();
        if table.held.is_empty() {
            table.tasks.remove(&runtime);
            return None;
        }
        let is_own = |place: &Place| {
            place.runtime == runtime || *lock(&place.due) + place.life / NEXT_TRY <= now
        };
        let is_any_due = table
            .held
            .first_key_value()
            .is_some_and(|((due, _), _)| *due <= now);
        let until = if is_any_due { now + AHEAD } else { now };
        let soon = table
            .held
            .range(..=(until, usize::MAX))
            .map(|(_, place)| Arc::clone(place));
        let due: Vec<_> = soon.filter(|place| is_own(place)).collect();
        due.iter()
            .for_each(|place| table.delay(place, now + place.life / NEXT_TRY));
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
        lock(&self.0).tasks.values().for_each(AbortHandle::abort);
    }
}

impl Holder for Renewals {
    fn give_back(&self) -> bool {
        let held = mem::take(&mut lock(&self.0).held);
        let is_any_held = !held.is_empty();
        for place in held.into_values() {
            *lock(&place.kept_until) = None;
            Release::new(&place.core, place.settlement(0)).begin(None);
        }
        is_any_held
    }
}

impl Core {
    /// The time after which a place is renewed: half of its life, less a round trip, so that the
    /// reply arrives before the place is lost.
    fn renewed_after(&self, life: Duration) -> Duration {
        (life / RENEWAL).saturating_sub(self.round_trip.smoothed())
    }
}

/// Renews the places of a limiter as long as any is held. A call that hangs, such as to one node of
/// a cluster, delays the other calls by one [`PAUSE`].
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
        let distance = due
            .first()
            .map_or(Duration::ZERO, |place| place.core.round_trip.distance());
        let far = IN_FLIGHT_FAR.saturating_mul(distance.as_millis() as usize);
        let mut is_late = false;
        // The renewals of a chunk begin together, so that they share batches.
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
    // A place may be freed while the call that renews it is on its way. The call may then take the
    // place again, and has to free it once more. So the task waits for the calls that are on their
    // way.
    while calls.join_next().await.is_some() {}
}

/// Renews a place. After a failure, the next try is due an eighth of the life after this try.
async fn renew_one(place: Arc<Place>) {
    let began = Instant::now();
    let core = &place.core;
    let (renewals, store) = (&core.renewals, &core.store);
    let _underway = core.owed.begin();
    let deadline = (place.life / LONGEST_TRY + core.round_trip.smoothed()).min(MOST_TIME);
    let try_again = || lock(&renewals.0).delay(&place, began + place.life / NEXT_TRY);
    let Ok(settled) = core
        .upkeep(store.settle(place.settlement(1)), deadline)
        .await
    else {
        return try_again();
    };
    if !settled.was_applied && renewals.has(&place) {
        *lock(&place.kept_until) = None;
        let again = place
            .check
            .map(|charge| charge.as_spent(charge.limit().clone(), charge.cost()));
        let taken = core
            .upkeep(store.decide(again.with_id(place.id)), deadline)
            .await;
        if !renewals.has(&place) {
            // The place was freed meanwhile. The store may have taken it again, even if no reply
            // came. So the place is freed once more.
            return Release::new(core, place.settlement(0)).free().await;
        }
        if taken.is_err() {
            return try_again();
        }
    }
    if let Some(kept_until) = &mut *lock(&place.kept_until) {
        *kept_until = began + place.life;
    }
    lock(&renewals.0).delay(&place, began + core.renewed_after(place.life));
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Held")
            .field(&self.free.as_ref().map(|free| &free.check))
            .finish()
    }
}
