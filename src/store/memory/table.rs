//! A store's records, and the code that decides checks.

use std::{
    array, slice,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    capacity::{CacheLines, Capacity},
    shard::{Shard, Verdict},
};
use crate::{
    check::{AdmissionId, Charge, Check},
    clock::system_time,
    decision::{Decision, Settled, Settlement},
    key::Digester,
    local::lock,
    window::{CheckContext, Figures},
};

/// The number of shards. Each has its own lock, so threads seldom contend.
const SHARDS: usize = 64;

/// All shards are swept within this time, in microseconds, as long as checks arrive.
const SWEEP_CYCLE: u64 = 1_000_000;

/// The time between two sweeps, in microseconds. Each sweep takes one shard.
const SWEEP_INTERVAL: u64 = SWEEP_CYCLE / SHARDS as u64;

/// After a pause, the next check catches up on sweeps. It stops after it has swept this many keys,
/// which takes less than a millisecond.
const SWEPT_AT_ONCE: usize = 10_000;

/// The state that a store's clones share.
pub(super) struct Table {
    shards: [CacheLines<Mutex<Shard>>; SHARDS],
    digester: Digester,
    pub(super) capacity: Capacity,
    /// The time at which the next sweep is due, in microseconds.
    sweep_due: AtomicU64,
}

impl Table {
    pub(super) fn new(capacity: Capacity) -> Self {
        Self {
            shards: array::from_fn(|_| CacheLines::default()),
            digester: Digester::default(),
            capacity,
            sweep_due: AtomicU64::new(0),
        }
    }

    pub(super) fn decide(&self, check: &Check) -> Decision {
        let context = CheckContext {
            now: 0,
            id: check.id().unwrap_or_else(AdmissionId::fresh),
            has_caller_id: check.id().is_some(),
        };
        // The statuses are built after the locks have been released.
        match check.only_charge() {
            Some(charge) => {
                let (figures, at) = self.decide_one(charge, context);
                Decision::new(check, system_time(at), context.id, |charge| {
                    figures.status(charge)
                })
            }
            None => {
                let (figures, at) = self.decide_all(check, context);
                let mut figures = figures.into_iter();
                Decision::new(check, system_time(at), context.id, |charge| {
                    figures.next().unwrap_or_default().status(charge)
                })
            }
        }
    }

    /// The fast path for a single charge, which most checks have: one lock, one look-up, no list.
    /// Also returns the time of the decision.
    #[inline]
    fn decide_one(&self, charge: &Charge, context: CheckContext) -> (Figures, u64) {
        let digest = charge.long_digest(&self.digester);
        let (mut shard, now) = self.locked(|| self.lock(shard_of(digest)));
        let mut record = shard.open(digest, charge, &self.capacity);
        let now = record.opened_at(now);
        let context = CheckContext { now, ..context };
        let look = record.look(charge, context);
        let verdict = Verdict::of(slice::from_ref(&look));
        (record.conclude(&look, context, verdict), verdict.at(now))
    }

    /// Looks at all charges, and then counts all of them or none.
    fn decide_all(&self, check: &Check, context: CheckContext) -> (Vec<Figures>, u64) {
        let digests: Vec<u128> = check
            .charges()
            .map(|charge| charge.long_digest(&self.digester))
            .collect();
        let mut indexes: Vec<usize> = digests.iter().map(|digest| shard_of(*digest)).collect();
        indexes.sort_unstable();
        indexes.dedup();
        // Shards are locked in index order, so that two checks cannot deadlock.
        let (mut shards, mut now) = self.locked(|| {
            let shards = indexes.iter().map(|index| self.lock(*index));
            shards.collect::<Vec<_>>()
        });
        for (charge, digest) in check.charges().zip(&digests) {
            let shard = &mut shards[number_of(*digest, &indexes)];
            now = shard.open(*digest, charge, &self.capacity).opened_at(now);
        }
        let context = CheckContext { now, ..context };
        let mut looks = Vec::with_capacity(digests.len());
        for (charge, digest) in check.charges().zip(&digests) {
            let shard = &mut shards[number_of(*digest, &indexes)];
            let mut record = shard.open(*digest, charge, &self.capacity);
            looks.push(record.look(charge, context));
        }
        let verdict = Verdict::of(&looks);
        let mut figures = Vec::with_capacity(digests.len());
        for (look, digest) in looks.iter().zip(&digests) {
            let shard = &mut shards[number_of(*digest, &indexes)];
            let record = shard.open(*digest, look.charge, &self.capacity);
            figures.push(record.conclude(look, context, verdict));
        }
        (figures, verdict.at(now))
    }

