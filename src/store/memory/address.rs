//! Where a slot is found: under which limit, for which key.

use std::{
    borrow::Cow,
    hash::{Hash, Hasher},
};

use crate::{algorithm::Algorithm, digest::Digester, key::Key, limit::Limit};

/// The name of a limit, its algorithm, and a key, hashed once, for the choice of the shard and for the look-up in it.
#[derive(Clone, Debug)]
pub(super) struct Address {
    hash: u64,
    limit: Cow<'static, str>,
    algorithm: Algorithm,
    key: Key,
}

impl Address {
    pub(super) fn new(limit: &Limit, key: &Key, digester: &Digester) -> Self {
        let hash = digester.of_key(limit, key);
        Self { hash, limit: limit.shared_name(), algorithm: limit.algorithm(), key: key.clone() }
    }

    /// One of so many shards, by bits from the middle: the table in the shard goes by the lowest and the highest.
    pub(super) fn shard(&self, shards: usize) -> usize {
        (self.hash >> 32) as usize % shards
    }
}

impl PartialEq for Address {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.limit == other.limit && self.algorithm == other.algorithm
    }
}

impl Eq for Address {}

impl Hash for Address {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}
