//! Refusals of the store's local state that may have become wrong.

use crate::{limit::Limit, local::LocalState};

/// Forgets the refusals of limits that may get units back, when it is made and when it is dropped. So no refusal from in
/// between stays in the store's local state.
pub(super) struct StaleRefusals {
    local_state: LocalState,
    limits: Vec<Limit>,
}

impl StaleRefusals {
    pub(super) fn new(local_state: &LocalState, limits: Vec<Limit>) -> Self {
        let refusals = Self { local_state: local_state.clone(), limits };
        refusals.forget();
        refusals
    }

    fn forget(&self) {
        self.limits.iter().for_each(|limit| self.local_state.forget_refusals(limit));
    }
}

impl Drop for StaleRefusals {
    fn drop(&mut self) {
        self.forget();
    }
}
