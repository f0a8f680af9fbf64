//! The prefetches that this process holds. [`limit::prefetch`](crate::limit::prefetch) has the
//! rules.
//!
//! A limiter spends the prefetches. The tasks of the limiter take prefetches and give them back:
//! see `limiter/prefetch.rs`. `holding.rs` has the prefetches of one limit and key, and `steps.rs`
//! decides what their task does next. `demand.rs` finds the keys that are asked for often, and
//! keeps prefetches from costing more than they save. `pace.rs` knows how long prefetches live, and
//! how many units they have.

mod demand;
mod holding;
mod pace;
mod steps;

use std::{
    fmt,
    hash::BuildHasherDefault,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::SystemTime,
};

use quick_cache::{UnitWeighter, sync::Cache};
use tokio::sync::Notify;

pub(crate) use self::steps::{KeptHolding, Step};
use self::{
    demand::{Budget, Demand},
    holding::Holding,
    pace::Pace,
};
use crate::{
    check::{AdmissionId, Charge, Check},
    clock::micros,
    decision::{Decision, LimitStatus},
    key::Prehashed,
    limit::{Limit, prefetch::Prefetch},
    local::{lock, refusals::Generations, round_trip::RoundTrip},
};

/// The most limits and keys of which a process holds prefetches. The checks of other limits and
/// keys ask the store.
const CAPACITY: usize = 10_000;

/// The prefetches that the limiters on one store hold.
pub(crate) struct Prefetches {
    /// The clock, and the digester.
    generations: Arc<Generations>,
    round_trip: Arc<RoundTrip>,
    /// The first key that is worth a prefetch makes the table.
    holdings: OnceLock<Cache<u64, Arc<Holding>, UnitWeighter, BuildHasherDefault<Prehashed>>>,
    /// The first admission of a limit with prefetch makes the counts.
    demand: OnceLock<Demand>,
    budget: Budget,
    /// Locked while a task begins or ends.
    keeping: Mutex<()>,
    /// The number of holdings that a task takes care of.
    kept: AtomicUsize,
    /// Whether a task has ever left a holding behind, because its runtime ended.
    has_abandoned: AtomicBool,
    /// How many prefetches were taken: the number of the last one.
    taken: AtomicU64,
    /// Tells [`give_back`](Self::give_back) that a task has ended.
    ended: Notify,
}

impl Prefetches {
    pub(super) fn new(generations: Arc<Generations>, round_trip: Arc<RoundTrip>) -> Self {
        Self {
            generations,
            round_trip,
            holdings: OnceLock::new(),
            demand: OnceLock::new(),
            budget: Budget::default(),
            keeping: Mutex::default(),
            kept: AtomicUsize::new(0),
            has_abandoned: AtomicBool::new(false),
            taken: AtomicU64::new(0),
            ended: Notify::new(),
        }
    }

    /// Admits a check of limits with prefetch, if this process holds enough units for all of its
    /// charges.
    #[inline]
    pub(crate) fn spend(&self, check: &Check) -> Option<Decision> {
        // If nothing is held, a check needs no look-up. While all limits are used up, nothing is
        // held, so prefetches then cost nothing.
        if self.kept.load(Ordering::Relaxed) == 0 && !self.has_abandoned.load(Ordering::Relaxed) {
            return None;
        }
        let Some(charge) = check.only_charge() else { return self.spend_all(check) };
        let holding = self.find(charge)?;
        let now = self.now();
        let mut state = lock(&holding.state);
        let (status, at) = holding.spend(&mut state, charge, now)?;
        state.count_saved(now);
        drop(state);
        Some(Decision::of_statuses(at, AdmissionId::fresh(), (status, Vec::new())))
    }

    /// Admits a check of several charges, if this process holds enough units for each of them. All
    /// charges are looked at under the locks of their holdings before any unit is spent.
    fn spend_all(&self, check: &Check) -> Option<Decision> {
        let find = |(place, charge)| Some((place, charge, self.find(charge)?));
        let mut found: Vec<(usize, &Charge, Arc<Holding>)> =
            check.charges().enumerate().map(find).collect::<Option<_>>()?;
        // All checks lock in the same order, so that no two checks wait for each other.
        found.sort_unstable_by_key(|(.., holding)| Arc::as_ptr(holding));
        let mut locked: Vec<_> =
            found.iter().map(|(place, charge, holding)| (place, charge, holding, lock(&holding.state))).collect();
        let now = self.now();
        if !locked.iter().all(|(_, charge, holding, state)| holding.can_spend(state, charge, now)) {
            return None;
        }
        locked.sort_unstable_by_key(|(place, ..)| *place);
        let spent = locked.iter_mut().map(|(_, charge, holding, state)| holding.spend(state, charge, now));
        let spent: Vec<(LimitStatus, SystemTime)> = spent.collect::<Option<_>>()?;
        // The check counts once, whatever its number of charges.
        locked.first_mut()?.3.count_saved(now);
        let at = spent.iter().map(|(_, at)| *at).max()?;
        let mut statuses = spent.into_iter().map(|(status, _)| status);
        Some(Decision::of_statuses(at, AdmissionId::fresh(), (statuses.next()?, statuses.collect())))
    }

    /// The unspent units that this process holds of a limit and key.
    pub(crate) fn held(&self, charge: &Charge) -> u64 {
        self.find(charge).map_or(0, |holding| lock(&holding.state).left(self.now()))
    }

