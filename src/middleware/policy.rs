//! What a layer was told: from a request to a claim, and from a decision to a verdict.

use std::{fmt, mem, sync::Arc};

use http::{Response, request::Parts};

use super::{
    asking::{Asked, Asker, Asking},
    claim::{Claim, Record},
    degraded::Degraded,
    draft::{Choices, Draft, Unchosen},
    dropped::Dropping,
    errand::Errand,
    gate::Passage,
    limits::Limits,
    rejection::{Rejection, RejectionResponse},
    reset::ResetFormat,
    settings::Settings,
    shadow::{LeftOut, ShadowRefusals},
    waited::waited,
};
use crate::{
    check::Check,
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

/// What is to be done about a claim.
pub(super) enum Next {
    Decide,
    /// It takes more than one question, and is not in the claim any more.
    Ask(Asking),
    /// It is refused without a question.
    Refuse(Decision),
}

impl<S, R> Policy<S, R, Limits> {
    /// Adds to an empty claim what a request takes, and says what is to be done about it. Beside that, what is done with the
    /// request while the store cannot decide.
    #[inline]
    pub(super) fn claim(&self, parts: &Parts, claim: &mut Claim) -> Result<(Next, FailureMode), Rejection>
    where
        S: Store,
    {
        if let Passage::Uncounted = self.settings.gate.passage(parts, &self.settings.events)? {
            return Ok((Next::Decide, FailureMode::default()));
        }
        let cost = self.settings.cost.as_ref().map_or(1, |cost| cost(parts));
        let mode = self.failure_mode(parts, cost);
        let traits = self.limits.traits();
        let is_kept = self.settings.heeds_upstream && traits.heeds_upstream || traits.settles;
        if traits.chooses {
            let drafts = self
                .limits
                .iter()
                .map(|limit| limit.draft(parts, cost, self.settings.heeds_upstream))
                .collect::<Result<Vec<_>, _>>()?;
            if let Some(refusal) = self.refuse_unchosen(&drafts) {
                drafts.into_iter().enumerate().for_each(|(place, draft)| claim.add(place, draft));
                return Ok((Next::Refuse(refusal), mode));
            }
            let drafts = drafts.into_iter().map(|draft| draft.begin(parts)).collect();
            let choices = Choices::new(drafts, mode);
            return Ok((Next::Ask(self.asker(mode, parts).choose_and_ask(choices, is_kept)), mode));
        }
        claim.keep(is_kept);
        for (place, limit) in self.limits.iter().enumerate() {
            limit.charge(parts, cost, self.settings.heeds_upstream, (place, claim))?;
        }
        claim.complete();
        let waits = self.settings.patience.is_some();
        let next = if waits { Next::Ask(self.asker(mode, parts).ask(mem::take(claim))) } else { Next::Decide };
        Ok((next, mode))
    }

    /// What settles requests that are dropped, if some limit says at what.
    pub(super) fn dropping(&self) -> Option<Dropping<S>>
    where
        S: Store,
    {
        let limits = self.limits.when_dropped()?;
        Some(Dropping::new(self.limiter.clone(), limits, Arc::clone(&self.settings.events)))
    }

    /// A decision that takes more than one question. A request that is dropped while it waits for room leaves the line.
    pub(super) fn asked_for(&self, asking: Asking) -> Errand<Asked>
    where
        S: Store,
    {
        match self.dropping().filter(|_| self.settings.patience.is_none()) {
            Some(dropping) => dropping.follow_up_asking(asking),
            None => Errand::given_up_when_dropped(asking),
        }
    }

    /// The refusal of a request that limits refuse which need not be chosen, if that is known at once: then there is no need
    /// to choose. Where room is waited for there is.
    fn refuse_unchosen(&self, drafts: &[Draft]) -> Option<Decision>
    where
        S: Store,
    {
        let mut charges = drafts.iter().filter_map(Draft::charge).cloned();
        let first = charges.next().filter(|_| self.settings.patience.is_none())?;
        let mut check = Check::new(first);
        charges.for_each(|charge| check.add_distinct(charge));
        self.limiter.refuse_now(&check)
    }

    fn asker(&self, mode: FailureMode, parts: &Parts) -> Asker<S>
    where
        S: Store,
    {
        Asker::new(self.limiter.clone().with_share(mode.share()), self.settings.patience, waited(parts))
    }

    /// What there is to say of a request that the store has not decided, or not under all of its limits.
    #[inline]
    pub(super) fn degraded(
        &self,
        outcome: &Result<Option<Decision>, Error>,
        mode: FailureMode,
        unchosen: &[Unchosen],
    ) -> Option<Degraded> {
        let undecided = match outcome {
            Ok(decision) => decision.as_ref().and_then(Decision::local_cause),
            Err(Error::NeverFits(_) | Error::LimitNotChosen(_)) => None,
            Err(error) => Some(error),
        };
        let (events, limits) = (&self.settings.events, || self.limits.listed());
        if unchosen.is_empty() {
            return undecided.map(|error| Degraded::told(error, mode, events, limits));
        }
        Degraded::of_choices(undecided, unchosen, mode, events, limits)
    }

    /// What is only in the shadow refuses nothing, least of all without a decision.
    fn failure_mode(&self, parts: &Parts, cost: u64) -> FailureMode {
        if self.limits.traits().is_shadow { FailureMode::Open } else { self.settings.failing.mode(parts, cost) }
    }

    /// What limits in the shadow would have refused.
    pub(super) fn shadow(&self, decision: Option<&Decision>, left_out: Vec<LeftOut>) -> Option<ShadowRefusals> {
        let shadow = ShadowRefusals::of(decision, left_out)?;
        self.settings.events.shadow(&shadow);
        for left_out in shadow.left_out() {
            match left_out.rejection() {
                Rejection::Unavailable(error) => {
                    self.settings.events.no_choice(|| self.limits.listed(), error, Some(FailureMode::Open), &[]);
                }
                rejection => self.settings.events.rejected(rejection),
            }
        }
        Some(shadow)
    }

    /// How the figures are written that a client sees of this request, if the layer sends them.
    pub(super) fn reset_format(&self, request: &Parts) -> Option<ResetFormat> {
        let settings = &self.settings;
        settings.headers.has_x_rate_limit().then(|| settings.reset_format.within(&request.extensions))
    }

    /// The answer to a request that is not let through.
    pub(super) fn reject<B>(
        &self,
        request: &Parts,
        rejection: Rejection,
        record: Option<Box<Record>>,
        degraded: Option<Degraded>,
    ) -> Response<B>
    where
        R: RejectionResponse<B>,
    {
        self.settings.events.rejected(&rejection);
        let decision = if let Rejection::Limited(decision) = &rejection { Some(decision) } else { None };
        let shadow = self.shadow(decision, record.map(|record| record.left_out).unwrap_or_default());
        let mut response = rejection.into_response_by(&self.responder, self.reset_format(request));
        if let Some(degraded) = degraded {
            response.extensions_mut().insert(degraded);
        }
        if let Some(shadow) = shadow {
            shadow.write(&mut response, self.settings.shadow_header.as_ref());
        }
        response
    }
}

/// Whether a request is let through, and by which decision; by none if there was nothing to decide, or nobody who could.
#[inline]
pub(super) fn verdict(
    outcome: Result<Option<Decision>, Error>,
    mode: FailureMode,
) -> Result<Option<Decision>, Rejection> {
    match outcome {
        Ok(Some(decision)) if !decision.is_allowed() => Err(Rejection::Limited(decision)),
        Ok(admission) => Ok(admission),
        Err(error) => match (Rejection::from(error), mode) {
            (Rejection::Unavailable(_), FailureMode::Open) => Ok(None),
            (rejection, _) => Err(rejection),
        },
    }
}

impl<S: fmt::Debug, R, L: fmt::Debug> fmt::Debug for Policy<S, R, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("limiter", &self.limiter)
            .field("limits", &self.limits)
            .field("gate", &self.settings.gate)
            .field("failing", &self.settings.failing)
            .field("headers", &self.settings.headers)
            .field("reset_format", &self.settings.reset_format)
            .finish_non_exhaustive()
    }
}
