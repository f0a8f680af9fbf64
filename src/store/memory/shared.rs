//! What the clones of a store share: the shards, and how a check is decided in them.

use std::{
    array, iter, mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{
    address::Address,
    room::{Full, Room},
    shard::Shard,
    slot::{Look, Standing},
    sweeps::{SHARDS, Sweeps},
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

/// A check that finds no room sweeps on until it has looked at so many keys, which takes less than a millisecond.
const SWEPT_AT_ONCE: usize = 10_000;

/// One a charge, of which there is at least one.
type Statuses = (LimitStatus, Vec<LimitStatus>);

pub(super) struct Shared {
    shards: [Mutex<Shard>; SHARDS],
    digester: Digester,
    clock: Clock,
    room: Room,
    sweeps: Sweeps,
}

impl Shared {
    pub(super) fn new(clock: Clock, room: Room) -> Self {
        Self {
            shards: array::from_fn(|_| Mutex::default()),
            digester: Digester::default(),
            clock,
            room,
            sweeps: Sweeps::new(),
        }
    }

    pub(super) fn decide(&self, check: &Check) -> Result<Decision, StoreError> {
        let now = self.clock.now();
        self.sweep_in_passing(now);

        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        let attempt = Attempt { now, id, is_given: check.id().is_some() };
        let decision = |counted_at: Option<u64>, statuses| {
            Decision::of_statuses(system_time(counted_at.unwrap_or(now)), id, statuses)
        };
        let error = |full: Full| full.when("deciding a check");
        Ok(match check.only_charge() {
            Some(charge) => {
                let decide = || self.decide_one(charge, attempt);
                let (standing, counted_at) = self.with_room(now, decide).map_err(error)?;
                decision(counted_at, (standing.of(charge), Vec::new()))
            }
            None => {
                let decide = || self.decide_all(check, attempt);
                let (statuses, counted_at) = self.with_room(now, decide).map_err(error)?;
                decision(counted_at, statuses)
            }
        })
    }

    /// Decides a charge that is alone in its check, as most are: one lock, one look-up, and no list.
    fn decide_one(&self, charge: &Charge, attempt: Attempt) -> Result<(Standing, Option<u64>), Full> {
        let address = self.address(charge.limit(), charge.key());
        self.lock(address.shard(SHARDS)).decide(address, charge, attempt, &self.room)
    }

    /// Looks at all charges first, and then counts all of them, or none. If one of them knows the check, it was admitted
    /// before, and none is counted again.
    fn decide_all(&self, check: &Check, attempt: Attempt) -> Result<(Statuses, Option<u64>), Full> {
        let addresses: Vec<Address<'_>> =
            check.charges().map(|charge| self.address(charge.limit(), charge.key())).collect();
        let mut locked = Locked::of(self, &addresses);
        let mut looks: Vec<Look> = check
            .charges()
            .zip(&addresses)
            .map(|(charge, address)| locked.shard(*address).look(*address, charge, attempt))
            .collect();
        let known =
            check.charges().zip(&looks).filter_map(|(charge, look)| Some((charge.is_exact(), look.counted_at?)));
        // Another than an exact log may not tell the time to the microsecond.
        let counted_at = known.max().map(|(_, at)| at);
        let is_known = counted_at.is_some();
        let refuses = |(charge, look): (&Charge, &Look)| look.refuses && !charge.is_shadow();
        let is_refused = !is_known && check.charges().zip(&looks).any(refuses);
        looks.iter_mut().filter(|look| is_known || is_refused || look.refuses).for_each(|look| look.new = 0);
        let new: usize = looks.iter().map(|look| look.new).sum();
        if new > 0 && !self.room.is_ample(new) {
            self.exchange(&mut locked, &addresses, &mut looks)?;
        }
        let mut places = iter::zip(addresses, looks);
        let statuses = check.map_charges(|charge| {
            let standing = match places.next() {
                Some((address, look)) if is_known => {
                    locked.shard(address).stand(address, charge, attempt, &look, &self.room)
                }
                Some((address, look)) if is_refused || look.refuses => {
                    locked.shard(address).refuse(address, charge, attempt, &look, &self.room)
                }
                Some((address, look)) => locked.shard(address).admit(address, charge, attempt, look, &self.room),
                None => Standing::default(),
            };
            standing.of(charge)
        });
        Ok((statuses, counted_at))
    }

    /// Exchanges the room of what is gone for that of what is new, for all charges; if there is none for one of them, only
    /// gives back.
    fn exchange(&self, locked: &mut Locked<'_>, addresses: &[Address<'_>], looks: &mut [Look]) -> Result<(), Full> {
        let mut full = None;
        for (address, look) in iter::zip(addresses, &mut *looks) {
            let (gone, new) = if full.is_none() { (look.gone, look.new) } else { (look.gone, 0) };
            match locked.shard(*address).exchange(*address, (gone, new), &self.room) {
                Ok(holding) => (look.holding, look.gone, look.new) = (holding, 0, new),
                Err(error) => (look.new, full) = (0, Some(error)),
            }
        }
        let Some(full) = full else {
            looks.iter_mut().for_each(|look| look.new = 0);
            return Ok(());
        };
        for (address, look) in iter::zip(addresses, looks) {
            locked.shard(*address).give_back(*address, look.holding.as_deref(), look.new, &self.room);
        }
        Err(full)
    }

    /// Settles one charge after the other: each is exact by itself. One for which there is no room leaves the others alone.
    pub(super) fn settle(&self, settlement: &Settlement) -> Result<Settled, StoreError> {
        let (now, mut is_known, mut full, mut standings) = (self.clock.now(), false, None, Vec::new());
        for account in settlement.accounts() {
            let address = self.address(account.charge().limit(), account.charge().key());
            let settle = || self.lock(address.shard(SHARDS)).settle(address, now, settlement, account, &self.room);
            match self.with_room(now, settle) {
                Ok(outcome) => {
                    is_known |= outcome.is_known;
                    standings.push(outcome.standing);
                }
                Err(error) => full = Some(error),
            }
        }
        if let Some(full) = full {
            return Err(full.when("settling an admission"));
        }
        let mut standings = standings.into_iter();
        Ok(Settled::new(settlement, system_time(now), is_known, |account| {
            standings.next().unwrap_or_default().of(account.charge())
        }))
    }

    pub(super) fn reset(&self, limit: &Limit, key: &Key) {
        let address = self.address(limit, key);
        self.lock(address.shard(SHARDS)).remove(address, &self.room);
    }

    pub(super) fn room(&self) -> &Room {
        &self.room
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
    #[inline]
    fn sweep_in_passing(&self, now: u64) {
        if let Some(index) = self.sweeps.turn(now) {
            if let Ok(mut shard) = self.shards[index].try_lock() {
                shard.sweep(now, &self.room);
                self.sweeps.has_swept(index, now);
            }
            if index == 0 {
                self.room.forget_empty_holdings();
            }
        }
    }

    /// Does what may need room. If there is none, does it again once more of what has expired is swept.
    #[inline]
    fn with_room<T>(&self, now: u64, mut act: impl FnMut() -> Result<T, Full>) -> Result<T, Full> {
        let mut is_swept = false;
        loop {
            match act() {
                Err(full) if mem::replace(&mut is_swept, true) || !self.make_room(now) => return Err(full),
                Err(_) => {}
                outcome => return outcome,
            }
        }
    }

    /// Sweeps what has not been swept for long, and says whether anything had expired.
    #[cold]
    fn make_room(&self, now: u64) -> bool {
        let (mut keys, mut is_any) = (0, false);
        for index in 0..SHARDS {
            if keys < SWEPT_AT_ONCE && self.sweeps.is_overdue(index, now) {
                let mut shard = self.lock(index);
                keys += shard.keys();
                is_any |= shard.sweep(now, &self.room);
            }
        }
        is_any
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
