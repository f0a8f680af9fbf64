//! Who is let through uncounted, and who not at all.
//!
//! 1. Who is on a list of denied keys is answered 403. Then who is on a list of allowed keys, is skipped, or sends a
//!    CORS preflight goes to the service uncounted. Everybody else is counted.
//! 2. Who has no key is on no list: a [`KeyError`](super::extract::KeyError) neither denies nor allows.

use std::{collections::HashSet, fmt, sync::Arc};

use http::{
    Method,
    header::{ACCESS_CONTROL_REQUEST_METHOD, ORIGIN},
    request::Parts,
};

use super::{events::Events, extract::KeyExtractor};
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
    Denied,
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

    pub(super) fn passage(&self, parts: &Parts, events: &Events) -> Passage {
        let is_on_any = |lists: &[List]| lists.iter().any(|list| list.has(parts, events));
        if is_on_any(&self.denied) {
            return Passage::Denied;
        }
        let is_skipped = !self.counts_preflights && is_preflight(parts)
            || self.skipped.iter().any(|skips| skips(parts))
            || is_on_any(&self.allowed);
        if is_skipped { Passage::Uncounted } else { Passage::Counted }
    }
}

impl List {
    fn new(extractor: impl KeyExtractor, keys: impl IntoIterator<Item = Key>) -> Self {
        Self { extractor: Arc::new(extractor), keys: Arc::new(keys.into_iter().collect()) }
    }

    fn has(&self, parts: &Parts, events: &Events) -> bool {
        match self.extractor.extract(parts) {
            Ok(key) => self.keys.contains(&key),
            Err(error) => {
                if error.status().is_server_error() {
                    events.no_key(&error);
                }
                false
            }
        }
    }
}

/// What a browser sends of itself before a request to another origin (Fetch, section 3.3.2): the script that makes it
/// send one has no say in it, and the request itself is counted.
fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS
        && parts.headers.contains_key(ORIGIN)
        && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
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
