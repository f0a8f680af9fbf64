//! What one limit makes of a request, before its check is whole.

use std::{
    future::poll_fn,
    num::NonZeroU32,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::request::Parts;

use super::{rejection::Rejection, shadow::LeftOut};
use crate::{
    check::{Charge, NeverFits},
    error::{ChoiceError, Error},
    key::Key,
    limit::Limit,
    limiter::Limiter,
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
    pub(super) key: Key,
    pub(super) cost: u64,
    pub(super) terms: Terms,
}

/// How a limit charges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// For how long it reserves its units, if it settles them.
    pub(super) lease: Option<Duration>,
    pub(super) is_shadow: bool,
    pub(super) is_hidden: bool,
    /// Into how many it is split, if it is.
    pub(super) parts: Option<NonZeroU32>,
}

/// A limit that is being chosen, or none, and what is to be charged to it.
pub(super) struct Choosing {
    choice: Choice,
    key: Key,
    cost: u64,
    terms: Terms,
}

/// Chooses a limit for a request, or none.
pub(super) type Choose = dyn Fn(&Parts) -> Choice + Send + Sync;

/// In a box, since each limit of a layer may choose in its own way.
pub(super) type Choice = Pin<Box<dyn Future<Output = Result<Option<Limit>, ChoiceError>> + Send>>;

impl Terms {
    pub(super) fn charge(self, limit: Limit, key: Key, cost: u64) -> Result<Draft, NeverFits> {
        let (limit, key) = match self.parts {
            Some(parts) => Split::of_at_most(limit, parts).into_next(&key),
            None => (limit, key),
        };
        // What is to be settled has to be remembered.
        let cost = if self.lease.is_some() { cost.max(1) } else { cost };
        let charge = Charge::new(limit, key, cost);
        match if self.is_hidden { charge.map(Charge::hidden).map_err(NeverFits::hidden) } else { charge } {
            Ok(charge) => {
                let charge = self.lease.into_iter().fold(charge, Charge::reserve);
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

    fn chosen(self, choice: Result<Option<Limit>, ChoiceError>, key: Key, cost: u64) -> Result<Draft, Error> {
        match choice {
            Ok(Some(limit)) => Ok(self.charge(limit, key, cost)?),
            Ok(None) => Ok(Draft::Nothing),
            Err(error) if self.is_shadow => Ok(self.left_out(None, Rejection::Unavailable(error.into()))),
            Err(error) => Err(error.into()),
        }
    }
}

impl Choosing {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Draft, Error>> {
        let choice = self.choice.as_mut().poll(cx);
        choice.map(|choice| self.terms.chosen(choice, self.key.clone(), self.cost))
    }

    /// Too late.
    fn give_up(&self, deadline: Duration) -> Result<Draft, Error> {
        self.terms.chosen(Err(ChoiceError::TimedOut { deadline }), self.key.clone(), self.cost)
    }
}

impl Draft {
    /// Begins to choose, where a limit is to be chosen.
    pub(super) fn begin(self, request: &Parts) -> Self {
        match self {
            Self::Open(Open { choose, key, cost, terms }) => {
                Self::Choosing(Choosing { choice: choose(request), key, cost, terms })
            }
            draft => draft,
        }
    }

    /// What is charged whatever is chosen.
    pub(super) fn charge(&self) -> Option<&Charge> {
        if let Self::Charge(charge) = self { Some(charge) } else { None }
    }
}

/// Chooses all limits that have to be, at once, within what is left of the deadline to a request that has `waited` already.
pub(super) async fn choose<S: Store>(
    drafts: &mut [Draft],
    limiter: &Limiter<S>,
    waited: Duration,
) -> Result<(), Error> {
    let chosen = poll_fn(|cx| {
        let mut is_pending = false;
        for draft in drafts.iter_mut() {
            if let Draft::Choosing(choosing) = draft {
                match choosing.poll(cx) {
                    Poll::Ready(chosen) => *draft = chosen?,
                    Poll::Pending => is_pending = true,
                }
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(Ok(())) }
    });
    match limiter.within_after(chosen, waited).await {
        Ok(chosen) => chosen,
        Err(Error::TimedOut { deadline }) => drafts.iter_mut().try_for_each(|draft| {
            if let Draft::Choosing(choosing) = draft {
                *draft = choosing.give_up(deadline)?;
            }
            Ok(())
        }),
        Err(error) => Err(error),
    }
}
