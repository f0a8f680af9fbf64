//! A decision that takes more than one question: where limits have to be chosen first, or room is waited for.

use std::{future::Future, pin::Pin, time::Duration};

use tokio::time::Instant;

use super::{
    claim::{Claim, Record},
    draft::Choices,
};
use crate::{decision::Decision, error::Error, limiter::Limiter, store::Store};

/// In a box: what users' code chooses by cannot be named.
pub(super) type Asking = Pin<Box<dyn Future<Output = Asked> + Send>>;

/// What came of it.
pub(super) struct Asked {
    /// No decision where there was nothing to decide.
    pub(super) outcome: Result<Option<Decision>, Error>,
    pub(super) record: Option<Box<Record>>,
    /// How long the request has waited for decisions by now. A choice is no matter of the store, and takes no time from
    /// layers further in.
    pub(super) waited: Duration,
}

/// What asks for a request: with how much patience, and how long the request has waited already.
pub(super) struct Asker<S> {
    limiter: Limiter<S>,
    patience: Option<Duration>,
    waited: Duration,
}

impl<S> Asker<S> {
    pub(super) fn new(limiter: Limiter<S>, patience: Option<Duration>, waited: Duration) -> Self {
        Self { limiter, patience, waited }
    }
}

impl<S: Store> Asker<S> {
    pub(super) fn ask(self, claim: Claim) -> Asking {
        Box::pin(async move { self.answer(claim).await })
    }

    pub(super) fn choose_and_ask(mut self, mut choices: Choices, is_kept: bool) -> Asking {
        Box::pin(async move {
            let begun = Instant::now();
            let chosen = choices.choose(&self.limiter, self.waited).await;
            let choice = begun.elapsed();
            let Choices { drafts, unchosen, .. } = choices;
            let mut claim = Claim::without(unchosen);
            match chosen.and_then(|()| claim.add_all(drafts, is_kept)) {
                Ok(()) => {
                    self.waited = self.waited.saturating_add(choice);
                    let asked = self.answer(claim).await;
                    Asked { waited: asked.waited.saturating_sub(choice), ..asked }
                }
                Err(error) => Asked { outcome: Err(error), record: claim.record, waited: self.waited },
            }
        })
    }

    async fn answer(mut self, claim: Claim) -> Asked {
        let Claim { check, record, .. } = claim;
        let waited = &mut self.waited;
        let outcome = match (check, self.patience) {
            (Some(check), Some(patience)) => self.limiter.acquire_after(check, patience, waited).await.map(Some),
            (Some(check), None) => self.limiter.check_after(check, waited).await.map(Some),
            (None, _) => Ok(None),
        };
        Asked { outcome, record, waited: self.waited }
    }
}
