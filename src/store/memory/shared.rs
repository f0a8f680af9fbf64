//! What the clones of a store share: the shards, and how a check is decided in them.

use std::{
    array,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use super::{
    address::Address,
    room::{Full, Room},
    shard::Shard,
    slot::{Look, Standing},
};
use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
    digest::Digester,
    error::StoreError,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
    store::clock::{Clock, system_time},
    window::Attempt,
};

/// Many locks, so that threads seldom meet at one.
const SHARDS: usize = 64;

/// One shard is swept this often, in microseconds, so that all of them are within a second.
const SWEEP_INTERVAL: u64 = 1_000_000 / SHARDS as u64;

pub(super) struct Shared {
    shards: [Mutex<Shard>; SHARDS],
    digester: Digester,
    clock: Clock,
    room: Room,
    /// When the next shard is to be swept.
    next_sweep: AtomicU64,
    /// Which one that is.
    sweeping: AtomicUsize,
}

impl Shared {
    pub(super) fn new(clock: Clock, room: Room) -> Self {
        Self {
            shards: array::from_fn(|_| Mutex::default()),
            digester: Digester::default(),
            clock,
            room,
            next_sweep: AtomicU64::new(0),
            sweeping: AtomicUsize::new(0),
        }
    }

    pub(super) fn decide(&self, check: &Check) -> Result<Decision, StoreError> {
        let now = self.clock.now();
        self.sweep_in_passing(now);

        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        let attempt = Attempt { now, id, is_given: check.id().is_some() };
        let decision = |statuses| Decision::of_statuses(system_time(now), id, statuses);
        Ok(match check.only_charge() {
            Some(charge) => decision((self.decide_one(charge, attempt)?.of(charge), Vec::new())),
            None => decision(self.decide_all(check, attempt)?),
        })
    }

    /// Decides a charge that is alone in its check, as most are: one lock, one look-up, and no list.
    fn decide_one(&self, charge: &Charge, attempt: Attempt) -> Result<Standing, Full> {
        let address = self.address(charge.limit(), charge.key());
        self.lock(address.shard(SHARDS)).decide(address, charge, attempt, &self.room)
    }

    /// Looks at all charges first, and then counts all of them, or none.
    fn decide_all(&self, check: &Check, attempt: Attempt) -> Result<(LimitStatus, Vec<LimitStatus>), Full> {
        let addresses: Vec<Address<'_>> =
            check.charges().map(|charge| self.address(charge.limit(), charge.key())).collect();
        let mut locked = Locked::of(self, &addresses);
        let looks: Vec<Look> = check
            .charges()
            .zip(&addresses)
            .map(|(charge, address)| locked.shard(*address).look(*address, charge, attempt))
            .collect();
        let is_refused = check.charges().zip(&looks).any(|(charge, look)| look.refuses && !charge.is_shadow());
        let admits = |look: &&Look| !is_refused && !look.refuses;
        let (gone, new) = (looks.iter().map(|look| look.gone).sum(), looks.iter().filter(admits).map(|look| look.new));
        self.room.exchange(gone, new.sum())?;
        let mut places = addresses.iter().zip(&looks);
        Ok(check.map_charges(|charge| {
            let standing = match places.next() {
                Some((address, look)) if admits(&look) => locked.shard(*address).admit(*address, charge, attempt),
                Some((address, _)) => locked.shard(*address).refuse(*address, charge, attempt),
                None => Standing::default(),
            };
            standing.of(charge)
        }))
    }

    /// Settles one charge after the other: each is exact by itself.
    pub(super) fn settle(&self, settlement: &Settlement) -> Settled {
        let (now, mut is_known, mut standings) = (self.clock.now(), false, Vec::new());
        for account in settlement.accounts() {
            let address = self.address(account.charge().limit(), account.charge().key());
            let outcome = self.lock(address.shard(SHARDS)).settle(address, now, settlement, account);
            self.room.give_back(outcome.gone);
            self.room.take(outcome.new);
            is_known |= outcome.is_known;
            standings.push(outcome.standing);
        }
        let mut standings = standings.into_iter();
        Settled::new(settlement, system_time(now), is_known, |account| {
            standings.next().unwrap_or_default().of(account.charge())
        })
    }

    pub(super) fn reset(&self, limit: &Limit, key: &Key) {
        let address = self.address(limit, key);
        let gone = self.lock(address.shard(SHARDS)).remove(address);
        self.room.give_back(gone);
    }

    pub(super) fn capacity(&self) -> usize {
        self.room.capacity()
    }

    pub(super) fn keys(&self) -> usize {
        (0..SHARDS).map(|index| self.lock(index).keys()).sum()
    }

    fn address<'a>(&self, limit: &'a Limit, key: &'a Key) -> Address<'a> {
        Address::new(limit, key, &self.digester)
    }

    fn lock(&self, index: usize) -> MutexGuard<'_, Shard> {
        // No code that can panic runs under the lock, and a shard is whole between any two of its operations.
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sweeps the next shard if it is time, and leaves it to somebody else if its lock is taken.
    fn sweep_in_passing(&self, now: u64) {
        let due = self.next_sweep.load(Ordering::Relaxed);
        let next = now.saturating_add(SWEEP_INTERVAL);
        // A due time far ahead is left over from a clock that has stepped back.
        let is_due = due <= now || due > next;
        if is_due && self.next_sweep.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let index = self.sweeping.fetch_add(1, Ordering::Relaxed) % SHARDS;
            if let Ok(mut shard) = self.shards[index].try_lock() {
                self.room.give_back(shard.sweep(now));
            }
        }
    }
}

/// The locks of all shards that a check needs, taken in the order of the shards, so that two checks never wait for
/// each other.
struct Locked<'a>(Vec<(usize, MutexGuard<'a, Shard>)>);

impl<'a> Locked<'a> {
    fn of(shared: &'a Shared, addresses: &[Address<'_>]) -> Self {
        let mut indexes: Vec<usize> = addresses.iter().map(|address| address.shard(SHARDS)).collect();
        indexes.sort_unstable();
        indexes.dedup();
        Self(indexes.into_iter().map(|index| (index, shared.lock(index))).collect())
    }

    /// The shard of one of the addresses.
    fn shard(&mut self, address: Address<'_>) -> &mut Shard {
        let index = address.shard(SHARDS);
        let place = self.0.partition_point(|(locked, _)| *locked < index);
        &mut self.0[place].1
    }
}
