//! A decision that takes more than one question: where limits have to be chosen first, or room is waited for.

use std::{future::Future, pin::Pin, time::Duration};

use super::{
    claim::{Claim, Record},
    draft::{Draft, choose},
};
use crate::{decision::Decision, error::Error, limiter::Limiter, store::Store};

/// In a box: what users' code chooses by cannot be named.
pub(super) type Asking = Pin<Box<dyn Future<Output = Asked> + Send>>;

/// What came of it.
pub(super) struct Asked {
    /// No decision where there was nothing to decide.
    pub(super) outcome: Result<Option<Decision>, Error>,
    pub(super) record: Option<Box<Record>>,
}

/// Who asks, and with how much patience.
pub(super) struct Asker<S> {
    limiter: Limiter<S>,
    patience: Option<Duration>,
}

impl<S> Asker<S> {
    pub(super) fn new(limiter: Limiter<S>, patience: Option<Duration>) -> Self {
        Self { limiter, patience }
    }
}

impl<S: Store> Asker<S> {
    pub(super) fn ask(self, claim: Claim) -> Asking {
        Box::pin(async move { self.answer(claim).await })
    }

    pub(super) fn choose_and_ask(self, mut drafts: Vec<Draft>, is_kept: bool) -> Asking {
        Box::pin(async move {
            let chosen = choose(&mut drafts, &self.limiter).await;
            match chosen.and_then(|()| Claim::of(drafts, is_kept)) {
                Ok(claim) => self.answer(claim).await,
                Err(error) => Asked { outcome: Err(error), record: None },
            }
        })
    }

    async fn answer(&self, claim: Claim) -> Asked {
        let Claim { check, record, .. } = claim;
        let outcome = match (check, self.patience) {
            (Some(check), Some(patience)) => self.limiter.acquire_all(check, patience).await.map(Some),
            (Some(check), None) => self.limiter.check_all(check).await.map(Some),
            (None, _) => Ok(None),
        };
        Asked { outcome, record }
    }
}
