//! The prefetches that this process holds. [`limit::prefetch`](crate::limit::prefetch) has the
//! rules.
//!
//! A limiter spends the prefetches, and its tasks take them and give them back: see
//! `limiter/prefetch.rs`. `holding.rs` has the prefetches for one limit and key, and `steps.rs`
//! decides what their task does next. `demand.rs` finds the heavy hitters, the keys that are asked
//! for often, and keeps prefetches from costing more than they save. `pace.rs` knows how long
//! prefetches live, and how many units they have.

mod demand;
mod holding;
mod pace;
mod steps;

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    iter,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

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
    limit::{Limit, prefetch::MAX_LIFE},
    local::{lock, refusals::Generations, round_trip::RoundTrip},
};

/// The most limits and keys for which a process holds prefetches. Checks with other limits and keys
/// ask the store.
const CAPACITY: usize = 10_000;

/// The holdings, by (limit, key) digest.
type Holdings = HashMap<u64, Arc<Holding>, BuildHasherDefault<Prehashed>>;

/// The prefetches that one store's limiters hold.
pub(crate) struct Prefetches {
    /// The clock, and the digester.
    generations: Arc<Generations>,
    round_trip: Arc<RoundTrip>,
    /// Locked for writing only while a task begins or ends.
    holdings: RwLock<Holdings>,
    /// The request counts. The first admission under a limit with prefetch creates them.
    demand: OnceLock<Demand>,
    budget: Budget,
    /// Locked while a check locks several holdings.
    several: Mutex<()>,
    /// The number of prefetches taken so far, which is also the number of the last one.
    taken: AtomicU64,
    /// Tells [`give_back`](Self::give_back) that a task has ended.
    ended: Notify,
}

impl Prefetches {
    pub(super) fn new(generations: Arc<Generations>, round_trip: Arc<RoundTrip>) -> Self {
        Self {
            generations,
            round_trip,
            holdings: RwLock::default(),
            demand: OnceLock::new(),
            budget: Budget::default(),
            several: Mutex::default(),
            taken: AtomicU64::new(0),
            ended: Notify::new(),
        }
    }

    /// Admits a check on limits with prefetch, if this process holds enough units for all its
    /// charges.
    #[inline]
    pub(crate) fn spend(&self, check: &Check) -> Option<Decision> {
        let Some(charge) = check.only_charge() else {
            return self.spend_all(check);
        };
        let holding = self.find(charge)?;
        let mut state = lock(&holding.state);
        let now = self.now();
        let (status, at) = holding.spend(&mut state, charge, now)?;
        state.count_saved(now);
        drop(state);
        let statuses = (status, Vec::new());
        Some(Decision::of_statuses(at, AdmissionId::fresh(), statuses))
    }

    /// Admits a check with several charges, if this process holds enough units for each of them.
    /// All charges are examined while their holdings are locked, before any unit is spent.
    fn spend_all(&self, check: &Check) -> Option<Decision> {
        let mut found = Vec::new();
        for charge in check.charges() {
            found.push((charge, self.find(charge)?));
        }
        // Only one check at a time locks several holdings, so that two checks cannot deadlock.
        let _several = lock(&self.several);
        let mut locked: Vec<_> = found
            .iter()
            .map(|(charge, holding)| (charge, holding, lock(&holding.state)))
            .collect();
        let now = self.now();
        let mut all = locked.iter();
        if !all.all(|(charge, _, state)| state.left(now) >= charge.cost()) {
            return None;
        }
        let spent = locked
            .iter_mut()
            .map(|(charge, holding, state)| holding.spend(state, charge, now));
        let spent: Vec<(LimitStatus, SystemTime)> = spent.collect::<Option<_>>()?;
        // The check counts once, however many charges it has.
        locked.first_mut()?.2.count_saved(now);
        let at = spent.iter().map(|(_, at)| *at).max()?;
        let mut statuses = spent.into_iter().map(|(status, _)| status);
        let statuses = (statuses.next()?, statuses.collect());
        Some(Decision::of_statuses(at, AdmissionId::fresh(), statuses))
    }

