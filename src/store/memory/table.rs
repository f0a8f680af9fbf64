//! All records of a store, and decisions on them.

use std::{
    array, iter, mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    capacity::{Capacity, OutOfCapacity},
    keyed_window::{Figures, Preview},
    shard::Shard,
    sweeps::{SHARDS, Sweeps},
};
use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    clock::{Clock, system_time},
    decision::{Decision, LimitStatus},
    error::StoreError,
    key::Digester,
    settlement::{Settled, Settlement},
    window::{ChargeSettlement, CheckContext},
};

/// A check that finds no capacity sweeps on until it has looked at this many keys, which takes less than a millisecond.
const SWEPT_AT_ONCE: usize = 10_000;

/// One status a charge; there is at least one.
type Statuses = (LimitStatus, Vec<LimitStatus>);

/// The state that the clones of a store share.
pub(super) struct Table {
    shards: [LockedShard; SHARDS],
    digester: Digester,
    clock: Clock,
    capacity: Capacity,
    sweeps: Sweeps,
}

/// On cache lines of its own: threads that lock two shards would otherwise wait for each other's lines.
#[derive(Default)]
#[repr(align(128))]
struct LockedShard(Mutex<Shard>);

impl Table {
    pub(super) fn new(clock: Clock, capacity: Capacity) -> Self {
        Self {
            shards: array::from_fn(|_| LockedShard::default()),
            digester: Digester::default(),
            clock,
            capacity,
            sweeps: Sweeps::new(),
        }
    }

    pub(super) fn decide(&self, check: &Check) -> Result<Decision, StoreError> {
        let now = self.clock.now();
        self.sweep_in_passing(now);

        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        let context = CheckContext { now, id, has_caller_id: check.id().is_some() };
        let decision = |counted_at: Option<u64>, statuses| {
            Decision::of_statuses(system_time(counted_at.unwrap_or(now)), id, statuses)
        };
        let error = |error: OutOfCapacity| error.when("deciding a check");
        Ok(match check.only_charge() {
            Some(charge) => {
                let decide = || self.decide_one(charge, context);
                let (figures, counted_at) = self.or_sweep(now, decide).map_err(error)?;
                decision(counted_at, (figures.status(charge), Vec::new()))
            }
            None => {
                let decide = || self.decide_all(check, context);
                let (statuses, counted_at) = self.or_sweep(now, decide).map_err(error)?;
                decision(counted_at, statuses)
            }
        })
    }

    /// Decides a charge that is alone in its check, as most are: one lock, one look-up, and no list.
    #[inline]
    fn decide_one(&self, charge: &Charge, context: CheckContext) -> Result<(Figures, Option<u64>), OutOfCapacity> {
        let digest = self.digest(charge);
        self.lock(shard_of(digest)).decide(digest, charge, context, &self.capacity)
    }

    /// Looks at all charges first, and then counts all of them or none. A check that one of them knows was admitted before,
    /// and is not counted again.
    fn decide_all(&self, check: &Check, context: CheckContext) -> Result<(Statuses, Option<u64>), OutOfCapacity> {
        let digests: Vec<u64> = check.charges().map(|charge| self.digest(charge)).collect();
        let mut locked = LockedShards::of(self, &digests);
        let mut previews: Vec<Preview> = check
            .charges()
            .zip(&digests)
            .map(|(charge, digest)| locked.shard(*digest).preview(*digest, charge, context))
            .collect();
        let known = check
            .charges()
            .zip(&previews)
            .filter_map(|(charge, preview)| Some((charge.is_exact(), preview.counted_at?)));
        // Only an exact log is sure to know the time to the microsecond.
        let counted_at = known.max().map(|(_, at)| at);
        let is_known = counted_at.is_some();
        let refuses = |(charge, preview): (&Charge, &Preview)| preview.refuses && !charge.is_shadow();
        let is_refused = !is_known && check.charges().zip(&previews).any(refuses);
        let is_counted = |preview: &Preview| !(is_known || is_refused || preview.refuses);
        previews.iter_mut().filter(|preview| !is_counted(preview)).for_each(|preview| preview.new = 0);
        let new: usize = previews.iter().map(|preview| preview.new).sum();
        if new > 0 && !self.capacity.is_ample(new) {
            self.take_capacity(&mut locked, check, &digests, &mut previews)?;
        }
        let mut previews = iter::zip(digests, previews);
        let statuses = check.map_charges(|charge| {
            let figures = match previews.next() {
                Some((digest, preview)) if is_counted(&preview) => {
                    locked.shard(digest).admit(digest, charge, context, preview, &self.capacity)
                }
                Some((digest, preview)) => {
                    locked.shard(digest).pass_over(digest, charge, context, (&preview, !is_known), &self.capacity)
                }
                None => Figures::default(),
            };
            figures.status(charge)
        });
        Ok((statuses, counted_at))
    }

