//! Any store behind one type, so that the rules are compiled once, and not once for each store.

use std::sync::Arc;

use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
    store::{LocalState, Store, StoreFuture},
};

#[derive(Clone)]
pub(super) struct StoreUnderTest(Arc<dyn ClonedStore>);

trait ClonedStore: Store {
    fn cloned(&self) -> StoreUnderTest;
}

impl<S: Store + Clone> ClonedStore for S {
    fn cloned(&self) -> StoreUnderTest {
        StoreUnderTest::new(self.clone())
    }
}

impl StoreUnderTest {
    pub(super) fn new(store: impl Store + Clone) -> Self {
        Self(Arc::new(store))
    }

    /// A clone of the store itself. Clones of this type share one store.
    pub(super) fn of_a_clone(&self) -> Self {
        (*self.0).cloned()
    }
}

impl Store for StoreUnderTest {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.0.decide(check)
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        self.0.decide_now(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        self.0.local_state()
    }
}
