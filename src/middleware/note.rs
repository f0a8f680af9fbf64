//! What a response is to say of how its request was let through.

use std::sync::Arc;

use http::{Response, request::Parts};

use super::{
    afterwards::{Afterwards, Done, Work},
    claim::Record,
    degraded::Degraded,
    headers::Figures,
    limits::Limits,
    policy::{Policy, verdict},
    rejection::{Rejection, RejectionResponse},
    reset::ResetFormat,
};
use crate::{decision::Decision, error::Error, limiter::FailureMode, store::Store};

/// What a response is to say of how its request was let through, and what is to be done before.
pub(super) struct Note<S, R> {
    /// How figures are written, if the layer sends them.
    pub(super) format: Option<ResetFormat>,
    pub(super) figures: Option<Figures>,
    pub(super) degraded: Option<Degraded>,
    pub(super) afterwards: Option<Box<Afterwards<S, R>>>,
}

/// How far a response has come.
pub(super) enum Progress<S, R, B> {
    Done(Response<B>),
    Waits { work: Work, answer: (Response<B>, Note<S, R>) },
}

impl<S: Store, R> Note<S, R> {
    /// What comes of an outcome: a note to a request that may go on, and now has the decision in its extensions, or the
    /// answer to one that may not.
    #[inline]
    pub(super) fn of<B>(
        policy: &Arc<Policy<S, R, Limits>>,
        outcome: Result<Option<Decision>, Error>,
        mode: FailureMode,
        record: Option<Box<Record>>,
        parts: &mut Parts,
    ) -> Result<Self, Response<B>>
    where
        R: RejectionResponse<B>,
    {
        let unchosen = record.as_deref().map_or(&[][..], |record| &record.unchosen);
        let degraded = policy.degraded(&outcome, mode, unchosen);
        match verdict(outcome, mode) {
            Ok(admission) => {
                let afterwards = Afterwards::of(policy, record, admission.as_ref(), || parts.clone());
                // An upstream's figures are its own.
                let format = policy.reset_format(parts).filter(|_| !policy.settings.heeds_upstream);
                let shown = admission.as_ref().filter(|_| format.is_some());
                let figures = shown.and_then(Figures::of);
                if let Some(format) = format {
                    format.tell(&mut parts.extensions);
                }
                if let Some(decision) = admission {
                    parts.extensions.insert(decision);
                }
                Ok(Self { format, figures, degraded, afterwards })
            }
            Err(rejection) => Err(policy.reject(parts, rejection, record, degraded)),
        }
    }

    /// Writes the response, or begins what has to be done before.
    pub(super) fn conclude<B>(mut self, response: Response<B>) -> Progress<S, R, B> {
        let (response, work) = match &mut self.afterwards {
            Some(afterwards) => afterwards.begin(response),
            None => (response, None),
        };
        match work {
            Some(work) => Progress::Waits { work, answer: (response, self) },
            None => Progress::Done(self.write(response)),
        }
    }

    /// Writes the response, now that what had to be done is done.
    pub(super) fn concluded<B>(mut self, done: &Done, response: Response<B>) -> Response<B> {
        if let Some(figures) = self.afterwards.as_ref().and_then(|afterwards| afterwards.end(done)) {
            self.figures = Some(figures);
        }
        self.write(response)
    }

    fn write<B>(self, mut response: Response<B>) -> Response<B> {
        if let Some(format) = self.format {
            self.show(format, &mut response);
        }
        if let Some(degraded) = self.degraded {
            response.extensions_mut().insert(degraded);
        }
        if let Some(afterwards) = self.afterwards {
            afterwards.write(&mut response);
        }
        response
    }

    /// Writes the layer's figures, or those that are there in its format.
    fn show<B>(&self, format: ResetFormat, response: &mut Response<B>) {
        let reset = match response.extensions().get::<Rejection>() {
            // Of an inner layer. It has the figures that its wait belongs to, or none.
            Some(rejection) => rejection.figures().map(Figures::reset),
            None => {
                if let Some(figures) = self.figures
                    && figures.write(format, response.headers_mut())
                {
                    return figures.reset().leave(format, response.extensions_mut());
                }
                response.extensions().get().copied()
            }
        };
        if let Some(reset) = reset {
            reset.rewrite(format, response.headers_mut());
        }
    }
}