    /// Takes capacity for the new entries of all charges, and gives back that of those that are gone. If there is none for
    /// one of them, it only gives back.
    fn take_capacity(
        &self,
        locked: &mut LockedShards<'_>,
        check: &Check,
        digests: &[u64],
        previews: &mut [Preview],
    ) -> Result<(), OutOfCapacity> {
        let mut failure = None;
        for ((charge, digest), preview) in check.charges().zip(digests).zip(&mut *previews) {
            let new = if failure.is_none() { preview.new } else { 0 };
            match locked.shard(*digest).take_capacity(*digest, charge, (preview.gone, new), &self.capacity) {
                Ok(usage) => (preview.usage, preview.gone, preview.new) = (usage, 0, new),
                Err(error) => (preview.new, failure) = (0, Some(error)),
            }
        }
        let Some(failure) = failure else {
            previews.iter_mut().for_each(|preview| preview.new = 0);
            return Ok(());
        };
        for ((charge, digest), preview) in check.charges().zip(digests).zip(previews) {
            locked.shard(*digest).give_back(*digest, charge, preview, &self.capacity);
        }
        Err(failure)
    }

    /// Settles one charge after the other. If one of them finds no capacity, the others are settled all the same.
    pub(super) fn settle(&self, settlement: &Settlement) -> Result<Settled, StoreError> {
        let (now, mut was_applied, mut failure, mut figures) = (self.clock.now(), false, None, Vec::new());
        for (charge, cost) in settlement.accounts() {
            let digest = self.digest(charge);
            let of_charge = ChargeSettlement { charge, cost, id: settlement.id(), at: settlement.at_micros() };
            let settle = || self.lock(shard_of(digest)).settle(digest, now, of_charge, &self.capacity);
            match self.or_sweep(now, settle) {
                Ok((settled, is_known)) => {
                    was_applied |= is_known;
                    figures.push(settled);
                }
                Err(error) => failure = Some(error),
            }
        }
        if let Some(failure) = failure {
            return Err(failure.when("settling an admission"));
        }
        let mut figures = figures.into_iter();
        let status = |charge: &Charge| figures.next().unwrap_or_default().status(charge);
        Ok(Settled::new(Decision::new(settlement.check(), system_time(now), settlement.id(), status), was_applied))
    }

    /// Forgets the key of a charge under its limit.
    pub(super) fn reset(&self, charge: &Charge) {
        let digest = self.digest(charge);
        self.lock(shard_of(digest)).remove(digest, charge, &self.capacity);
    }

    pub(super) fn capacity(&self) -> &Capacity {
        &self.capacity
    }

    pub(super) fn keys(&self) -> usize {
        (0..SHARDS).map(|index| self.lock(index).keys()).sum()
    }

    #[inline]
    fn digest(&self, charge: &Charge) -> u64 {
        self.digester.of_key(charge.limit().name(), charge.key())
    }

    #[inline]
    fn lock(&self, index: usize) -> MutexGuard<'_, Shard> {
        // No code that can panic runs under the lock, and a shard is whole between any two of its operations.
        self.shards[index].0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sweeps the next shard if it is due, and leaves it to another caller if its lock is taken.
    #[inline]
    fn sweep_in_passing(&self, now: u64) {
        if let Some(index) = self.sweeps.next_due(now) {
            if let Ok(mut shard) = self.shards[index].0.try_lock() {
                shard.sweep(now, &self.capacity);
                self.sweeps.has_swept(index, now);
            }
            if index == 0 {
                self.capacity.forget_unused();
            }
        }
    }

    /// Does something that may need capacity. If there is none, sweeps and does it again.
    #[inline]
    fn or_sweep<T>(&self, now: u64, mut act: impl FnMut() -> Result<T, OutOfCapacity>) -> Result<T, OutOfCapacity> {
        let mut has_swept = false;
        loop {
            match act() {
                Err(error) if mem::replace(&mut has_swept, true) || !self.sweep_overdue(now) => return Err(error),
                Err(_) => {}
                outcome => return outcome,
            }
        }
    }

    /// Sweeps overdue shards, and returns whether anything had expired.
    #[cold]
    fn sweep_overdue(&self, now: u64) -> bool {
        let (mut keys, mut is_any) = (0, false);
        for index in 0..SHARDS {
            if keys < SWEPT_AT_ONCE && self.sweeps.is_overdue(index, now) {
                let mut shard = self.lock(index);
                keys += shard.keys();
                is_any |= shard.sweep(now, &self.capacity);
            }
        }
        is_any
    }
}

/// By bits from the middle of a digest: the table in a shard uses the lowest and the highest.
fn shard_of(digest: u64) -> usize {
    (digest >> 32) as usize % SHARDS
}

/// The locks of all shards that a check needs, taken in the order of the shards, so that two checks never wait for each
/// other.
struct LockedShards<'a>(Vec<(usize, MutexGuard<'a, Shard>)>);

impl<'a> LockedShards<'a> {
    fn of(table: &'a Table, digests: &[u64]) -> Self {
        let mut indexes: Vec<usize> = digests.iter().map(|digest| shard_of(*digest)).collect();
        indexes.sort_unstable();
        indexes.dedup();
        Self(indexes.into_iter().map(|index| (index, table.lock(index))).collect())
    }

    /// The shard of one of the digests.
    fn shard(&mut self, digest: u64) -> &mut Shard {
        let index = shard_of(digest);
        let place = self.0.partition_point(|(locked, _)| *locked < index);
        &mut self.0[place].1
    }
}