    /// The number of the last prefetch that was taken. A check that asks the store from now on is
    /// decided after the store has counted this prefetch.
    pub(crate) fn last_taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// Takes note of an admission by the store. In the returned decision, the units that this
    /// process holds count as left, if they were taken before the store was asked. Calls `keep` for
    /// each limit and key for which a task has to take prefetches from now on.
    pub(crate) fn note(
        self: &Arc<Self>,
        check: &Check,
        decision: Decision,
        asked_after: u64,
        mut keep: impl FnMut(KeptHolding),
    ) -> Decision {
        let now = self.now();
        let at = decision.at();
        self.budget.count_asked(now, micros(self.round_trip.smoothed()));
        let find = |(charge, status)| self.find_or_make(charge, status, at, now);
        let found: Vec<Option<Arc<Holding>>> = check.charges().zip(decision.statuses()).map(find).collect();
        // If one charge has no holding, the check asks the store anyway, so the other charges would
        // take prefetches in vain.
        let is_worth_it = check.is_prefetched() && found.iter().all(Option::is_some);
        let mut own = Vec::new();
        for (place, (holding, (charge, status))) in
            found.into_iter().zip(check.charges().zip(decision.statuses())).enumerate()
        {
            let Some(holding) = holding else { continue };
            let spent = if is_worth_it { charge.cost() } else { 0 };
            own.push((place, holding.learn(spent, status, at, asked_after, now)));
            if is_worth_it && let Some(kept) = self.keep(holding, now) {
                keep(kept);
            }
        }
        own.into_iter()
            .fold(decision, |decision, (place, (held, reserved))| decision.without_held(place, held, reserved))
    }

    /// Finds the holding of a charge. If there is none, counts the request, and makes a holding if
    /// the key is asked for often. A new holding is not in the table yet.
    fn find_or_make(&self, charge: &Charge, status: &LimitStatus, at: SystemTime, now: u64) -> Option<Arc<Holding>> {
        let _ = charge.limit().prefetches?;
        let digest = charge.digest(&self.generations.digester);
        let is_usable = |holding: &Arc<Holding>| holding.is_of(charge) && !holding.is_abandoned(now);
        self.holding(digest).filter(is_usable).or_else(|| {
            let _ = charge.prefetched()?;
            let pace = self.pace(charge.limit());
            let requests = self.demand.get_or_init(Demand::default).count(digest, now, pace)?;
            let requests = Some(requests).filter(|_| self.budget.has_room())?;
            let figures = (status.used(), status.remaining());
            let first_units = pace::first_units(requests, charge.cost(), figures, pace)?;
            Some(Arc::new(Holding::new(charge, digest, first_units, (status, at), now, pace)))
        })
    }

    /// Puts a holding into the table, unless the table already has a holding of this digest.
    /// Returns the holding in the table if no task takes care of it. Then the caller has to start a
    /// task.
    fn keep(self: &Arc<Self>, holding: Arc<Holding>, now: u64) -> Option<KeptHolding> {
        let holdings = self.holdings.get_or_init(|| {
            Cache::with(CAPACITY, CAPACITY as u64, UnitWeighter, Default::default(), Default::default())
        });
        let _keeping = lock(&self.keeping);
        // The holding in the table may be of a limit with other settings. Then the task of that
        // holding gives back the units that are left, and ends.
        let held = holdings.get(&holding.digest).filter(|held| !held.is_abandoned(now));
        if held.is_none() && self.kept.load(Ordering::Relaxed) >= CAPACITY {
            return None;
        }
        let holding = held.unwrap_or_else(|| {
            holdings.insert(holding.digest, Arc::clone(&holding));
            holding
        });
        KeptHolding::begin(self, &holding, now)
    }

    /// The holdings that no task takes care of any more, since their runtimes have ended.
    fn abandoned(self: &Arc<Self>) -> Vec<KeptHolding> {
        let _keeping = lock(&self.keeping);
        let now = self.now();
        let holdings = self.holdings.get().into_iter().flat_map(Cache::iter);
        holdings.filter_map(|(_, holding)| KeptHolding::begin(self, &holding, now)).collect()
    }

    /// Gives back the prefetches of the limit and key with this digest at once, and drops the
    /// prefetch that is asked for.
    pub(super) fn drop_prefetches_of(&self, digest: u64) {
        if let Some(holding) = self.holding(digest) {
            holding.drop_prefetches(self.now());
        }
    }

    /// Gives back all prefetches at once, and returns when that is done. Calls `keep` for each
    /// limit and key that needs a new task to give its prefetches back.
    pub(crate) async fn give_back(self: &Arc<Self>, keep: impl FnMut(KeptHolding)) {
        self.abandoned().into_iter().for_each(keep);
        loop {
            let ended = self.ended.notified();
            let Some(holdings) = self.holdings.get() else { return };
            holdings.iter().for_each(|(_, holding)| holding.drop_prefetches(self.now()));
            if self.kept.load(Ordering::SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }

    fn now(&self) -> u64 {
        self.generations.clock.now()
    }

    fn find(&self, charge: &Charge) -> Option<Arc<Holding>> {
        self.holding(charge.digest(&self.generations.digester)).filter(|holding| holding.is_of(charge))
    }

    fn holding(&self, digest: u64) -> Option<Arc<Holding>> {
        self.holdings.get()?.get(&digest)
    }

    fn pace(&self, limit: &Limit) -> Pace {
        let set = limit.prefetches.map_or(0, Prefetch::life_micros);
        let [longest, trip, mostly] =
            [Prefetch::MAX_LIFE.min(limit.window()), self.round_trip.smoothed(), self.round_trip.mostly()].map(micros);
        Pace::new(set, longest, trip, mostly)
    }
}

impl fmt::Debug for Prefetches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefetch").field("held", &self.kept.load(Ordering::Relaxed)).finish()
    }
}
