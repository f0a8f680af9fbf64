//! All records of a store, and the decisions of checks by these records.

use std::{
    array, slice,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use super::{
    capacity::Capacity,
    shard::{Look, Shard, Verdict},
};
use crate::{
    check::{AdmissionId, Charge, Check},
    clock::{Clock, system_time},
    decision::{Decision, Settled, Settlement},
    key::Digester,
    local::lock,
    window::{CheckContext, Figures},
};

/// The number of shards. Each shard has a lock, and there are many shards, so that threads seldom
/// wait for each other.
const SHARDS: usize = 64;

/// The time within which all shards are swept, in microseconds, as long as checks arrive.
const SWEEP_CYCLE: u64 = 1_000_000;

/// After a check that found no room, the next check sweeps overdue shards. It stops when it has
/// swept this many keys, which takes less than a millisecond.
const SWEPT_AT_ONCE: usize = 10_000;

/// The state that the clones of a store share.
pub(super) struct Table {
    shards: [LockedShard; SHARDS],
    digester: Digester,
    pub(super) clock: Clock,
    pub(super) capacity: Capacity,
    sweep_due: AtomicU64,
    next_swept: AtomicUsize,
}

/// A shard behind its lock, in cache lines of its own. If shards shared cache lines, threads that
/// lock different shards would wait for each other.
#[derive(Default)]
#[repr(align(128))]
struct LockedShard {
    shard: Mutex<Shard>,
    swept_at: AtomicU64,
}

impl Table {
    pub(super) fn new(clock: Clock, capacity: Capacity) -> Self {
        Self {
            shards: array::from_fn(|_| LockedShard::default()),
            digester: Digester::default(),
            clock,
            capacity,
            sweep_due: AtomicU64::new(0),
            next_swept: AtomicUsize::new(0),
        }
    }

    pub(super) fn decide(&self, check: &Check) -> Decision {
        let now = self.clock.now();
        self.sweep_in_passing(now);

        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        let context = CheckContext { now, id, has_caller_id: check.id().is_some() };
        let decision = |verdict: Verdict, statuses| {
            let at = if let Verdict::Known(at) = verdict { at } else { now };
            Decision::of_statuses(system_time(at), id, statuses)
        };
        // Statuses are made after the locks are free.
        match check.only_charge() {
            Some(charge) => {
                let (figures, verdict) = self.decide_one(charge, context);
                decision(verdict, (figures.status(charge), Vec::new()))
            }
            None => {
                let (figures, verdict) = self.decide_all(check, context);
                let mut figures = figures.into_iter();
                decision(verdict, check.map_charges(|charge| figures.next().unwrap_or_default().status(charge)))
            }
        }
    }

    /// Decides a check of a single charge, as most checks are. This takes one lock, one look-up,
    /// and no list.
    #[inline]
    fn decide_one(&self, charge: &Charge, context: CheckContext) -> (Figures, Verdict) {
        let digest = charge.digest(&self.digester);
        let mut shard = self.lock(shard_of(digest));
        let mut place = shard.place(digest, charge, context.now, &self.capacity);
        let look = place.look(charge, context);
        let verdict = Verdict::of(slice::from_ref(&look));
        (place.conclude(&look, context, verdict), verdict)
    }

    /// Looks at all charges first, and then counts all of them or none.
    fn decide_all(&self, check: &Check, context: CheckContext) -> (Vec<Figures>, Verdict) {
        let digests: Vec<u64> = check.charges().map(|charge| charge.digest(&self.digester)).collect();
        let mut indexes: Vec<usize> = digests.iter().map(|digest| shard_of(*digest)).collect();
        indexes.sort_unstable();
        indexes.dedup();
        // The shards are locked in the order of their indices, so that two checks never block each
        // other for ever.
        let mut shards: Vec<_> = indexes.iter().map(|index| self.lock(*index)).collect();
        let number_of = |digest| indexes.partition_point(|index| *index < shard_of(digest));
        let charges = check.charges().zip(&digests);
        let looks: Vec<_> = charges
            .map(|(charge, digest)| {
                let shard = &mut shards[number_of(*digest)];
                shard.place(*digest, charge, context.now, &self.capacity).look(charge, context)
            })
            .collect();
        let verdict = Verdict::of(&looks);
        let conclude = |(look, digest): (&Look<'_>, &u64)| {
            let shard = &mut shards[number_of(*digest)];
            shard.place(*digest, look.charge, context.now, &self.capacity).conclude(look, context, verdict)
        };
        (looks.iter().zip(&digests).map(conclude).collect(), verdict)
    }

    /// Settles one charge after the other.
    pub(super) fn settle(&self, settlement: &Settlement) -> Settled {
        let now = self.clock.now();
        let mut was_applied = false;
        let mut figures = Vec::new();
        for (charge, cost) in settlement.accounts() {
            let digest = charge.digest(&self.digester);
            let mut shard = self.lock(shard_of(digest));
            let (settled, is_known) =
                shard.place(digest, charge, now, &self.capacity).settle(now, settlement, charge, cost);
            was_applied |= is_known;
            figures.push(settled);
        }
        let mut figures = figures.into_iter();
        let status = |charge: &Charge| figures.next().unwrap_or_default().status(charge);
        Settled { decision: Decision::new(&settlement.check, system_time(now), settlement.id, status), was_applied }
    }

    /// Forgets the key of a charge under its limit.
    pub(super) fn reset(&self, charge: &Charge) {
        let digest = charge.digest(&self.digester);
        self.lock(shard_of(digest)).remove(digest, charge, &self.capacity);
    }

    pub(super) fn keys(&self) -> usize {
        (0..SHARDS).map(|index| self.lock(index).keys()).sum()
    }

    #[inline]
    fn lock(&self, index: usize) -> MutexGuard<'_, Shard> {
        lock(&self.shards[index].shard)
    }

    /// Sweeps the next shard if a sweep is due. If the lock of that shard is taken, the shard waits
    /// for the next cycle. Sweeps overdue shards as well if a limit has had no room since the last
    /// call.
    #[inline]
    fn sweep_in_passing(&self, now: u64) {
        let due = self.sweep_due.load(Ordering::Relaxed);
        let next = now.saturating_add(SWEEP_CYCLE / SHARDS as u64);
        // A time far ahead is left over from before the clock stepped back.
        let is_due = due <= now || due > next;
        if is_due && self.sweep_due.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.sweep_next(now);
        }
        if self.capacity.was_lacking() {
            self.sweep_overdue(now);
        }
    }

    #[cold]
    fn sweep_next(&self, now: u64) {
        let index = self.next_swept.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let LockedShard { shard, swept_at } = &self.shards[index];
        if let Ok(mut shard) = shard.try_lock() {
            shard.sweep(now, &self.capacity);
            swept_at.store(now, Ordering::Relaxed);
        }
        if index == 0 {
            self.capacity.forget_unused(now);
        }
    }

    /// Sweeps shards that have not been swept for a whole cycle. If several threads come at once,
    /// only one of them sweeps a given shard.
    #[cold]
    fn sweep_overdue(&self, now: u64) {
        let mut keys = 0;
        for (index, LockedShard { swept_at, .. }) in self.shards.iter().enumerate() {
            let swept = swept_at.load(Ordering::Relaxed);
            let is_overdue = keys < SWEPT_AT_ONCE && (swept > now || now - swept >= SWEEP_CYCLE);
            if is_overdue && swept_at.compare_exchange(swept, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                let mut shard = self.lock(index);
                keys += shard.keys();
                shard.sweep(now, &self.capacity);
            }
        }
    }
}

/// The index of the shard of a digest. Bits from the middle of the digest choose it, because the
/// hash table in a shard uses the lowest and the highest bits.
fn shard_of(digest: u64) -> usize {
    (digest >> 32) as usize % SHARDS
}
