//! Stores in this process that fail or never reply.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex},
};

use futures_util::FutureExt;
use tower_sliding_window::{
    Check, Decision, Key, Limit, MemoryStore, Store,
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
    testing::{Fault, FaultyStore},
};
use tower_sliding_window_conformance::Conformance;

/// A store in this process that has this fault until a test sets another.
pub(crate) fn with_fault(fault: Fault) -> FaultyStore {
    let store = FaultyStore::new(MemoryStore::new());
    store.set(fault);
    store
}

/// A store that always fails.
pub(crate) fn failing() -> FaultyStore {
    with_fault(Fault::Fails)
}

/// A store that never replies.
pub(crate) fn silent() -> FaultyStore {
    with_fault(Fault::Hangs)
}

/// A store that remembers the settlements that it is asked for, and may have a fault at them alone.
#[derive(Clone)]
pub(crate) struct Watched {
    checks: FaultyStore,
    settlements: FaultyStore,
    seen: Arc<Mutex<Vec<Settlement>>>,
}

impl Watched {
    pub(crate) fn new(store: MemoryStore) -> Self {
        Self {
            checks: FaultyStore::new(store.clone()),
            settlements: FaultyStore::new(store),
            seen: Arc::default(),
        }
    }

    pub(crate) fn set_for_settlements(&self, fault: Fault) {
        self.settlements.set(fault);
    }
}

impl Store for Watched {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.checks.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.seen.lock().unwrap().push(settlement.clone());
        self.settlements.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.checks.reset(limit, key)
    }
}

/// The costs of each settlement that a store was asked for, whether it failed or not.
pub(crate) fn settled_costs(store: &Watched) -> Vec<Vec<Option<u64>>> {
    let costs = |settlement: &Settlement| settlement.accounts().map(|(_, cost)| cost).collect();
    store.seen.lock().unwrap().iter().map(costs).collect()
}

/// What the conformance suite says of a store; nothing if the store keeps all rules.
pub(crate) async fn broken_rules<S: Store + Clone>(
    suite: &Conformance,
    make: impl AsyncFn(ManualClock) -> S,
) -> String {
    let run = AssertUnwindSafe(suite.run(make)).catch_unwind().await;
    run.err()
        .map_or_else(String::new, |panic| *panic.downcast::<String>().unwrap())
}
