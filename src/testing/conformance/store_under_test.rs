//! Any store behind one type, so that the rules are compiled once, and not once for each store.

use std::{future::Future, pin::Pin, sync::Arc};

use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    settlement::{Settled, Settlement},
    store::{LocalState, Store},
};

type Reply<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

#[derive(Clone)]
pub(super) struct StoreUnderTest(Arc<dyn ErasedStore>);

trait ErasedStore: Send + Sync {
    fn decide(&self, check: Check) -> Reply<Decision>;
    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>>;
    fn settle(&self, settlement: Settlement) -> Reply<Settled>;
    fn reset(&self, limit: Limit, key: Key) -> Reply<()>;
    fn local_state(&self) -> Option<&LocalState>;
    fn cloned(&self) -> StoreUnderTest;
}

impl StoreUnderTest {
    pub(super) fn new(store: impl Store) -> Self {
        Self(Arc::new(store))
    }

    /// A clone of the store itself. Clones of this type share one store.
    pub(super) fn of_a_clone(&self) -> Self {
        self.0.cloned()
    }
}

impl<S: Store> ErasedStore for S {
    fn decide(&self, check: Check) -> Reply<Decision> {
        Box::pin(Store::decide(self, check))
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        Store::decide_now(self, check)
    }

    fn settle(&self, settlement: Settlement) -> Reply<Settled> {
        Box::pin(Store::settle(self, settlement))
    }

    fn reset(&self, limit: Limit, key: Key) -> Reply<()> {
        Box::pin(Store::reset(self, limit, key))
    }

    fn local_state(&self) -> Option<&LocalState> {
        Store::local_state(self)
    }

    fn cloned(&self) -> StoreUnderTest {
        StoreUnderTest::new(self.clone())
    }
}

impl Store for StoreUnderTest {
    type Decide = Reply<Decision>;
    type Settle = Reply<Settled>;
    type Reset = Reply<()>;

    fn decide(&self, check: Check) -> Self::Decide {
        ErasedStore::decide(&*self.0, check)
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        ErasedStore::decide_now(&*self.0, check)
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        ErasedStore::settle(&*self.0, settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        ErasedStore::reset(&*self.0, limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        ErasedStore::local_state(&*self.0)
    }
}
