//! What a layer was told: from a request to a check, and from a decision to a verdict.

use std::{fmt, sync::Arc};

use http::{Response, request::Parts};

use super::{
    events::Events,
    headers::ResetFormat,
    keyed_limit::KeyedLimit,
    rejection::{Degraded, Rejection, RejectionResponse},
};
use crate::{
    check::Check,
    decision::Decision,
    error::Error,
    limiter::{FailureMode, Limiter},
};

/// How many units a request takes.
pub(super) type Cost = dyn Fn(&Parts) -> u64 + Send + Sync;

/// The settings of a layer, shared by all of its services.
#[derive(Clone)]
pub(super) struct Policy<S, R, L> {
    pub(super) limiter: Limiter<S>,
    pub(super) limits: L,
    pub(super) cost: Option<Arc<Cost>>,
    pub(super) failure_mode: FailureMode,
    pub(super) reset_format: ResetFormat,
    pub(super) responder: R,
    pub(super) events: Arc<Events>,
}

/// The limits of a layer, at least one, no two of one name.
#[derive(Clone, Debug)]
pub struct Limits {
    first: KeyedLimit,
    rest: Vec<KeyedLimit>,
}

impl Limits {
    pub(super) fn new(first: KeyedLimit) -> Self {
        Self { first, rest: Vec::new() }
    }

    /// Adds a limit; `false` if there is one of that name already.
    pub(super) fn push(&mut self, limit: KeyedLimit) -> bool {
        let is_new = self.rest.iter().chain([&self.first]).all(|other| other.limit().name() != limit.limit().name());
        if is_new {
            self.rest.push(limit);
        }
        is_new
    }
}

/// How a request that was let through came to be.
#[derive(Debug)]
pub(super) enum Admission {
    Decided(Decision),
    Undecided(Degraded),
}

impl<S, R> Policy<S, R, Limits> {
    /// What a request takes.
    pub(super) fn check(&self, parts: &Parts) -> Result<Check, Rejection> {
        let cost = self.cost.as_ref().map_or(1, |cost| cost(parts));
        let first = self.limits.first.charge(parts, cost)?;
        let mut rest = Vec::with_capacity(self.limits.rest.len());
        for limit in &self.limits.rest {
            rest.push(limit.charge(parts, cost)?);
        }
        Ok(Check::of_distinct(first, rest))
    }

    /// Whether a request is let through.
    pub(super) fn verdict(&self, outcome: Result<Decision, Error>) -> Result<Admission, Rejection> {
        match outcome {
            Ok(decision) if decision.is_allowed() => Ok(Admission::Decided(decision)),
            Ok(decision) => Err(Rejection::Limited(decision)),
            Err(Error::NeverFits(error)) => Err(Rejection::NeverFits(error)),
            Err(error) => {
                self.events.no_decision(&error, self.failure_mode);
                match self.failure_mode {
                    FailureMode::Open => Ok(Admission::Undecided(Degraded::new(error))),
                    FailureMode::Closed => Err(Rejection::Unavailable(error)),
                }
            }
        }
    }

    /// The answer to a request that is not let through.
    pub(super) fn reject<B>(&self, rejection: Rejection) -> Response<B>
    where
        R: RejectionResponse<B>,
    {
        match &rejection {
            Rejection::NeverFits(error) => self.events.never_fits(error),
            Rejection::NoKey(error) if error.status().is_server_error() => self.events.no_key(error),
            _ => {}
        }
        let mut response = self.responder.respond(&rejection, rejection.head(self.reset_format));
        response.extensions_mut().insert(rejection);
        response
    }
}

impl<S: fmt::Debug, R, L: fmt::Debug> fmt::Debug for Policy<S, R, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("limiter", &self.limiter)
            .field("limits", &self.limits)
            .field("failure_mode", &self.failure_mode)
            .field("reset_format", &self.reset_format)
            .finish_non_exhaustive()
    }
}
