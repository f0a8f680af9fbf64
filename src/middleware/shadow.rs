//! What limits in the shadow would have refused.

use http::{HeaderName, HeaderValue, Response};

use super::rejection::Rejection;
use crate::{decision::Decision, limit::Limit};

/// In the extensions of a response: what limits in the [shadow](super::KeyedLimit::in_shadow) would have refused, of
/// all layers that it went through.
#[derive(Clone, Debug)]
pub struct ShadowRefusals {
    decisions: Vec<Decision>,
    left_out: Vec<LeftOut>,
}

/// A limit in the shadow that could not charge a request at all, and was left out of its check.
#[derive(Clone, Debug)]
pub struct LeftOut {
    limit: Option<Limit>,
    rejection: Rejection,
    is_hidden: bool,
}

impl ShadowRefusals {
    /// What there is to tell, if there is something.
    pub(super) fn of(decision: Option<&Decision>, left_out: Vec<LeftOut>) -> Option<Self> {
        let refused = decision.filter(|decision| decision.shadow_refusals().next().is_some());
        let is_any = refused.is_some() || !left_out.is_empty();
        is_any.then(|| Self { decisions: refused.cloned().into_iter().collect(), left_out })
    }

    /// The names of the limits that would have refused the request.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.limits().map(|(name, _)| name)
    }

    /// Their names, and whether they are hidden from clients.
    fn limits(&self) -> impl Iterator<Item = (&str, bool)> {
        let refusals = self.decisions().flat_map(Decision::shadow_refusals);
        let refusals = refusals.map(|status| (status.limit().name(), status.is_hidden()));
        let left_out = self.left_out().filter_map(|left_out| Some((left_out.limit()?.name(), left_out.is_hidden)));
        refusals.chain(left_out)
    }

    /// The decisions in which a limit without room is: see [`Decision::shadow_refusals`].
    pub fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.decisions.iter()
    }

    /// The limits that could not charge the request at all.
    pub fn left_out(&self) -> impl Iterator<Item = &LeftOut> {
        self.left_out.iter()
    }

    /// Adds them to a response, and the names that clients may see to a header of it, if there is to be one.
    pub(super) fn write<B>(mut self, response: &mut Response<B>, header: Option<&HeaderName>) {
        let names = || HeaderValue::try_from(self.listed(false)).ok().filter(|names| !names.is_empty());
        if let Some((header, names)) = header.and_then(|header| Some((header, names()?))) {
            // Where layers are stacked, each has a line.
            response.headers_mut().append(header, names);
        }
        if let Some(inner) = response.extensions_mut().remove::<Self>() {
            self.decisions.extend(inner.decisions);
            self.left_out.extend(inner.left_out);
        }
        response.extensions_mut().insert(self);
    }

    /// Their names, with or without those that clients do not see.
    pub(super) fn listed(&self, with_hidden: bool) -> String {
        let names = self.limits().filter_map(|(name, is_hidden)| (with_hidden || !is_hidden).then_some(name));
        names.collect::<Vec<_>>().join(", ")
    }
}

impl LeftOut {
    pub(super) fn new(limit: Option<Limit>, rejection: Rejection, is_hidden: bool) -> Self {
        Self { limit, rejection, is_hidden }
    }

    /// The limit, if it is known.
    #[must_use]
    pub fn limit(&self) -> Option<&Limit> {
        self.limit.as_ref()
    }

    /// What it would have answered.
    #[must_use]
    pub fn rejection(&self) -> &Rejection {
        &self.rejection
    }
}
