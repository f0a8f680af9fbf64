//! One lock's worth of slots.

use std::sync::Arc;

use hashbrown::HashTable;

use super::{
    address::{Address, Place},
    holding::{Holding, Holdings},
    room::{Full, Room},
    slot::{Look, Outcome, Slot, Standing},
};
use crate::{
    check::Charge,
    settlement::{Account, Settlement},
    window::Attempt,
};

/// Slots in which something is counted: what is refused or free leaves none behind.
#[derive(Debug, Default)]
pub(super) struct Shard {
    places: HashTable<Place>,
    /// Those of the limits that have places here, so that a new key does not meet other shards' keys.
    holdings: Holdings,
}

impl Shard {
    /// Decides a charge that is alone in its check.
    pub(super) fn decide(
        &mut self,
        address: Address<'_>,
        charge: &Charge,
        attempt: Attempt,
        room: &Room,
    ) -> Result<Standing, Full> {
        if let Some(Place { slot, holding, .. }) = self.find(address) {
            return slot.decide(charge, attempt, |gone, new| room.exchange(holding, gone, new));
        }
        let (mut slot, mut holding) = (Slot::new(charge.limit()), None);
        let standing = slot.decide(charge, attempt, |gone, new| {
            if new == 0 {
                return Ok(());
            }
            room.exchange(holding.insert(self.new_holding(address, room)), gone, new)
        })?;
        self.keep(address, slot, holding);
        Ok(standing)
    }

    /// Looks at a charge that is decided together with others.
    pub(super) fn look(&mut self, address: Address<'_>, charge: &Charge, attempt: Attempt) -> Look {
        match self.find(address) {
            Some(place) => place.slot.look(charge, attempt),
            None => Slot::new(charge.limit()).look(charge, attempt),
        }
    }

    /// How a charge stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(&mut self, address: Address<'_>, charge: &Charge, attempt: Attempt) -> Standing {
        match self.find(address) {
            Some(place) => place.slot.refuse(charge, attempt),
            None => Slot::new(charge.limit()).refuse(charge, attempt),
        }
    }

    /// Counts a charge of a check that is admitted, and says how it stands then. The holding is known if it is counted
    /// in a new place.
    pub(super) fn admit(
        &mut self,
        address: Address<'_>,
        charge: &Charge,
        attempt: Attempt,
        holding: Option<Arc<Holding>>,
    ) -> Standing {
        if let Some(place) = self.find(address) {
            return place.slot.admit(charge, attempt);
        }
        let mut slot = Slot::new(charge.limit());
        let standing = slot.admit(charge, attempt);
        self.keep(address, slot, holding);
        standing
    }

    /// Sets what an admission has cost.
    pub(super) fn settle(
        &mut self,
        address: Address<'_>,
        now: u64,
        settlement: &Settlement,
        account: Account<'_>,
        room: &Room,
    ) -> Result<Outcome, Full> {
        if let Some(Place { slot, holding, .. }) = self.find(address) {
            let outcome = slot.settle(now, settlement, account, |gone, new| room.exchange(holding, gone, new));
            if slot.is_empty() {
                self.remove(address, room);
            }
            return outcome;
        }
        let (mut slot, mut holding) = (Slot::new(account.charge().limit()), None);
        let outcome = slot.settle(now, settlement, account, |gone, new| {
            if new == 0 {
                return Ok(());
            }
            room.exchange(holding.insert(self.new_holding(address, room)), gone, new)
        })?;
        self.keep(address, slot, holding);
        Ok(outcome)
    }

    /// Forgets a key under a limit.
    pub(super) fn remove(&mut self, address: Address<'_>, room: &Room) {
        if let Ok(place) = self.places.find_entry(address.hash(), |place| place.is_at(address)) {
            let Place { slot, holding, .. } = place.remove().0;
            room.give_back(&holding, slot.entries());
        }
    }

    /// What the limit of an address holds.
    pub(super) fn holding(&mut self, address: Address<'_>, room: &Room) -> Arc<Holding> {
        match self.find(address) {
            Some(place) => place.holding.clone(),
            None => self.new_holding(address, room),
        }
    }

    /// The same for an address that has no place yet.
    fn new_holding(&mut self, address: Address<'_>, room: &Room) -> Arc<Holding> {
        self.holdings.of(address.limit(), || room.holding(address.limit()))
    }

    #[inline]
    fn find(&mut self, address: Address<'_>) -> Option<&mut Place> {
        self.places.find_mut(address.hash(), |place| place.is_at(address))
    }

    /// Keeps a slot that has no place yet, if there is anything in it: then it has taken room of a holding.
    fn keep(&mut self, address: Address<'_>, slot: Slot, holding: Option<Arc<Holding>>) {
        if let Some(holding) = holding.filter(|_| !slot.is_empty()) {
            self.places.insert_unique(address.hash(), Place::new(address, slot, holding), Place::hash);
        }
    }

    /// Drops what has expired, under every limit and for every key, and says whether that was anything.
    pub(super) fn sweep(&mut self, now: u64, room: &Room) -> bool {
        let mut is_any = false;
        self.places.retain(|Place { slot, holding, .. }| {
            let gone = slot.sweep(now);
            room.give_back(holding, gone);
            is_any |= gone > 0;
            !slot.is_empty()
        });
        // Gives back memory that a crowd of keys left behind.
        if self.places.capacity() / 4 > self.places.len() {
            self.places.shrink_to_fit(Place::hash);
        }
        self.holdings.forget_empty();
        is_any
    }

    pub(super) fn keys(&self) -> usize {
        self.places.len()
    }
}