    /// The unspent units that this process holds for a limit and key.
    pub(crate) fn held(&self, charge: &Charge) -> u64 {
        self.find(charge)
            .map_or(0, |holding| lock(&holding.state).left(self.now()))
    }

    /// The number of the last prefetch taken. A check that asks the store from now on is decided
    /// after the store has counted this prefetch.
    pub(crate) fn last_taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// Learns from an admission by the store. In the returned decision, units that this process
    /// holds count as left if they were taken before the store was asked. Calls `keep` for each
    /// limit and key that needs a task to take prefetches from now on.
    pub(crate) fn note(
        self: &Arc<Self>,
        check: &Check,
        mut decision: Decision,
        asked_after: u64,
        mut keep: impl FnMut(KeptHolding),
    ) -> Decision {
        let now = self.now();
        let at = decision.at();
        self.budget
            .count_asked(now, micros(self.round_trip.smoothed()));
        let found: Vec<_> = iter::zip(check.charges(), decision.statuses())
            .map(|(charge, status)| self.find_or_make(charge, status, at, now))
            .collect();
        // If one charge has no holding, the check asks the store anyway, so prefetches for the
        // other charges would be useless.
        let is_worth_it = check.is_prefetched() && found.iter().all(Option::is_some);
        for (index, (holding, charge)) in found.into_iter().zip(check.charges()).enumerate() {
            let (Some(holding), Some(status)) = (holding, decision.statuses().nth(index)) else {
                continue;
            };
            let spent = if is_worth_it { charge.cost() } else { 0 };
            let clock = &self.generations.clock;
            let (held, reserved) = holding.learn(spent, status, at, asked_after, clock);
            decision = decision.without_held(index, held, reserved);
            if is_worth_it && let Some(kept) = self.keep(&holding) {
                keep(kept);
            }
        }
        decision
    }

    /// Finds a charge's holding. If there is none, counts the request, and makes a holding if the
    /// key is asked for often. A new holding is not in the table yet.
    fn find_or_make(
        &self,
        charge: &Charge,
        status: &LimitStatus,
        at: SystemTime,
        now: u64,
    ) -> Option<Arc<Holding>> {
        charge.limit().prefetch_life()?;
        if let Some(known) = self.find(charge)
            && !known.is_abandoned(now)
        {
            return Some(known);
        }
        if !charge.is_prefetched() {
            return None;
        }
        let digest = charge.digest(&self.generations.digester);
        let pace = self.pace(charge.limit());
        let demand = self.demand.get_or_init(Demand::default);
        let requests = demand.count(digest, now, pace)?;
        if !self.budget.has_room() {
            return None;
        }
        let figures = (status.used, status.remaining());
        let units = pace::first_units(requests, charge.cost(), figures, pace)?;
        let holding = Holding::new(charge, digest, units, (status, at), now, pace);
        Some(Arc::new(holding))
    }

    /// Puts a holding into the table, if there is room. If the table already has a holding with
    /// this digest, and that holding is not abandoned, it stays there instead. If the holding that
    /// is now in the table has no task, returns this holding, and the caller has to start a task
    /// for it.
    fn keep(self: &Arc<Self>, holding: &Arc<Holding>) -> Option<KeptHolding> {
        let mut holdings = self.write();
        let now = self.now();
        // The table may already have a holding for the same limit with different settings. The task
        // of that holding then gives back the units left, and ends.
        if let Some(held) = holdings.get(&holding.digest)
            && !held.is_abandoned(now)
        {
            return KeptHolding::begin(self, held);
        }
        if holdings.len() >= CAPACITY {
            return None;
        }
        holdings.insert(holding.digest, Arc::clone(holding));
        KeptHolding::begin(self, holding)
    }

    /// Gives back the prefetches for the limit and key with this digest at once. A prefetch that
    /// has been asked for is given back when the reply arrives.
    pub(super) fn drop_prefetches_of(&self, digest: u64) {
        let holding = self.read(|holdings| holdings.get(&digest).cloned());
        if let Some(holding) = holding {
            holding.drop_prefetches();
        }
    }

