//! The charge that one limit makes for a request, and the choice of a limit that depends on the request.

use std::{error, future::poll_fn, mem, num::NonZeroU32, pin::Pin, sync::Arc, task::Poll, time::Duration};

use http::request::Parts;

use super::super::rejection::{Rejection, shadow::LeftOut};
use crate::{
    check::Charge,
    error::Error,
    error::NeverFits,
    key::Key,
    limit::Limit,
    limiter::{FailureMode, Limiter},
    split::Split,
};

/// Chooses a limit for a request, or none.
pub(crate) type ChooseLimit = dyn Fn(&Parts) -> LimitFuture + Send + Sync;

/// In a box, since each limit of a layer may choose in its own way.
pub(crate) type LimitFuture = Pin<Box<dyn Future<Output = ChosenLimit> + Send>>;

type ChosenLimit = Result<Option<Limit>, Error>;

/// The charge of one limit, or why there is none. `C` chooses the limit, and becomes a [`LimitFuture`].
pub(crate) enum DraftCharge<C> {
    Charge(Charge),
    /// The limit is in the shadow, and cannot charge the request.
    LeftOut(LeftOut),
    /// No limit was chosen for this request.
    Unlimited,
    ToChoose(LimitChoice<C>),
}

/// A limit to choose, and the key and cost to charge it.
pub(crate) struct LimitChoice<C> {
    pub(super) choose: C,
    pub(super) fallback: Option<Limit>,
    pub(super) key: Key,
    pub(super) cost: u64,
    pub(super) options: ChargeOptions,
}

/// The options of a limit that shape its charges.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargeOptions {
    /// Set if the limit settles.
    pub(super) lease: Option<Duration>,
    /// Then the units are reserved until the response, and count as of its time.
    pub(super) heeds_upstream: bool,
    pub(super) counts_afterwards: bool,
    pub(super) is_shadow: bool,
    pub(super) is_hidden: bool,
    pub(super) parts: Option<NonZeroU32>,
}

/// A limit that could not be chosen.
pub(crate) struct UnchosenLimit {
    pub(crate) error: Error,
    /// Charged in its place.
    pub(crate) fallback: Option<Limit>,
}

impl ChargeOptions {
    pub(super) fn charge<C>(self, limit: Limit, key: Key, cost: u64) -> Result<DraftCharge<C>, NeverFits> {
        let (limit, key) = match self.parts {
            Some(parts) => Split::of_at_most(limit, parts).into_next(&key),
            None => (limit, key),
        };
        // A cost of 0 would leave no entry to settle.
        let cost = if self.lease.is_some() { cost.max(1) } else { cost };
        let charge =
            if self.counts_afterwards { Ok(Charge::any_left(limit, key)) } else { Charge::new(limit, key, cost) };
        match charge {
            Ok(charge) => {
                let charge = if self.is_hidden { charge.hidden() } else { charge };
                let heeding = (self.heeds_upstream && charge.units() > 0).then(|| charge.limit().window());
                let charge = self.lease.or(heeding).into_iter().fold(charge, Charge::reserve);
                Ok(DraftCharge::Charge(if self.is_shadow { charge.in_shadow() } else { charge }))
            }
            Err(error) => {
                let error = NeverFits { is_hidden: self.is_hidden, ..error };
                if !self.is_shadow {
                    return Err(error);
                }
                Ok(self.left_out(Some(error.limit.clone()), Rejection::NeverFits(error)))
            }
        }
    }

    /// Leaves a limit in the shadow out of the check; any other limit rejects the request.
    pub(super) fn leave_out_or_reject<C>(
        self,
        limit: Option<&Limit>,
        rejection: Rejection,
    ) -> Result<DraftCharge<C>, Rejection> {
        if self.is_shadow { Ok(self.left_out(limit.cloned(), rejection)) } else { Err(rejection) }
    }

    fn left_out<C>(self, limit: Option<Limit>, rejection: Rejection) -> DraftCharge<C> {
        DraftCharge::LeftOut(LeftOut::new(limit, rejection, self.is_hidden))
    }
}

impl<C> DraftCharge<C> {
    /// The charge, if no limit has to be chosen for it.
    pub(crate) fn charge(&self) -> Option<&Charge> {
        if let Self::Charge(charge) = self { Some(charge) } else { None }
    }

