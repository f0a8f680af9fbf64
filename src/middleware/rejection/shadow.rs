//! The requests that limits in the shadow would have rejected.

use http::{HeaderName, HeaderValue, Response};

use super::Rejection;
use crate::{decision::Decision, limit::Limit};

/// The limits in the [shadow](crate::KeyedLimit::in_shadow) that would have refused a request, in all layers that it went
/// through: in the extensions of its response.
#[derive(Clone, Debug)]
pub struct ShadowRefusals {
    decisions: Vec<Decision>,
    left_out: Vec<LeftOut>,
}

/// A limit in the shadow that could not charge a request, and was left out of its check.
#[derive(Clone, Debug)]
pub struct LeftOut {
    limit: Option<Limit>,
    rejection: Rejection,
    is_hidden: bool,
}

impl ShadowRefusals {
    /// `None` if no limit would have refused.
    pub(crate) fn of(decision: Option<&Decision>, left_out: Vec<LeftOut>) -> Option<Self> {
        let refused = decision.filter(|decision| decision.shadow_refusals().next().is_some());
        let is_any = refused.is_some() || !left_out.is_empty();
        is_any.then(|| Self { decisions: refused.cloned().into_iter().collect(), left_out })
    }

    /// The names of the limits that would have refused the request.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.limits().map(|(name, _)| name)
    }

    /// The names, and whether the limits are hidden.
    fn limits(&self) -> impl Iterator<Item = (&str, bool)> {
        let refusals = self.decisions().flat_map(Decision::shadow_refusals);
        let refusals = refusals.map(|status| (status.limit().name(), status.is_hidden()));
        let left_out = self.left_out().filter_map(|left_out| Some((left_out.limit()?.name(), left_out.is_hidden)));
        refusals.chain(left_out)
    }

    /// The decisions in which a limit would have refused: see [`Decision::shadow_refusals`].
    pub fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.decisions.iter()
    }

    /// The limits that could not charge the request.
    pub fn left_out(&self) -> impl Iterator<Item = &LeftOut> {
        self.left_out.iter()
    }

    /// Adds them to the response's extensions, and the names of visible limits to its header.
    pub(crate) fn write<B>(mut self, response: &mut Response<B>, header: Option<&HeaderName>) {
        let names = || HeaderValue::try_from(self.name_list(false)).ok().filter(|names| !names.is_empty());
        if let Some((header, names)) = header.and_then(|header| Some((header, names()?))) {
            // Stacked layers have one line each.
            response.headers_mut().append(header, names);
        }
        if let Some(inner) = response.extensions_mut().remove::<Self>() {
            self.decisions.extend(inner.decisions);
            self.left_out.extend(inner.left_out);
        }
        response.extensions_mut().insert(self);
    }

    pub(crate) fn name_list(&self, with_hidden: bool) -> String {
        let names = self.limits().filter_map(|(name, is_hidden)| (with_hidden || !is_hidden).then_some(name));
        names.collect::<Vec<_>>().join(", ")
    }
}

impl LeftOut {
    pub(crate) fn new(limit: Option<Limit>, rejection: Rejection, is_hidden: bool) -> Self {
        Self { limit, rejection, is_hidden }
    }

    /// The limit, if it is known.
    #[must_use]
    pub fn limit(&self) -> Option<&Limit> {
        self.limit.as_ref()
    }

    /// The rejection that the request would have got.
    #[must_use]
    pub fn rejection(&self) -> &Rejection {
        &self.rejection
    }
}
