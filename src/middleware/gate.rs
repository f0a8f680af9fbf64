//! Which requests are let through uncounted, and which not at all.
//!
//! 1. A request whose key is on a list of denied keys is answered 403. Then a request whose key is on a list of allowed
//!    keys, one that is skipped, and a CORS preflight go to the service uncounted. All others are counted.
//! 2. A request without a key is on no list. A key that is there but cannot be read is not absent: a list of denied keys
//!    answers it with the status of its [`KeyError`], and no list of allowed keys has it.

use std::{collections::HashSet, fmt, sync::Arc};

use http::request::Parts;

use super::{
    events::Events,
    extract::{KeyError, KeyExtractor},
    preflight::is_preflight,
    rejection::Rejection,
};
use crate::key::Key;

/// Which requests are not counted.
type Skip = dyn Fn(&Parts) -> bool + Send + Sync;

#[derive(Clone, Default)]
pub(super) struct Gate {
    denied: Vec<List>,
    allowed: Vec<List>,
    skipped: Vec<Arc<Skip>>,
    counts_preflights: bool,
}

#[derive(Clone)]
struct List {
    extractor: Arc<dyn KeyExtractor>,
    keys: Arc<HashSet<Key>>,
}

/// How a request passes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Passage {
    Uncounted,
    Counted,
}

impl Gate {
    pub(super) fn deny(&mut self, extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) {
        self.denied.push(List::new(extractor, keys));
    }

    pub(super) fn allow(&mut self, extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) {
        self.allowed.push(List::new(extractor, keys));
    }

    pub(super) fn skip(&mut self, skip: Arc<Skip>) {
        self.skipped.push(skip);
    }

    pub(super) fn count_preflights(&mut self) {
        self.counts_preflights = true;
    }

    pub(super) fn passage(&self, parts: &Parts, events: &Events) -> Result<Passage, Rejection> {
        for list in &self.denied {
            if list.has(parts).map_err(Rejection::NoKey)? {
                return Err(Rejection::Denied);
            }
        }
        let allows = |list: &List| list.has(parts).inspect_err(|error| events.unusable_key(error)).unwrap_or(false);
        let is_skipped = !self.counts_preflights && is_preflight(parts)
            || self.skipped.iter().any(|skips| skips(parts))
            || self.allowed.iter().any(allows);
        Ok(if is_skipped { Passage::Uncounted } else { Passage::Counted })
    }
}

impl List {
    fn new(extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Self {
        Self { extractor: Arc::new(extractor), keys: Arc::new(keys.into_iter().collect()) }
    }

    /// Whether the request's key is on the list; an error if the key is there and cannot be read.
    fn has(&self, parts: &Parts) -> Result<bool, KeyError> {
        match self.extractor.extract(parts) {
            Ok(key) => Ok(self.keys.contains(&key)),
            Err(error) if error.is_missing() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl fmt::Debug for Gate {
    // Keys may be personal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("denied", &self.denied.len())
            .field("allowed", &self.allowed.len())
            .field("skipped", &self.skipped.len())
            .field("counts_preflights", &self.counts_preflights)
            .finish()
    }
}
