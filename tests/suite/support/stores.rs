//! Stores in this process that fail or never reply.

use tower_sliding_window::{
    MemoryStore, Settlement,
    testing::{Fault, FaultyStore},
};

/// A store in this process that has this fault until a test sets another.
pub(crate) fn with_fault(fault: Fault) -> FaultyStore<MemoryStore> {
    let store = FaultyStore::new(MemoryStore::new());
    store.set(fault);
    store
}

/// A store that always fails.
pub(crate) fn failing() -> FaultyStore<MemoryStore> {
    with_fault(Fault::Fails)
}

/// A store that never replies.
pub(crate) fn silent() -> FaultyStore<MemoryStore> {
    with_fault(Fault::Hangs)
}

/// The costs of each settlement that a store was asked for.
pub(crate) fn settled_costs(store: &FaultyStore<MemoryStore>) -> Vec<Vec<Option<u64>>> {
    let costs = |settlement: &Settlement| settlement.accounts().map(|(_, cost)| cost).collect();
    store.settlements().iter().map(costs).collect()
}
