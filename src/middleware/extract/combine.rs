//! Extractors made of two.

use http::request::Parts;

use super::{KeyError, KeyExtractor};
use crate::key::Key;

/// One key of two: see [`KeyExtractor::and`].
#[derive(Clone, Debug)]
pub struct And<A, B> {
    first: A,
    second: B,
}

impl<A, B> And<A, B> {
    pub(super) fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for And<A, B> {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        Ok(Key::pair(&self.first.extract(parts)?, &self.second.extract(parts)?))
    }

    fn is_by_upstream(&self) -> bool {
        self.first.is_by_upstream() || self.second.is_by_upstream()
    }
}

/// The key of the second if the first is absent: see [`KeyExtractor::or`].
#[derive(Clone, Debug)]
pub struct Or<A, B> {
    first: A,
    second: B,
}

impl<A, B> Or<A, B> {
    pub(super) fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Or<A, B> {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        match self.first.extract(parts) {
            Err(error) if error.is_missing() => self.second.extract(parts),
            outcome => outcome,
        }
    }

    fn is_by_upstream(&self) -> bool {
        self.first.is_by_upstream() && self.second.is_by_upstream()
    }
}
