//! A decision that takes more than one question: where limits have to be chosen first, or room is waited for.

use std::{future::Future, pin::Pin};

use super::{
    claim::{Charges, Claim, Record},
    draft::{Draft, choose},
};
use crate::{decision::Decision, error::Error, limiter::Limiter, store::Store};

/// In a box: what users' code chooses by cannot be named.
pub(super) type Asking = Pin<Box<dyn Future<Output = Asked> + Send>>;

/// What came of it.
pub(super) struct Asked {
    /// No decision where no limit was chosen.
    pub(super) outcome: Result<Option<Decision>, Error>,
    pub(super) record: Option<Box<Record>>,
}

/// Chooses, and then decides.
pub(super) fn choose_and_ask<S: Store>(limiter: Limiter<S>, mut drafts: Vec<Draft>, is_kept: bool) -> Asking {
    Box::pin(async move {
        let chosen = choose(&mut drafts, &limiter).await;
        match chosen.and_then(|()| Charges::claim_all(drafts, is_kept)) {
            Ok(Claim { check: Some(check), record }) => {
                let outcome = limiter.check_all(check).await.map(Some);
                Asked { outcome, record }
            }
            Ok(Claim { check: None, record }) => Asked { outcome: Ok(None), record },
            Err(error) => Asked { outcome: Err(error), record: None },
        }
    })
}
