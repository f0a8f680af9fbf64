//! A limit and the extractor of its keys.

use std::{fmt, sync::Arc};

use http::request::Parts;

use super::{extract::KeyExtractor, rejection::Rejection};
use crate::{check::Charge, limit::Limit};

/// A limit and the extractor of its keys: made by [`Limit::by`], taken by
/// [`RateLimitLayer::limit`](super::RateLimitLayer::limit).
#[derive(Clone)]
pub struct KeyedLimit {
    limit: Limit,
    extractor: Arc<dyn KeyExtractor>,
}

impl Limit {
    /// Counts requests by the key that `extractor` finds in them.
    #[must_use]
    pub fn by(self, extractor: impl KeyExtractor) -> KeyedLimit {
        KeyedLimit { limit: self, extractor: Arc::new(extractor) }
    }
}

impl KeyedLimit {
    /// The limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// What a request of this cost takes from the limit.
    pub(super) fn charge(&self, parts: &Parts, cost: u64) -> Result<Charge, Rejection> {
        let key = self.extractor.extract(parts).map_err(Rejection::NoKey)?;
        Charge::new(self.limit.clone(), key, cost).map_err(Rejection::NeverFits)
    }
}

impl fmt::Debug for KeyedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedLimit").field("limit", &self.limit).finish_non_exhaustive()
    }
}
