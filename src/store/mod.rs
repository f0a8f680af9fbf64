//! Stores, which decide checks and remember what they admitted.
//!
//! 1. A store decides a [`Check`](crate::Check) in one atomic step: all of its charges or none.
//! 2. A refusal adds nothing: no units, and no longer life for a key. It may drop entries that have left the window.
//! 3. After the last unit has left its window, and a slack that the store states, nothing of the key is left.
//! 4. A settlement is exact, counts once, and gives back nothing that was not spent.
//! 5. A check whose id any of its limits still knows has been admitted before: it is admitted again without being counted,
//!    and the decision says when it was admitted.
//! 6. A charge that [takes nothing](crate::Charge::takes_nothing) may refuse and is not counted. A charge that is
//!    [spent](crate::Charge::is_spent) is counted and never refuses.
//! 7. A status says how many of its units are [reserved](crate::LimitStatus::with_reserved).
//! 8. A check is counted when its future is first polled, not when it is made; a dropped future may have counted it. A
//!    decision that needs no waiting may be made [without a future](Store::decide_now), and is counted then: so a layer on a
//!    [`MemoryStore`] counts when its service is called.
//!
//! [`MemoryStore`] serves one process. `RedisStore` shares its limits between all processes that use the same server.
//! [`AnyStore`] is either of them, chosen at run time.
//! A store of your own implements [`Store`]; the conformance suite, `tests/suite/stores/conformance.rs` in the repository, shows
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

mod any;
mod breaker;
mod breaker_state;
mod clock;
mod deny_cache;
mod interface;
mod local_state;
mod memory;
#[cfg(feature = "redis")]
mod redis;
mod refusals;

#[cfg(feature = "redis")]
pub use self::redis::{
    InvalidRedisConfig, RedisCall, RedisDecide, RedisReset, RedisSettle, RedisStore, RedisStoreBuilder,
};
pub use self::{
    any::{AnyDecide, AnyFuture, AnyReset, AnySettle, AnyStore, InvalidStoreUrl},
    breaker::Breaker,
    clock::ManualClock,
    deny_cache::DenyCache,
    interface::Store,
    local_state::LocalState,
    memory::{MemoryDecide, MemoryStore, MemoryStoreBuilder},
};
pub(crate) use self::{
    breaker_state::SharedBreaker,
    refusals::{Lookup, Recall, Refusals},
};
