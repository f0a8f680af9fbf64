//! One lock's worth of slots.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::BuildHasherDefault,
};

use super::{
    address::Address,
    room::{Full, Room},
    slot::{Look, Outcome, Slot},
};
use crate::{
    check::Charge,
    decision::LimitStatus,
    prehashed::Prehashed,
    settlement::{Account, Settlement},
    window::Attempt,
};

/// Slots in which something is counted: what is refused or free leaves none behind.
#[derive(Debug, Default)]
pub(super) struct Shard {
    slots: HashMap<Address, Slot, BuildHasherDefault<Prehashed>>,
}

impl Shard {
    /// Decides a charge that is alone in its check, with one look-up.
    pub(super) fn decide(
        &mut self,
        address: Address,
        charge: &Charge,
        attempt: Attempt,
        room: &Room,
    ) -> Result<LimitStatus, Full> {
        match self.slots.entry(address) {
            Entry::Occupied(mut slot) => slot.get_mut().decide(charge, attempt, room),
            Entry::Vacant(place) => {
                let mut slot = Slot::new(charge.limit());
                let status = slot.decide(charge, attempt, room)?;
                if !slot.is_empty() {
                    place.insert(slot);
                }
                Ok(status)
            }
        }
    }

    /// Looks at a charge that is decided together with others.
    pub(super) fn look(&mut self, address: &Address, charge: &Charge, attempt: Attempt) -> Look {
        self.slots
            .get_mut(address)
            .map_or_else(|| Slot::new(charge.limit()).look(charge, attempt), |slot| slot.look(charge, attempt))
    }

    /// How a charge stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(&mut self, address: &Address, charge: &Charge, attempt: Attempt) -> LimitStatus {
        self.slots
            .get_mut(address)
            .map_or_else(|| Slot::new(charge.limit()).refuse(charge, attempt), |slot| slot.refuse(charge, attempt))
    }

    /// Counts a charge of a check that is admitted, and says how it stands then.
    pub(super) fn admit(&mut self, address: &Address, charge: &Charge, attempt: Attempt) -> LimitStatus {
        if let Some(slot) = self.slots.get_mut(address) {
            return slot.admit(charge, attempt);
        }
        let mut slot = Slot::new(charge.limit());
        let status = slot.admit(charge, attempt);
        if !slot.is_empty() {
            self.slots.insert(address.clone(), slot);
        }
        status
    }

    /// Sets what an admission has cost.
    pub(super) fn settle(
        &mut self,
        address: &Address,
        now: u64,
        settlement: &Settlement,
        account: Account<'_>,
    ) -> Outcome {
        let Some(slot) = self.slots.get_mut(address) else {
            return Slot::new(account.charge().limit()).settle(now, settlement, account);
        };
        let outcome = slot.settle(now, settlement, account);
        if slot.is_empty() {
            self.slots.remove(address);
        }
        outcome
    }

    /// Forgets a key under a limit, and says how many entries that were.
    pub(super) fn remove(&mut self, address: &Address) -> usize {
        self.slots.remove(address).map_or(0, |slot| slot.entries())
    }

    /// Drops what has expired, under every limit and for every key, and says how many entries that were.
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        let mut gone = 0;
        self.slots.retain(|_, slot| {
            gone += slot.sweep(now);
            !slot.is_empty()
        });
        // Gives back memory that a crowd of keys left behind.
        if self.slots.capacity() / 4 > self.slots.len() {
            self.slots.shrink_to_fit();
        }
        gone
    }

    pub(super) fn keys(&self) -> usize {
        self.slots.len()
    }
}
