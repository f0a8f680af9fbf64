//! What one limit makes of a request, before its check is whole.

use std::{future::poll_fn, num::NonZeroU32, pin::Pin, sync::Arc, task::Poll, time::Duration};

use http::request::Parts;

use super::{rejection::Rejection, shadow::LeftOut};
use crate::{
    check::{Charge, NeverFits},
    error::{ChoiceError, Error},
    key::Key,
    limit::Limit,
    limiter::{FailureMode, Limiter},
    split::Split,
    store::Store,
};

/// What one limit makes of a request.
pub(super) enum Draft {
    Charge(Charge),
    /// The limit is in the shadow, and cannot charge the request.
    LeftOut(LeftOut),
    /// There is no such limit for this request.
    Nothing,
    /// The limit has to be chosen first.
    Open(Open),
    Choosing(Choosing),
}

/// A limit that is to be chosen, and what is to be charged to it.
pub(super) struct Open {
    pub(super) choose: Arc<Choose>,
    pub(super) fallback: Option<Limit>,
    pub(super) key: Key,
    pub(super) cost: u64,
    pub(super) terms: Terms,
}

/// How a limit charges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// For how long it reserves its units, if it settles them.
    pub(super) lease: Option<Duration>,
    /// Whether it heeds the upstream: then its units count as of the answer, and are reserved until then.
    pub(super) heeds_upstream: bool,
    /// Whether it only asks if anything is left, and counts afterwards.
    pub(super) counts_afterwards: bool,
    pub(super) is_shadow: bool,
    pub(super) is_hidden: bool,
    /// Into how many it is split, if it is.
    pub(super) parts: Option<NonZeroU32>,
}

/// A limit that is being chosen, or none, and what is to be charged to it.
pub(super) struct Choosing {
    choice: Choice,
    fallback: Option<Limit>,
    key: Key,
    cost: u64,
    terms: Terms,
}

/// A limit that could not be chosen.
pub(super) struct Unchosen {
    pub(super) error: Error,
    /// What is charged in its place.
    pub(super) fallback: Option<Limit>,
}

/// Chooses a limit for a request, or none.
pub(super) type Choose = dyn Fn(&Parts) -> Choice + Send + Sync;

/// In a box, since each limit of a layer may choose in its own way.
pub(super) type Choice = Pin<Box<dyn Future<Output = Chosen> + Send>>;

type Chosen = Result<Option<Limit>, ChoiceError>;

impl Terms {
    pub(super) fn charge(self, limit: Limit, key: Key, cost: u64) -> Result<Draft, NeverFits> {
        let (limit, key) = match self.parts {
            Some(parts) => Split::of_at_most(limit, parts).into_next(&key),
            None => (limit, key),
        };
        // What is to be settled has to be remembered.
        let cost = if self.lease.is_some() { cost.max(1) } else { cost };
        let charge =
            if self.counts_afterwards { Ok(Charge::any_left(limit, key)) } else { Charge::new(limit, key, cost) };
        match if self.is_hidden { charge.map(Charge::hidden).map_err(NeverFits::hidden) } else { charge } {
            Ok(charge) => {
                let heeding = (self.heeds_upstream && charge.units() > 0).then(|| charge.limit().window());
                let charge = self.lease.or(heeding).into_iter().fold(charge, Charge::reserve);
                Ok(Draft::Charge(if self.is_shadow { charge.in_shadow() } else { charge }))
            }
            Err(error) if self.is_shadow => Ok(self.left_out(Some(error.limit().clone()), Rejection::NeverFits(error))),
            Err(error) => Err(error),
        }
    }

    /// What is a rejection where the limit is not in the shadow.
    pub(super) fn forgive(self, limit: Option<&Limit>, rejection: Rejection) -> Result<Draft, Rejection> {
        if self.is_shadow { Ok(self.left_out(limit.cloned(), rejection)) } else { Err(rejection) }
    }

    fn left_out(self, limit: Option<Limit>, rejection: Rejection) -> Draft {
        Draft::LeftOut(LeftOut::new(limit, rejection, self.is_hidden))
    }
}

impl Choosing {
    /// What is charged, now that a limit is chosen or could not be.
    fn end(&self, choice: Chosen, unchosen: &mut Vec<Unchosen>) -> Result<Draft, NeverFits> {
        let limit = match choice {
            Ok(limit) => limit,
            Err(error) if self.terms.is_shadow && self.fallback.is_none() => {
                return Ok(self.terms.left_out(None, Rejection::Unavailable(error.into())));
            }
            Err(error) => {
                unchosen.push(Unchosen { error: error.into(), fallback: self.fallback.clone() });
                self.fallback.clone()
            }
        };
        limit.map_or(Ok(Draft::Nothing), |limit| self.terms.charge(limit, self.key.clone(), self.cost))
    }
}

impl Draft {
    /// Begins to choose, where a limit is to be chosen.
    pub(super) fn begin(self, request: &Parts) -> Self {
        match self {
            Self::Open(Open { choose, fallback, key, cost, terms }) => {
                Self::Choosing(Choosing { choice: choose(request), fallback, key, cost, terms })
            }
            draft => draft,
        }
    }

    /// What is charged whatever is chosen.
    pub(super) fn charge(&self) -> Option<&Charge> {
        if let Self::Charge(charge) = self { Some(charge) } else { None }
    }
}

/// The limits of a request, some of which are being chosen.
pub(super) struct Choices {
    pub(super) drafts: Vec<Draft>,
    pub(super) unchosen: Vec<Unchosen>,
    mode: FailureMode,
}

impl Choices {
    /// `mode` says what is done with a request for which a limit without a fallback cannot be chosen.
    pub(super) fn new(drafts: Vec<Draft>, mode: FailureMode) -> Self {
        Self { drafts, unchosen: Vec::new(), mode }
    }

    /// Chooses all limits that have to be, at once, within what is left of the deadline to a request that has `waited`
    /// already. An error if the request is not to be let through whatever the other limits say.
    pub(super) async fn choose<S: Store>(&mut self, limiter: &Limiter<S>, waited: Duration) -> Result<(), Error> {
        let chosen = poll_fn(|cx| {
            let is_pending = self.end(|choosing| choosing.choice.as_mut().poll(cx))?;
            if is_pending { Poll::Pending } else { Poll::Ready(Ok(())) }
        });
        match limiter.within_after(chosen, waited).await {
            Err(Error::TimedOut { deadline }) => {
                self.end(|_| Poll::Ready(Err(ChoiceError::TimedOut { deadline }))).map(|_| ())
            }
            chosen => chosen?,
        }
    }

    /// Ends the choices that are ready, and says whether others are not.
    fn end(&mut self, mut choice: impl FnMut(&mut Choosing) -> Poll<Chosen>) -> Result<bool, Error> {
        let mut is_pending = false;
        for draft in &mut self.drafts {
            let Draft::Choosing(choosing) = draft else { continue };
            match choice(choosing) {
                Poll::Ready(choice) => *draft = choosing.end(choice, &mut self.unchosen)?,
                Poll::Pending => is_pending = true,
            }
        }
        match self.unchosen.iter().find(|unchosen| unchosen.fallback.is_none()) {
            Some(Unchosen { error, .. }) if self.mode != FailureMode::Open => Err(error.clone()),
            _ => Ok(is_pending),
        }
    }
}
