//! Stores: what decides a check and remembers it.
//!
//! 1. A store decides a [`Check`] in one atomic step: all of its charges or none.
//! 2. A refusal writes nothing: no unit, no longer life for a key.
//! 3. After the last unit has left its window, plus a slack that the store states, nothing of the key is left.
//! 4. A settlement is exact, counts once, and gives back nothing that was not spent.
//! 5. A check whose id any of its limits still knows was admitted whole: it is admitted, and none of them is charged again.
//!    The decision tells when it was admitted.
//! 6. A charge that [takes nothing](crate::Charge::takes_nothing) refuses and is not counted. One that is
//!    [spent](crate::Charge::is_spent) is counted and never refuses.
//! 7. A status tells which of its units are [reserved](crate::LimitStatus::with_reserved).
//! 8. A check is charged when its future is first polled, not when it is made; a dropped future may have been charged.
//!    What takes no waiting is also decided [without a future](Store::decide_now), and charged then: so a layer on a
//!    [`MemoryStore`] charges when its service is called.
//!
//! [`MemoryStore`] serves one process. `RedisStore` shares its limits between all processes that use the same server.
//! A store of your own implements [`Store`]; the conformance suite, `tests/suite/conformance.rs` in the repository, says
//! what it has to get right. One that wraps another is short:
//!
//! ```
//! use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
//! use tower_sliding_window::{Check, Key, Limit, MemoryStore, Settlement, Store};
//!
//! /// Counts the checks that pass through it.
//! #[derive(Clone)]
//! struct Counted<S> {
//!     store: S,
//!     checks: Arc<AtomicU64>,
//! }
//!
//! impl<S: Store> Store for Counted<S> {
//!     type Decide = S::Decide;
//!     type Settle = S::Settle;
//!     type Reset = S::Reset;
//!
//!     fn decide(&self, check: Check) -> S::Decide {
//!         self.checks.fetch_add(1, Ordering::Relaxed);
//!         self.store.decide(check)
//!     }
//!
//!     fn settle(&self, settlement: Settlement) -> S::Settle {
//!         self.store.settle(settlement)
//!     }
//!
//!     fn reset(&self, limit: Limit, key: Key) -> S::Reset {
//!         self.store.reset(limit, key)
//!     }
//! }
//! # fn is_store(_: impl Store) {}
//! # is_store(Counted { store: MemoryStore::new(), checks: Arc::default() });
//! ```

mod breaker;
mod clock;
mod deny_cache;
mod events;
mod health;
mod local_state;
mod memory;
#[cfg(feature = "redis")]
mod redis;

use std::future::Future;

#[cfg(feature = "redis")]
pub use self::redis::{InvalidRedisConfig, RedisDecide, RedisReset, RedisSettle, RedisStore, RedisStoreBuilder};
pub use self::{
    breaker::Breaker,
    clock::ManualClock,
    deny_cache::DenyCache,
    local_state::LocalState,
    memory::{MemoryDecide, MemoryStore, MemoryStoreBuilder},
};
pub(crate) use self::{
    breaker::Circuit,
    deny_cache::{Question, Refusals},
};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
};

/// What decides in this process, in the place of a store that cannot.
pub(crate) type InProcess = MemoryStore;

/// What decides a check and remembers it. See the [module docs](self).
///
/// A store is a handle: clones share what they remember. Its futures are associated types, so that a tower service can
/// name its own future without a box.
pub trait Store: Clone + Send + Sync + 'static {
    /// The future of a decision.
    type Decide: Future<Output = Result<Decision, StoreError>> + Send + 'static;

    /// The future of a settlement.
    type Settle: Future<Output = Result<Settled, StoreError>> + Send + 'static;

    /// The future of a reset.
    type Reset: Future<Output = Result<(), StoreError>> + Send + 'static;

    /// Decides `check` and, if it is admitted, counts it.
    fn decide(&self, check: Check) -> Self::Decide;

    /// Decides `check` without a future, and counts it now if it is admitted, where that takes no waiting. `None` says
    /// that it would: then nothing has been done, and [`decide`](Self::decide) is asked. Default: `None`. A store that
    /// wraps another need not hand this on: then it is asked by `decide` alone.
    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        let _ = check;
        None
    }

    /// Sets what an admitted check has really cost: see [`settlement`](crate::settlement).
    fn settle(&self, settlement: Settlement) -> Self::Settle;

    /// Forgets what `limit` counts for `key`.
    fn reset(&self, limit: Limit, key: Key) -> Self::Reset;

    /// What clones of the store share in this process, if they do: whether it answers, by its [`Breaker`], and what it has
    /// refused, by its [`DenyCache`]. Default: nothing. Then each limiter has a breaker of its own, and no refusal is
    /// remembered. A store that wraps another hands on the other's local state, if it hands on limits and keys as they are.
    fn local_state(&self) -> Option<&LocalState> {
        None
    }
}
