//! The prefetches that this process holds. [`limit::prefetch`](crate::limit::prefetch) has the rules.
//!
//! A limiter spends them, and its tasks take and give them back: see `limiter/prefetch.rs`. `holding.rs` decides what to do with the prefetches
//! of one limit and key, which `state.rs` lists. `demand.rs` finds the keys that are asked for often.

mod demand;
mod holding;
mod state;

use std::{
    fmt,
    hash::BuildHasherDefault,
    iter,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::SystemTime,
};

use quick_cache::{UnitWeighter, sync::Cache};
use tokio::sync::Notify;

pub(crate) use self::holding::{KeptHolding, Step, Taking};
use self::{
    demand::{Demand, FEWEST_REQUESTS},
    holding::{Holding, PART_OF_THE_REST},
    state::State,
};
use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    clock::Clock,
    decision::{Decision, LimitStatus},
    key::{Digester, Key, Prehashed},
    limit::{Limit, prefetch::Prefetch},
};

/// The most limits and keys of which a process holds prefetches. The checks of others ask the store.
const CAPACITY: usize = 10_000;

/// The prefetches that the limiters on one store hold.
pub(crate) struct Prefetches {
    clock: Clock,
    digester: Digester,
    /// Made by the first admission of a limit with prefetch.
    tables: OnceLock<Tables>,
    /// The holdings that a task takes care of.
    kept: AtomicUsize,
    /// Whether a task has ever left one behind, because its runtime ended.
    has_abandoned: AtomicBool,
    /// How many prefetches were taken: the number of the last one.
    taken: AtomicU64,
    /// A task has ended.
    ended: Notify,
}

struct Tables {
    holdings: Cache<u64, Arc<Holding>, UnitWeighter, BuildHasherDefault<Prehashed>>,
    demand: Demand,
    /// Locked while a holding is looked for and inserted.
    keeping: Mutex<()>,
}

/// A charge with prefetch, as this process knows it.
struct Found {
    digest: u64,
    holding: Option<Arc<Holding>>,
    /// Those of the prefetch to take first, or none if the process holds some. `None` if it is not worth it.
    first_units: Option<u64>,
}

impl Prefetches {
    pub(super) fn new(clock: Clock) -> Self {
        let digester = Digester::default();
        Self {
            clock,
            digester,
            tables: OnceLock::new(),
            kept: AtomicUsize::new(0),
            has_abandoned: AtomicBool::new(false),
            taken: AtomicU64::new(0),
            ended: Notify::new(),
        }
    }

    /// Admits a check if this process holds enough units for all of its charges.
    #[inline]
    pub(crate) fn spend(&self, check: &Check) -> Option<Decision> {
        if !self.is_spendable(check) {
            return None;
        }
        let Some(charge) = check.only_charge() else { return self.spend_all(check) };
        let holding = self.find(charge)?;
        let now = self.clock.now();
        let (status, at) = holding.spend(&mut holding.lock(), charge, now)?;
        Some(Decision::of_statuses(at, AdmissionId::fresh(), (status, Vec::new())))
    }

