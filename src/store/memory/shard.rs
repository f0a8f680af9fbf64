//! One lock's worth of slots.

use hashbrown::HashTable;

use super::{
    address::{Address, Place},
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
        if let Some(slot) = self.find(address) {
            return slot.decide(charge, attempt, room);
        }
        let mut slot = Slot::new(charge.limit());
        let standing = slot.decide(charge, attempt, room)?;
        self.keep(address, slot);
        Ok(standing)
    }

    /// Looks at a charge that is decided together with others.
    pub(super) fn look(&mut self, address: Address<'_>, charge: &Charge, attempt: Attempt) -> Look {
        self.find(address)
            .map_or_else(|| Slot::new(charge.limit()).look(charge, attempt), |slot| slot.look(charge, attempt))
    }

    /// How a charge stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(&mut self, address: Address<'_>, charge: &Charge, attempt: Attempt) -> Standing {
        self.find(address)
            .map_or_else(|| Slot::new(charge.limit()).refuse(charge, attempt), |slot| slot.refuse(charge, attempt))
    }

    /// Counts a charge of a check that is admitted, and says how it stands then.
    pub(super) fn admit(&mut self, address: Address<'_>, charge: &Charge, attempt: Attempt) -> Standing {
        if let Some(slot) = self.find(address) {
            return slot.admit(charge, attempt);
        }
        let mut slot = Slot::new(charge.limit());
        let standing = slot.admit(charge, attempt);
        self.keep(address, slot);
        standing
    }

    /// Sets what an admission has cost.
    pub(super) fn settle(
        &mut self,
        address: Address<'_>,
        now: u64,
        settlement: &Settlement,
        account: Account<'_>,
    ) -> Outcome {
        let Some(slot) = self.find(address) else {
            let mut slot = Slot::new(account.charge().limit());
            let outcome = slot.settle(now, settlement, account);
            self.keep(address, slot);
            return outcome;
        };
        let outcome = slot.settle(now, settlement, account);
        if slot.is_empty() {
            self.remove(address);
        }
        outcome
    }

    /// Forgets a key under a limit, and says how many entries that were.
    pub(super) fn remove(&mut self, address: Address<'_>) -> usize {
        let place = self.places.find_entry(address.hash(), |place| place.is_at(address));
        place.map_or(0, |place| place.remove().0.slot.entries())
    }

    #[inline]
    fn find(&mut self, address: Address<'_>) -> Option<&mut Slot> {
        self.places.find_mut(address.hash(), |place| place.is_at(address)).map(|place| &mut place.slot)
    }

    /// Keeps a slot that has no place yet, if there is anything in it.
    fn keep(&mut self, address: Address<'_>, slot: Slot) {
        if !slot.is_empty() {
            self.places.insert_unique(address.hash(), Place::new(address, slot), Place::hash);
        }
    }

    /// Drops what has expired, under every limit and for every key, and says how many entries that were.
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        let mut gone = 0;
        self.places.retain(|Place { slot, .. }| {
            gone += slot.sweep(now);
            !slot.is_empty()
        });
        // Gives back memory that a crowd of keys left behind.
        if self.places.capacity() / 4 > self.places.len() {
            self.places.shrink_to_fit(Place::hash);
        }
        gone
    }

    pub(super) fn keys(&self) -> usize {
        self.places.len()
    }
}
