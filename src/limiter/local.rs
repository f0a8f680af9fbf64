//! Decides in the process while the store cannot. [`Share`] has the rules.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use super::failure::Share;
use crate::{
    check::Check,
    decision::Decision,
    error::{Error, StoreError},
    settlement::{Settled, Settlement},
    store::{InProcess, Store},
};

/// What a limiter and its clones have admitted without their store. Made by the first decision.
#[derive(Clone, Default)]
pub(super) struct Local(Arc<OnceLock<InProcess>>);

impl Local {
    /// Decides a check that the store has failed to decide, under a share of its limits; the error where that cannot
    /// admit it at any time.
    pub(super) fn decide(&self, check: &Check, share: Share, error: Error) -> Result<Decision, Error> {
        let Some(check) = check.under(|limit| share.of(limit)) else { return Err(error) };
        match self.store().decide_now(&check) {
            Some(Ok(decision)) => Ok(decision.instead_of(error)),
            // Full. Why the store itself does not decide is of more use.
            Some(Err(_)) | None => Err(error),
        }
    }

    pub(super) async fn count(&self, spent: Check) -> Result<Decision, StoreError> {
        self.store().decide(spent).await
    }

    pub(super) async fn settle(&self, settlement: Settlement) -> Result<Settled, StoreError> {
        self.store().settle(settlement).await
    }

    fn store(&self) -> &InProcess {
        self.0.get_or_init(InProcess::new)
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Local").field(&self.0.get()).finish()
    }
}