    /// All charges are looked at under their locks before any of them is spent.
    fn spend_all(&self, check: &Check) -> Option<Decision> {
        let holdings: Vec<Arc<Holding>> = check.charges().map(|charge| self.find(charge)).collect::<Option<_>>()?;
        // In one order, so that two checks never wait for each other.
        let mut places: Vec<usize> = (0..holdings.len()).collect();
        places.sort_unstable_by_key(|place| Arc::as_ptr(&holdings[*place]));
        let mut locked: Vec<(usize, MutexGuard<'_, State>)> =
            places.into_iter().map(|place| (place, holdings[place].lock())).collect();
        locked.sort_unstable_by_key(|(place, _)| *place);
        let now = self.clock.now();
        let charges = || check.charges().zip(&holdings);
        let mut states = locked.iter();
        if !charges()
            .all(|(charge, holding)| states.next().is_some_and(|(_, state)| holding.can_spend(state, charge, now)))
        {
            return None;
        }
        let mut states = locked.iter_mut();
        let spent = charges().map(|(charge, holding)| holding.spend(&mut states.next()?.1, charge, now));
        let mut statuses: Vec<(LimitStatus, SystemTime)> = spent.collect::<Option<_>>()?;
        let at = statuses.iter().map(|(_, at)| *at).max()?;
        let (first, _) = statuses.remove(0);
        let rest = statuses.into_iter().map(|(status, _)| status).collect();
        Some(Decision::of_statuses(at, AdmissionId::fresh(), (first, rest)))
    }

    /// Whether this process holds enough units for all charges of a check.
    pub(crate) fn can_spend(&self, check: &Check) -> bool {
        let now = self.clock.now();
        let is_held = |charge| self.find(charge).is_some_and(|holding| holding.can_spend(&holding.lock(), charge, now));
        self.is_spendable(check) && check.charges().all(is_held)
    }

    /// Whether it is worth looking for prefetches. If none are held, a check costs no look-up: prefetches are free where all limits are at
    /// their end.
    fn is_spendable(&self, check: &Check) -> bool {
        check.is_prefetched() && (self.kept.load(Ordering::Relaxed) > 0 || self.has_abandoned.load(Ordering::Relaxed))
    }

    /// The number of the last prefetch. A check that is asked now finds that prefetch counted.
    pub(crate) fn last_taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// Takes note of an admission by the store. Returns the decision with the units that this process holds as those that are
    /// left, if they were taken before the check was asked. Calls `keep` for each limit and key for which a task has to take prefetches from now on.
    pub(crate) fn note(
        self: &Arc<Self>,
        check: &Check,
        decision: Decision,
        asked_after: u64,
        mut keep: impl FnMut(KeptHolding),
    ) -> Decision {
        let now = self.clock.now();
        let mut statuses = decision.statuses();
        let (first, rest) =
            check.map_charges(|charge| statuses.next().and_then(|status| self.look_up(charge, status, now)));
        drop(statuses);
        let found = || iter::once(&first).chain(&rest).enumerate();
        // One charge that never gets prefetches is enough for the check to ask the store, so the others would take theirs in vain.
        let is_worth_it = check.is_prefetched()
            && found().all(|(_, found)| found.as_ref().is_some_and(|found| found.first_units.is_some()));
        let mut own = Vec::new();
        for ((place, found), (charge, status)) in found().zip(check.charges().zip(decision.statuses())) {
            let Some(Found { digest, holding, first_units }) = found else { continue };
            if let Some(holding) = holding {
                let spent = if is_worth_it { charge.cost() } else { 0 };
                own.push((place, holding.learn(spent, status, decision.at(), asked_after, now)));
            }
            if is_worth_it && let Some(holding) = self.keep(charge, *digest, status, decision.at(), now) {
                let first_units = if holding.is_of(charge) { first_units.unwrap_or(0) } else { 0 };
                keep(self.kept(*digest, holding, first_units));
            }
        }
        own.into_iter()
            .fold(decision, |decision, (place, (held, reserved))| decision.without_held(place, held, reserved))
    }

    /// Looks up the holding of a charge, and counts its request if there is none. `None` if its limit has no prefetches.
    fn look_up(&self, charge: &Charge, status: &LimitStatus, now: u64) -> Option<Found> {
        let _ = charge.limit().prefetched()?;
        let digest = self.digest(charge.limit(), charge.key());
        let holding = self.holding(digest).filter(|holding| holding.is_of(charge));
        let first_units = match (&holding, charge.prefetched()) {
            (Some(_), _) => Some(0),
            (None, Some(prefetches)) => self.first_units(charge, digest, prefetches, status, now),
            (None, None) => None,
        };
        Some(Found { digest, holding, first_units })
    }

    /// Counts a request of a key that has no prefetches, and returns the units of the first one if it is worth it.
    fn first_units(
        &self,
        charge: &Charge,
        digest: u64,
        prefetches: Prefetch,
        status: &LimitStatus,
        now: u64,
    ) -> Option<u64> {
        let demand = &self.tables.get_or_init(Tables::default).demand;
        let requests = demand.count(digest, now, prefetches.life_micros())?;
        let rest = status.remaining() / PART_OF_THE_REST;
        // At most what is used, since the costs of the other requests are not known.
        let units = requests.saturating_mul(charge.cost()).min(status.used()).min(prefetches.most()).min(rest);
        (units >= charge.cost().saturating_mul(FEWEST_REQUESTS)).then_some(units)
    }

    /// The holding of a charge that no task takes care of yet: the caller has to start one.
    fn keep(
        &self,
        charge: &Charge,
        digest: u64,
        status: &LimitStatus,
        at: SystemTime,
        now: u64,
    ) -> Option<Arc<Holding>> {
        let (Tables { holdings, keeping, .. }, prefetches) = (self.tables.get()?, charge.limit().prefetched()?);
        // Two threads that find no holding must not both insert one: one of the two would be lost.
        let _keeping = keeping.lock().unwrap_or_else(PoisonError::into_inner);
        // If the limit was another one then, the task gives back what is left, and ends.
        if let Some(holding) = holdings.get(&digest).filter(|holding| !holding.is_abandoned(now))
            && let Some(has_to_start) = holding.keep(now)
        {
            return has_to_start.then_some(holding);
        }
        if self.kept.load(Ordering::Relaxed) >= CAPACITY {
            return None;
        }
        let holding = Arc::new(Holding::new(charge, prefetches, status, at, now));
        holdings.insert(digest, Arc::clone(&holding));
        Some(holding)
    }

    fn kept(self: &Arc<Self>, digest: u64, holding: Arc<Holding>, first_units: u64) -> KeptHolding {
        self.kept.fetch_add(1, Ordering::SeqCst);
        KeptHolding { prefetches: Arc::clone(self), digest, holding, first_units, is_over: false }
    }

    /// The holdings that no task takes care of any more, since their runtimes have ended.
    fn abandoned(self: &Arc<Self>) -> Vec<KeptHolding> {
        let (Some(tables), now) = (self.tables.get(), self.clock.now()) else { return Vec::new() };
        let abandoned = tables.holdings.iter().filter(|(_, holding)| holding.keep(now) == Some(true));
        abandoned.map(|(digest, holding)| self.kept(digest, holding, 0)).collect()
    }

    /// Gives back the prefetches of a limit and key at once, and drops those that are being asked for.
    pub(crate) fn drop_prefetches_of(&self, limit: &Limit, key: &Key) {
        if let Some(holding) = self.holding(self.digest(limit, key)) {
            holding.drop_prefetches(self.clock.now());
        }
    }

    /// Gives back all prefetches at once, and returns when that is done. Calls `keep` for each limit and key for which a task has to do so.
    pub(crate) async fn give_back(self: &Arc<Self>, keep: impl FnMut(KeptHolding)) {
        self.abandoned().into_iter().for_each(keep);
        loop {
            let ended = self.ended.notified();
            let Some(tables) = self.tables.get() else { return };
            tables.holdings.iter().for_each(|(_, holding)| holding.drop_prefetches(self.clock.now()));
            if self.kept.load(Ordering::SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }

    fn find(&self, charge: &Charge) -> Option<Arc<Holding>> {
        self.holding(self.digest(charge.limit(), charge.key())).filter(|holding| holding.is_of(charge))
    }

    fn holding(&self, digest: u64) -> Option<Arc<Holding>> {
        self.tables.get()?.holdings.get(&digest)
    }

    fn digest(&self, limit: &Limit, key: &Key) -> u64 {
        self.digester.of_key(limit.name(), key)
    }
}

impl Default for Tables {
    fn default() -> Self {
        let holdings = Cache::with(CAPACITY, CAPACITY as u64, UnitWeighter, Default::default(), Default::default());
        Self { holdings, demand: Demand::default(), keeping: Mutex::default() }
    }
}

impl fmt::Debug for Prefetches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefetch").field("held", &self.kept.load(Ordering::Relaxed)).finish()
    }
}
