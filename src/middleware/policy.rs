//! What a layer was told: from a request to a claim, and from a decision to a verdict.

use std::fmt;

use http::{Response, request::Parts};

use super::{
    asking::{Asker, Asking},
    claim::{Charges, Claim, Record},
    gate::Passage,
    limits::Limits,
    rejection::{Degraded, Rejection, RejectionResponse},
    settings::Settings,
    shadow::{LeftOut, ShadowRefusals},
};
use crate::{
    decision::Decision,
    error::Error,
    limiter::{FailureMode, Limiter},
    store::Store,
};

/// What a layer was told, shared by all of its services.
#[derive(Clone)]
pub(super) struct Policy<S, R, L> {
    pub(super) limiter: Limiter<S>,
    pub(super) limits: L,
    pub(super) responder: R,
    pub(super) settings: Settings,
}

/// How it comes to be known what a request takes.
pub(super) enum Claimed {
    Known(Claim),
    Asks(Asking),
}

/// How a request that was let through came to be.
#[derive(Debug)]
pub(super) enum Admission {
    Decided(Decision),
    Undecided(Degraded),
    /// There was nothing to decide.
    Uncounted,
}

impl<S, R> Policy<S, R, Limits> {
    /// What a request takes.
    pub(super) fn claim(&self, parts: &Parts) -> Result<Claimed, Rejection>
    where
        S: Store,
    {
        match self.settings.gate.passage(parts, &self.settings.events) {
            Passage::Denied => return Err(Rejection::Denied),
            Passage::Uncounted => return Ok(Claimed::Known(Claim { check: None, record: None })),
            Passage::Counted => {}
        }
        let cost = self.settings.cost.as_ref().map_or(1, |cost| cost(parts));
        let is_kept = self.settings.heeds_upstream || self.limits.iter().any(|limit| limit.settles().is_some());
        if self.limits.iter().all(|limit| limit.limit().is_some()) {
            let mut charges = Charges::of(self.limits.len(), is_kept);
            for (place, limit) in self.limits.iter().enumerate() {
                charges.add(place, limit.draft(parts, cost)?);
            }
            return Ok(match self.settings.patience {
                None => Claimed::Known(charges.claim()),
                Some(_) => Claimed::Asks(self.asker().ask(charges.claim())),
            });
        }
        let drafts = self.limits.iter().map(|limit| limit.draft(parts, cost)).collect::<Result<_, _>>()?;
        Ok(Claimed::Asks(self.asker().choose_and_ask(drafts, is_kept)))
    }

    fn asker(&self) -> Asker<S>
    where
        S: Clone,
    {
        Asker::new(self.limiter.clone(), self.settings.patience)
    }

    /// Whether a request is let through.
    pub(super) fn verdict(&self, outcome: Result<Option<Decision>, Error>) -> Result<Admission, Rejection> {
        match outcome {
            Ok(Some(decision)) if decision.is_allowed() => Ok(Admission::Decided(decision)),
            Ok(Some(decision)) => Err(Rejection::Limited(decision)),
            Ok(None) => Ok(Admission::Uncounted),
            Err(Error::NeverFits(error)) => Err(Rejection::NeverFits(error)),
            Err(error) => {
                let mode = self.failure_mode();
                self.settings.events.no_decision(&error, mode);
                match mode {
                    FailureMode::Open => Ok(Admission::Undecided(Degraded::new(error))),
                    FailureMode::Closed => Err(Rejection::Unavailable(error)),
                }
            }
        }
    }

    /// What is only in the shadow refuses nothing, least of all without a decision.
    fn failure_mode(&self) -> FailureMode {
        let is_shadow = self.limits.iter().all(|limit| limit.is_shadow());
        if is_shadow { FailureMode::Open } else { self.settings.failure_mode }
    }

    /// What limits in the shadow would have refused.
    pub(super) fn shadow(&self, decision: Option<&Decision>, left_out: Vec<LeftOut>) -> Option<ShadowRefusals> {
        let shadow = ShadowRefusals::of(decision, left_out)?;
        self.settings.events.shadow(&shadow);
        for left_out in shadow.left_out() {
            match left_out.rejection() {
                Rejection::Unavailable(error) => self.settings.events.no_decision(error, FailureMode::Open),
                rejection => self.settings.events.rejected(rejection),
            }
        }
        Some(shadow)
    }

    /// The answer to a request that is not let through.
    pub(super) fn reject<B>(&self, rejection: Rejection, record: Option<Box<Record>>) -> Response<B>
    where
        R: RejectionResponse<B>,
    {
        self.settings.events.rejected(&rejection);
        let decision = if let Rejection::Limited(decision) = &rejection { Some(decision) } else { None };
        let shadow = self.shadow(decision, record.map(|record| record.left_out).unwrap_or_default());
        let mut response = self.responder.respond(&rejection, rejection.head(self.settings.reset_format));
        response.extensions_mut().insert(rejection);
        if let Some(shadow) = shadow {
            shadow.write(&mut response, self.settings.shadow_header.as_ref());
        }
        response
    }
}

impl<S: fmt::Debug, R, L: fmt::Debug> fmt::Debug for Policy<S, R, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("limiter", &self.limiter)
            .field("limits", &self.limits)
            .field("gate", &self.settings.gate)
            .field("failure_mode", &self.settings.failure_mode)
            .field("reset_format", &self.settings.reset_format)
            .finish_non_exhaustive()
    }
}
