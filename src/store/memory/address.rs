//! Where a slot is found: under which limit, for which key.

use std::sync::Arc;

use super::{holding::Holding, slot::Slot};
use crate::{algorithm::Algorithm, digest::Digester, key::Key, limit::Limit};

/// The name of a limit, its algorithm, and a key, hashed once, for the choice of the shard and for the look-up in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address<'a> {
    hash: u64,
    limit: &'a Limit,
    key: &'a Key,
}

/// A slot, and what it is found by: two cache lines, and no third that they begin or end in.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Place {
    hash: u64,
    key: Key,
    algorithm: Algorithm,
    /// Of all keys under the limit's name.
    pub(super) holding: Arc<Holding>,
    pub(super) slot: Slot,
}

impl<'a> Address<'a> {
    #[inline]
    pub(super) fn new(limit: &'a Limit, key: &'a Key, digester: &Digester) -> Self {
        Self { hash: digester.of_key(limit, key), limit, key }
    }

    pub(super) fn limit(&self) -> &'a Limit {
        self.limit
    }

    /// What the table in a shard goes by, by the lowest and the highest bits.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    /// One of so many shards, by bits from the middle.
    pub(super) fn shard(&self, shards: usize) -> usize {
        (self.hash >> 32) as usize % shards
    }
}

impl Place {
    pub(super) fn new(address: Address<'_>, slot: Slot, holding: Arc<Holding>) -> Self {
        let Address { hash, limit, key } = address;
        Self { hash, key: key.clone(), algorithm: limit.algorithm(), holding, slot }
    }

    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    #[inline]
    pub(super) fn is_at(&self, address: Address<'_>) -> bool {
        self.hash == address.hash
            && self.key == *address.key
            && self.holding.is_of(address.limit)
            && self.algorithm == address.limit.algorithm()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_two_cache_lines() {
        assert_eq!(size_of::<Place>(), 128);
    }
}