    pub(crate) fn into_left_out(self) -> Option<LeftOut> {
        if let Self::LeftOut(left_out) = self { Some(left_out) } else { None }
    }
}

impl DraftCharge<Arc<ChooseLimit>> {
    fn begin_choice(self, request: &Parts) -> DraftCharge<LimitFuture> {
        match self {
            Self::Charge(charge) => DraftCharge::Charge(charge),
            Self::LeftOut(left_out) => DraftCharge::LeftOut(left_out),
            Self::Unlimited => DraftCharge::Unlimited,
            Self::ToChoose(LimitChoice { choose, fallback, key, cost, options }) => {
                DraftCharge::ToChoose(LimitChoice { choose: choose(request), fallback, key, cost, options })
            }
        }
    }
}

impl<C> LimitChoice<C> {
    /// The charge, once a limit is chosen or could not be.
    fn charge(&self, chosen: ChosenLimit, unchosen: &mut Vec<UnchosenLimit>) -> Result<DraftCharge<C>, NeverFits> {
        let limit = match chosen {
            Ok(limit) => limit,
            Err(error) if self.options.is_shadow && self.fallback.is_none() => {
                return Ok(self.options.left_out(None, Rejection::Unavailable(error)));
            }
            Err(error) => {
                unchosen.push(UnchosenLimit { error, fallback: self.fallback.clone() });
                self.fallback.clone()
            }
        };
        limit.map_or(Ok(DraftCharge::Unlimited), |limit| self.options.charge(limit, self.key.clone(), self.cost))
    }
}

/// The charges of a request, while some of their limits are being chosen.
pub(crate) struct LimitChoices {
    drafts: Vec<DraftCharge<LimitFuture>>,
    unchosen: Vec<UnchosenLimit>,
    mode: FailureMode,
}

impl LimitChoices {
    /// `mode` is for a limit without a fallback that cannot be chosen.
    pub(crate) fn begin(drafts: Vec<DraftCharge<Arc<ChooseLimit>>>, request: &Parts, mode: FailureMode) -> Self {
        let drafts = drafts.into_iter().map(|draft| draft.begin_choice(request)).collect();
        Self { drafts, unchosen: Vec::new(), mode }
    }

    /// Chooses all limits at once, within what is left of the deadline. An error if the request is rejected whatever the
    /// other limits decide.
    pub(super) async fn choose(&mut self, limiter: &Limiter, waited: Duration) -> Result<(), Error> {
        let chosen = poll_fn(|cx| {
            let is_pending = self.charge_chosen(|choice| choice.choose.as_mut().poll(cx))?;
            if is_pending { Poll::Pending } else { Poll::Ready(Ok(())) }
        });
        match limiter.within_after(chosen, waited).await {
            Err(Error::TimedOut { deadline }) => {
                let cause = format!("choosing a limit took longer than {deadline:?}");
                let cause = Arc::from(Box::<dyn error::Error + Send + Sync>::from(cause));
                self.charge_chosen(|_| Poll::Ready(Err(Error::LimitNotChosen(Arc::clone(&cause))))).map(|_| ())
            }
            chosen => chosen?,
        }
    }

    /// Makes the charges whose limits are chosen, and returns whether others are still being chosen.
    fn charge_chosen(
        &mut self,
        mut poll: impl FnMut(&mut LimitChoice<LimitFuture>) -> Poll<ChosenLimit>,
    ) -> Result<bool, Error> {
        let mut is_pending = false;
        for draft in &mut self.drafts {
            let DraftCharge::ToChoose(choice) = draft else { continue };
            match poll(choice) {
                Poll::Ready(chosen) => *draft = choice.charge(chosen, &mut self.unchosen)?,
                Poll::Pending => is_pending = true,
            }
        }
        match self.unchosen.iter().find(|unchosen| unchosen.fallback.is_none()) {
            Some(UnchosenLimit { error, .. }) if self.mode != FailureMode::Open => Err(error.clone()),
            _ => Ok(is_pending),
        }
    }

    /// Takes out the charges, and the limits that could not be chosen.
    pub(super) fn take(&mut self) -> (Vec<DraftCharge<LimitFuture>>, Vec<UnchosenLimit>) {
        (mem::take(&mut self.drafts), mem::take(&mut self.unchosen))
    }
}
