//! Stores that do not decide.

use std::future::{Pending, Ready, pending, ready};

use tower_sliding_window::{Check, Decision, Key, Limit, Settled, Settlement, Store, StoreError};

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

/// A store that never answers.
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
