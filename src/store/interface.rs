//! The trait of stores.

use std::future::Future;

use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    local::LocalState,
    settlement::{Settled, Settlement},
};

/// Decides checks, and remembers what it admitted. See the [module docs](super).
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

    /// Decides `check` and counts it now, if that needs no waiting. `None`, the default, means that nothing was done, and
    /// [`decide`](Self::decide) has to be called. A store that wraps another need not forward this method.
    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        let _ = check;
        None
    }

    /// Sets the actual cost of an admitted check: see [`settlement`](crate::settlement).
    fn settle(&self, settlement: Settlement) -> Self::Settle;

    /// Forgets the units that `limit` counts for `key`.
    fn reset(&self, limit: Limit, key: Key) -> Self::Reset;

    /// The state that clones of the store share in this process: its [`Breaker`](crate::Breaker) and its
    /// [`DenyCache`](crate::DenyCache). Default: none. Then each limiter has a breaker of its own, and no refusal is
    /// remembered. A store that wraps another returns the other's, if it passes limits and keys on unchanged.
    fn local_state(&self) -> Option<&LocalState> {
        None
    }
}
