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
    /// Decides a charge that is alone in its check, and says when it was counted if it was before.
    pub(super) fn decide(
        &mut self,
        address: Address<'_>,
        charge: &Charge,
        attempt: Attempt,
        room: &Room,
    ) -> Result<(Standing, Option<u64>), Full> {
        if let Some(Place { slot, holding, .. }) = self.find(address) {
            return slot.decide(charge, attempt, |gone, new| room.exchange(holding, gone, new));
        }
        let (mut slot, mut holding) = (Slot::new(charge.limit()), None);
        let decided = slot.decide(charge, attempt, |gone, new| {
            if new == 0 {
                return Ok(());
            }
            room.exchange(holding.insert(self.new_holding(address, room)), gone, new)
        })?;
        self.keep(address, slot, holding);
        Ok(decided)
    }

    /// Looks at a charge that is decided together with others.
    pub(super) fn look(&mut self, address: Address<'_>, charge: &Charge, attempt: Attempt) -> Look {
        match self.find(address) {
            Some(place) => place.slot.look(charge, attempt),
            None => Slot::new(charge.limit()).look(charge, attempt),
        }
    }

    /// How a charge stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(
        &mut self,
        address: Address<'_>,
        charge: &Charge,
        attempt: Attempt,
        look: &Look,
        room: &Room,
    ) -> Standing {
        match self.find(address) {
            Some(Place { slot, holding, .. }) => {
                room.give_back(holding, look.gone);
                slot.refuse(charge, attempt)
            }
            None => Slot::new(charge.limit()).refuse(charge, attempt),
        }
    }

    /// How a charge stands in a check that was counted before.
    pub(super) fn stand(
        &mut self,
        address: Address<'_>,
        charge: &Charge,
        attempt: Attempt,
        look: &Look,
        room: &Room,
    ) -> Standing {
        match self.find(address) {
            Some(Place { slot, holding, .. }) => {
                room.give_back(holding, look.gone);
                slot.stand(charge, attempt)
            }
            None => Standing::default(),
        }
    }

    /// Counts a charge of a check that is admitted, and says how it stands then.
    pub(super) fn admit(
        &mut self,
        address: Address<'_>,
        charge: &Charge,
        attempt: Attempt,
        look: Look,
        room: &Room,
    ) -> Standing {
        if let Some(Place { slot, holding, .. }) = self.find(address) {
            room.change(holding, look.gone, look.new);
            return slot.admit(charge, attempt);
        }
        let mut slot = Slot::new(charge.limit());
        let standing = slot.admit(charge, attempt);
        if !slot.is_empty() {
            let holding = look.holding.unwrap_or_else(|| self.new_holding(address, room));
            room.change(&holding, look.gone, look.new);
            self.keep(address, slot, Some(holding));
        }
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

    /// Exchanges the room of what is gone for that of what is new, and returns the holding if there is no place yet.
    pub(super) fn exchange(
        &mut self,
        address: Address<'_>,
        (gone, new): (usize, usize),
        room: &Room,
    ) -> Result<Option<Arc<Holding>>, Full> {
        if let Some(place) = self.find(address) {
            room.exchange(&place.holding, gone, new)?;
            return Ok(None);
        }
        if new == 0 {
            return Ok(None);
        }
        let holding = self.new_holding(address, room);
        room.exchange(&holding, gone, new)?;
        Ok(Some(holding))
    }

    /// Gives back room that was taken, or of what is gone.
    pub(super) fn give_back(&mut self, address: Address<'_>, holding: Option<&Holding>, entries: usize, room: &Room) {
        if let Some(holding) = holding.or_else(|| self.find(address).map(|place| &*place.holding)) {
            room.give_back(holding, entries);
        }
    }

    /// The holding of an address that has no place yet.
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
