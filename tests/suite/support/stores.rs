//! Stores that fail or never reply, and one that records its settlements.

use std::{
    future::{Future, Pending, Ready, pending, ready},
    pin::Pin,
    sync::{Arc, Mutex},
};

use tower_sliding_window::{Check, Decision, Key, Limit, MemoryStore, Settled, Settlement, Store, StoreError};

/// A store that always fails.
#[derive(Clone)]
pub(crate) struct Failing;

impl Store for Failing {
    type Decide = Ready<Result<Decision, StoreError>>;
    type Settle = Ready<Result<Settled, StoreError>>;
    type Reset = Ready<Result<(), StoreError>>;

    fn decide(&self, _: Check) -> Self::Decide {
        ready(Err(StoreError::new("deciding a check", "out of order")))
    }

    fn settle(&self, _: Settlement) -> Self::Settle {
        ready(Err(StoreError::new("settling an admission", "out of order")))
    }

    fn reset(&self, _: Limit, _: Key) -> Self::Reset {
        ready(Err(StoreError::new("resetting a key", "out of order")))
    }
}

/// A store that never replies.
#[derive(Clone)]
pub(crate) struct Silent;

impl Store for Silent {
    type Decide = Pending<Result<Decision, StoreError>>;
    type Settle = Pending<Result<Settled, StoreError>>;
    type Reset = Pending<Result<(), StoreError>>;

    fn decide(&self, _: Check) -> Self::Decide {
        pending()
    }

    fn settle(&self, _: Settlement) -> Self::Settle {
        pending()
    }

    fn reset(&self, _: Limit, _: Key) -> Self::Reset {
        pending()
    }
}

/// A store that records its settlements, and may fail to settle.
#[derive(Clone)]
pub(crate) struct Watched {
    store: MemoryStore,
    settles: Settles,
    /// The costs of each settlement.
    settlements: Arc<Mutex<Vec<Vec<Option<u64>>>>>,
}

#[derive(Clone, Copy)]
pub(crate) enum Settles {
    Well,
    Fails,
    Never,
}

impl Watched {
    pub(crate) fn new(store: MemoryStore, settles: Settles) -> Self {
        Self { store, settles, settlements: Arc::default() }
    }

    pub(crate) fn settlements(&self) -> Vec<Vec<Option<u64>>> {
        self.settlements.lock().unwrap().clone()
    }
}

impl Store for Watched {
    type Decide = <MemoryStore as Store>::Decide;
    type Settle = Pin<Box<dyn Future<Output = Result<Settled, StoreError>> + Send>>;
    type Reset = <MemoryStore as Store>::Reset;

    fn decide(&self, check: Check) -> Self::Decide {
        self.store.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        let costs = settlement.accounts().map(|account| account.cost()).collect();
        self.settlements.lock().unwrap().push(costs);
        match self.settles {
            Settles::Well => Box::pin(self.store.settle(settlement)),
            Settles::Fails => Box::pin(Failing.settle(settlement)),
            Settles::Never => Box::pin(Silent.settle(settlement)),
        }
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        self.store.reset(limit, key)
    }
}
