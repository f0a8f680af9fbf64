//! The trait of stores.

use std::{fmt, future::Future, pin::Pin, sync::Arc};

use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    local::LocalState,
    settlement::{Settled, Settlement},
};

/// The future of a store's reply.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// Decides checks, and remembers what it admitted. See the [module docs](super).
///
/// Layers and limiters keep a store behind a pointer, so none of their types names it. An `Arc` of a store is a store.
pub trait Store: Send + Sync + 'static {
    /// Decides `check` and, if it is admitted, counts it.
    fn decide(&self, check: Check) -> StoreFuture<Decision>;

    /// Decides `check` and counts it now, if that needs no waiting. `None`, the default, means that nothing was done, and
    /// [`decide`](Self::decide) has to be called. A store that wraps another need not forward this method.
    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        let _ = check;
        None
    }

    /// Sets the actual cost of an admitted check: see [`settlement`](crate::settlement).
    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled>;

    /// Forgets the units that `limit` counts for `key`.
    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()>;

    /// The state that clones of the store share in this process: its [`Breaker`](crate::limiter::Breaker) and its
    /// [refusal cache](crate::Limiter::refusal_cache). Default: none. Then each limiter has a breaker of its own, and no refusal is
    /// remembered. A store that wraps another returns the other's, if it passes limits and keys on unchanged.
    fn local_state(&self) -> Option<&LocalState> {
        None
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        (**self).decide(check)
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        (**self).decide_now(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        (**self).settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        (**self).reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        (**self).local_state()
    }
}

impl fmt::Debug for dyn Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("local_state", &self.local_state()).finish_non_exhaustive()
    }
}
