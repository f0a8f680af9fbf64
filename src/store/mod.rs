//! Stores: what decides a check and remembers it.
//!
//! 1. A store decides a [`Check`] in one atomic step: all of its charges or none.
//! 2. A refusal writes nothing: no unit, no longer life for a key.
//! 3. After the last unit has left its window, plus a slack that the store states, nothing of the key is left.
//! 4. A check is charged when its future is first polled, not when it is made; a dropped future may have been charged.
//!
//! [`MemoryStore`] serves one process. `RedisStore` shares its limits between all processes that use the same server.
//! A store of your own implements [`Store`]; the conformance suite in the repository's `tests/conformance.rs` says
//! what it has to get right.

mod clock;
mod memory;
#[cfg(feature = "redis")]
mod redis;

use std::future::Future;

#[cfg(feature = "redis")]
pub use self::redis::{InvalidRedisConfig, RedisFuture, RedisStore, RedisStoreBuilder};
pub use self::{
    clock::ManualClock,
    memory::{MemoryDecide, MemoryStore, MemoryStoreBuilder},
};
use crate::{check::Check, decision::Decision, error::StoreError, key::Key, limit::Limit};

/// What decides a check and remembers it. See the [module docs](self).
///
/// A store is a handle: clones share what they remember. Its futures are associated types, so that a tower service can
/// name its own future without a box.
pub trait Store: Clone + Send + Sync + 'static {
    /// The future of a decision.
    type Decide: Future<Output = Result<Decision, StoreError>> + Send + 'static;

    /// The future of a reset.
    type Reset: Future<Output = Result<(), StoreError>> + Send + 'static;

    /// Decides `check` and, if it is admitted, counts it.
    fn decide(&self, check: Check) -> Self::Decide;

    /// Forgets what `limit` counts for `key`.
    fn reset(&self, limit: Limit, key: Key) -> Self::Reset;
}
