//! Finds the entries of a long log whose ids callers have given.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

use crate::admission::AdmissionId;

/// The map is in so many parts: one that grows, which takes as long as it has entries, is a small part of all.
const PARTS: usize = 256;

/// At which time the entry stands that has an id and so many units. It may name a time at which there is none any more.
#[derive(Debug, Default)]
pub(super) struct Ids {
    hasher: RandomState,
    parts: Vec<HashMap<(AdmissionId, u64), u64>>,
}

impl Ids {
    /// The time at which an entry with this id and so many units stands, if there is one.
    pub(super) fn time_of(&self, id: AdmissionId, units: u64) -> Option<u64> {
        self.parts.get(self.part(id))?.get(&(id, units)).copied()
    }

    /// Remembers one. All that was before the oldest has left.
    pub(super) fn know(&mut self, id: AdmissionId, units: u64, at: u64, oldest: u64) {
        if self.parts.is_empty() {
            self.parts.resize_with(PARTS, HashMap::new);
        }
        let part = self.part(id);
        let Some(part) = self.parts.get_mut(part) else { return };
        let room = part.capacity();
        if part.len() == room {
            part.retain(|_, at| *at >= oldest);
            // Not to be looked through again soon.
            if part.len() > room / 2 {
                part.reserve(room);
            }
        }
        part.insert((id, units), at);
    }

    pub(super) fn forget(&mut self, id: AdmissionId, units: u64) {
        let part = self.part(id);
        if let Some(part) = self.parts.get_mut(part) {
            part.remove(&(id, units));
        }
    }

    fn part(&self, id: AdmissionId) -> usize {
        self.hasher.hash_one(id) as usize % PARTS
    }
}