    /// Locks shards, and then reads the clock: a time read before waiting for a lock would be older
    /// than the units that other threads count meanwhile.
    #[inline]
    fn locked<T>(&self, lock: impl Fn() -> T) -> (T, u64) {
        let (shards, now) = (lock(), self.capacity.clock.now());
        let due = self.sweep_due.load(Ordering::Relaxed);
        // If the time is far ahead, it was set before the clock stepped back.
        if due > now && due <= now.saturating_add(SWEEP_INTERVAL) {
            return (shards, now);
        }
        // The sweep locks shards itself, so these have to be released. It may make room for this
        // check.
        drop(shards);
        self.sweep(now, due);
        (lock(), self.capacity.clock.now())
    }

    /// Settles one charge after the other.
    pub(super) fn settle(&self, settlement: &Settlement) -> Settled {
        let mut costs = settlement.accounts().map(|(_, cost)| cost);
        let mut was_applied = false;
        let mut at = 0;
        let statuses = settlement.check.map_charges(|charge| {
            let digest = charge.long_digest(&self.digester);
            let mut shard = self.lock(shard_of(digest));
            let record = shard.open(digest, charge, &self.capacity);
            // Opening a new record may have waited for the cells' lock.
            let now = self.capacity.clock.now();
            let (figures, is_known) =
                record.settle(now, settlement, charge, costs.next().flatten());
            drop(shard);
            at = now;
            was_applied |= is_known;
            figures.status(charge)
        });
        Settled {
            decision: Decision::of_statuses(system_time(at), settlement.id, statuses),
            was_applied,
        }
    }

    /// Forgets a charge's key under its limit.
    pub(super) fn reset(&self, charge: &Charge) {
        let digest = charge.long_digest(&self.digester);
        self.lock(shard_of(digest)).remove(digest, &self.capacity);
    }

    pub(super) fn keys(&self) -> usize {
        (0..SHARDS).map(|index| self.lock(index).keys()).sum()
    }

    #[inline]
    fn lock(&self, index: usize) -> MutexGuard<'_, Shard> {
        lock(&self.shards[index].0)
    }

    /// Makes the sweeps that are due, until another thread takes over. A shard that another thread
    /// has locked is swept in the next cycle.
    #[cold]
    fn sweep(&self, now: u64, mut due: u64) {
        let mut keys = 0;
        for _ in 0..SHARDS {
            let next = due
                .clamp(now.saturating_sub(SWEEP_CYCLE), now)
                .saturating_add(SWEEP_INTERVAL);
            if self
                .sweep_due
                .compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_err()
            {
                return;
            }
            let index = (next / SWEEP_INTERVAL) as usize % SHARDS;
            if let Ok(mut shard) = self.shards[index].0.try_lock() {
                keys += shard.keys();
                shard.sweep(self.capacity.clock.now(), &self.capacity);
            }
            if index == 0 {
                self.capacity.forget_unused();
            }
            if next > now || keys >= SWEPT_AT_ONCE {
                return;
            }
            due = next;
        }
    }
}

/// The index of a digest's shard. It comes from bits in the middle of the digest's lower half,
/// because a shard's hash table uses that half's lowest and highest bits.
fn shard_of(digest: u128) -> usize {
    (digest >> 32) as usize % SHARDS
}

/// A shard's position among these indices, which are sorted.
fn number_of(digest: u128, indexes: &[usize]) -> usize {
    indexes.partition_point(|index| *index < shard_of(digest))
}