    /// Gives back all prefetches at once, and returns when that is done. Calls `keep` for each
    /// limit and key that needs a new task to give its prefetches back. If no task can start, the
    /// units count until the prefetch life is over.
    pub(crate) async fn give_back(self: &Arc<Self>, mut keep: impl FnMut(KeptHolding)) {
        loop {
            // Holdings whose task has ended with its runtime need a new task.
            let without_task: Vec<_> = self
                .write()
                .values()
                .filter_map(|holding| KeptHolding::begin(self, holding))
                .collect();
            for holding in without_task {
                keep(holding);
            }
            // A task that could not start has already reported its end. So the code below waits
            // only for holdings with a task.
            let ended = self.ended.notified();
            let holdings: Vec<_> = self.read(|holdings| {
                let with_task = holdings.values().filter(|holding| holding.has_task());
                with_task.cloned().collect()
            });
            if holdings.is_empty() {
                return;
            }
            for holding in &holdings {
                holding.drop_prefetches();
            }
            ended.await;
        }
    }

    fn now(&self) -> u64 {
        self.generations.clock.now()
    }

    fn find(&self, charge: &Charge) -> Option<Arc<Holding>> {
        self.read(|holdings| {
            // The table is empty while all limits are used up. In that case, prefetches cost next
            // to nothing, since the digest need not be computed.
            if holdings.is_empty() {
                return None;
            }
            let digest = charge.digest(&self.generations.digester);
            let holding = holdings.get(&digest)?;
            holding.is_of(charge).then(|| Arc::clone(holding))
        })
    }

    fn read<T>(&self, read: impl FnOnce(&Holdings) -> T) -> T {
        read(&self.holdings.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self) -> RwLockWriteGuard<'_, Holdings> {
        self.holdings
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn pace(&self, limit: &Limit) -> Pace {
        let set = limit.prefetch_life().map_or(0, micros);
        let longest = micros(MAX_LIFE.min(limit.window()));
        let trip = micros(self.round_trip.smoothed());
        let mostly = micros(self.round_trip.mostly());
        Pace::new(set, longest, trip, mostly)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use super::{holding::PrefetchedUnits, *};
    use crate::clock::{Clock, ManualClock};

    #[test]
    fn a_thread_that_waits_for_a_holding_spends_nothing_after_the_life() {
        let clock = ManualClock::new();
        let generations = Arc::new(Generations::new(Clock::Manual(clock.clone())));
        let prefetches = Prefetches::new(generations, Arc::new(RoundTrip::new(Duration::ZERO)));
        let limit = Limit::per_minute("calls", 100).prefetch(Duration::from_millis(100));
        let charge = Charge::fitting(limit.clone(), "ada".into(), 1);
        let check = Check::new(charge.clone());
        let decision = Decision::new(&check, clock.now(), AdmissionId::fresh(), |charge| {
            LimitStatus::new(charge, 10, 0, limit.window(), None)
        });
        let (now, digest) = (
            prefetches.now(),
            charge.digest(&prefetches.generations.digester),
        );
        let status = (decision.binding(), decision.at());
        let pace = prefetches.pace(&limit);
        let holding = Arc::new(Holding::new(&charge, digest, 10, status, now, pace));
        lock(&holding.state).prefetches.push(PrefetchedUnits {
            check: check.clone(),
            admitted: Some(decision.clone()),
            number: 1,
            units: 10,
            left: 10,
            low: 0,
            asked_at: now,
            until: now + 1_000,
        });
        prefetches.write().insert(digest, Arc::clone(&holding));
        assert!(prefetches.spend(&check).is_some());

        let (read, has_read) = mpsc::channel();
        clock.after_reading(move || _ = read.send(()));
        thread::scope(|scope| {
            let state = lock(&holding.state);
            let late = scope.spawn(|| prefetches.spend(&check));
            // A thread that reads the clock before it waits has done so by then.
            let _ = has_read.recv_timeout(Duration::from_millis(50));
            clock.advance(Duration::from_millis(1));
            drop(state);
            assert!(late.join().unwrap().is_none());
        });
    }
}
